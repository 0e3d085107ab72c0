"""Groups of a grid's ranks, none of them created twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid.groups.creation import NOT_A_MEMBER
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.plan import Ranks

Lists: TypeAlias = list[Ranks]  # the members of every group of one label


class UniqueGroups:
    """Groups over the ranks of one grid: equal members and backend are one group.

    Every rank knows them all. One without this rank is torch's non-member marker: so the ranks
    agree on which groups are missing.
    """

    def __init__(self, grid: HyperCommGrid, owner: str) -> None:
        self.grid = grid
        self._owner = owner
        self._groups: dict[tuple[str | None, Ranks], ProcessGroup] = {}

    def missing(self, lists: Iterable[Ranks], backend: str | None) -> set[Ranks]:
        """The members of each group that was not created. Equal lists: equal on all ranks."""
        return {ranks for ranks in lists if (backend, ranks) not in self._groups}

    def create(
        self,
        lists_of: Mapping[str, Lists],
        backend: str | None,
        proposal: Mapping[str, Any],
    ) -> None:
        """Create what is missing of the lists, by label; all or none. *Collective* over the grid.

        The ranks compare ``proposal`` first, and how many groups are missing.
        """
        rank = dist.get_rank()
        missing = self.missing(chain(*lists_of.values()), backend)
        proposal = {**proposal, "groups that are missing": len(missing)}
        groups = dict(self._groups)
        with self.grid.two_phase_commit(proposal, self._owner) as pool:
            for label, lists in lists_of.items():
                # A label before may have created some of them.
                new = [ranks for ranks in lists if (backend, ranks) not in groups]
                if not new:
                    continue
                own_ranks = {}
                for ranks in new:
                    groups[backend, ranks] = NOT_A_MEMBER
                    if rank in ranks:
                        own_ranks[label] = ranks
                # One group or none: those of a label have no rank in common.
                for group in pool.make(label, own_ranks, new.copy, backend=backend):
                    groups[backend, own_ranks[label]] = group
        self._groups = groups

    def own(self, lists: Iterable[Ranks], backend: str | None) -> ProcessGroup:
        """The group of this rank among these; the non-member marker where it is in none."""
        rank = dist.get_rank()
        for ranks in lists:
            if rank in ranks:
                return self._groups[backend, ranks]
        return NOT_A_MEMBER  # type: ignore[no-any-return]

    def ranks_of(self, group: ProcessGroup) -> list[int]:
        """The members of one of these groups of this rank. KeyError for another."""
        if group is NOT_A_MEMBER or group not in self._groups.values():
            raise KeyError(group)
        return dist.get_process_group_ranks(group)

    def destroy(self) -> None:
        """Destroy every group. *Local*; they can be created again."""
        self.grid.destroy()
        self._groups = {}
