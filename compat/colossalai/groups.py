"""Groups of a grid's ranks, none of them created twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid.groups.creation import NOT_A_MEMBER
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.plan import Ranks

Row: TypeAlias = tuple[tuple[str, ...], list[Ranks]]  # dims, and the members of every group


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
        self, rows: Mapping[str, Row], backend: str | None, proposal: Mapping[str, Any]
    ) -> None:
        """Create what is missing of the rows, by label; all or none. *Collective* over the grid.

        The ranks compare ``proposal`` first, and how many groups are missing.
        """
        rank = dist.get_rank()
        groups = dict(self._groups)
        count = 0
        for _, lists in rows.values():
            count += len(self.missing(lists, backend))
        proposal = {**proposal, "groups that are missing": count}
        with self.grid.two_phase_commit(proposal, self._owner) as pool:
            for label, (dims, lists) in rows.items():
                missing = [ranks for ranks in lists if (backend, ranks) not in groups]
                if not missing:
                    continue
                own_ranks = {}
                for ranks in missing:
                    if rank in ranks:
                        own_ranks[label] = ranks
                created = pool.make(label, own_ranks, missing.copy, dims=dims, backend=backend)
                for ranks in missing:
                    groups[backend, ranks] = created[0] if rank in ranks else NOT_A_MEMBER
        self._groups = groups

    def own(self, lists: Iterable[Ranks], backend: str | None) -> ProcessGroup:
        """The group of this rank among these; the non-member marker where it is in none."""
        rank = dist.get_rank()
        for ranks in lists:
            if rank in ranks:
                return self._groups[backend, ranks]
        return NOT_A_MEMBER  # type: ignore[no-any-return]

    def ranks_of(self, group: ProcessGroup) -> list[int] | None:
        """The members of one of these groups of this rank; None of another."""
        for (_, ranks), known_group in self._groups.items():
            if known_group is group and group is not NOT_A_MEMBER:
                return list(ranks)
        return None

    def destroy(self) -> None:
        """Destroy every group. *Local*; they can be created again."""
        self.grid.destroy()
        self._groups = {}
