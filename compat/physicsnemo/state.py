"""What physicsnemo's manager knows, in one place, and how its groups and meshes are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from compat.physicsnemo.division import Division
from hypergrid.groups.environment import EnvironmentTable
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.groups.pool import GroupPool
from hypergrid.groups.prepare import Agreement, telling_others
from hypergrid.policy import Policy
from hypergrid.tree import GroupNode


class PhysicsNeMoUndefinedGroupError(Exception):
    """A process group, or an axis of the mesh, that nobody has created."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no process group {name!r}: create it on every rank before it is asked for."
        )


class PhysicsNeMoUninitializedDistributedManagerWarning(Warning):
    """Raised, as upstream does, by ``DistributedManager()`` before ``initialize()``."""

    def __init__(self) -> None:
        super().__init__(
            "DistributedManager() was called before DistributedManager.initialize(): it knows "
            "neither rank nor group. Initialise it first, on every rank."
        )


@dataclass
class State:
    """All that the singleton knows; its private attributes are these with an underscore."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    distributed: bool = False
    cuda: bool = field(default_factory=torch.cuda.is_available)
    device: torch.device = field(
        default_factory=lambda: torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    )
    initialization_method: str = "None"
    made_default: bool = False  # the default group is ours to destroy
    broadcast_buffers: bool = False
    find_unused_parameters: bool = False
    divisions: dict[str, Division] = field(default_factory=dict)
    owners: list[GroupPool | HyperCommGrid] = field(default_factory=list)
    global_mesh: DeviceMesh | None = None
    mesh_dims: dict[str, int] = field(default_factory=dict)
    mesh_groups: dict[DeviceMesh, ProcessGroup] = field(default_factory=dict)

    @cached_property
    def table(self) -> EnvironmentTable:
        """What knows the groups by name, from the first one on."""
        return EnvironmentTable(local_rank=self.local_rank)

    @property
    def groups(self) -> dict[str, ProcessGroup]:
        """The groups that were created, by name."""
        return {name: self.table.get_process_group(name) for name in self.divisions}


def create(
    state: State,
    divisions: Mapping[str, Division],
    grid: HyperCommGrid | None = None,
    verbose: bool = False,
) -> None:
    """Create all or none, in ``grid`` if there is one, and remember them by name. *Collective*."""
    if grid:
        over = {name: "-".join(division.inner) for name, division in divisions.items()}
        proposal = {"tree": repr(grid.layout), **{f"group {n}": dims for n, dims in over.items()}}
    else:
        proposal = {f"group {name}": str(division) for name, division in divisions.items()}
    made: dict[str, ProcessGroup] = {}
    if grid:
        agreed = grid.agreed(proposal, "DistributedManager")
    else:
        agreed = _new_pool(range(state.world_size), proposal)
    with agreed as pool:
        for name, division in divisions.items():
            dims = division.inner if grid else ()
            mine = {name: tuple(division.group(state.rank))}
            (made[name],) = pool.make(name, mine, division.ranks, dims=dims)
    state.owners.append(grid or pool)
    for name, division in divisions.items():
        state.table.hold(name, made[name], division.ranks())
        state.divisions[name] = division
    if verbose and state.rank == 0:
        for name, division in divisions.items():
            print(f"{name}:", *division.ranks(), sep="\n    ")


def make_mesh(state: State, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh over the groups of a new grid, and from now on the job's. *Collective*."""
    grid = HyperCommGrid(shape[::-1], names[::-1])
    try:
        for dim in grid.dim_names:
            if len(shape) == 1:  # the default group, as torch's own mesh takes it
                grid.hold((dim,), dist.group.WORLD)
            else:
                grid.create_pg((dim,))
        mesh = grid.device_mesh(device_type="cuda" if state.cuda else "cpu")
    except BaseException:
        grid.destroy()
        raise
    state.owners.append(grid)
    state.global_mesh, state.mesh_dims = mesh, dict(zip(names, shape, strict=True))
    return mesh


def mesh_group(state: State, mesh: DeviceMesh) -> ProcessGroup:
    """The group of all ranks of ``mesh``. *Collective* over them, the first time."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh not in state.mesh_groups:
        ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        name = "mesh " + "-".join(mesh.mesh_dim_names or ())
        with _new_pool(ranks, {"mesh": name}) as pool:
            if pool.agreement.way != "members" and len(ranks) < state.world_size:
                raise RuntimeError(
                    f"rank {state.rank} cannot make a group of {len(ranks)} of "
                    f"{state.world_size} ranks: every rank would have to take part, because "
                    f"{pool.agreement.why}. Make it by create_process_subgroup()."
                )
            (group,) = pool.make(name, {name: ranks}, lambda: [ranks])
        state.owners.append(pool)
        state.mesh_groups[mesh] = group
    return state.mesh_groups[mesh]


def telling_all(state: State) -> AbstractContextManager[None]:
    """Tell every rank of the job when this one refuses its arguments, so that none waits."""
    return telling_others(lambda: range(state.world_size))


@contextmanager
def _new_pool(ranks: Sequence[int], proposal: Mapping[str, Any]) -> Iterator[GroupPool]:
    policy = replace(Policy.resolve(), share="none")  # each name has a communicator of its own
    pool = GroupPool(Agreement(""), policy, "DistributedManager")
    with pool.agreed(ranks, proposal):
        yield pool


def orthogonal_names(node: GroupNode) -> list[str]:
    """Its orthogonal groups; one in the scope of the world, by upstream's name, comes first."""
    named = node.orthogonals
    if None in named.values():
        return sorted(named, key=lambda name: named[name] is not None)
    return [f"__orthogonal_to_{node.name}", *named]


def mesh_shape_of(shape: Sequence[int], names: Sequence[str], world_size: int) -> tuple[int, ...]:
    """The sizes with -1 filled in; RuntimeError if they do not make the world."""
    asked = f"a mesh of {tuple(shape)} named {tuple(names)}"
    if not shape or len(shape) != len(names):
        raise RuntimeError(f"{asked} cannot be: give at least one dim, and one name for each.")
    if len(set(names)) != len(names):
        raise RuntimeError(f"{asked} cannot be: names must not repeat.")
    known = prod(size for size in shape if size != -1)
    left = world_size // known if -1 in shape and known > 0 else 1
    sizes = tuple(left if size == -1 else size for size in shape)
    if min(sizes) < 1 or list(shape).count(-1) > 1 or prod(sizes) != world_size:
        raise RuntimeError(
            f"{asked} cannot be: its sizes, one of which may be -1, must multiply to the world's "
            f"{world_size} ranks."
        )
    return sizes
