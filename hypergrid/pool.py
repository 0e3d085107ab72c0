"""GroupPool: owns the process groups that were made together; nobody else destroys one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from hypergrid import creation
from hypergrid.agreement import Agreement
from hypergrid.creation import Ranks


@dataclass(frozen=True)
class PooledGroup:
    """A live group: the label that asked for it, its global ranks, torch's group."""

    label: str
    ranks: tuple[int, ...]
    group: ProcessGroup


class GroupPool:
    """Live groups of this process, in the order in which they were made."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.groups: list[PooledGroup] = []

    def make(
        self,
        label: str,
        mine: Mapping[str, Ranks],
        everyone: Callable[[], Sequence[Ranks]],
        **options: Any,
    ) -> list[ProcessGroup]:
        """Create the groups of one label and give those of this rank, often one or none.

        Parameters
        ----------
        label : str
            The name; also the description, unless ``group_desc`` is given.
        mine : mapping of name to ranks
            The groups that this rank belongs to; their members know them by the same name.
        everyone : function
            Gives all groups of the label; asked only where members alone cannot create.
        **options
            As for ``torch.distributed.new_group``: backend, timeout (timedelta), pg_options.

        *Collective* over the members of each group, or over the world where the agreement says
        that members alone cannot create. After a failure nothing of this call is left.
        """
        options.setdefault("group_desc", label)
        before = len(self.groups)
        try:
            if self.agreement.obstacle is None:
                for name, ranks in mine.items():
                    group = creation.by_members(name, ranks, self.agreement.epoch, **options)
                    self.groups.append(PooledGroup(label, tuple(ranks), group))
            else:
                made = creation.by_everyone(label, everyone(), self.agreement.epoch, **options)
                for ranks, group in zip(mine.values(), made, strict=True):
                    self.groups.append(PooledGroup(label, tuple(ranks), group))
        except BaseException:
            self.destroy(before)
            raise
        return [pooled.group for pooled in self.groups[before:]]

    def destroy(self, keep: int = 0) -> None:
        """Give back every group but the first ``keep``; those that torch has lost already too."""
        leaving, self.groups = self.groups[keep:], self.groups[:keep]
        for pooled in leaving:
            if pooled.group in c10d._world.pg_map:
                dist.destroy_process_group(pooled.group)
