"""Which groups there are under which names: of a grid, a state, meshes, and labels of one's own."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid.groups.grid import BASE, HyperCommGrid
from hypergrid.layout import Dims, LayoutError
from hypergrid.messages import shown, span_of
from hypergrid.plan import GroupPlan, GroupRow, Ranks

NOT_A_MEMBER: Any = dist.GroupMember.NON_GROUP_MEMBER


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
    def prefix(self) -> str:
        return self.name[: self.name.rfind("/") + 1]

    @property
    def groups(self) -> list[Ranks]:
        return [tuple(each) for each in self.grid.get_rank_enum(self.dims, view=self.view)]


class KnownGroups:
    """Names and what they mean. Whatever is compared here is alike on all ranks.

    ``"dp-tp"`` are dims of the source, ``"moe/ep"`` those of its view, ``"train/dp"`` those of
    the mesh ``train``; every other name is a label.
    """

    def __init__(self, source: HyperCommGrid | State | None) -> None:
        self._source = source
        self.labels: dict[str, ProcessGroup] = {}
        self.labelled: dict[str, tuple[str | None, list[Ranks]]] = {}  # backend and all groups
        self.grids: dict[str, HyperCommGrid] = {}  # of meshes, by their names

    def names(self) -> dict[str, ProcessGroup]:
        """Every group by its names; torch's non-member marker where this rank is outside."""
        names: dict[str, ProcessGroup] = dict(self.labels)
        for prefix, grid in self._all_grids():
            for name, group in grid.groups.items():
                names[prefix + name] = NOT_A_MEMBER if group is None else group
        base = self.base
        for pooled in base.pool.groups if base is not None and base.pool else ():
            names.setdefault(pooled.label, pooled.group)
        for _, row in self._rows():
            names.setdefault(row.label, NOT_A_MEMBER)
        return names

    @property
    def base(self) -> HyperCommGrid | None:
        source = self._source
        return source if source is None or isinstance(source, HyperCommGrid) else source.grid

    def _rows(self) -> Iterator[tuple[GroupPlan, GroupRow]]:
        """What a state has made beside its dims; none while it is suspended."""
        plan = getattr(self._source, "plan", None)
        if plan is not None and self.base is not None and self.base.pool is not None:
            yield from ((plan, row) for row in plan.rows)

    def _all_grids(self) -> Iterator[tuple[str, HyperCommGrid]]:
        if self.base is not None:
            yield "", self.base
        yield from ((f"{name}/", grid) for name, grid in self.grids.items())

    def find(self, name: Dims) -> Place | None:
        """The place that a name or dims mean, whether its groups exist or not."""
        where, _, dims = name.rpartition("/") if isinstance(name, str) else ("", "", tuple(name))
        grid, view = self.grids.get(where), None
        if grid is None and self.base is not None:
            grid, view = self.base, where or None
        try:
            if grid is None or (view is not None and view not in grid.views):
                return None
            known = grid.name(dims, view=view)
            layout = grid.views[view or BASE]
            ordered = tuple(layout.dims[axis] for axis in layout.axes(dims))
        except LayoutError:
            return None
        return Place(known if grid is self.base else f"{where}/{known}", grid, ordered, view)

    def place(self, name: Dims) -> Place:
        place = self.find(name)
        if place is None:
            dims = [
                f"{prefix}{dim}" for prefix, grid in self._all_grids() for dim in grid.dim_names
            ]
            raise KeyError(
                f"{shown(name)} names no dims that rank {dist.get_rank()} knows: {dims or 'none'}. "
                f"Give ranks too, for a group with that label, or shape and dim_names, for a mesh."
            )
        return place

    def _families(self) -> Iterator[tuple[str, str | None, Iterable[Ranks]]]:
        """Each name with its backend and its groups, those of other ranks too: alike on all."""
        for prefix, grid in self._all_grids():
            for name in grid.groups:
                place = self.find(prefix + name)
                if place is not None:
                    yield place.name, grid.backend, place.groups
        for name, (backend, groups) in self.labelled.items():
            yield name, backend, groups
        for plan, row in self._rows():
            yield row.label, row.backend, plan.all(row)

    def duplicates(
        self,
        name: str,
        groups: Iterable[Ranks],
        backend: str | None,
        share: bool,
        options: Mapping[str, Any],
    ) -> dict[Ranks, str]:
        """Which of ``groups`` exist, and under which name; refused unless they may be shared."""
        wanted, found = {tuple(sorted(ranks)) for ranks in groups}, dict[Ranks, str]()
        for known, theirs, members in self._families():
            if plain(theirs) == plain(backend):
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
                f"process group {name!r} would share that of {known!r}, which has its timeout and "
                f"options: leave them out, or leave share out and choose other ranks."
            )
        return found


def plain(backend: str | None) -> str | None:
    """None for the default group's backend, however it was asked for."""
    if backend is None or backend.lower() == dist.get_backend():
        return None
    return backend.lower()


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
