"""EnvironmentTable: this process's rank, groups and device meshes, by meaningful names."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid import of_torch
from hypergrid.agreement.commit import telling_others
from hypergrid.groups.creation import NOT_A_MEMBER, plain_backend
from hypergrid.groups.grid import BASE, HyperCommGrid, ordered
from hypergrid.groups.pool import GroupPool
from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import shown, span_of
from hypergrid.plan import Ranks
from hypergrid.policy import Agreement, Policy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = ProcessGroup | str | None  # a group, or its name
T = TypeVar("T")
_Key: TypeAlias = tuple[str | None, Ranks]  # of a group: its backend and its members


@dataclass(frozen=True)
class _Family:
    """All groups of a name, of which a rank is in one at most; equal on all ranks."""

    name: str
    backend: str | None
    everyone: Callable[[], list[Ranks]]  # each ascending; costs O(world) over dims
    dims: tuple[str, ...] = ()

    @functools.cached_property
    def keys(self) -> list[_Key]:
        """What tells each of the groups from all others."""
        return [(self.backend, ranks) for ranks in self.everyone()]


class EnvironmentTable:
    """One object to ask about ranks, groups and meshes, as ColossalAI's issue 3051 proposed.

    The name of a group is its dims in any order (``"dp-tp"``), after the mesh or view that they
    are of (``"train/dp"``, ``"moe/ep"``), or the label it was given. No group is created twice:
    members and a backend that the table knows are the same group under a second name. The default
    group does not count.

    A job may hold several tables; each destroys what it created. Methods that create are
    *collective* over the world, the others *local*. One that refuses its arguments raises when the
    other ranks know of it, after a minute at most.

    Parameters
    ----------
    source : HyperCommGrid, optional
        Whose groups are in the table too, also those that it creates later; of a ``ParallelState``
        its ``grid``.

    Raises
    ------
    RuntimeError
        torch.distributed is not initialised.

    Examples
    --------
    >>> table = EnvironmentTable()                                        # doctest: +SKIP
    >>> mesh = table.create_device_mesh("train", (2, 4), ("dp", "tp"))    # doctest: +SKIP
    >>> table.get_process_group("train/tp") is mesh.get_group("tp")       # doctest: +SKIP
    True
    >>> table.is_master("train/tp"), table.get_world_size("train/tp")     # doctest: +SKIP
    (True, 4)
    """

    def __init__(self, source: HyperCommGrid | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "an EnvironmentTable needs a world: call torch.distributed.init_process_group() "
                "first, as in a script that torchrun starts."
            )
        if source is not None and not isinstance(source, HyperCommGrid):
            raise TypeError(
                f"EnvironmentTable() takes a hypergrid.HyperCommGrid, not one of "
                f"{type(source).__module__}. Give its own: grid.core, state.grid."
            )
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.default_process_group = of_torch.default_group()
        self._source = source
        self._policy = replace(Policy.resolve(), share="none")
        self._start()

    def _start(self) -> None:
        self._pool = GroupPool(Agreement(epoch=""), self._policy, repr(self))
        self._created: dict[str, tuple[_Family, ProcessGroup]] = {}
        # By the part of a name before "/". Those of meshes own no groups.
        self._grids = {} if self._source is None else {"": self._source}
        self._meshes: dict[str, DeviceMesh] = {}

    def __repr__(self) -> str:
        return f"EnvironmentTable(rank {self.rank} of {self.world_size})"

    @property
    def process_group_pool(self) -> dict[str, ProcessGroup]:
        """Every group by its names; torch's non-member marker where this rank is outside."""
        return {name: group for name, (_, group) in self._named().items()}

    @property
    def device_mesh_pool(self) -> dict[str, DeviceMesh]:
        """Every mesh by its name."""
        return dict(self._meshes)

    def is_master(self, process_group: Group = None) -> bool:
        """Whether this rank is the first of a group, given or named; by default of the world."""
        return self.get_rank(process_group) == 0

    def get_rank(self, process_group: Group = None) -> int:
        """This rank's place in a group, given or named; -1 outside it."""
        return dist.get_rank(self._group(process_group))

    def get_world_size(self, process_group: Group = None) -> int:
        """The size of a group, given or named; -1 outside it."""
        return dist.get_world_size(self._group(process_group))

    def _group(self, process_group: Group) -> ProcessGroup | None:
        if isinstance(process_group, str):
            return self.get_process_group(process_group)
        return process_group

    def get_process_group(self, name: str) -> ProcessGroup:
        """The group of this name; torch's non-member marker outside it.

        KeyError if it was not created.
        """
        return self._look_up("process group", name, self.process_group_pool)

    def get_device_mesh(self, name: str) -> DeviceMesh:
        """The mesh of this name. KeyError if it was not created."""
        return self._look_up("device mesh", name, self._meshes)

    def _look_up(self, kind: str, name: str, pool: Mapping[str, T]) -> T:
        if name in pool:
            return pool[name]
        family = self._over(name)
        if family is not None and family.name in pool:  # its dims in another order
            return pool[family.name]
        raise KeyError(
            f"there is no {kind} {shown(name)} on rank {self.rank}: call "
            f"create_{kind.replace(' ', '_')}() on every rank first. Created so far: "
            f"{sorted(pool) or 'none'}."
        )

    def create_process_group(
        self,
        name: str,
        ranks: Iterable[int] | Iterable[Iterable[int]] | None = None,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
    ) -> ProcessGroup:
        """Create a group, or find it; returns this rank's, torch's non-member marker outside it.

        Parameters
        ----------
        name : str
            Dims of the source (``"dp-tp"``), of a view (``"moe/ep"``) or of a mesh made here
            (``"train/dp-tp"``). With ``ranks``, a label of your choice.
        ranks : iterable of int, or several of them, optional
            The members. Several groups under one label have no rank in common; on each rank the
            label means its own one.
        backend, timeout, pg_options
            As for ``torch.distributed.new_group``; by default the backend of the grid.

        Raises
        ------
        ValueError
            The name means other groups, invalid ranks, or options for a group that exists.
        KeyError
            Without ``ranks``: no dims of a known grid.
        AgreementError, CreationError
            Ranks asked for different things, or a group could not be created; all roll back.
        """
        with self._refusing():
            family = self._over(name)
            if ranks is not None:
                if family is not None or not isinstance(name, str) or not name:
                    raise ValueError(
                        f"with ranks, the name of a group must be a text that names no dims; rank "
                        f"{self.rank} was given {shown(name)}."
                    )
                groups = _groups_of(ranks, name, self.world_size)
                family = _Family(name, plain_backend(backend), groups.copy)
            elif family is None:
                dims = []
                for mesh, grid in self._grids.items():
                    for dim in grid.dim_names:
                        dims.append(f"{mesh}/{dim}" if mesh else dim)
                raise KeyError(
                    f"{shown(name)} names no dims that rank {self.rank} knows: {dims or 'none'}. "
                    f"For a group with that label, give ranks."
                )
            elif backend is not None:
                family = replace(family, backend=plain_backend(backend) or family.backend)
        return self._create([family], timeout=timeout, pg_options=pg_options)[0]

    def create_device_mesh(
        self,
        name: str,
        shape: Sequence[int],
        dim_names: Sequence[str],
        *,
        device_type: str | None = None,
        backend: str | None = None,
    ) -> DeviceMesh:
        """Create a mesh over the world; its groups are ``"name/dim"`` in the table.

        For a mesh over the source's groups call its ``device_mesh()``. Errors as for a group.

        Parameters
        ----------
        shape, dim_names : sequence
            As for ``torch.distributed.device_mesh.init_device_mesh``: the last is the fastest.
        device_type : str, optional
            By default what the groups' backend serves.
        backend : str, optional
            By default the default group's.
        """
        with self._refusing():
            if not isinstance(name, str) or not name or "/" in name:
                raise ValueError(
                    f"the name of a mesh must be a text without '/', as its groups are called "
                    f"name/dim; rank {self.rank} was given {shown(name)}."
                )
            if name in self._meshes or (self._source and name in self._source.views):
                raise ValueError(
                    f"rank {self.rank} has a mesh or view {name!r}: take another name."
                )
            layout = RankLayout(tuple(dim_names)[::-1], tuple(shape)[::-1])
            if layout.size != self.world_size:
                raise ValueError(
                    f"device mesh {name!r} of shape {shown(shape)} has {layout.size} ranks and the "
                    f"world has {self.world_size}. For a part of it, make a HyperCommGrid with a "
                    f"rank_offset and give it to EnvironmentTable()."
                )
            grid = HyperCommGrid.over(layout, backend=plain_backend(backend))
            families = [_over(grid, f"{name}/{dim}", [dim]) for dim in layout.dims]
        for dim, group in zip(layout.dims, self._create(families), strict=True):
            grid.hold(dim, group)
        self._meshes[name] = grid.device_mesh(device_type=device_type)
        self._grids[name] = grid
        return self._meshes[name]

    def destroy(self) -> None:
        """Destroy every group that this table created and forget the others. *Local*."""
        self._pool.destroy()
        self._start()

    def _refusing(self) -> AbstractContextManager[None]:
        world = range(self.world_size)
        return telling_others(lambda: world, patience=timedelta(minutes=1))

    def _over(self, name: Any) -> _Family | None:
        """The groups over the dims that a name means, whether or not they exist."""
        if not isinstance(name, str):
            return None
        where, _, dims = name.rpartition("/")
        # Before "/" there is a mesh of this table, or else a view of the source.
        grid = self._grids.get(where)
        view = None
        if grid is None:
            grid = self._source
            view = where
        if grid is None or not dims:
            return None
        try:
            group_name = grid.name(dims, view=view)
            names = ordered(grid.views[view or BASE], dims)
        except (KeyError, LayoutError):
            return None
        if where and view is None:
            group_name = f"{where}/{group_name}"
        return _over(grid, group_name, names, view)

    def _named(self) -> dict[str, tuple[_Family, ProcessGroup]]:
        """Each name that has groups, with this rank's."""
        named = dict(self._created)
        if self._source is None:
            return named
        for name, group in self._source.groups.items():
            family = self._over(name)
            if family is not None:
                if group is None:  # this rank is outside the grid
                    group = NOT_A_MEMBER
                named[name] = (family, group)
        return named

    def _create(self, families: list[_Family], **options: Any) -> list[ProcessGroup]:
        """This rank's group of each family: a known one with these members, or created now."""
        with self._refusing():
            named = self._named()
            group_of: dict[_Key, tuple[str, ProcessGroup]] = {}
            for name, (family, group) in named.items():
                for key in family.keys:
                    group_of.setdefault(key, (name, group))
            for family in families:
                namesake, _ = named.get(family.name, (family, None))
                if set(namesake.keys) != set(family.keys):
                    raise ValueError(
                        f"the name {family.name!r} means other groups on rank {self.rank}: take "
                        f"another name."
                    )
            keys = [key for family in families for key in family.keys]
            existing = sorted(group_of[key][0] for key in keys if key in group_of)
            if existing and any(value is not None for value in options.values()):
                raise ValueError(
                    f"process group {families[0].name!r} exists as {existing[0]!r}, whose timeout "
                    f"and options are set: leave them out, or take other ranks."
                )
        # The first groups of each name: an error shows them where ranks differ.
        spans = []
        for family in families:
            for _, ranks in family.keys[:8]:
                spans.append(span_of(ranks))
        proposal = {
            "groups": [family.name for family in families],
            "ranks": spans,
            "plan": hashlib.sha256(repr(keys).encode()).hexdigest(),
            "same as": existing,
            "timeout": options.get("timeout"),
        }
        groups = []
        with self._pool.agreed(range(self.world_size), proposal):
            for family in families:
                group = self._create_missing(family, group_of, options)
                groups.append(group)
        for family, group in zip(families, groups, strict=True):
            self._created[family.name] = (family, group)
        return groups

    def _create_missing(
        self,
        family: _Family,
        group_of: dict[_Key, tuple[str, ProcessGroup]],
        options: dict[str, Any],
    ) -> ProcessGroup:
        """Create the groups of ``family`` that ``group_of`` lacks; gives that of this rank."""
        missing = [key for key in family.keys if key not in group_of]
        missing_ranks = [ranks for _, ranks in missing]
        own_key = None
        for key in family.keys:
            _, ranks = key
            if self.rank in ranks:
                own_key = key
        ranks_of = {}
        if own_key in missing:
            ranks_of[family.name] = own_key[1]
        created = self._pool.make(
            family.name,
            ranks_of,
            missing_ranks.copy,
            dims=family.dims,
            backend=family.backend,
            **options,
        )
        for key in missing:
            group_of[key] = (family.name, created[0] if created else NOT_A_MEMBER)
        if own_key is None:
            return NOT_A_MEMBER  # type: ignore[no-any-return]
        _, group = group_of[own_key]
        return group


def _over(grid: HyperCommGrid, name: str, dims: Sequence[str], view: str | None = None) -> _Family:
    def everyone() -> list[Ranks]:
        return _ascending(grid.get_rank_enum(dims, view=view))

    return _Family(name, plain_backend(grid.backend), everyone, tuple(dims))


def _ascending(groups: Iterable[Iterable[int]]) -> list[Ranks]:
    return [tuple(sorted(ranks)) for ranks in groups]


def _groups_of(ranks: Any, name: str, world_size: int) -> list[Ranks]:
    """One group, or several without a common rank."""
    try:
        lists = list(ranks)
        are_groups = all(isinstance(members, Iterable) for members in lists)
        if not lists or not are_groups:
            lists = [lists]  # one group
        groups = _ascending(map(operator.index, members) for members in lists)
    except TypeError:
        raise ValueError(
            f"the ranks of {name!r} must be whole numbers, or lists of them, got {shown(ranks)}."
        ) from None
    members = [rank for group in groups for rank in group]
    is_repeated = len(set(members)) < len(members)
    is_outside = not set(members) <= set(range(world_size))
    if not all(groups) or is_repeated or is_outside:
        raise ValueError(
            f"the ranks of {name!r} are {shown(ranks)}: give each at most once, at least one for "
            f"each group, of 0 to {world_size - 1}."
        )
    return groups
