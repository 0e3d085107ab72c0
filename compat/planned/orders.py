"""All orders of a job's dims, ranked by which of its groups cross hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

from compat.planned.layouts import Layouts, most_hosts
from compat.swap.order import DIMS
from hypergrid.topology import Topology


@dataclass(frozen=True)
class RankedOrder:
    """An order of dims, and by kind of groups how many hosts a group touches at most under it."""

    order: str
    hosts: Mapping[str, int]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of hosts: of two orders, the one with the smaller tuple is better."""
        return tuple(self.hosts.values())


def ranked_orders(
    requested: str, layouts_of: Callable[[str], Layouts | None], hosts: Topology
) -> list[RankedOrder]:
    """All orders that differ, the best first; of equally good ones ``requested`` comes first.

    In the better of two orders, groups touch fewer hosts in the first kind in which they differ. tp
    is the first kind, since it sends the most. ``layouts_of`` gives the layouts under an order, or
    None where Megatron refuses it.

    Two hosts of 4 ranks, tp=4, dp=2: under tp-dp a tp group touches 1 host and a dp group 2, under
    dp-tp a tp group 2 and a dp group 1. tp-dp is better.
    """
    ranking = []
    known_layouts = set()
    for order in _orders(requested, layouts_of(requested)):
        layouts = layouts_of(order)
        if layouts is None:
            continue
        # Dims of size 1 may stand anywhere: such orders lay the ranks out in the same way.
        trimmed = tuple(layout.trimmed for _, layout in sorted(layouts.items()))
        if trimmed in known_layouts:
            continue
        known_layouts.add(trimmed)
        ranking.append(RankedOrder(order, most_hosts(layouts, hosts)))
    return sorted(ranking, key=lambda ranked: (ranked.numbers, ranked.order != requested))


def _orders(requested: str, layouts: Layouts | None) -> Iterator[str]:
    """``requested``, then every order of the dims that are larger than 1 in its ``layouts``.

    Orders that begin with tp come first, so that of equally good ones tp has the nearest ranks.
    """
    yield requested
    used = set()
    if layouts is None:
        used.update(requested.lower().split("-"))
    else:
        for layout in layouts.values():
            used.update(layout.trimmed.dims)
    for dims in permutations([dim for dim in DIMS if dim in used]):
        yield "-".join(dims)
