"""Groups and meshes as physicsnemo lists them, created on hypergrid's grids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from compat.physicsnemo.tree import GroupNode, Placement
from hypergrid.groups import creation
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.groups.pool import GroupPool
from hypergrid.layout import LayoutError, RankLayout, span_of
from hypergrid.policy import Policy

OWNER = "DistributedManager"
# By the name of a group: the ranks of all groups of that name, and the dims that they are over.
Ranks: TypeAlias = dict[str, list[list[int]]]
DimsOf: TypeAlias = dict[str, tuple[str, ...]]


def groups_over(layout: RankLayout, dims: Sequence[str]) -> list[list[int]]:
    """All groups over ``dims``, which decides what a later cut of them gives.

    Members run through the dims from the first of ``dims`` on, and around the layout's end.
    """
    first = 0
    if dims:
        first = layout.dims.index(dims[0])
    # Over b of (a, b, c) members follow each other along b, and groups along c, then along a.
    from_first = layout.dims[first:] + layout.dims[:first]
    inside_first = sorted(from_first, key=lambda dim: dim not in dims)
    in_order = layout.groups(inside_first, as_given=True)
    return in_order.reshape(-1, layout.dim_size(dims)).tolist()


def orthogonal_name(node: GroupNode) -> str:
    """The name of its orthogonal group; upstream's if it has none."""
    return node.orthogonal_group or f"__orthogonal_to_{node.name}"


def of_tree(placement: Placement, nodes: Iterable[GroupNode]) -> tuple[DimsOf, Ranks]:
    """For each group of ``nodes`` and each orthogonal to one, by name: its dims, and all ranks."""
    dims_of = DimsOf()
    ranks_of = Ranks()
    for node in nodes:
        node_dims = placement.dims(node.name)
        node_ranks = groups_over(placement.layout, node_dims)
        # An orthogonal group may have the name of a node: both are over the same dims.
        dims_of.setdefault(node.name, node_dims)
        ranks_of.setdefault(node.name, node_ranks)
        orthogonal = orthogonal_name(node)
        dims_of.setdefault(orthogonal, placement.orthogonal(node.name))
        # Upstream groups the first members of all groups, the second ones ...
        ranks_of.setdefault(orthogonal, np.transpose(node_ranks).tolist())
    return dims_of, ranks_of


def create(grid: HyperCommGrid, ranks_of: Ranks, dims_of: DimsOf) -> dict[str, ProcessGroup]:
    """Create groups of all names, or none; ``grid`` owns them. *Collective*."""
    proposal: dict[str, Any] = {"layout": repr(grid.layout)}
    for name, all_ranks in ranks_of.items():
        # A few for the message where ranks differ; the digest is of all.
        proposal[f"group {name}"] = [span_of(ranks) for ranks in all_ranks[:8]]
    proposal["plan"] = hashlib.sha256(repr(ranks_of).encode()).hexdigest()
    own_rank = dist.get_rank()
    groups = {}
    with grid.two_phase_commit(proposal, OWNER) as pool:
        for name, all_ranks in ranks_of.items():
            (own_ranks,) = (ranks for ranks in all_ranks if own_rank in ranks)
            members = {name: tuple(sorted(own_ranks))}
            dims = dims_of.get(name, ())
            (groups[name],) = pool.make(name, members, all_ranks.copy, dims=dims)
    return groups


def mesh_layout(shape: Sequence[int], names: Sequence[str], world_size: int) -> RankLayout:
    """A mesh's layout, its last dim fastest, with -1 replaced. RuntimeError if it is invalid."""
    invalid = f"a mesh of {tuple(shape)} named {tuple(names)} is invalid"
    # (2, -1, 2) in a world of 8: 8 / (2 * 2) = 2 in place of the -1.
    known_product = prod(size for size in shape if size != -1)
    remaining = world_size // max(known_product, 1)
    sizes = list(shape)
    if -1 in sizes:
        sizes[sizes.index(-1)] = remaining
    try:
        layout = RankLayout(tuple(names)[::-1], tuple(sizes)[::-1])
    except LayoutError as error:
        raise RuntimeError(f"{invalid}: {error}") from None
    if layout.size != world_size or not sizes:
        raise RuntimeError(
            f"{invalid}: there must be at least one size, at most one of them -1, and they must "
            f"multiply to the world's {world_size} ranks."
        )
    return layout


def create_mesh(layout: RankLayout, device_type: str) -> tuple[HyperCommGrid, DeviceMesh]:
    """A mesh over the groups of a new grid, which owns them. *Collective* over the job."""
    grid = HyperCommGrid.over(layout)
    try:
        # A mesh of one dim has the default group, as torch's own.
        if len(layout.dims) == 1:
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
    by_members = creation.way_of(creation.expected(policy), None, len(ranks)) == "members"
    # A mesh of the whole world needs nobody else.
    if not by_members and len(ranks) < dist.get_world_size():
        raise RuntimeError(
            f"rank {dist.get_rank()} cannot create a group of {len(ranks)} of "
            f"{dist.get_world_size()} ranks: members alone cannot create one here, so every rank "
            f"would have to take part. Create it with create_process_subgroup()."
        )
    name = "mesh " + "-".join(mesh.mesh_dim_names or ())
    pool = GroupPool(policy, OWNER)
    with pool.two_phase_commit(ranks, {"group": name}):
        (group,) = pool.make(name, {name: ranks}, lambda: [ranks])
    return pool, group
