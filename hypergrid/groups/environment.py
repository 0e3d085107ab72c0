"""EnvironmentTable: this process's rank, groups and device meshes, by meaningful names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from hypergrid.groups.grid import BASE, HyperCommGrid
from hypergrid.groups.known_groups import NOT_A_MEMBER, KnownGroups, Place, State, groups_of, plain
from hypergrid.groups.pool import GroupPool
from hypergrid.groups.prepare import Agreement, refusing_together
from hypergrid.layout import Dims, RankLayout
from hypergrid.messages import shown, span_of
from hypergrid.plan import Ranks
from hypergrid.policy import Policy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class EnvironmentTable:
    """What ColossalAI's issue 3051 proposed: one object to ask about ranks, groups and meshes.

    Its open questions, answered:

    1. *How is a group or mesh created?* ``create_process_group("dp-tp")`` over dims of a grid,
       ``create_process_group("io", [0, 4])`` over ranks, ``create_device_mesh("train", (2, 4),
       ("dp", "tp"))``.
    2. *Duplicates?* A group with the members and backend of one that is in the table is refused,
       with that one's name; ``share=True`` makes it a second name. The default group is not in the
       pool and counts for none.
    3. *Who initialises?* torch: ``init_process_group()`` comes first, the table launches nothing.
    4. *Groups and meshes?* A mesh is a view of groups that are in the pool; both hand out the same.
    5. *What is the key?* What the group is: its dims in any order (``"dp-tp"``), the mesh or view
       that they are of (``"train/dp"``, ``"moe/ep"``), or the label it was given.

    No singleton: a job may hold several; each gives back what it made. Methods that create are
    *collective*, the others *local*. What they refuse is raised when the other ranks have come
    and heard of it, after a minute at most.

    Parameters
    ----------
    source : HyperCommGrid or ParallelState, optional
        Whose groups are in the table too. They stay the source's.
    local_rank : int, optional
        By default ``LOCAL_RANK``, which torchrun sets.

    Raises
    ------
    RuntimeError
        torch.distributed, or the state, is not initialised.

    Examples
    --------
    >>> table = EnvironmentTable()                                        # doctest: +SKIP
    >>> mesh = table.create_device_mesh("train", (2, 4), ("dp", "tp"))    # doctest: +SKIP
    >>> table.get_process_group("train/tp") is mesh.get_group("tp")       # doctest: +SKIP
    True
    >>> table.is_master("train/tp"), table.get_world_size("train/tp")     # doctest: +SKIP
    (True, 4)
    """

    def __init__(
        self, source: HyperCommGrid | State | None = None, *, local_rank: int | None = None
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "an EnvironmentTable needs a world: call torch.distributed.init_process_group() "
                "first, as in a script that torchrun starts."
            )
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.default_process_group = c10d._get_default_group()
        self._source = source
        self._local_rank = local_rank
        self._start()

    def _start(self) -> None:
        self._policy = replace(Policy.resolve(), share="none")
        self._pool = GroupPool(Agreement(epoch=""), self._policy, repr(self))
        self._known = KnownGroups(self._source)
        self._meshes: dict[str, DeviceMesh] = {}

    @classmethod
    def from_grid(cls, grid: HyperCommGrid, **options: Any) -> EnvironmentTable:
        """A table with the groups of ``grid``, those made later too."""
        if not isinstance(grid, HyperCommGrid):
            raise TypeError(
                f"from_grid() takes a hypergrid.HyperCommGrid, not one of {type(grid).__module__}. "
                f"Where that holds one, give it: from_grid(grid.core)."
            )
        return cls(grid, **options)

    @classmethod
    def from_state(cls, state: State, **options: Any) -> EnvironmentTable:
        """A table with the groups of a ``ParallelState``, by their labels and by their dims."""
        if state.grid is None:
            raise RuntimeError(f"{state!r} has no groups: create or initialise it first.")
        return cls(state, **options)

    def __repr__(self) -> str:
        return f"EnvironmentTable(rank {self.rank} of {self.world_size})"

    @property
    def local_rank(self) -> int:
        """This process's place on its host."""
        if self._local_rank is not None:
            return self._local_rank
        if "LOCAL_RANK" not in os.environ:
            raise RuntimeError(
                f"the local rank of rank {self.rank} is not known: start with torchrun, which sets "
                f"LOCAL_RANK, or give EnvironmentTable(local_rank=...)."
            )
        return int(os.environ["LOCAL_RANK"])

    @property
    def process_group_pool(self) -> dict[str, ProcessGroup]:
        """Every group by its names; torch's non-member marker where this rank is outside."""
        return self._known.names()

    @property
    def device_mesh_pool(self) -> dict[str, DeviceMesh]:
        """Every mesh by its name."""
        return dict(self._meshes)

    def is_master(
        self,
        process_group: ProcessGroup | str | None = None,
        *,
        group: ProcessGroup | str | None = None,
    ) -> bool:
        """Whether this rank is the first of a group, given or named; by default of the world."""
        return self.get_rank(process_group, group=group) == 0

    def get_rank(
        self,
        process_group: ProcessGroup | str | None = None,
        *,
        group: ProcessGroup | str | None = None,
    ) -> int:
        """This rank's place in a group, given or named; -1 outside it."""
        return dist.get_rank(self._group(process_group, group))

    def get_world_size(
        self,
        process_group: ProcessGroup | str | None = None,
        *,
        group: ProcessGroup | str | None = None,
    ) -> int:
        """The size of a group, given or named; -1 outside it."""
        return dist.get_world_size(self._group(process_group, group))

    def get_process_group(self, name: Dims) -> ProcessGroup:
        """The group of this name, or over these dims; torch's non-member marker outside it.

        Raises
        ------
        KeyError
            It was not created.
        """
        known, place = self.process_group_pool, self._known.find(name)
        for each in (name, place and place.name):
            if isinstance(each, str) and each in known:
                return known[each]
        remedy = f"create_process_group({shown(name)}{'' if place else ', ranks'})"
        raise KeyError(
            f"there is no process group {shown(name)} on rank {self.rank}: call {remedy} on every "
            f"rank first. Created so far: {sorted(known) or 'none'}."
        )

    def get_device_mesh(self, name: Dims) -> DeviceMesh:
        """The mesh of this name, or over these dims. KeyError if it was not created."""
        place = self._known.find(name)
        for each in (name, place and place.name):
            if isinstance(each, str) and each in self._meshes:
                return self._meshes[each]
        raise KeyError(
            f"there is no device mesh {shown(name)} on rank {self.rank}: call create_device_mesh() "
            f"on every rank first. Created so far: {sorted(self._meshes) or 'none'}."
        )

    def create_process_group(
        self,
        name_or_dims: Dims,
        ranks: Iterable[int] | Iterable[Iterable[int]] | None = None,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        share: bool = False,
    ) -> ProcessGroup:
        """Create a group and give it. *Collective* over the world, or over the grid of the dims.

        Parameters
        ----------
        name_or_dims : str or iterable of str
            Dims of the source (``"dp-tp"``), of a view (``"moe/ep"``) or of a mesh made here
            (``"train/dp-tp"``). With ``ranks``, a label of your choice.
        ranks : iterable of int, or several of them, optional
            The members. Several groups under one label have no rank in common; each rank's own is
            the one that the label gives it.
        backend, timeout, pg_options
            As for ``torch.distributed.new_group``. Over dims the grid's backend holds.
        share : bool
            Where the same members and backend have a group, make this a second name of it.

        Returns
        -------
        ProcessGroup
            torch's non-member marker on ranks outside it.

        Raises
        ------
        ValueError
            A duplicate, a name that is taken, ranks that make no group.
        KeyError
            Without ``ranks``: no dims of a known grid.
        AgreementError, CreationError
            Ranks asked for different things, or a group could not be created; none is left.
        """
        options = {"timeout": timeout, "pg_options": pg_options}
        if ranks is not None:
            return self._create_labelled(name_or_dims, ranks, backend, share, options)
        place = self._place(name_or_dims)
        with refusing_together(place.grid.participants(), self._policy):
            if backend is not None and plain(backend) != plain(place.grid.backend):
                raise ValueError(
                    f"the groups over {place.name!r} have the backend of their grid, not "
                    f"{backend!r}. Leave it out, or give ranks and a label."
                )
            found = self._known.duplicates(
                place.name, place.groups, place.grid.backend, share, options
            )
        if place.name not in self.process_group_pool:
            self._create_over(place.grid, {place: found}, options)
        return self.get_process_group(place.name)

    def hold(self, name: str, group: ProcessGroup, ranks: Iterable[Iterable[int]]) -> None:
        """Know a group that somebody else made, and keeps, by a label of your choice. *Local*.

        Parameters
        ----------
        name : str
            The label.
        group : ProcessGroup
            This rank's, or torch's non-member marker.
        ranks : iterable of iterables of int
            All groups of the label, those of other ranks too.

        Raises
        ------
        ValueError
            The name is taken, or the ranks make no groups.
        """
        groups = groups_of(ranks, name, self.world_size)
        if name in self.process_group_pool or self._known.find(name):
            raise ValueError(_taken("process group", name, self.rank))
        backend = None if group is NOT_A_MEMBER else plain(dist.get_backend(group))
        self._known.labels[name] = group
        self._known.labelled[name] = (backend, groups)

    def create_device_mesh(
        self,
        name_or_dims: Dims,
        shape: Sequence[int] | None = None,
        dim_names: Sequence[str] | None = None,
        *,
        device_type: str | None = None,
        backend: str | None = None,
        share: bool = False,
    ) -> DeviceMesh:
        """Create a mesh whose groups are in the pool. *Collective* as for a group.

        Parameters
        ----------
        name_or_dims : str or iterable of str
            Dims of the source, whose groups are used where they exist. With ``shape``, the name
            of a new mesh over the whole world; its groups are ``"name/dim"``.
        shape, dim_names : sequence, optional
            As for ``torch.distributed.device_mesh.init_device_mesh``: the last is the fastest.
        device_type : str, optional
            By default what the groups' backend serves.
        backend : str, optional
            Of a new mesh; by default the default group's.
        share : bool
            As for a group. A dim of size 1 uses a group that is there without being asked.

        Raises
        ------
        As ``create_process_group``.
        """
        if shape is not None:
            return self._new_mesh(name_or_dims, shape, dim_names, device_type, backend, share)
        place = self._place(name_or_dims)
        with refusing_together(place.grid.participants(), self._policy):
            if place.view is not None:
                raise ValueError(
                    f"there is no device mesh over a view, as {place.name!r}: give shape and "
                    f"dim_names for a mesh of its own."
                )
            if place.name in self._meshes:
                raise ValueError(_taken("device mesh", place.name, self.rank))
            wanted = self._single_dims(place.grid, place.dims, place.prefix, share)
        self._create_over(place.grid, wanted, {})
        mesh = self._meshes[place.name] = place.grid.device_mesh(place.dims, device_type)
        return mesh

    def _place(self, name_or_dims: Dims) -> Place:
        base = self._known.base
        everybody = range(self.world_size) if base is None else base.participants()
        with refusing_together(everybody, self._policy):
            return self._known.place(name_or_dims)

    def _new_mesh(
        self,
        name: Any,
        shape: Sequence[int],
        dim_names: Sequence[str] | None,
        device_type: str | None,
        backend: str | None,
        share: bool,
    ) -> DeviceMesh:
        with refusing_together(range(self.world_size), self._policy):
            if not isinstance(name, str) or not name or "/" in name:
                raise ValueError(
                    f"a mesh's name is a text without '/', rank {self.rank} was given "
                    f"{shown(name)}: its groups are called name/dim."
                )
            views = self._known.base.views if self._known.base else ()
            if name in self._meshes or name in views or self._known.find(name):
                raise ValueError(_taken("device mesh", name, self.rank))
            layout = RankLayout(tuple(dim_names or ())[::-1], tuple(shape)[::-1])
            if layout.size != self.world_size:
                raise ValueError(
                    f"device mesh {name!r} of shape {shown(shape)} has {layout.size} ranks and "
                    f"the world has {self.world_size}. For a part of it, make a HyperCommGrid "
                    f"with a rank_offset and ask EnvironmentTable.from_grid()."
                )
            grid = HyperCommGrid.over(layout, backend=plain(backend))
            wanted = self._single_dims(grid, grid.layout.dims, f"{name}/", share)
        try:
            self._create_over(grid, wanted, {}, name)
            mesh = grid.device_mesh(device_type=device_type)
        except BaseException:
            grid.destroy()
            raise
        self._known.grids[name], self._meshes[name] = grid, mesh
        return mesh

    def destroy(self) -> None:
        """Give back every group that this table made and forget the rest. *Local*.

        Groups over the source's dims are the source's, also when the table was asked for them.
        """
        self._pool.destroy()
        for grid in self._known.grids.values():
            grid.destroy()
        self._start()

    def _group(
        self, process_group: ProcessGroup | str | None, group: ProcessGroup | str | None
    ) -> ProcessGroup | None:
        given = group if process_group is None else process_group
        return self.get_process_group(given) if isinstance(given, str) else given

    def _single_dims(
        self, grid: HyperCommGrid, dims: Sequence[str], prefix: str, share: bool
    ) -> dict[Place, dict[Ranks, str]]:
        """What a mesh over ``dims`` still lacks, each with the groups that it can share."""
        places = [Place(prefix + dim, grid, (dim,)) for dim in dims]
        return {
            place: self._known.duplicates(
                place.name, place.groups, grid.backend, share or grid.dim_size(place.dims) == 1, {}
            )
            for place in places
            if place.dims[0] not in grid.groups
        }

    def _create_over(
        self,
        grid: HyperCommGrid,
        wanted: Mapping[Place, Mapping[Ranks, str]],
        options: Mapping[str, Any],
        mesh: str = "",
    ) -> None:
        """Create what is wanted and not found, all or none, and let the grid answer for it."""
        if not wanted:
            return
        if self.rank not in grid.participants():
            for place in wanted:
                grid.create_pg(place.dims, view=place.view)
            return
        proposal = {
            "layouts": {name: repr(layout) for name, layout in grid.views.items()},
            "mesh": mesh,
            "groups": {place.name: sorted({*found.values()}) for place, found in wanted.items()},
            "backend": grid.backend,
            "timeout": options.get("timeout"),
        }
        owner = f"{self!r}, mesh {mesh!r}" if mesh else None
        made: dict[Place, ProcessGroup] = {}
        with grid.agreed(proposal, owner) as pool:
            for place, found in wanted.items():
                layout = grid.views[place.view or BASE]
                inside = grid.is_current_rank_in_grid()
                mine = tuple(layout.group(self.rank, place.dims)) if inside else ()
                if mine in found:
                    made[place] = self.get_process_group(found[mine])
                label = place.name.removeprefix(f"{mesh}/")
                created = pool.make(
                    label,
                    {} if not mine or mine in found else {label: mine},
                    lambda place=place, found=found: [  # type: ignore[misc]
                        ranks for ranks in place.groups if tuple(sorted(ranks)) not in found
                    ],
                    dims=place.dims,
                    backend=grid.backend,
                    **options,
                )
                if created:
                    made[place] = created[0]
        for place in wanted:
            grid.hold(place.dims, made.get(place), view=place.view)

    def _create_labelled(
        self,
        name: Any,
        ranks: Iterable[int] | Iterable[Iterable[int]],
        backend: str | None,
        share: bool,
        options: Mapping[str, Any],
    ) -> ProcessGroup:
        everybody = range(self.world_size)
        with refusing_together(everybody, self._policy):
            if not isinstance(name, str) or not name:
                raise ValueError(
                    f"with ranks, a group's name is a text; rank {self.rank} was given "
                    f"{shown(name)}."
                )
            groups, backend = groups_of(ranks, name, self.world_size), plain(backend)
            if share and self._known.labelled.get(name) == (backend, groups):
                return self._known.labels[name]
            if name in self.process_group_pool or self._known.find(name):
                raise ValueError(_taken("process group", name, self.rank))
            found = self._known.duplicates(name, groups, backend, share, options)
        missing = [each for each in groups if each not in found]
        mine = next((each for each in groups if self.rank in each), ())
        proposal = {
            "group": name,
            "ranks": [span_of(each) for each in groups[:8]],
            "plan": hashlib.sha256(repr(groups).encode()).hexdigest(),
            "same as": sorted({*found.values()}),
            "backend": backend,
            "timeout": options["timeout"],
        }
        with self._pool.agreed(everybody, proposal):
            made = self._pool.make(
                name,
                {name: mine} if mine in missing else {},
                lambda: missing,
                backend=backend,
                **options,
            )
        shared = self.get_process_group(found[mine]) if mine in found else NOT_A_MEMBER
        self._known.labels[name] = made[0] if made else shared
        self._known.labelled[name] = (backend, groups)
        return self._known.labels[name]


def _taken(what: str, name: str, rank: int) -> str:
    return f"the name {name!r} is taken on rank {rank}: choose another for a new {what}."
