"""Which groups exist under which names: of a grid or a state, of meshes, and under labels."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid.groups.backends import plain_backend
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.layout import Dims, LayoutError
from hypergrid.messages import shown, span_of
from hypergrid.plan import GroupPlan, GroupRow, Ranks
from hypergrid.views import BASE, ordered

NOT_A_MEMBER: Any = dist.GroupMember.NON_GROUP_MEMBER
Found: TypeAlias = dict[Ranks, str]  # groups that exist, and under which name


class State(Protocol):
    """Such as ``compat.state.ParallelState``."""

    @property
    def grid(self) -> HyperCommGrid | None: ...

    @property
    def plan(self) -> GroupPlan | None: ...


class Place(NamedTuple):
    """Where the groups over some dims belong, and the name by which the table knows them."""

    name: str
    grid: HyperCommGrid
    dims: tuple[str, ...]
    view: str | None = None

    @property
    def groups(self) -> list[Ranks]:
        return [tuple(sorted(x)) for x in self.grid.get_rank_enum(self.dims, view=self.view)]


class Labelled(NamedTuple):
    """This rank's group of a label, and what all ranks know: the backend, and every group."""

    group: ProcessGroup
    backend: str | None
    groups: list[Ranks]


class KnownGroups:
    """Names and what they mean. What is compared here is equal on all ranks.

    ``"dp-tp"`` are dims of the source, ``"moe/ep"`` of its view, ``"train/dp"`` of the mesh
    ``train``; every other name is a label.
    """

    def __init__(self, source: HyperCommGrid | State | None) -> None:
        self._source = source
        self.labelled: dict[str, Labelled] = {}
        self.grids: dict[str, HyperCommGrid] = {}  # of meshes, by their names

    def names(self) -> dict[str, ProcessGroup]:
        """Every group by its names; torch's non-member marker where this rank is outside."""
        names = {name: each.group for name, each in self.labelled.items()}
        for prefix, grid in self.all_grids():
            for name, group in grid.groups.items():
                names[prefix + name] = NOT_A_MEMBER if group is None else group
        for pooled in self.base.pool.usable() if self.base and self.base.pool else ():
            names.setdefault(pooled.label, pooled.group)
        for _, row in self._rows():
            names.setdefault(row.label, NOT_A_MEMBER)
        return names

    @property
    def base(self) -> HyperCommGrid | None:
        source = self._source
        return source if source is None or isinstance(source, HyperCommGrid) else source.grid

    def _rows(self) -> list[tuple[GroupPlan, GroupRow]]:
        """The rows of a state's plan; none while a group of it is suspended."""
        pool = self.base.pool if self.base else None
        is_open = pool is not None and pool.is_open
        plan = getattr(self._source, "plan", None) if is_open else None
        return [(plan, row) for row in plan.rows] if plan is not None else []

    def all_grids(self) -> list[tuple[str, HyperCommGrid]]:
        """With the prefixes of their groups' names."""
        own = [] if self.base is None else [("", self.base)]
        return own + [(f"{name}/", grid) for name, grid in self.grids.items()]

    def find(self, name: Dims) -> Place | None:
        """The place that a name or dims mean, whether or not its groups exist."""
        where, _, dims = name.rpartition("/") if isinstance(name, str) else ("", "", tuple(name))
        grid = self.grids.get(where, self.base)
        view = None if where in self.grids else where or None
        if grid is None:
            return None
        try:
            known, over = grid.name(dims, view=view), ordered(grid.views[view or BASE], dims)
        except (KeyError, LayoutError):
            return None
        return Place(known if grid is self.base else f"{where}/{known}", grid, tuple(over), view)

    def _families(self) -> Iterator[tuple[str, str | None, Iterable[Ranks]]]:
        """Each name with its backend and all its groups; equal on all ranks."""
        for prefix, grid in self.all_grids():
            for name in grid.groups:
                if (place := self.find(prefix + name)) is not None:
                    yield place.name, grid.backend, place.groups
        for name, each in self.labelled.items():
            yield name, each.backend, each.groups
        for plan, row in self._rows():
            yield row.label, row.backend, plan.all(row)

    def duplicates(
        self, name: str, groups: list[Ranks], backend: str | None, share: bool, **options: Any
    ) -> Found:
        """Which of ``groups`` (ascending) exist. ValueError unless they may be shared."""
        wanted, found = {*groups}, Found()
        for known, theirs, members in self._families():
            if plain_backend(theirs) == plain_backend(backend):
                for ranks in {tuple(sorted(each)) for each in members} & wanted:
                    found.setdefault(ranks, known)
        if not found:
            return found
        ranks, known = min(found.items())
        if not share:
            already = "already" if known == name else f"already as {known!r}"
            raise ValueError(
                f"process group {name!r} of ranks {span_of(ranks)} exists {already}: use "
                f"get_process_group({known!r}), or give share=True to let both names mean it."
            )
        if any(value is not None for value in options.values()):
            raise ValueError(
                f"process group {name!r} would share the one of {known!r}, whose timeout and "
                f"options are set: leave them out, or leave share out and choose other ranks."
            )
        return found


def groups_of(ranks: Any, name: str, world_size: int) -> list[Ranks]:
    """One group, or several without a common rank; each ascending."""
    try:
        given = list(ranks)
        several = bool(given) and all(isinstance(each, Iterable) for each in given)
        groups = [tuple(sorted(map(operator.index, g))) for g in (given if several else [given])]
    except TypeError:
        raise ValueError(
            f"the ranks of {name!r} must be whole numbers, or lists of them, got {shown(ranks)}."
        ) from None
    members = [rank for group in groups for rank in group]
    if not all(groups) or len({*members}) < len(members) or not {*members} <= {*range(world_size)}:
        raise ValueError(
            f"the ranks of {name!r} are {shown(ranks)}: give each at most once, at least one for "
            f"each group, of 0 to {world_size - 1}."
        )
    return groups
