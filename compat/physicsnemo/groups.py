"""Groups and meshes as physicsnemo lists them, created on hypergrid's grids."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from compat.physicsnemo.tree import ProcessGroupConfig
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
    lists: Lists = np.reshape(parents, (-1, size)).tolist()
    return lists


def orthogonal(groups: Lists) -> Lists:
    """The first members of all the groups, the second members, and so on."""
    lists: Lists = np.transpose(groups).tolist()
    return lists


def of_tree(config: ProcessGroupConfig, world_size: int) -> dict[str, Lists]:
    """All groups of each node and all orthogonal to one, by name, in upstream's order."""
    lists_of: dict[str, Lists] = {}

    def add(name: str, groups: Lists) -> None:
        # Orthogonal to "model" in "model x data" may be "data", which is a node too.
        if sorted(lists_of.setdefault(name, groups)) != sorted(groups):
            raise AssertionError(
                f"two groups of the tree have the name {name!r} and other ranks: {groups[:4]} "
                f"and {lists_of[name][:4]}. Take another name for one of them."
            )

    add(config.root_id, cut([list(range(world_size))], config.root.size or 0))
    add(config.root.orthogonal_name, orthogonal(lists_of[config.root_id]))
    for name in config.breadth_first():
        # Each child is cut from the ranks that differ in nothing that the child before is over.
        remaining = lists_of[name]
        for child in config.children(name):
            add(child.name, cut(remaining, child.size or 0))
            remaining = orthogonal(lists_of[child.name])
            add(child.orthogonal_name, remaining)
    return lists_of


def create(grid: HyperCommGrid, lists_of: dict[str, Lists]) -> dict[str, ProcessGroup]:
    """Create groups of all names, or none; ``grid`` owns them. *Collective*."""
    proposal = {f"group {name}": lists for name, lists in lists_of.items()}
    groups = {}
    with grid.two_phase_commit(proposal, OWNER) as pool:
        for name, lists in lists_of.items():
            (own_ranks,) = (ranks for ranks in lists if dist.get_rank() in ranks)
            (groups[name],) = pool.make(name, {name: tuple(sorted(own_ranks))}, lists.copy)
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
        layout = RankLayout(tuple(names)[::-1], tuple(sizes)[::-1])
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
    # A mesh of one dim has the default group, as torch's own.
    groups = dict.fromkeys(layout.dims, dist.group.WORLD)
    if len(layout.dims) > 1:
        lists_of: dict[str, Lists] = {dim: layout.groups(dim).tolist() for dim in layout.dims}
        groups = create(grid, lists_of)
    for dim, group in groups.items():
        grid.hold((dim,), group)
    return grid, grid.device_mesh(device_type=device_type)
