"""Groups and meshes as physicsnemo lists them, created on hypergrid's grids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hypergrid.groups import creation
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.groups.pool import GroupPool
from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import span_of
from hypergrid.policy import Agreement, Policy
from hypergrid.tree import GroupNode, Placement

OWNER = "DistributedManager"
# By the name of a group: the ranks of all groups of that name, and the dims that they are over.
Ranks: TypeAlias = dict[str, list[list[int]]]
DimsOf: TypeAlias = dict[str, tuple[str, ...]]


def groups_over(layout: RankLayout, dims: Sequence[str]) -> list[list[int]]:
    """All groups over ``dims``, which decides what a later cut of them gives.

    Members run through the dims from the first of ``dims`` on, and around the layout's end.
    """
    first = layout.dims.index(dims[0]) if dims else 0
    around = layout.dims[first:] + layout.dims[:first]
    inside_first = sorted(around, key=lambda dim: dim not in dims)
    return layout.groups(inside_first, as_given=True).reshape(-1, layout.dim_size(dims)).tolist()


def orthogonal_names(node: GroupNode) -> list[str]:
    """The names of its orthogonal groups, that of the world first; upstream's if it has none."""
    named = node.orthogonals
    if None in named.values():
        return sorted(named, key=lambda name: named[name] is not None)
    return [f"__orthogonal_to_{node.name}", *named]


def of_tree(placement: Placement, nodes: Iterable[GroupNode]) -> tuple[DimsOf, Ranks]:
    """For each group of ``nodes`` and each orthogonal to one, by name: its dims, and all ranks."""
    dims, ranks = DimsOf(), Ranks()
    for node in nodes:
        dims.setdefault(node.name, placement.dims(node.name))
        own = groups_over(placement.layout, placement.dims(node.name))
        ranks.setdefault(node.name, own)
        for name in orthogonal_names(node):
            scope = node.orthogonals.get(name)
            over = placement.orthogonal(node.name, scope)
            dims.setdefault(name, over)
            across = groups_over(placement.layout, over) if scope else np.transpose(own).tolist()
            ranks.setdefault(name, across)
    return dims, ranks


def create(grid: HyperCommGrid, groups: Ranks, dims: DimsOf) -> dict[str, ProcessGroup]:
    """Create all ``groups``, by their names, or none; ``grid`` owns them. *Collective*."""
    firsts = {f"group {name}": list(map(span_of, ranks[:8])) for name, ranks in groups.items()}
    digest = hashlib.sha256(repr(groups).encode()).hexdigest()
    proposal = {"layout": repr(grid.layout), **firsts, "plan": digest}
    rank, made = dist.get_rank(), dict[str, ProcessGroup]()
    with grid.agreed(proposal, OWNER) as pool:
        for name, ranks in groups.items():
            mine = next(tuple(sorted(each)) for each in ranks if rank in each)
            (made[name],) = pool.make(name, {name: mine}, ranks.copy, dims=dims.get(name, ()))
    return made


def mesh_layout(shape: Sequence[int], names: Sequence[str], world_size: int) -> RankLayout:
    """A mesh's layout, its last dim fastest, with -1 replaced. RuntimeError if it is invalid."""
    asked = f"a mesh of {tuple(shape)} named {tuple(names)} is invalid"
    known = prod(size for size in shape if size != -1)
    sizes = [world_size // max(known, 1) if size == -1 else size for size in shape]
    try:
        layout = RankLayout(tuple(names)[::-1], tuple(sizes)[::-1])
    except LayoutError as error:
        raise RuntimeError(f"{asked}: {error}") from None
    if layout.size != world_size or not sizes or list(shape).count(-1) > 1:
        raise RuntimeError(
            f"{asked}: there must be at least one size, at most one of them -1, and they must "
            f"multiply to the world's {world_size} ranks."
        )
    return layout


def create_mesh(layout: RankLayout, device_type: str) -> tuple[HyperCommGrid, DeviceMesh]:
    """A mesh over the groups of a new grid, which owns them. *Collective* over the job."""
    grid = HyperCommGrid.over(layout)
    try:
        if len(layout.dims) == 1:  # the default group, as in torch's own mesh
            grid.hold(layout.dims, dist.group.WORLD)
        else:
            for dim in layout.dims:
                grid.create_pg((dim,))
        return grid, grid.device_mesh(device_type=device_type)
    except BaseException:
        grid.destroy()
        raise


def create_flattened(mesh: DeviceMesh) -> tuple[GroupPool, ProcessGroup]:
    """The group of all ranks of ``mesh``, and the pool that owns it. *Collective* over them."""
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    policy = replace(Policy.resolve(), share="none")
    by_members = creation.way_of(creation.expected(policy), None) == "members"
    # A mesh of the whole world needs nobody else.
    if not by_members and len(ranks) < dist.get_world_size():
        raise RuntimeError(
            f"rank {dist.get_rank()} cannot create a group of {len(ranks)} of "
            f"{dist.get_world_size()} ranks: members alone cannot create one here, so every rank "
            f"would have to take part. Create it with create_process_subgroup()."
        )
    name = "mesh " + "-".join(mesh.mesh_dim_names or ())
    pool = GroupPool(Agreement(""), policy, OWNER)
    with pool.agreed(ranks, {"group": name}):
        (group,) = pool.make(name, {name: ranks}, lambda: [ranks])
    return pool, group
