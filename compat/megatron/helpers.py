"""Groups that callers create themselves: create_group, and functions built on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.megatron.request import now
from compat.megatron.rows import of_level, run_sizes
from hypergrid.groups import creation

note: Callable[[ProcessGroup], None] | None = None  # called with each group of this rank


def create_group(
    ranks: list[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> ProcessGroup:
    """Create a group as ``torch.distributed.new_group`` does. *Collective* as that is.

    The caller destroys it: ``destroy_model_parallel`` does not.
    """
    group = dist.new_group(**creation.copied_options(dict(locals())))
    if ranks is not None and dist.get_rank() not in ranks:
        return group
    if note is not None:
        note(group)
    return group


@contextmanager
def collecting() -> Iterator[list[ProcessGroup]]:
    """List the groups of this rank that ``create_group`` creates inside."""
    global note
    outer_note = note
    collected: list[ProcessGroup] = []
    note = collected.append
    try:
        yield collected
    finally:
        note = outer_note


def create_hierarchical_groups(
    rank: int,
    ranks: list[int],
    hierarchical_group_sizes: list[int],
    create_gloo_process_groups: bool = False,
    pg_options: Any = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> tuple[list[ProcessGroup], list[ProcessGroup | None]]:
    """Groups of ``rank`` at each level of ``ranks`` cut into sizes, innermost first.

    *Collective* over the world. ``pg_options`` is one for all levels or a list with one for each.
    With ``ranks`` 0..7 and sizes [2, 4], rank 3 gets [2, 3] and [1, 3, 5, 7].
    """
    sizes = list(hierarchical_group_sizes)
    if prod(sizes) != len(ranks):
        raise ValueError(
            f"hierarchical_group_sizes={sizes} multiply to {prod(sizes)}, but there are "
            f"{len(ranks)} ranks."
        )
    options = pg_options if isinstance(pg_options, list) else [pg_options] * len(sizes)
    groups: list[ProcessGroup] = []
    twins: list[ProcessGroup | None] = []
    for level in range(len(sizes)):
        common = {"timeout": timeout, "pg_options": options[level]}
        for members in of_level(ranks, sizes, level):
            desc = f"HIERARCHICAL_{group_desc}_L{level}"
            group = now(create_group)(members, group_desc=desc, **common)
            twin = None
            if create_gloo_process_groups:
                desc = f"HIERARCHICAL_{group_desc}_GLOO_L{level}"
                twin = now(create_group)(members, backend="gloo", group_desc=desc, **common)
            if rank in members:
                groups.append(group)
                twins.append(twin)
    return groups, twins


def create_hybrid_dp_cp_groups(
    rank: int, ranks: list[int], pg_options: Any
) -> dict[int, ProcessGroup]:
    """Groups of ``rank`` by size: runs of 2, 4, 8 ... of ``ranks``. *Collective* over the world."""
    return _runs("HYBRID", rank, ranks, pg_options, 2)


def create_dynamic_dp_cp_groups(
    rank: int, ranks: list[int], pg_options: Any, min_cp_size: int = 1
) -> dict[int, ProcessGroup]:
    """Groups of ``rank`` by size: runs of ``ranks`` of each power of two from ``min_cp_size`` on.

    *Collective* over the world. Of Megatron-LM's branch dev.
    """
    return _runs("DYNAMIC", rank, ranks, pg_options, min_cp_size)


def _runs(
    kind: str, rank: int, ranks: list[int], pg_options: Any, smallest: int
) -> dict[int, ProcessGroup]:
    groups = {}
    for size in run_sizes(len(ranks), smallest):
        for start in range(0, len(ranks), size):
            members = ranks[start : start + size]
            desc = f"{kind}_DP_CP_GROUP_{size}"
            group = now(create_group)(members, pg_options=pg_options, group_desc=desc)
            if rank in members:
                groups[size] = group
    return groups
