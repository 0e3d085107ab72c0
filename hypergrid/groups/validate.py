"""Checks of grids that are used together."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, combinations

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
    layouts = []
    for declared in grids:
        layout = declared if isinstance(declared, RankLayout) else declared.layout
        layouts.append(layout)
    if world_size is None:
        world_size = grid.known_world_size()
    # Two layouts of the same ranks have all of them in common.
    for first, second in combinations(layouts, 2):
        if first.ranks == second.ranks:
            continue
        common = sorted(set(first.ranks) & set(second.ranks))
        if common:
            raise ValueError(
                f"{first!r} and {second!r} overlap on ranks {few(common)} only: grids that are "
                f"declared together have all ranks in common or none. Change an offset or a shape."
            )
    world = set(range(world_size))
    covered = set(chain.from_iterable(layout.ranks for layout in layouts))
    ranks = sorted(world - covered)
    fault = "are in no grid"
    if not ranks:
        ranks = sorted(covered - world)
        fault = f"are in a grid and outside the world of {world_size}"
    if ranks:
        names = ", ".join(map(repr, layouts)) or "no grids"
        raise ValueError(f"ranks {few(ranks)} {fault}: {names}.")
