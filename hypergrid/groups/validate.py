"""Checks of grids that are used together."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from hypergrid.groups import grid
from hypergrid.layout import RankLayout
from hypergrid.messages import few


def validate_grids(
    grids: Iterable[grid.HyperCommGrid | RankLayout], world_size: int | None = None
) -> None:
    """Check that grids divide the world between them. *Local*.

    Any two must lay out the same ranks or have none in common, and each rank of the world must
    be in one. ValueError otherwise: it names the ranks in conflict, or those in no grid.
    """
    layouts = [each if isinstance(each, RankLayout) else each.layout for each in grids]
    world = range(grid.world_size() if world_size is None else world_size)
    for one, other in combinations(layouts, 2):
        both = sorted(set(one.ranks) & set(other.ranks))
        if both and one.ranks != other.ranks:
            raise ValueError(
                f"{one!r} and {other!r} overlap on ranks {few(both)} only: grids that are declared "
                f"together have all ranks in common or none. Change an offset or a shape."
            )
    covered = {rank for layout in layouts for rank in layout.ranks}
    for ranks, fault in (
        (sorted(set(world) - covered), "are in no grid"),
        (sorted(covered - set(world)), f"are in a grid and outside the world of {len(world)}"),
    ):
        if ranks:
            raise ValueError(
                f"ranks {few(ranks)} {fault}: {', '.join(map(repr, layouts)) or 'no grids'}."
            )
