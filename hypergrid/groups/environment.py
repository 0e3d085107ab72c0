"""EnvironmentTable: this process's rank, groups and device meshes, by meaningful names."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid import of_torch
from hypergrid.agreement.commit import telling_others
from hypergrid.groups.creation import NOT_A_MEMBER, plain_backend
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.groups.pool import GroupPool
from hypergrid.layout import RankLayout
from hypergrid.messages import shown, span_of
from hypergrid.plan import GroupRow, Ranks
from hypergrid.policy import Agreement, Policy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = ProcessGroup | str | None  # a group, or its name
T = TypeVar("T")
_Key: TypeAlias = tuple[str | None, Ranks]  # of a group: its backend and its members


class EnvironmentTable:
    """One object to ask about ranks, groups and meshes, as ColossalAI's issue 3051 proposed.

    A group has the name that it was given, a group of a mesh ``"mesh/dim"``. No group is created
    twice: members and a backend that the table knows are the same group under a second name. The
    default group does not count.

    A job may hold several tables; each destroys what it created. Methods that create are
    *collective* over the world, the others *local*. One that refuses its arguments raises when the
    other ranks know of it, after a minute at most.

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

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "an EnvironmentTable needs a world: call torch.distributed.init_process_group() "
                "first, as in a script that torchrun starts."
            )
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.default_process_group = of_torch.default_group()
        self._policy = replace(Policy.resolve(), share="none")
        self._start()

    def _start(self) -> None:
        self._pool = GroupPool(Agreement(epoch=""), self._policy, repr(self))
        # By name: its row, and the group of this rank.
        self._created: dict[str, tuple[GroupRow, ProcessGroup]] = {}
        self._meshes: dict[str, DeviceMesh] = {}

    def __repr__(self) -> str:
        return f"EnvironmentTable(rank {self.rank} of {self.world_size})"

    @property
    def process_group_pool(self) -> dict[str, ProcessGroup]:
        """Every group by its names; torch's non-member marker where this rank is outside."""
        return {name: group for name, (_, group) in self._created.items()}

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
        if name not in pool:
            raise KeyError(
                f"there is no {kind} {shown(name)} on rank {self.rank}: call "
                f"create_{kind.replace(' ', '_')}() on every rank first. Created so far: "
                f"{sorted(pool) or 'none'}."
            )
        return pool[name]

    def create_process_group(
        self,
        name: str,
        ranks: Iterable[int] | Iterable[Iterable[int]],
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
    ) -> ProcessGroup:
        """Create a group, or find it; returns this rank's, torch's non-member marker outside it.

        Parameters
        ----------
        name : str
            A label of your choice.
        ranks : iterable of int, or several of them
            The members. Several groups under one label have no rank in common; on each rank the
            label means its own one.
        backend, timeout, pg_options
            As for ``torch.distributed.new_group``; by default the default group's backend.

        Raises
        ------
        ValueError
            The name means other groups, invalid ranks, or options for a group that exists.
        AgreementError, CreationError
            Ranks asked for different things, or a group could not be created; all roll back.
        """
        with self._refusing():
            if not isinstance(name, str) or not name:
                raise ValueError(
                    f"the name of a group must be a text; rank {self.rank} was given {shown(name)}."
                )
            groups = _groups_of(ranks, name, self.world_size)
            row = _row(name, groups, backend)
        return self._create([row], timeout=timeout, pg_options=pg_options)[0]

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

        Errors as for a group.

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
            if name in self._meshes:
                raise ValueError(f"rank {self.rank} has a mesh {name!r}: take another name.")
            layout = RankLayout(tuple(dim_names)[::-1], tuple(shape)[::-1])
            if layout.size != self.world_size:
                raise ValueError(
                    f"device mesh {name!r} of shape {shown(shape)} has {layout.size} ranks and the "
                    f"world has {self.world_size}. For a part of it, make a HyperCommGrid with a "
                    f"rank_offset and call its device_mesh()."
                )
            rows = []
            for dim in layout.dims:
                groups = layout.groups(dim).tolist()
                rows.append(_row(f"{name}/{dim}", groups, backend, (dim,)))
        grid = HyperCommGrid.over(layout, backend=plain_backend(backend))
        for dim, group in zip(layout.dims, self._create(rows), strict=True):
            grid.hold(dim, group)
        self._meshes[name] = grid.device_mesh(device_type=device_type)
        return self._meshes[name]

    def destroy(self) -> None:
        """Destroy every group that this table created. *Local*."""
        self._pool.destroy()
        self._start()

    def _refusing(self) -> AbstractContextManager[None]:
        world = range(self.world_size)
        return telling_others(lambda: world, patience=timedelta(minutes=1))

    def _create(self, rows: list[GroupRow], **options: Any) -> list[ProcessGroup]:
        """This rank's group of each row: one that exists already, or one that is created now."""
        keys = [key for row in rows for key in _keys(row)]
        with self._refusing():
            # The groups that exist: the first name of each, and this rank's group of that name.
            group_of: dict[_Key, tuple[str, ProcessGroup]] = {}
            for name, (row, group) in self._created.items():
                for key in _keys(row):
                    group_of.setdefault(key, (name, group))
            for row in rows:
                namesake, _ = self._created.get(row.label, (row, None))
                if set(_keys(namesake)) != set(_keys(row)):
                    raise ValueError(
                        f"the name {row.label!r} means other groups on rank {self.rank}: take "
                        f"another name."
                    )
            existing = sorted(group_of[key][0] for key in keys if key in group_of)
            if existing and any(value is not None for value in options.values()):
                raise ValueError(
                    f"process group {rows[0].label!r} exists as {existing[0]!r}, whose timeout "
                    f"and options are set: leave them out, or take other ranks."
                )
        # The first groups of each name: an error shows them where ranks differ.
        spans = []
        for row in rows:
            for _, ranks in _keys(row)[:8]:
                spans.append(span_of(ranks))
        proposal = {
            "groups": [row.label for row in rows],
            "ranks": spans,
            "plan": hashlib.sha256(repr(keys).encode()).hexdigest(),
            "same as": existing,
            "timeout": options.get("timeout"),
        }
        groups = []
        with self._pool.two_phase_commit(range(self.world_size), proposal):
            for row in rows:
                group = self._create_missing(row, group_of, options)
                groups.append(group)
        for row, group in zip(rows, groups, strict=True):
            self._created[row.label] = (row, group)
        return groups

    def _create_missing(
        self,
        row: GroupRow,
        group_of: dict[_Key, tuple[str, ProcessGroup]],
        options: dict[str, Any],
    ) -> ProcessGroup:
        """Create the groups of a row that do not exist yet; gives that of this rank."""
        missing = []
        ranks_of = {}  # the group of this rank, if it is missing
        own_key = None
        for key in _keys(row):
            _, ranks = key
            if self.rank in ranks:
                own_key = key
            if key not in group_of:
                missing.append(ranks)
                if self.rank in ranks:
                    ranks_of[row.label] = ranks
        created = self._pool.make(
            row.label, ranks_of, missing.copy, dims=row.dims, backend=row.backend, **options
        )
        group = created[0] if created else NOT_A_MEMBER
        for key in _keys(row):
            group_of.setdefault(key, (row.label, group))
        if own_key is None:
            return NOT_A_MEMBER  # type: ignore[no-any-return]
        return group_of[own_key][1]


def _row(
    name: str, groups: Iterable[Iterable[int]], backend: str | None, dims: tuple[str, ...] = ()
) -> GroupRow:
    """All groups of a name, of which a rank is in one at most; equal on all ranks."""
    explicit = tuple([tuple(sorted(ranks)) for ranks in groups])
    return GroupRow(name, "world", dims, explicit=explicit, backend=plain_backend(backend))


def _keys(row: GroupRow) -> list[_Key]:
    return [(row.backend, ranks) for ranks in row.explicit or ()]


def _groups_of(ranks: Any, name: str, world_size: int) -> list[list[int]]:
    """One group, or several without a common rank."""
    try:
        lists = list(ranks)
        if not lists or not isinstance(lists[0], Iterable):
            lists = [lists]  # one group
        groups = [list(map(operator.index, members)) for members in lists]
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
