"""Edits of stock's source; and the repairs of places where its own code defeats itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import ModuleType

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


# What to replace where stock defeats itself; elsewhere a repair changes nothing that stock does.
REPAIRS: dict[str, list[tuple[str, str]]] = {
    # 0.19: the barrier asks for a group that is only made later, so that SHARP on dp always fails;
    # a rank outside the window has no such group at all.
    "sharp on dp": [
        (
            """torch.distributed.barrier(
            group=get_data_parallel_group(with_context_parallel=True),""",
            """if _DATA_PARALLEL_GROUP_WITH_CP is not None: torch.distributed.barrier(
            group=_DATA_PARALLEL_GROUP_WITH_CP,""",
        ),
    ],
    # dev: ranks outside the window have none of the groups on which the members meet.
    "dynamic groups in a window": [
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
    ],
    # 0.19: "tp" is looked for in a string that contains "gtp_remat".
    "order without tp": [
        (
            "if name not in order",
            'if name not in (order.split("-") if name == "tp" else order)',
        ),
    ],
    # 0.19: the data-parallel size already counts gtp_remat, which is then counted again.
    "all-gather groups with gtp_remat": [
        (
            "dp_size = get_data_parallel_world_size()",
            "dp_size = get_data_parallel_world_size(with_gtp_remat=False)",
        ),
        (
            "expert_dp_size = get_expert_data_parallel_world_size()",
            "expert_dp_size = get_expert_data_parallel_world_size(with_gtp_remat=False)",
        ),
    ],
}


def repaired_stocks(release: str) -> Iterator[ModuleType]:
    """Stock with one or more of the `REPAIRS` that its source has the places of."""
    text = source(release)
    repairs = [pairs for pairs in REPAIRS.values() if all(old in text for old, _ in pairs)]
    for count in range(1, len(repairs) + 1):
        for chosen in itertools.combinations(repairs, count):
            yield load_stock(release, replaced(*itertools.chain(*chosen)))
