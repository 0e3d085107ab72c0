"""All orders of a job's dims, ranked by which of its groups cross hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from compat.planned.layouts import SHARDS, Layouts, has_experts, most_hosts
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


def dp_across(
    ranking: Sequence[RankedOrder],
    requested: RankedOrder,
    layouts: Layouts,
    refusal_of: Callable[[str], str],
    hosts: Topology,
    places: str,
) -> str:
    """In words: the order in which dp alone leaves a host, or what makes that impossible.

    Empty without pipelines or data parallelism, as the ranking keeps the other groups inside, and
    where the ``requested`` order does so already. ``layouts`` are those of the requested order,
    ``refusal_of`` says why Megatron refuses an order, and ``places`` what ``hosts`` are called.

    Hosts of 4 ranks, tp=2, pp=2, dp=2: under tp-pp-dp only dp touches two of them. Under tp-dp-pp,
    which the ranking prefers, as dp sends more, only pp does.
    """
    inside = [kind for kind in requested.hosts if not kind.endswith("dp")]
    if "pp" not in inside or "dp" not in requested.hosts or _are_inside(requested, inside):
        return ""
    kinds = ", ".join(inside)
    for ranked in ranking:
        if _are_inside(ranked, inside):
            return (
                f"With order {ranked.order} groups of {kinds} stay inside {places}, and dp crosses."
            )
    sentence = f"No order keeps {kinds} inside {places} with dp across them"
    ranks_of_place = int(np.bincount(hosts.numbers).max())
    dims: list[str] = []
    for name in SHARDS if has_experts(layouts) else ["decoder"]:
        layout = layouts[name].trimmed
        inner_dims = [dim for dim in layout.dims if dim != "dp"]
        ranks = math.prod(layout.size_of(dim) for dim in inner_dims)
        if ranks_of_place % ranks or layout.offset % ranks:
            product = " x ".join(inner_dims)
            return (
                f"{sentence}: {product} of the {name} is {ranks} ranks, which do not fill {places} "
                f"of {ranks_of_place}."
            )
        dims += inner_dims
    order = "-".join([*(dim for dim in DIMS if dim in dims), "dp"])
    return f"{sentence}. Megatron refuses {order}: {refusal_of(order)}"


def _are_inside(ranked: RankedOrder, kinds: Sequence[str]) -> bool:
    return all(ranked.hosts[kind] == 1 for kind in kinds)
