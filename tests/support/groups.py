"""The groups of the current Megatron state on this rank: which there are, whether they work."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from compat import parallel_state as ps
from compat.state import GROUP_SLOTS
from hypergrid.groups.pool import GroupPool


def state_groups() -> dict[str, dist.ProcessGroup]:
    """Every group that Megatron's globals hold, by slot; with a number where it holds several."""
    group_of_slot = {}
    for slot in GROUP_SLOTS:
        value = getattr(ps, slot)
        if isinstance(value, (dict, list)):
            several = value.values() if isinstance(value, dict) else value
            group_of_slot.update({f"{slot}/{i}": g for i, g in enumerate(several) if g is not None})
        elif value is not None:
            group_of_slot[slot] = value
    return group_of_slot


def check_all_reduce(rank: int) -> None:
    """Each group of the state adds up what its members, and no other ranks, send."""
    for slot, group in state_groups().items():
        _check_sum(rank, group, dist.get_process_group_ranks(group), slot)


def check_pool(rank: int, pool: GroupPool | None = None) -> None:
    """The same for each group of a pool, by default the current state's, by its planned ranks."""
    for pooled in (pool or ps.current_state().pool).groups:
        _check_sum(rank, pooled.group, pooled.ranks, pooled.label)


def _check_sum(rank: int, group: dist.ProcessGroup, ranks: Iterable[int], label: str) -> None:
    members = torch.tensor([2.0**rank], dtype=torch.double)
    dist.all_reduce(members, group=group)
    assert members.item() == sum(2.0**r for r in ranks), label
