"""Groups of a grid's ranks, none of them created twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid.groups.creation import NOT_A_MEMBER
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.plan import Ranks


class UniqueGroups:
    """Groups over the ranks of one grid: equal members and backend are one group.

    Every rank knows them all. One without this rank is torch's non-member marker: so the ranks
    agree on which groups are missing.
    """

    def __init__(self, grid: HyperCommGrid, owner: str) -> None:
        self.grid = grid
        self._owner = owner
        self._groups: dict[tuple[str | None, Ranks], ProcessGroup] = {}

    def missing(self, lists: Iterable[Ranks], backend: str | None) -> list[Ranks]:
        """The lists whose groups were not created."""
        return [ranks for ranks in lists if (backend, ranks) not in self._groups]

    def create(
        self, lists_of: Mapping[str, list[Ranks]], backend: str | None, proposal: Mapping[str, Any]
    ) -> None:
        """Create what is missing of the lists, by label; all or none. *Collective* over the grid.

        The ranks compare ``proposal`` first, and how many groups are missing.
        """
        rank = dist.get_rank()
        count = sum(len(self.missing(lists, backend)) for lists in lists_of.values())
        proposal = {**proposal, "groups that are missing": count}
        groups = dict(self._groups)
        with self.grid.two_phase_commit(proposal, self._owner) as pool:
            for label, lists in lists_of.items():
                # A label before may have created some of these.
                missing = [ranks for ranks in lists if (backend, ranks) not in groups]
                if not missing:
                    continue
                own_ranks = {}
                for ranks in missing:
                    groups[backend, ranks] = NOT_A_MEMBER
                    if rank in ranks:
                        own_ranks[label] = ranks
                # One group or none: those of a label have no rank in common.
                for group in pool.make(label, own_ranks, missing.copy, backend=backend):
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
        for (_, ranks), known_group in self._groups.items():
            if known_group is group and group is not NOT_A_MEMBER:
                return list(ranks)
        raise KeyError(group)

    def destroy(self) -> None:
        """Destroy every group. *Local*; they can be created again."""
        self.grid.destroy()
        self._groups = {}
