"""EnvironmentTable: this process's rank, groups and device meshes, by meaningful names."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from compat.colossalai.groups import Lists, UniqueGroups
from hypergrid import of_torch
from hypergrid.agreement.commit import telling_others
from hypergrid.groups.creation import plain_backend
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.layout import RankLayout, span_of
from hypergrid.messages import shown


class EnvironmentTable:
    """One object to ask about ranks, groups and meshes, as ColossalAI's issue 3051 proposed.

    A group has the name that it was given, a group of a mesh ``"mesh/dim"``. No group is created
    twice: members and a backend that the table knows are the same group under a second name. The
    default group does not count.

    A job may hold several tables; each destroys what it created. Methods that create are
    *collective* over the world, the others *local*. One that refuses its arguments raises when the
    other ranks know of it, after ten seconds at most.

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
        # The attributes of the proposal.
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.default_process_group = of_torch.default_group()
        self.process_group_pool: dict[str, ProcessGroup] = {}
        """Every group by its names; torch's non-member marker where this rank is outside."""
        self.device_mesh_pool: dict[str, DeviceMesh] = {}
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
        self,
        name: str,
        ranks: Iterable[int],
        *,
        backend: str | None = None,
    ) -> ProcessGroup:
        """Create the group of ``ranks``, or find it; torch's non-member marker outside it.

        Raises
        ------
        ValueError
            The name is taken, or a rank is not of the world.
        AgreementError, CreationError
            Ranks asked for different things, or a group could not be created; all roll back.
        """
        with telling_others(lambda: self._world):
            self._check_new(name)
            # Also numpy's whole numbers; ascending, as a second name has the same members.
            numbers = [operator.index(rank) for rank in ranks]
            members = tuple(sorted(numbers))
            different_members = set(members)
            is_repeated = len(different_members) < len(members)
            is_of_world = different_members <= set(self._world)
            if not members or is_repeated or not is_of_world:
                raise ValueError(
                    f"ranks {shown(members)} make no group: give at least one of 0 to "
                    f"{self.world_size - 1}, each once."
                )
        proposal = {"group": name, "ranks": span_of(members)}
        self._create({name: [members]}, backend, proposal)
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
        with telling_others(lambda: self._world):
            # In a mesh the last dim is the fastest, in a layout the first.
            names = tuple(dim_names)[::-1]
            sizes = tuple(shape)[::-1]
            layout = RankLayout(names, sizes)
            if layout.size != self.world_size:
                raise ValueError(
                    f"mesh {shown(name)} has {layout.size} ranks and the world {self.world_size}. "
                    f"For a part of it, make a HyperCommGrid with a rank_offset."
                )
            self._check_new(name)
            lists_of: dict[str, Lists] = {}
            for dim in layout.dims:
                label = f"{name}/{dim}"
                self._check_new(label)
                lists_of[label] = [tuple(ranks) for ranks in layout.groups(dim).tolist()]
        self._create(lists_of, backend, {"mesh": name, "layout": repr(layout)})
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

    def _create(
        self,
        lists_of: Mapping[str, Lists],
        backend: str | None,
        proposal: dict[str, Any],
    ) -> None:
        """Create what is missing of the lists, and put this rank's groups into the pool."""
        backend = plain_backend(backend)
        self._groups.create(lists_of, backend, {**proposal, "backend": backend})
        for name, lists in lists_of.items():
            self.process_group_pool[name] = self._groups.own(lists, backend)

    def _check_new(self, name: Any) -> None:
        is_taken = name in self.process_group_pool or name in self.device_mesh_pool
        if is_taken or not isinstance(name, str) or not name:
            raise ValueError(
                f"{shown(name)} is no text, or a name that rank {self.rank} has already: take "
                f"another name."
            )
