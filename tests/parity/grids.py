"""HyperCommGrid beside stock's: ranks of combinations of dims, and groups."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from compat.hyper_comm_grid import HyperCommGrid
from tests.support.stock import load_stock_grid, source_dir

NAMES = ("tp", "cp", "ep", "pp", "dp")


@dataclass(frozen=True)
class GridCase:
    """A grid, the combinations of dims to create in it, and the rank that creates them."""

    shape: list[int]
    names: list[str]
    offset: int
    dims: list[list[str]]
    world: int
    rank: int

    def __str__(self) -> str:
        grid = f"{self.shape} {self.names} from rank {self.offset}"
        return f"{grid} as rank {self.rank} of {self.world}"


def compare_grids(release: str, n: int, seed: int) -> list[str] | None:
    """What differs over `n` random grids, one line each; None if the release has no such class."""
    if not (source_dir(release) / "hyper_comm_grid.py").is_file():
        return None
    differences = []
    for number in range(n):
        case = random_case(random.Random(f"{seed}/{release}/{number}"))
        differences += compare_grid(release, case)
    return differences


def random_case(rng: random.Random) -> GridCase:
    """A grid of up to 64 ranks in a world that may have a few more."""
    names = rng.sample(NAMES, rng.randint(1, 5))
    shape = [rng.choice((1, 2, 2, 3, 4)) for _ in names]
    offset = rng.choice((0, 0, 1, 5))
    while math.prod(shape) + offset > 64:
        shape[shape.index(max(shape))] -= 1
    size = math.prod(shape)
    dims = [rng.sample(names, rng.randint(1, len(names))) for _ in range(3)]
    return GridCase(
        shape,
        names,
        offset,
        dims,
        world=size + offset + rng.choice((0, 3)),
        rank=offset + rng.randrange(size),
    )


def compare_grid(release: str, case: GridCase) -> list[str]:
    """What differs of one grid."""
    stock = load_stock_grid(release).HyperCommGrid
    stock_answers = _answers(stock, stock, case)
    our_answers = _answers(HyperCommGrid, stock, case)
    differences = []
    for question, answer in stock_answers.items():
        our_answer = our_answers[question]
        if answer != our_answer:
            differences.append(f"{case}, {question}: stock {answer}, ours {our_answer}")
    return differences


def _answers(kind: Any, stock: Any, case: GridCase) -> dict[str, Any]:
    dist.init_process_group("fake", rank=case.rank, world_size=case.world, store=FakeStore())
    try:
        grid = kind(case.shape, case.names, case.offset)
        shown = {}
        for name in ("shape", "dim_names", "rank_offset", "size"):
            shown[name] = getattr(grid, name)
        if hasattr(stock, "is_current_rank_in_grid"):
            shown["is inside"] = grid.is_current_rank_in_grid()
        for group_dims in case.dims:
            label = "-".join(group_dims)
            shown[f"ranks over {label}"] = grid._gen_rank_enum(group_dims)
            shown[f"before {label}"] = _tried(grid.get_pg, group_dims)
            shown[f"made over {label}"] = _tried(grid.create_pg, group_dims)
            shown[f"again {label}"] = _tried(grid.create_pg, group_dims)
            shown[f"got over {label}"] = _tried(grid.get_pg, group_dims)
            for order in ("_order_dims", "_order_dims_for"):
                if hasattr(stock, order):
                    first = (case.names,) if order == "_order_dims_for" else ()
                    shown[f"{order} {label}"] = getattr(grid, order)(*first, group_dims)
        shown["keys"] = list(grid._pgs)
        return shown
    finally:
        dist.destroy_process_group()


def _tried(function: Any, *arguments: Any) -> Any:
    """The ranks of the group, or the built-in kind of the refusal."""
    try:
        group = function(*arguments)
    except Exception as error:
        kinds = (KeyError, ValueError, RuntimeError, AssertionError)
        return next((kind.__name__ for kind in kinds if isinstance(error, kind)), repr(error))
    return dist.get_process_group_ranks(group)
