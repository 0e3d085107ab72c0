"""DistributedManager: physicsnemo's singleton; hypergrid creates and owns its named groups."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Iterator, KeysView, Sequence, ValuesView
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from compat.physicsnemo import groups, launch
from compat.physicsnemo.tree import ProcessGroupConfig, ProcessGroupNode
from hypergrid.agreement.commit import telling_others
from hypergrid.groups.grid import HyperCommGrid


class PhysicsNeMoUndefinedGroupError(Exception):
    """A process group that has not been created."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no process group {name!r}: create it on every rank first.")


class PhysicsNeMoUninitializedDistributedManagerWarning(Warning):
    """Raised, as upstream does, by ``DistributedManager()`` before ``initialize()``."""

    def __init__(self) -> None:
        super().__init__(
            "DistributedManager() was called before DistributedManager.initialize(): it has "
            "neither a rank nor groups. Initialise it first, on every rank."
        )


def _read_only(attribute: str) -> Any:
    return property(attrgetter(attribute))


class DistributedManager:
    """The rank, device, groups and mesh of this process, as nvidia-physicsnemo 1.3.

    All objects share one state.

    Call ``initialize()`` first, on every rank; ``DistributedManager()`` then returns the manager
    anywhere. Groups are created by their members alone, after all ranks have compared them, and
    listed by ``hypergrid.dump()``. ``cleanup()`` destroys them; it also runs when the process
    exits. Raises PhysicsNeMoUninitializedDistributedManagerWarning before ``initialize()``.
    """

    # The attributes of all objects, as upstream, since its users and tests write here: empty, the
    # manager is as new; with "_is_initialized" alone it is a job of a single process.
    _shared_state: ClassVar[dict[str, Any]] = {}
    _rank = 0
    _world_size = 1
    _local_rank = 0
    _distributed = False
    _initialization_method = "None"
    _owns_default_group = False
    _broadcast_buffers = False
    _find_unused_parameters = False
    _global_mesh: DeviceMesh | None = None
    _cuda: bool
    _device: torch.device
    _groups: dict[str, ProcessGroup]
    _group_names: dict[ProcessGroup, str]
    _group_ranks: dict[str, groups.Lists]
    _mesh_dims: dict[str, int]
    _owners: list[HyperCommGrid]

    def __init__(self) -> None:
        # The attributes of this object stay those that they are also after cleanup().
        attributes = DistributedManager._shared_state
        self.__dict__ = attributes
        if not self.is_initialized():
            raise PhysicsNeMoUninitializedDistributedManagerWarning()
        attributes.setdefault("_cuda", torch.cuda.is_available())
        attributes.setdefault("_device", torch.device("cuda:0" if self._cuda else "cpu"))
        attributes.setdefault("_owners", [])
        for name in ("_groups", "_group_names", "_group_ranks", "_mesh_dims"):
            attributes.setdefault(name, {})

    def __reduce__(self) -> tuple[type[DistributedManager], tuple[()]]:
        return type(self), ()  # a model that holds the manager can be copied

    def __str__(self) -> str:
        method = self._initialization_method
        return f"rank {self.rank} of {self.world_size} on {self.device}, initialised by {method!r}"

    rank: int = _read_only("_rank")
    """The rank of this process."""
    local_rank: int = _read_only("_local_rank")
    """The rank of this process on its host."""
    world_size: int = _read_only("_world_size")
    """Number of processes in the job."""
    device: torch.device = _read_only("_device")
    """``cuda:LOCAL_RANK``, or the CPU."""
    distributed: bool = _read_only("_distributed")
    """Whether there is a process group."""
    cuda: bool = _read_only("_cuda")
    """Whether there is a GPU."""

    @property
    def broadcast_buffers(self) -> bool:
        """For ``DistributedDataParallel``; only kept here."""
        return self._broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self._broadcast_buffers = value

    @property
    def find_unused_parameters(self) -> bool:
        """For ``DistributedDataParallel``; only kept here."""
        return self._find_unused_parameters

    @find_unused_parameters.setter
    def find_unused_parameters(self, value: bool) -> None:
        if value:
            warnings.warn(
                "find_unused_parameters makes DDP search the graph in every step: set it only "
                "where parameters stay without gradients.",
                stacklevel=2,
            )
        self._find_unused_parameters = value

    # Groups by name.

    @property
    def group_names(self) -> KeysView[str]:
        """The names of all groups, in the order of creation."""
        return self._groups.keys()

    def group(self, name: str | None = None) -> ProcessGroup | None:
        """This rank's group of that name; None, torch's default group, for None. *Local*.

        Raises PhysicsNeMoUndefinedGroupError if there is none.
        """
        if name is None:
            return None
        if name not in self._groups:
            raise PhysicsNeMoUndefinedGroupError(name)
        return self._groups[name]

    def group_size(self, name: str | None = None) -> int:
        """Number of ranks in the group of that name, or of the job."""
        if name is None:
            return self.world_size
        return dist.get_world_size(self.group(name))

    def group_rank(self, name: str | None = None) -> int:
        """The rank of this process in the group of that name, or in the job."""
        if name is None:
            return self.rank
        return dist.get_rank(self.group(name))

    def group_name(self, group: ProcessGroup | None = None) -> str | None:
        """The name of ``group``; None for None. Raises KeyError if it was not created here."""
        if group is None:
            return None
        return self._group_names[group]

    # Start and end.

    @classmethod
    def is_initialized(cls) -> bool:
        """Whether ``initialize()`` was called."""
        return bool(DistributedManager._shared_state.get("_is_initialized"))

    @staticmethod
    def get_available_backend() -> str:
        """``"nccl"`` where there are GPUs and NCCL, else ``"gloo"``."""
        has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        return "nccl" if has_nccl else "gloo"

    @staticmethod
    def initialize() -> None:
        """Join the job that this process was launched in. *Collective* over it.

        Reads the variables of torchrun, SLURM or OpenMPI, the first that are set, or those of
        ``PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD`` (Modulus' name works too): ENV, SLURM or
        OPENMPI. Without any, a job of a single process, with a warning. Seeds numpy's generator
        with the rank, as upstream. Raises RuntimeError if the method is unknown or torch cannot
        join, ValueError if a variable is not set or is not a number.
        """
        if DistributedManager.is_initialized():
            warnings.warn("DistributedManager is already initialised.", stacklevel=2)
            return
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        addr = os.environ.get("MASTER_ADDR", "localhost")
        port = os.environ.get("MASTER_PORT", "12355")
        method = launch.method()
        if method == "ENV":
            DistributedManager.initialize_env()
        elif method == "SLURM":
            DistributedManager.initialize_slurm(port)
        elif method == "OPENMPI":
            DistributedManager.initialize_open_mpi(addr, port)
        else:
            warnings.warn(
                "no variables of torchrun, SLURM or OpenMPI were found, so this is a job of a "
                "single process.",
                stacklevel=2,
            )
            DistributedManager._shared_state["_is_initialized"] = True
        np.random.seed(seed=DistributedManager().rank)

    @staticmethod
    def initialize_env() -> None:
        """Join from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."""
        _join("ENV", launch.required("MASTER_ADDR"), launch.required("MASTER_PORT"))

    @staticmethod
    def initialize_slurm(port: str) -> None:
        """Join from SLURM's variables."""
        _join("SLURM", launch.required("SLURM_LAUNCH_NODE_IPADDR"), port)

    @staticmethod
    def initialize_open_mpi(addr: str, port: str) -> None:
        """Join from OpenMPI's variables."""
        _join("OPENMPI", addr, port)

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
        """Create the default group, or use the one that exists, and be initialised.

        *Collective* over the job. After a failure the manager is as before. Raises RuntimeError if
        the default group has another rank or world size.
        """
        creates_default_group = not dist.is_initialized()
        # Default groups of one rank each, in a job of many, would train as many models.
        if not creates_default_group:
            default_rank = dist.get_rank()
            default_size = dist.get_world_size()
            if (default_rank, default_size) != (rank, world_size):
                raise RuntimeError(
                    f"torch.distributed is already initialised, as rank {default_rank} of "
                    f"{default_size}, and this process was launched as rank {rank} of "
                    f"{world_size}. Leave its initialisation to DistributedManager, or give it the "
                    f"same numbers."
                )
        if local_rank is None:
            local_rank = rank % max(torch.cuda.device_count(), 1)  # the host's devices in turn
        device = torch.device("cpu")
        bound_device = None  # torch accepts no CPU here
        if torch.cuda.is_available():
            device = torch.device("cuda", local_rank)
            bound_device = device
        attributes = DistributedManager._shared_state
        os.environ.update(MASTER_ADDR=addr, MASTER_PORT=str(port))
        if creates_default_group:
            dist.init_process_group(
                backend, rank=rank, world_size=world_size, device_id=bound_device
            )
            attributes["_owns_default_group"] = True
        if bound_device is not None:
            torch.cuda.set_device(device)
            torch.cuda.empty_cache()
        attributes.update(
            _rank=rank,
            _world_size=world_size,
            _local_rank=local_rank,
            _device=device,
            _distributed=True,
            _initialization_method=method,
            _is_initialized=True,
        )

    @staticmethod
    def cleanup(barrier: bool = False) -> None:
        """Destroy every group, also the default group if it was created here, and forget all.

        With ``barrier`` it waits for the other ranks first.
        """
        if DistributedManager.is_initialized():
            manager = DistributedManager()
            # A program may have destroyed the default group, and with it all others.
            if manager.distributed and dist.is_initialized():
                if barrier:
                    device_ids = [manager.local_rank] if manager.cuda else None
                    dist.barrier(device_ids=device_ids)
                for owner in reversed(manager._owners):
                    owner.destroy()
                if manager._owns_default_group:
                    dist.destroy_process_group()
        DistributedManager._shared_state = {}

    # New groups.

    @staticmethod
    def create_process_subgroup(
        name: str, size: int, group_name: str | None = None, verbose: bool = False
    ) -> None:
        """Cut each group of ``group_name``, by default the world, into groups of ``size``.

        *Collective* over the job; each rank creates its own group only. Raises AssertionError if
        the name is taken, ``size`` does not divide the parent, or there is no torch.distributed;
        KeyError if there is no such parent; AgreementError if another rank has other arguments.
        """
        with _checking() as manager:
            manager._check_new(name, AssertionError)
            parents = [list(range(manager.world_size))]
            if group_name:
                parents = manager._ranks_of(group_name, KeyError)
            ranks = groups.cut(parents, size)
        manager._create({name: ranks}, verbose)

    @staticmethod
    def create_orthogonal_process_group(
        orthogonal_group_name: str, group_name: str, verbose: bool = False
    ) -> None:
        """Group the first members of all groups of ``group_name``, the second members, and so on.

        *Collective* over the job. Each new group shares exactly one rank with each old one. Raises
        ValueError if there is no ``group_name`` or the new name is taken; AssertionError and
        AgreementError as ``create_process_subgroup``.
        """
        with _checking() as manager:
            ranks = manager._ranks_of(group_name, ValueError)
            manager._check_new(orthogonal_group_name, ValueError)
        manager._create({orthogonal_group_name: groups.orthogonal(ranks)}, verbose)

    @staticmethod
    def create_group_from_node(
        node: ProcessGroupNode, parent: str | None = None, verbose: bool = False
    ) -> str:
        """Create a node's group inside ``parent``, and its orthogonal group, whose name it gives.

        *Collective* over the job. Raises AssertionError if the node has no size.
        """
        with _checking():
            if node.size is None:
                raise AssertionError(
                    f"{node.name!r} has no size: call set_leaf_group_sizes() on its tree first."
                )
        DistributedManager.create_process_subgroup(node.name, node.size, parent, verbose)
        orthogonal_name = node.orthogonal_name
        DistributedManager.create_orthogonal_process_group(orthogonal_name, node.name, verbose)
        return orthogonal_name

    @staticmethod
    def create_groups_from_config(config: ProcessGroupConfig, verbose: bool = False) -> None:
        """Create the groups of all nodes of a tree, and those orthogonal to them.

        *Collective* over the job. Each node's group has its name. The one orthogonal to it, in
        the world, has the name that the node gives it, else ``__orthogonal_to_NAME``. Raises
        AssertionError if a name is taken, a node has no size, or sizes do not divide the world;
        AgreementError if another rank has another tree.

        Parameters
        ----------
        config : ProcessGroupConfig
            The first leaf's ranks are adjacent; leaves are ordered depth first.
        verbose : bool
            Print the ranks of each group, at rank 0.
        """
        with _checking() as manager:
            ranks_of = groups.of_tree(config, manager.world_size)
            for name in ranks_of:
                manager._check_new(name, AssertionError)
        manager._create(ranks_of, verbose)

    @staticmethod
    def create_process_groups(
        config: ProcessGroupConfig, topology_mapping: None = None, verbose: bool = False
    ) -> None:
        """``create_groups_from_config`` as Modulus' pull request 153 has it.

        Raises ValueError on a ``topology_mapping``: the order of the tree decides which ranks are
        adjacent.
        """
        with _checking():
            if topology_mapping is not None:
                raise ValueError(
                    "topology_mapping must be None: ranks are placed in the order of the tree. "
                    "Add the node first whose ranks are to be adjacent."
                )
        DistributedManager.create_groups_from_config(config, verbose)

    # The mesh.

    mesh_dims: dict[str, int] = _read_only("_mesh_dims")
    """The mesh's names and sizes."""

    def mesh_names(self) -> KeysView[str]:
        """The names of the mesh's dims."""
        return self._mesh_dims.keys()

    def mesh_sizes(self) -> ValuesView[int]:
        """The sizes of the mesh's dims."""
        return self._mesh_dims.values()

    @property
    def global_mesh(self) -> DeviceMesh:
        """The mesh of the job; the first time, without ``initialize_mesh``, the flat world."""
        if self._global_mesh is None:
            return self.initialize_mesh((-1,), ("world",))
        return self._global_mesh

    def initialize_mesh(
        self, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]
    ) -> DeviceMesh:
        """Lay a mesh over the job, the last dim fastest. *Collective* over the job.

        One size may be -1: what is left. Raises RuntimeError if sizes do not multiply to the
        world's, if there are none, not one name for each, or a repeat; AssertionError if there is
        no torch.distributed.
        """
        with _checking() as manager:
            layout = groups.mesh_layout(mesh_shape, mesh_dim_names)
        grid, mesh = groups.create_mesh(layout, "cuda" if manager.cuda else "cpu")
        manager._owners.append(grid)
        manager._mesh_dims = dict(zip(layout.dims[::-1], layout.sizes[::-1], strict=True))
        manager._global_mesh = mesh
        return mesh

    def _check_new(self, name: str, error: type[Exception]) -> None:
        if name in self._groups:
            raise error(f"the group {name!r} exists already. Choose another name.")

    def _ranks_of(self, name: str, error: type[Exception]) -> groups.Lists:
        if name not in self._groups:
            raise error(f"there is no group {name!r}. Existing groups: {list(self._groups)}.")
        return self._group_ranks[name]

    def _create(self, ranks_of: dict[str, groups.Lists], verbose: bool) -> None:
        grid = HyperCommGrid([self.world_size], ["world"])
        new_groups = groups.create(grid, ranks_of)
        self._owners.append(grid)
        self._groups.update(new_groups)
        self._group_ranks.update(ranks_of)
        for name, group in new_groups.items():
            self._group_names[group] = name
        if verbose and self.rank == 0:
            for name, all_ranks in ranks_of.items():
                print(f"{name}:", *all_ranks, sep="\n    ")


def _join(method: str, addr: str, port: str) -> None:
    backend = DistributedManager.get_available_backend()
    numbers = launch.numbers(method)
    DistributedManager.setup(
        **numbers, addr=addr, port=port, backend=backend, method=method.lower()
    )


@contextmanager
def _checking() -> Iterator[DistributedManager]:
    """The manager. An error inside is raised on this rank and told to all others of the job."""
    manager = DistributedManager()
    if not manager.distributed:
        raise AssertionError(
            "this job has a single process without torch.distributed, so it has no groups: start "
            "it with torchrun, srun or mpirun."
        )
    with telling_others(lambda: range(manager.world_size)):
        yield manager


atexit.register(DistributedManager.cleanup)  # here, as upstream: it runs last
