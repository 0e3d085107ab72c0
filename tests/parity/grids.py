"""HyperCommGrid beside stock's: ranks of every combination of dims, groups, and refusals."""

from __future__ import annotations

import random
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from compat.hyper_comm_grid import HyperCommGrid
from tests.support.stock import load_stock_grid, source_dir

NAMES = ("tp", "cp", "ep", "pp", "dp")


def compare_grids(release: str, n: int, seed: int) -> list[str] | None:
    """What differs over `n` random grids, one line each; None if the release has no such class."""
    if not (source_dir(release) / "hyper_comm_grid.py").is_file():
        return None
    stock = load_stock_grid(release).HyperCommGrid
    differences = []
    for number in range(n):
        rng = random.Random(f"{seed}/{release}/{number}")
        names = rng.sample(NAMES, rng.randint(1, 5))
        shape = [rng.choice((1, 2, 2, 3, 4)) for _ in names]
        offset = rng.choice((0, 0, 1, 5))
        while (size := _product(shape)) + offset > 64:
            shape[shape.index(max(shape))] -= 1
        dims = [rng.sample(names, rng.randint(1, len(names))) for _ in range(3)]
        world, rank = size + offset + rng.choice((0, 3)), offset + rng.randrange(size)
        answers = [
            _answers(kind, stock, shape, names, offset, dims, world, rank)
            for kind in (stock, HyperCommGrid)
        ]
        for question, answer in answers[0].items():
            our_answer = answers[1][question]
            # Older releases leave an unknown dim to einops, which refuses in a way of its own.
            both_refuse = answer == "EinopsError" and str(our_answer).endswith("Error")
            if answer != our_answer and not both_refuse:
                grid = f"{shape} {names} from rank {offset} as rank {rank} of {world}"
                differences.append(f"{grid}, {question}: stock {answer}, ours {our_answer}")
    return differences


def _product(shape: list[int]) -> int:
    size = 1
    for dim_size in shape:
        size *= dim_size
    return size


def _answers(
    kind: Any,
    stock: Any,
    shape: list[int],
    names: list[str],
    offset: int,
    dims: list[list[str]],
    world: int,
    rank: int,
) -> dict[str, Any]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        grid = kind(shape, names, offset)
        shown = {
            name: getattr(grid, name) for name in ("shape", "dim_names", "rank_offset", "size")
        }
        for group_dims in dims:
            label = "-".join(group_dims)
            shown[f"ranks over {label}"] = grid._gen_rank_enum(group_dims)
            shown[f"before {label}"] = _tried(grid.get_pg, group_dims)
            shown[f"made over {label}"] = _tried(grid.create_pg, group_dims)
            shown[f"again {label}"] = _tried(grid.create_pg, group_dims)
            shown[f"got over {label}"] = _tried(grid.get_pg, group_dims)
            for order in ("_order_dims", "_order_dims_for"):
                if hasattr(stock, order):
                    first = (names,) if order == "_order_dims_for" else ()
                    shown[f"{order} {label}"] = getattr(grid, order)(*first, group_dims)
        shown["keys"] = list(grid._pgs)
        shown["an unknown dim"] = _tried(grid.create_pg, "zz")
        shown["the group of an unknown dim"] = _tried(grid.get_pg, "zz")
        shown["too large"] = _tried(kind, [world + 1], ["tp"])
        shown["names too few"] = _tried(kind, [1, 1], ["tp"])
        return shown
    finally:
        dist.destroy_process_group()


def _tried(function: Any, *arguments: Any) -> Any:
    """The ranks of the group, or the built-in kind of the refusal."""
    try:
        group = function(*arguments)
    except Exception as error:
        if type(error).__name__ == "EinopsError":
            return "EinopsError"
        kinds = (KeyError, ValueError, RuntimeError, AssertionError)
        return next((kind.__name__ for kind in kinds if isinstance(error, kind)), repr(error))
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else "made"
