"""DistributedManager: physicsnemo's singleton, its named groups made and owned by hypergrid."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import KeysView, Sequence, ValuesView
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from compat.physicsnemo import launch
from compat.physicsnemo.division import Division
from compat.physicsnemo.state import (
    PhysicsNeMoUndefinedGroupError,
    PhysicsNeMoUninitializedDistributedManagerWarning,
    State,
    create,
    make_mesh,
    mesh_group,
    mesh_shape_of,
    orthogonal_names,
    telling_all,
)
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.topology import Hosts
from hypergrid.tree import OPEN, GroupNode, GroupTree


class DistributedManager:
    """What this process knows about the job, as nvidia-physicsnemo 1.3: one for all objects.

    ``initialize()`` first, on every rank; then ``DistributedManager()`` anywhere gives it. Groups
    are made by their members alone, compared between ranks first, listed by ``hypergrid.dump()``
    and given back by ``cleanup()``, which also runs at the exit of the process.

    Raises
    ------
    PhysicsNeMoUninitializedDistributedManagerWarning
        Before ``initialize()``.
    """

    # The attributes of all objects, as upstream, since its users and tests write here: empty, the
    # manager is as new; with "_is_initialized" alone it is a job of a single process.
    _shared_state: ClassVar[dict[str, Any]] = {}
    _state: State

    def __init__(self) -> None:
        self.__dict__ = DistributedManager._shared_state  # what it knows, it knows after cleanup()
        if not self.is_initialized():
            raise PhysicsNeMoUninitializedDistributedManagerWarning()
        self.__dict__.setdefault("_state", State())

    def __reduce__(self) -> tuple[type[DistributedManager], tuple[()]]:
        return type(self), ()  # a model that holds the manager can be copied

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name[1:] in State.__dataclass_fields__:
            return getattr(self._state, name[1:])
        raise AttributeError(f"DistributedManager has no attribute {name!r}.")

    def __str__(self) -> str:
        s = self._state
        method = s.initialization_method
        return f"rank {s.rank} of {s.world_size} on {s.device}, initialised by {method!r}"

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._state.rank

    @property
    def local_rank(self) -> int:
        """Its rank on its host."""
        return self._state.local_rank

    @property
    def world_size(self) -> int:
        """Number of processes in the job."""
        return self._state.world_size

    @property
    def device(self) -> torch.device:
        """``cuda:LOCAL_RANK``, or the CPU."""
        return self._state.device

    @property
    def distributed(self) -> bool:
        """Whether there is a process group."""
        return self._state.distributed

    @property
    def cuda(self) -> bool:
        """Whether there is a GPU."""
        return self._state.cuda

    @property
    def broadcast_buffers(self) -> bool:
        """For ``DistributedDataParallel``; only kept here."""
        return self._state.broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, broadcast: bool) -> None:
        self._state.broadcast_buffers = broadcast

    @property
    def find_unused_parameters(self) -> bool:
        """For ``DistributedDataParallel``; only kept here."""
        return self._state.find_unused_parameters

    @find_unused_parameters.setter
    def find_unused_parameters(self, find_params: bool) -> None:
        if find_params:
            warnings.warn(
                "find_unused_parameters makes DDP search the graph in every step: set it only "
                "where parameters stay without gradients.",
                stacklevel=2,
            )
        self._state.find_unused_parameters = find_params

    # Groups by name.

    @property
    def group_names(self) -> KeysView[str]:
        """The names of all groups, in the order of creation."""
        return self._state.groups.keys()

    def group(self, name: str | None = None) -> ProcessGroup | None:
        """This rank's group of that name; None, torch's default group, for None. *Local*.

        Raises
        ------
        PhysicsNeMoUndefinedGroupError
            There is none.
        """
        if name is None:
            return None
        if name not in self._state.groups:
            raise PhysicsNeMoUndefinedGroupError(name)
        return self._state.groups[name]

    def group_size(self, name: str | None = None) -> int:
        """Number of ranks in the group of that name, or of the job."""
        return self.world_size if name is None else dist.get_world_size(self.group(name))

    def group_rank(self, name: str | None = None) -> int:
        """The rank of this process in the group of that name, or in the job."""
        return self.rank if name is None else dist.get_rank(self.group(name))

    def group_name(self, group: ProcessGroup | None = None) -> str | None:
        """The name of ``group``; None for None. Raises KeyError if it was not made here."""
        if group is None:
            return None
        if group not in self._group_names:
            raise KeyError(f"{group} has no name here. Groups with one: {list(self.group_names)}.")
        return self._group_names[group]

    @property
    def _groups(self) -> dict[str, ProcessGroup]:
        return self._state.groups

    @property
    def _group_names(self) -> dict[ProcessGroup, str]:
        return {group: name for name, group in self._state.groups.items()}

    @property
    def _group_ranks(self) -> dict[str, list[list[int]]]:
        return {name: division.ranks() for name, division in self._state.divisions.items()}

    # Start and end.

    @classmethod
    def is_initialized(cls) -> bool:
        """Whether ``initialize()`` was called."""
        return bool(DistributedManager._shared_state.get("_is_initialized"))

    @staticmethod
    def get_available_backend() -> str:
        """``"nccl"`` where there are GPUs and NCCL, else ``"gloo"``."""
        return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"

    @staticmethod
    def initialize() -> None:
        """Join the job that this process was launched in. *Collective* over it.

        From torchrun's variables, SLURM's or OpenMPI's, the first that are there;
        ``PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD`` (or Modulus' name for it) set to ENV,
        SLURM or OPENMPI takes that one. Without any, a job of a single process, with a warning.
        Seeds numpy's generator with the rank, as upstream.

        Raises
        ------
        RuntimeError
            That variable names no way, or one whose variables are missing; torch could not join.
        """
        if DistributedManager.is_initialized():
            warnings.warn("DistributedManager is already initialised.", stacklevel=2)
            return
        method = launch.method()
        addr = os.environ.get("MASTER_ADDR", "localhost")
        port = os.environ.get("MASTER_PORT", "12355")
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        if method == "ENV":
            DistributedManager.initialize_env()
        elif method == "SLURM":
            DistributedManager.initialize_slurm(port)
        elif method == "OPENMPI":
            DistributedManager.initialize_open_mpi(addr, port)
        else:
            warnings.warn(
                f"no launcher was found, this is taken for a job of a single process: "
                f"{launch.missing()}.",
                stacklevel=2,
            )
            DistributedManager._shared_state["_is_initialized"] = True
        np.random.seed(seed=DistributedManager().rank)

    @staticmethod
    def initialize_env() -> None:
        """Join from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."""
        _join(launch.from_env())

    @staticmethod
    def initialize_slurm(port: str) -> None:
        """Join from SLURM's variables."""
        _join(launch.from_slurm(port))

    @staticmethod
    def initialize_open_mpi(addr: str, port: str) -> None:
        """Join from OpenMPI's variables."""
        _join(launch.from_open_mpi(addr, port))

    @staticmethod
    def setup(
        rank: int = 0,
        world_size: int = 1,
        local_rank: int | None = None,
        addr: str = "localhost",
        port: str | int = "12355",
        backend: str = "nccl",
        method: str = "env",
    ) -> None:
        """Make the default group, or take the one that exists, and be initialised.

        *Collective* over the job. After a failure the manager is as before.

        Raises
        ------
        RuntimeError
            A default group exists, of another rank or world size.
        """
        cuda, distributed = torch.cuda.is_available(), dist.is_available()
        state = State(initialization_method=method, distributed=distributed)
        if distributed:
            local = launch.default_local_rank(rank) if local_rank is None else local_rank
            state.rank, state.world_size, state.local_rank = rank, world_size, local
        state.device = torch.device(f"cuda:{state.local_rank}" if cuda else "cpu")
        os.environ.update(MASTER_ADDR=addr, MASTER_PORT=str(port))
        if distributed and dist.is_initialized():
            here = (dist.get_rank(), dist.get_world_size())
            if here != (rank, world_size):
                raise RuntimeError(
                    f"torch.distributed runs already, as rank {here[0]} of {here[1]}, and this "
                    f"was launched as rank {rank} of {world_size}. Leave its initialisation to "
                    f"DistributedManager, or start it with the same numbers."
                )
        elif distributed:
            # Bound to its device, as upstream has it. Torch takes no CPU here.
            device = state.device if cuda else None
            dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=device)
            state.made_default = True
        if cuda:
            torch.cuda.set_device(state.device)
            torch.cuda.empty_cache()
        DistributedManager._shared_state.update(_is_initialized=True, _state=state)
        atexit.unregister(DistributedManager.cleanup)
        atexit.register(DistributedManager.cleanup)

    @staticmethod
    def cleanup(barrier: bool = False) -> None:
        """Give back every group, the default one too if it was made here, and forget all.

        Parameters
        ----------
        barrier : bool
            Wait for the other ranks first.
        """
        state = DistributedManager._shared_state.get("_state")
        if state is not None and state.distributed and dist.is_initialized():
            if barrier:
                dist.barrier(device_ids=[state.local_rank] if state.cuda else None)
            for owner in reversed(state.owners):
                owner.destroy()
            if state.made_default:
                dist.destroy_process_group()
        DistributedManager._shared_state = {}

    # New groups.

    @staticmethod
    def create_process_subgroup(
        name: str, size: int, group_name: str | None = None, verbose: bool = False
    ) -> None:
        """Cut each group of ``group_name``, by default the world, into groups of ``size``.

        *Collective* over the job, and each rank makes its own group only.

        Raises
        ------
        AssertionError
            The name is taken, ``size`` does not divide the parent, no torch.distributed.
        KeyError
            There is no parent of that name.
        AgreementError
            Another rank asked for something else.
        """
        manager = _distributed_manager()
        with telling_all(manager._state):
            if name in manager.group_names:
                raise AssertionError(f"the group {name!r} exists already. Take another name.")
            if group_name and group_name not in manager.group_names:
                raise KeyError(
                    f"the group {group_name!r}, which {name!r} is to be a part of, does not "
                    f"exist. Existing: {list(manager.group_names) or 'none'}."
                )
            parent = manager._state.divisions[group_name] if group_name else None
            division = (parent or Division.of_world(manager.world_size)).cut(size)
        create(manager._state, {name: division}, verbose=verbose)

    @staticmethod
    def create_orthogonal_process_group(
        orthogonal_group_name: str, group_name: str, verbose: bool = False
    ) -> None:
        """Group the first members of all groups of ``group_name``, the second, and so on.

        *Collective* over the job. The two meet in exactly one rank.

        Raises
        ------
        ValueError
            There is no ``group_name``, or the new name is taken.
        AssertionError
            No torch.distributed.
        """
        manager = _distributed_manager()
        with telling_all(manager._state):
            if group_name not in manager.group_names:
                raise ValueError(
                    f"the group {group_name!r}, which {orthogonal_group_name!r} is to be "
                    f"orthogonal to, does not exist. Existing: "
                    f"{list(manager.group_names) or 'none'}."
                )
            if orthogonal_group_name in manager.group_names:
                raise ValueError(
                    f"the group {orthogonal_group_name!r} exists already. Take another name."
                )
            division = manager._state.divisions[group_name].orthogonal()
        create(manager._state, {orthogonal_group_name: division}, verbose=verbose)

    @staticmethod
    def create_group_from_node(
        node: GroupNode, parent: str | None = None, verbose: bool = False
    ) -> str:
        """Create a node's group inside ``parent``, and its orthogonal group, whose name it gives.

        *Collective* over the job. Raises AssertionError if the node has no size.
        """
        if node.size is None:
            raise AssertionError(
                f"{node.name!r} has no size: call set_leaf_group_sizes() on its tree first."
            )
        DistributedManager.create_process_subgroup(node.name, node.size, parent, verbose)
        orthogonal = orthogonal_names(node)[0]
        DistributedManager.create_orthogonal_process_group(orthogonal, node.name, verbose)
        return orthogonal

    @staticmethod
    def create_groups_from_config(
        config: GroupTree[Any], verbose: bool = False, *, hosts: Hosts | None = None
    ) -> HyperCommGrid:
        """Create the groups of all nodes of a tree, and those orthogonal to them.

        *Collective* over the job. Each node's group has its name. The one orthogonal to it, in
        the world, has the name that the node gives it, else ``__orthogonal_to_NAME``.

        Parameters
        ----------
        config : ProcessGroupConfig
            Its leaf of size -1, if there is one, gets the size that is left.
        verbose : bool
            Print the ranks of each group, at rank 0.
        hosts : optional
            As for ``hypergrid.Topology``; by default what the launcher says. Asked for only
            where a node is to stay inside a host.

        Returns
        -------
        HyperCommGrid
            Whose dims are the leaves and whose groups are these.

        Raises
        ------
        AssertionError
            A name is taken, a leaf has no size, sizes do not divide the world, a node cannot
            stay inside a host.
        AgreementError
            Another rank has another tree.
        """
        manager = _distributed_manager()
        with telling_all(manager._state):
            nodes = [config.get_node(name) for name in config.breadth_first()]
            if hosts is None and any(node.within for node in nodes):
                hosts = launch.ranks_per_host()
            placement = config.place(manager.world_size, hosts=hosts)
            divisions: dict[str, Division] = {}
            for node in nodes:
                own = Division.of_dims(placement, placement.dims(node.name))
                divisions.setdefault(node.name, own)
                for name in orthogonal_names(node):
                    scope = node.orthogonals.get(name)
                    dims = placement.orthogonal(node.name, scope)
                    other = Division.of_dims(placement, dims) if scope else own.orthogonal()
                    divisions.setdefault(name, other)
            taken = [name for name in divisions if name in manager.group_names]
            if taken:
                raise AssertionError(f"the groups {taken} exist already. Take other names.")
            grid = HyperCommGrid.over(placement.layout)
        create(manager._state, divisions, grid, verbose)
        for name in [*config.breadth_first(), *divisions]:  # a node's own is what its dims give
            grid.hold(divisions[name].inner, manager.group(name))
        for name in config.leaf_groups():
            if config.get_node(name).size == OPEN:
                config.set_leaf_group_sizes({name: placement.size(name)})
        return grid

    @staticmethod
    def create_process_groups(
        config: GroupTree[Any], topology_mapping: Hosts | None = None, verbose: bool = False
    ) -> HyperCommGrid:
        """``create_groups_from_config`` as Modulus' pull request 153 has it."""
        return DistributedManager.create_groups_from_config(config, verbose, hosts=topology_mapping)

    # The mesh.

    @property
    def mesh_dims(self) -> dict[str, int]:
        """The mesh's names and sizes."""
        return self._state.mesh_dims

    def mesh_names(self) -> KeysView[str]:
        """The names of the mesh's dims."""
        return self._state.mesh_dims.keys()

    def mesh_sizes(self) -> ValuesView[int]:
        """The sizes of the mesh's dims."""
        return self._state.mesh_dims.values()

    @property
    def global_mesh(self) -> DeviceMesh:
        """The mesh of the job; the first time, without ``initialize_mesh``, the flat world."""
        return self._state.global_mesh or self.initialize_mesh((-1,), ("world",))

    def mesh(self, name: str | None = None) -> DeviceMesh:
        """The mesh, or one dim of it. Raises PhysicsNeMoUndefinedGroupError if there is none."""
        mesh = self._state.global_mesh
        if mesh is None or name not in (None, *self.mesh_names()):
            raise PhysicsNeMoUndefinedGroupError("the mesh" if name is None else name)
        return mesh if name is None else mesh[name]

    def initialize_mesh(
        self, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]
    ) -> DeviceMesh:
        """Lay a mesh over the job, the last dim fastest. *Collective* over the job.

        Parameters
        ----------
        mesh_shape : sequence of int
            One size may be -1: what is left.
        mesh_dim_names : sequence of str
            A name for each.

        Raises
        ------
        RuntimeError
            Sizes that do not multiply to the world's, no dims, not one name for each, a repeat.
        AssertionError
            No torch.distributed.
        """
        state = _distributed_manager()._state
        with telling_all(state):
            shape = mesh_shape_of(mesh_shape, mesh_dim_names, state.world_size)
        return make_mesh(state, shape, tuple(mesh_dim_names))

    def get_mesh_group(self, mesh: DeviceMesh) -> ProcessGroup:
        """The group of all ranks of ``mesh``, made once. *Collective* over them the first time.

        Raises
        ------
        RuntimeError
            The mesh is a part of the world, and its members cannot create a group alone.
        """
        return mesh_group(self._state, mesh)


def _join(where: launch.Launch) -> None:
    backend = DistributedManager.get_available_backend()
    DistributedManager.setup(**where._asdict(), backend=backend)


def _distributed_manager() -> DistributedManager:
    manager = DistributedManager()
    if not manager.distributed:
        raise AssertionError(
            "this job has a single process without torch.distributed, so there are no groups to "
            "make: start it with torchrun, srun or mpirun."
        )
    return manager
