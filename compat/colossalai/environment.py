"""EnvironmentTable: this process's rank, groups and device meshes, by meaningful names."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from compat.colossalai.groups import Row, UniqueGroups
from hypergrid import of_torch
from hypergrid.agreement.commit import telling_others
from hypergrid.groups.creation import plain_backend
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.layout import RankLayout, span_of
from hypergrid.messages import shown
from hypergrid.plan import Ranks


class _Pool(dict[str, Any]):
    """A dict of what was created, by name."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"there is no {shown(name)} here: create it on every rank first. Created so far: "
            f"{sorted(self) or 'none'}."
        )


class EnvironmentTable:
    """One object to ask about ranks, groups and meshes, as ColossalAI's issue 3051 proposed.

    A group has the name that it was given, a group of a mesh ``"mesh/dim"``. No group is created
    twice: members and a backend that the table knows are the same group under a second name. The
    default group does not count.

    A job may hold several tables; each destroys what it created. Methods that create are
    *collective* over the world, the others *local*. One that refuses its arguments raises when the
    other ranks know of it, after a minute at most.

    Examples
    --------
    >>> table = EnvironmentTable()                                        # doctest: +SKIP
    >>> mesh = table.create_device_mesh("train", (2, 4), ("dp", "tp"))    # doctest: +SKIP
    >>> table.get_process_group("train/tp") is mesh.get_group("tp")       # doctest: +SKIP
    True
    >>> table.is_master(mesh.get_group("tp"))                             # doctest: +SKIP
    True
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.default_process_group = of_torch.default_group()
        self.process_group_pool: dict[str, ProcessGroup] = _Pool()
        """Every group by its names; torch's non-member marker where this rank is outside."""
        self.device_mesh_pool: dict[str, DeviceMesh] = _Pool()
        """Every mesh by its name."""
        self._world = range(self.world_size)
        grid = HyperCommGrid([self.world_size], ["world"])
        self._groups = UniqueGroups(grid, f"EnvironmentTable of rank {self.rank}")

    def is_master(self, process_group: ProcessGroup | None = None) -> bool:
        """Whether this rank is the first of a group, by default of the world."""
        return dist.get_rank(process_group) == 0

    def get_rank(self, process_group: ProcessGroup | None = None) -> int:
        """This rank's place in a group; -1 outside it."""
        return dist.get_rank(process_group)

    def get_world_size(self, process_group: ProcessGroup | None = None) -> int:
        """The size of a group; -1 outside it."""
        return dist.get_world_size(process_group)

    def get_process_group(self, name: str) -> ProcessGroup:
        """The group of this name. KeyError if it was not created."""
        return self.process_group_pool[name]

    def get_device_mesh(self, name: str) -> DeviceMesh:
        """The mesh of this name. KeyError if it was not created."""
        return self.device_mesh_pool[name]

    def create_process_group(
        self, name: str, ranks: Iterable[int], *, backend: str | None = None
    ) -> ProcessGroup:
        """Create the group of ``ranks``, or find it; torch's non-member marker outside it.

        Raises
        ------
        ValueError
            The name is taken, or a rank is not of the world.
        AgreementError, CreationError
            Ranks asked for different things, or a group could not be created; all roll back.
        """
        with self._telling_others():
            members = self._members(ranks)
            rows: dict[str, Row] = {name: ((), [members])}
            self._check_names(name, rows)
        self._create(rows, backend, group=name, ranks=span_of(members))
        return self.process_group_pool[name]

    def create_device_mesh(
        self,
        name: str,
        shape: Sequence[int],
        dim_names: Sequence[str],
        *,
        backend: str | None = None,
    ) -> DeviceMesh:
        """Create a mesh over the world; its groups are ``"name/dim"`` in the table.

        ``shape`` and ``dim_names`` are as for ``torch.distributed.device_mesh.init_device_mesh``:
        the last is the fastest. Errors as for a group.
        """
        with self._telling_others():
            layout = RankLayout(tuple(dim_names)[::-1], tuple(shape)[::-1])
            if layout.size != self.world_size:
                raise ValueError(
                    f"mesh {shown(name)} has {layout.size} ranks and the world {self.world_size}. "
                    f"For a part of it, make a HyperCommGrid with a rank_offset."
                )
            rows: dict[str, Row] = {}
            for dim in layout.dims:
                rows[f"{name}/{dim}"] = (dim,), list(map(tuple, layout.groups(dim).tolist()))
            self._check_names(name, rows)
        self._create(rows, backend, mesh=name, layout=repr(layout))
        grid = HyperCommGrid.over(layout)
        for dim in layout.dims:
            grid.hold(dim, self.process_group_pool[f"{name}/{dim}"])
        mesh = grid.device_mesh()
        self.device_mesh_pool[name] = mesh
        return mesh

    def destroy(self) -> None:
        """Destroy every group that this table created. *Local*."""
        self._groups.destroy()
        self.process_group_pool.clear()
        self.device_mesh_pool.clear()

    def _telling_others(self) -> AbstractContextManager[None]:
        return telling_others(lambda: self._world, patience=timedelta(minutes=1))

    def _create(self, rows: Mapping[str, Row], backend: str | None, **proposal: Any) -> None:
        """Create what is missing of the rows, and put this rank's groups into the pool."""
        backend = plain_backend(backend)
        self._groups.create(rows, backend, proposal | {"backend": backend})
        for name, (_, lists) in rows.items():
            self.process_group_pool[name] = self._groups.own(lists, backend)

    def _members(self, ranks: Any) -> Ranks:
        """The ranks of a group, ascending."""
        with suppress(TypeError):
            members = sorted(map(operator.index, ranks))
            if members and {*members} <= {*self._world} and len({*members}) == len(members):
                return tuple(members)
        raise ValueError(
            f"ranks {shown(ranks)} make no group: give whole numbers of 0 to "
            f"{self.world_size - 1}, at least one and each once."
        )

    def _check_names(self, name: Any, rows: Mapping[str, Row]) -> None:
        is_taken = {*rows} & {*self.process_group_pool} or name in self.device_mesh_pool
        if is_taken or not isinstance(name, str) or not name:
            raise ValueError(
                f"{shown(name)} is no text, or a name that rank {self.rank} has already: take "
                f"another name."
            )
