"""Edits of stock's source; and the repairs of places where its own code defeats itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

from tests.parity.surface import Config
from tests.support.stock import load_stock, source


def replaced(*pairs: tuple[str, str]) -> Callable[[str], str]:
    """An edit of stock's source that insists on finding what it replaces."""

    def edit(text: str) -> str:
        for old, new in pairs:
            if old not in text:
                raise ValueError(f"the source has no {old!r} to replace")
            text = text.replace(old, new)
        return text

    return edit


@dataclass(frozen=True)
class Repair:
    """What to replace where stock defeats itself, and which configurations come across it."""

    applies: Callable[[Config], bool]
    pairs: tuple[tuple[str, str], ...]


def _has_remat(config: Config) -> bool:
    names = ("gtp_remat_size", "expert_gtp_remat_size")
    return any(config["kwargs"].get(name, 1) > 1 for name in names)


def _has_uneven_levels(config: Config) -> bool:
    levels = config["kwargs"].get("hierarchical_context_parallel_sizes") or [1]
    return math.prod(levels) != config["kwargs"].get("context_parallel_size", 1)


REPAIRS = {
    # 0.12: levels that do not multiply to the context-parallel size make groups of some of the
    # ranks, or none; later releases refuse them.
    "levels of another product": Repair(
        _has_uneven_levels,
        (
            (
                "            global _HIERARCHICAL_CONTEXT_PARALLEL_GROUPS\n            _HIER",
                "            global _HIERARCHICAL_CONTEXT_PARALLEL_GROUPS\n"
                "            import math\n"
                "            assert math.prod(hierarchical_context_parallel_sizes) == "
                "context_parallel_size\n            _HIER",
            ),
        ),
    ),
    # 0.19: the barrier asks for a group that is only made later, so that SHARP on dp always fails;
    # a rank outside the window has no such group at all.
    "sharp on dp": Repair(
        lambda config: config["kwargs"].get("use_sharp", False),
        (
            (
                """torch.distributed.barrier(
            group=get_data_parallel_group(with_context_parallel=True),""",
                """if _DATA_PARALLEL_GROUP_WITH_CP is not None: torch.distributed.barrier(
            group=_DATA_PARALLEL_GROUP_WITH_CP,""",
            ),
        ),
    ),
    # dev: ranks outside the window have none of the groups on which the members meet.
    "dynamic groups in a window": Repair(
        lambda config: (
            "local_world_size" in config["kwargs"]
            and config["kwargs"].get("dynamic_context_parallel", False)
        ),
        (
            (
                "        for group_size in group_sizes:\n            group = get_dynamic",
                "        for group_size in group_sizes if is_initialized_here else ():\n"
                "            group = get_dynamic",
            ),
            (
                "        group_sizes = [\n            2**i\n",
                "        is_initialized_here = _DATA_PARALLEL_GROUP_WITH_CP is not None\n"
                "        group_sizes = [\n            2**i\n",
            ),
        ),
    ),
    # 0.19: "tp" is looked for in a string that contains "gtp_remat".
    "order without tp": Repair(
        lambda config: "tp" not in config["kwargs"].get("order", "tp").lower().split("-"),
        (("if name not in order", 'if name not in order.split("-")'),),
    ),
    # 0.19: the data-parallel size already counts gtp_remat, which is then counted again.
    "all-gather groups with gtp_remat": Repair(
        _has_remat,
        (
            (
                "dp_size = get_data_parallel_world_size()",
                "dp_size = get_data_parallel_world_size(with_gtp_remat=False)",
            ),
            (
                "expert_dp_size = get_expert_data_parallel_world_size()",
                "expert_dp_size = get_expert_data_parallel_world_size(with_gtp_remat=False)",
            ),
        ),
    ),
}


def repaired_stocks(release: str, config: Config) -> Iterator[ModuleType]:
    """Stock with one or more of the `REPAIRS` that `config` would come across."""
    text = source(release)
    met = [
        repair.pairs
        for repair in REPAIRS.values()
        if all(old in text for old, _ in repair.pairs) and repair.applies(config)
    ]
    for count in range(1, len(met) + 1):
        for chosen in itertools.combinations(met, count):
            yield load_stock(release, replaced(*itertools.chain(*chosen)))
