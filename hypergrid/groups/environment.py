"""EnvironmentTable: this process's rank, groups and device meshes, by meaningful names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from hypergrid.groups.backends import plain_backend
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.groups.known_groups import (
    NOT_A_MEMBER,
    Found,
    KnownGroups,
    Labelled,
    Place,
    State,
    groups_of,
)
from hypergrid.groups.pool import GroupPool
from hypergrid.groups.prepare import Agreement, refusing_together
from hypergrid.groups.suspension import Suspended
from hypergrid.layout import Dims, RankLayout
from hypergrid.messages import shown, span_of
from hypergrid.plan import Ranks
from hypergrid.policy import Policy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = ProcessGroup | str | None  # a group, or its name
T = TypeVar("T")


class EnvironmentTable:
    """What ColossalAI's issue 3051 proposed: one object to ask about ranks, groups and meshes.

    The name of a group is its dims in any order (``"dp-tp"``), after the mesh or view that they
    are of (``"train/dp"``, ``"moe/ep"``), or the label it was given. A mesh is a view of groups
    in the table; both return the same ones. A group with the members and backend of one in the
    table is refused with the name of that one; ``share=True`` makes the new name a second one. The
    default group does not count.

    A job may hold several tables; each destroys what it created. Methods that create are
    *collective*, the others *local*. A collective method that refuses its arguments raises when
    the other ranks know of it, after a minute at most. RuntimeError if torch.distributed, or the
    state, is not initialised.

    Parameters
    ----------
    source : HyperCommGrid or ParallelState, optional
        Whose groups are in the table too. The table does not destroy them.
    local_rank : int, optional
        By default ``LOCAL_RANK``, which torchrun sets.

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
        self._shared: dict[str, str] = {}  # names of this rank's groups -> their first names
        self._away: dict[str, tuple[str, Labelled]] = {}  # suspended, with the groups' names

    @classmethod
    def from_grid(cls, grid: HyperCommGrid, **options: Any) -> EnvironmentTable:
        """A table with the groups of ``grid``, also those that it creates later."""
        if not isinstance(grid, HyperCommGrid):
            raise TypeError(
                f"from_grid() takes a hypergrid.HyperCommGrid, not one of {type(grid).__module__}. "
                f"If it holds one, use that: from_grid(grid.core)."
            )
        return cls(grid, **options)

    @classmethod
    def from_state(cls, state: State, **options: Any) -> EnvironmentTable:
        """A table with the groups of a ``ParallelState``, by their labels and by their dims."""
        if state.grid is None:
            raise RuntimeError(f"{state!r} has no groups: initialise it first.")
        return cls(state, **options)

    def __repr__(self) -> str:
        return f"EnvironmentTable(rank {self.rank} of {self.world_size})"

    @property
    def local_rank(self) -> int:
        """This process's place on its host."""
        found = os.environ.get("LOCAL_RANK") if self._local_rank is None else self._local_rank
        if found is None:
            raise RuntimeError(
                f"the local rank of rank {self.rank} is not known: start with torchrun, which sets "
                f"LOCAL_RANK, or give EnvironmentTable(local_rank=...)."
            )
        return int(found)

    @property
    def process_group_pool(self) -> dict[str, ProcessGroup]:
        """Every group by its names; torch's non-member marker where this rank is outside."""
        return self._known.names()

    @property
    def device_mesh_pool(self) -> dict[str, DeviceMesh]:
        """Every mesh by its name."""
        return dict(self._meshes)

    def is_master(self, process_group: Group = None, *, group: Group = None) -> bool:
        """Whether this rank is the first of a group, given or named; by default of the world."""
        return self.get_rank(process_group, group=group) == 0

    def get_rank(self, process_group: Group = None, *, group: Group = None) -> int:
        """This rank's place in a group, given or named; -1 outside it."""
        return dist.get_rank(self._group(process_group, group))

    def get_world_size(self, process_group: Group = None, *, group: Group = None) -> int:
        """The size of a group, given or named; -1 outside it."""
        return dist.get_world_size(self._group(process_group, group))

    def _group(self, process_group: Group, group: Group) -> ProcessGroup | None:
        given = group if process_group is None else process_group
        return self.get_process_group(given) if isinstance(given, str) else given

    def get_process_group(self, name: Dims) -> ProcessGroup:
        """The group of this name, or over these dims; torch's non-member marker outside it.

        KeyError if it was not created.
        """
        ranks = "" if self._known.find(name) else ", ranks"
        create = f"create_process_group({shown(name)}{ranks})"
        return self._found("process group", name, self.process_group_pool, create)

    def get_device_mesh(self, name: Dims) -> DeviceMesh:
        """The mesh of this name, or over these dims. KeyError if it was not created."""
        return self._found("device mesh", name, self._meshes, "create_device_mesh()")

    def _found(self, what: str, name: Dims, pool: Mapping[str, T], create: str) -> T:
        place = self._known.find(name)
        for each in (name, place and place.name):
            if isinstance(each, str) and each in pool:
                return pool[each]
        raise KeyError(
            f"there is no {what} {shown(name)} on rank {self.rank}: call {create} on every rank "
            f"first. Created so far: {sorted(pool) or 'none'}."
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
        """Create a group; returns this rank's, torch's non-member marker outside it.

        *Collective* over the world, or over the grid of the dims.

        Parameters
        ----------
        name_or_dims : str or iterable of str
            Dims of the source (``"dp-tp"``), of a view (``"moe/ep"``) or of a mesh made here
            (``"train/dp-tp"``). With ``ranks``, a label of your choice.
        ranks : iterable of int, or several of them, optional
            The members. Several groups under one label have no rank in common; on each rank the
            label means its own one.
        backend, timeout, pg_options
            As for ``torch.distributed.new_group``. Groups over dims have the grid's backend.
        share : bool
            If a group with the same members and backend exists, make this a second name of it.

        Raises
        ------
        ValueError
            A duplicate, a name that is taken, invalid ranks.
        KeyError
            Without ``ranks``: no dims of a known grid.
        AgreementError, CreationError
            Ranks asked for different things, or a group could not be created; all roll back.
        """
        options = {"timeout": timeout, "pg_options": pg_options}
        if ranks is not None:
            return self._create_labelled(name_or_dims, ranks, backend, share, **options)
        place = self._place(name_or_dims)
        name, grid = place.name, place.grid
        with refusing_together(grid.participants(), self._policy):
            if backend is not None and plain_backend(backend) != plain_backend(grid.backend):
                raise ValueError(
                    f"the groups over {name!r} have the backend of their grid, not {backend!r}. "
                    f"Leave it out, or give ranks and a label."
                )
            found = self._known.duplicates(name, place.groups, grid.backend, share, **options)
        if name not in self.process_group_pool:
            self._create_over(grid, {place: found}, **options)
        return self.get_process_group(name)

    def hold(self, name: str, group: ProcessGroup, ranks: Iterable[Iterable[int]]) -> None:
        """Add a group that the caller created and will destroy, under a label. *Local*.

        ``group`` is this rank's, or torch's non-member marker; ``ranks`` are all groups of the
        label, those of other ranks too. ValueError if the name is taken or the ranks are invalid.
        """
        groups = groups_of(ranks, name, self.world_size)
        self._check_label(name)
        backend = None if group is NOT_A_MEMBER else plain_backend(dist.get_backend(group))
        self._known.labelled[name] = Labelled(group, backend, groups)

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
        """Create a mesh whose groups are in the table. *Collective* as for a group; same errors.

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
            As for a group. A dim of size 1 always uses a group that exists.
        """
        place = self._place(name_or_dims) if shape is None else None
        ranks = range(self.world_size) if place is None else place.grid.participants()
        with refusing_together(ranks, self._policy):
            mesh: Any = name_or_dims if place is None else place.name
            if place is None:
                place = self._new_grid(mesh, shape, dim_names, backend)
            elif place.view is not None:
                raise ValueError(
                    f"there is no device mesh over a view, as {place.name!r}: give shape and "
                    f"dim_names for a mesh of its own."
                )
            grid = place.grid
            self._check_free("device mesh", mesh, mesh in self._meshes)
            prefix = place.name[: place.name.rfind("/") + 1]
            # A mesh needs a group for each dim; one of size 1 may always be shared.
            wanted = {
                each: self._known.duplicates(
                    each.name, each.groups, grid.backend, share or len(each.groups[0]) == 1
                )
                for each in (Place(prefix + dim, grid, (dim,)) for dim in place.dims)
                if each.dims[0] not in grid.groups
            }
        try:
            self._create_over(grid, wanted, "" if shape is None else mesh)
            made = grid.device_mesh(place.dims, device_type)
        except BaseException:
            if shape is not None:
                grid.destroy()
            raise
        if shape is not None:
            self._known.grids[mesh] = grid
        self._meshes[mesh] = made
        return made

    def _place(self, name_or_dims: Dims) -> Place:
        base = self._known.base
        everybody = range(self.world_size) if base is None else base.participants()
        with refusing_together(everybody, self._policy):
            place = self._known.find(name_or_dims)
            if place is None:
                grids = self._known.all_grids()
                dims = [prefix + dim for prefix, grid in grids for dim in grid.dim_names]
                raise KeyError(
                    f"{shown(name_or_dims)} names no dims that rank {self.rank} knows: "
                    f"{dims or 'none'}. For a group with that label, give ranks; for a mesh, "
                    f"shape and dim_names."
                )
            return place

    def _new_grid(
        self, name: Any, shape: Any, dim_names: Sequence[str] | None, backend: str | None
    ) -> Place:
        """All dims of the grid of a new mesh over the world."""
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(
                f"the name of a mesh must be a text without '/', as its groups are called "
                f"name/dim; rank {self.rank} was given {shown(name)}."
            )
        views = self._known.base.views if self._known.base else ()
        self._check_free("device mesh", name, name in views or self._known.find(name))
        layout = RankLayout(tuple(dim_names or ())[::-1], tuple(shape)[::-1])
        if layout.size != self.world_size:
            raise ValueError(
                f"device mesh {name!r} of shape {shown(shape)} has {layout.size} ranks and the "
                f"world has {self.world_size}. For a part of it, make a HyperCommGrid with a "
                f"rank_offset and use EnvironmentTable.from_grid()."
            )
        grid = HyperCommGrid.over(layout, backend=plain_backend(backend))
        return Place(f"{name}/{grid.name(layout.dims)}", grid, layout.dims)

    def suspend(self, how: str = "auto") -> dict[str, Suspended]:
        """Free the device memory of the groups that this table created, until ``resume``.

        Groups over the source's dims are suspended with the source. *Collective*, arguments,
        result and errors as for ``GroupPool.suspend``. Names of those that are kept remain.
        """
        names = {each.label: str(each.group.group_name) for each in self._pool.groups}
        report: dict[str, Suspended] = {}
        reports = [self._pool.suspend(how), *(g.suspend(how) for g in self._known.grids.values())]
        for backend, done in (item for each in reports for item in each.items()):
            report[backend] = done + report[backend] if backend in report else done
        for name in names.keys() - {each.label for each in self._pool.usable()}:
            self._away[name] = names[name], self._known.labelled.pop(name)
        return report

    def resume(self) -> dict[str, ProcessGroup]:
        """Let suspended groups work again; result and errors as ``GroupPool.resume``.

        *Collective* over the world where groups were closed. Meshes over new groups are new too,
        also over those of the source: resume that first.
        """
        renewed = self._pool.resume(range(self.world_size))
        for grid in self._known.grids.values():
            renewed |= grid.resume()
        for name, (old, known) in self._away.items():
            self._known.labelled[name] = known._replace(group=renewed[old])
        self._away = {}
        for name, same in self._shared.items():
            group = self.get_process_group(same)
            if name in self._known.labelled:
                known = self._known.labelled[name]
                self._known.labelled[name] = known._replace(group=group)
            elif (place := self._known.find(name)) is not None:
                place.grid.hold(place.dims, group, view=place.view, again=True)
        for name, mesh in self._meshes.items():
            over = self._known.grids.get(name, self._known.base)
            if over is not None and mesh.mesh_dim_names and not _is_over(mesh, over):
                self._meshes[name] = over.device_mesh(mesh.mesh_dim_names, mesh.device_type)
        return renewed

    def destroy(self) -> None:
        """Destroy every group that this table created and forget the others. *Local*.

        Groups over the source's dims belong to the source, also if the table created them.
        """
        self._pool.destroy()
        for grid in self._known.grids.values():
            grid.destroy()
        self._start()

    def _create_over(
        self, grid: HyperCommGrid, wanted: dict[Place, Found], mesh: str = "", **options: Any
    ) -> None:
        """Create the groups that are wanted and not found, all or none; the grid holds them."""
        if not wanted:
            return
        made = dict.fromkeys(wanted, NOT_A_MEMBER)
        if self.rank in grid.participants():
            proposal = {
                "layouts": {name: repr(layout) for name, layout in grid.views.items()},
                "mesh": mesh,
                "groups": {each.name: sorted({*found.values()}) for each, found in wanted.items()},
                "backend": grid.backend,
                "timeout": options.get("timeout"),
            }
            with grid.agreed(proposal, f"{self!r}, mesh {mesh!r}" if mesh else None) as pool:
                for place, found in wanted.items():
                    label = place.name.removeprefix(f"{mesh}/")
                    own = {**options, "dims": place.dims, "backend": grid.backend}
                    made[place] = self._make(pool, label, place.groups, found, **own)
                    self._note_shared(place.name, place.groups, found)
        for place, group in made.items():
            grid.hold(place.dims, None if group is NOT_A_MEMBER else group, view=place.view)

    def _make(
        self, pool: GroupPool, label: str, groups: list[Ranks], found: Found, **options: Any
    ) -> ProcessGroup:
        """This rank's one of ``groups``: as found under another name, or created now."""
        mine = next((ranks for ranks in groups if self.rank in ranks), ())
        missing = [ranks for ranks in groups if ranks not in found]
        created = {label: mine} if mine in missing else {}
        made = pool.make(label, created, lambda: missing, **options)
        shared = self.get_process_group(found[mine]) if mine in found else NOT_A_MEMBER
        return made[0] if made else shared

    def _note_shared(self, name: str, groups: list[Ranks], found: Found) -> None:
        for ranks in groups:
            if self.rank in ranks and ranks in found:
                self._shared[name] = found[ranks]

    def _create_labelled(
        self, name: Any, ranks: Any, backend: str | None, share: bool, **options: Any
    ) -> ProcessGroup:
        everybody = range(self.world_size)
        with refusing_together(everybody, self._policy):
            if not isinstance(name, str) or not name:
                raise ValueError(
                    f"with ranks, the name of a group must be a text; rank {self.rank} was given "
                    f"{shown(name)}."
                )
            groups, backend = groups_of(ranks, name, self.world_size), plain_backend(backend)
            known = self._known.labelled.get(name)
            if share and known is not None and known[1:] == (backend, groups):
                return known.group
            self._check_label(name)
            found = self._known.duplicates(name, groups, backend, share, **options)
        proposal = {
            "group": name,
            "ranks": [span_of(each) for each in groups[:8]],
            "plan": hashlib.sha256(repr(groups).encode()).hexdigest(),
            "same as": sorted({*found.values()}),
            "backend": backend,
            "timeout": options["timeout"],
        }
        with self._pool.agreed(everybody, proposal):
            group = self._make(self._pool, name, groups, found, backend=backend, **options)
            self._note_shared(name, groups, found)
        self._known.labelled[name] = Labelled(group, backend, groups)
        return group

    def _check_label(self, name: str) -> None:
        is_taken = name in self.process_group_pool or self._known.find(name)
        self._check_free("process group", name, is_taken)

    def _check_free(self, what: str, name: str, is_taken: object) -> None:
        if is_taken:
            raise ValueError(
                f"the name {name!r} is taken on rank {self.rank}: choose another for a new {what}."
            )


def _is_over(mesh: DeviceMesh, grid: HyperCommGrid) -> bool:
    """Whether the groups of ``mesh`` are those that the grid has now."""
    try:
        return all(mesh.get_group(dim) is grid.get_pg(dim) for dim in mesh.mesh_dim_names or ())
    except RuntimeError:  # torch knows it no longer
        return False
