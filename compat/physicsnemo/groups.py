"""Groups and meshes as physicsnemo lists them, created on hypergrid's grids."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from compat.physicsnemo.tree import ProcessGroupConfig, ProcessGroupNode
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.layout import LayoutError, RankLayout

OWNER = "DistributedManager"
Lists: TypeAlias = list[list[int]]  # the ranks of all groups of one name


def cut(parents: Lists, size: int) -> Lists:
    """Cut each of the groups into groups of ``size``. AssertionError if that is impossible."""
    parent_size = len(parents[0])
    if size < 1 or parent_size % size:
        raise AssertionError(
            f"groups of {parent_size} ranks cannot be cut into groups of {size}: choose a size "
            f"that divides {parent_size}."
        )
    groups = np.reshape(parents, (-1, size))
    lists: Lists = groups.tolist()
    return lists


def orthogonal(groups: Lists) -> Lists:
    """The first members of all the groups, the second members, and so on."""
    transposed = np.transpose(groups)
    lists: Lists = transposed.tolist()
    return lists


def of_tree(config: ProcessGroupConfig, world_size: int) -> dict[str, Lists]:
    """All groups of each node and all orthogonal to one, by name, in upstream's order."""
    lists_of: dict[str, Lists] = {}

    def add(node: ProcessGroupNode, parents: Lists) -> Lists:
        """Add the groups of a node inside these, and those orthogonal to them, which it gives."""
        lists = cut(parents, node.size or 0)
        orthogonal_lists = orthogonal(lists)
        named_lists = [(node.name, lists), (node.orthogonal_name, orthogonal_lists)]
        for name, groups in named_lists:
            # Orthogonal to "model" in "model x data" may be "data", which is a node too.
            known_groups = lists_of.setdefault(name, groups)
            if sorted(known_groups) != sorted(groups):
                raise AssertionError(
                    f"two groups of the tree have the name {name!r} and other ranks: "
                    f"{groups[:4]} and {known_groups[:4]}. Take another name for one of them."
                )
        return orthogonal_lists

    world = list(range(world_size))
    add(config.root, [world])
    for name in config.breadth_first():
        # Each child is cut from the ranks that differ in nothing that the child before is over.
        remaining = lists_of[name]
        for child in config.children(name):
            remaining = add(child, remaining)
    return lists_of


def create(grid: HyperCommGrid, lists_of: dict[str, Lists]) -> dict[str, ProcessGroup]:
    """Create groups of all names, or none; ``grid`` owns them. *Collective*."""
    proposal = {f"group {name}": lists for name, lists in lists_of.items()}
    groups = {}
    rank = dist.get_rank()
    with grid.two_phase_commit(proposal, OWNER) as pool:
        for name, lists in lists_of.items():
            # Each name is over the world, so this rank is in one of its groups.
            (own_ranks,) = (ranks for ranks in lists if rank in ranks)
            ranks_of_name = {name: tuple(sorted(own_ranks))}
            (groups[name],) = pool.make(name, ranks_of_name, lists.copy)
    return groups


def mesh_layout(shape: Sequence[int], names: Sequence[str]) -> RankLayout:
    """A mesh's layout, its last dim fastest, with -1 replaced. RuntimeError if it is invalid."""
    world_size = dist.get_world_size()
    sizes = list(shape)
    if -1 in sizes:
        # (2, -1, 2) in a world of 8: 8 / (2 * 2) = 2 in place of the -1.
        known_product = -prod(sizes)
        sizes[sizes.index(-1)] = world_size // max(known_product, 1)
    try:
        # In a mesh the last dim is the fastest, in a layout the first.
        dims = tuple(names)[::-1]
        layout = RankLayout(dims, tuple(sizes)[::-1])
        if layout.size != world_size or not sizes:
            raise LayoutError(
                f"its sizes, of which one may be -1, must multiply to the world's {world_size} "
                f"ranks."
            )
    except LayoutError as error:
        mesh = f"a mesh of {tuple(shape)} named {tuple(names)}"
        raise RuntimeError(f"{mesh} is invalid: {error}") from None
    return layout


def create_mesh(layout: RankLayout, device_type: str) -> tuple[HyperCommGrid, DeviceMesh]:
    """A mesh over the groups of a new grid, which owns them. *Collective* over the job."""
    grid = HyperCommGrid.over(layout)
    if len(layout.dims) == 1:
        grid.hold(layout.dims, dist.group.WORLD)  # as torch's own meshes
    else:
        try:
            for dim in layout.dims:
                grid.create_pg(dim)
        except BaseException:
            grid.destroy()  # the groups over the dims before
            raise
    return grid, grid.device_mesh(device_type=device_type)
