"""All orders of a job's dims, ranked by which of its groups cross hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from compat.planned.layouts import SHARDS, Layouts, groups_by_kind, known
from compat.swap.order import DIMS
from hypergrid.layout import RankLayout
from hypergrid.topology import Topology


@dataclass(frozen=True)
class RankedOrder:
    """An order of dims, and by kind of groups how many hosts a group touches at most under it."""

    order: str
    hosts: Mapping[str, int]  # 1 if all groups of the kind stay inside

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of hosts: of two orders, the one with the smaller tuple is better."""
        return tuple(self.hosts.values())


def ranked_orders(requested: str, layouts: Layouts, hosts: Topology) -> list[RankedOrder]:
    """All orders that differ, the best first; of equally good ones ``requested`` comes first.

    In the better of two orders, groups touch fewer hosts in the first kind in which they differ. tp
    is the first kind, since it sends the most. ``layouts`` are those of the requested order.

    Two hosts of 4 ranks, tp=4, dp=2: under tp-dp a tp group touches 1 host and a dp group 2, under
    dp-tp a tp group 2 and a dp group 1. tp-dp is better.
    """
    shards = {name: layouts[name] for name in SHARDS if name in layouts}
    used_dims: set[str] = set()
    for layout in shards.values():
        used_dims.update(layout.trimmed.dims)
    used_in_order = [dim for dim in DIMS if dim in used_dims]
    orders = [requested]
    # A job of one rank has no dims, and no other order.
    if used_in_order:
        # Orders that begin with tp come first: of equally good ones tp has the nearest ranks.
        orders.extend(map("-".join, permutations(used_in_order)))
    ranking = []
    known_layouts = set()
    for order in orders:
        layouts_in_order = shards if order == requested else _in_order(order, shards)
        if layouts_in_order is None:
            continue
        # Dims of size 1 may stand anywhere: such orders lay the ranks out in the same way.
        trimmed = tuple(layout.trimmed for layout in layouts_in_order.values())
        if trimmed in known_layouts:
            continue
        known_layouts.add(trimmed)
        most_hosts = {}
        for kind, groups in groups_by_kind(layouts_in_order).items():
            most_hosts[kind] = int(hosts.touched(groups).max())
        ranking.append(RankedOrder(order, most_hosts))
    return sorted(ranking, key=lambda ranked: (ranked.numbers, ranked.order != requested))


def _in_order(order: str, layouts: Layouts) -> Layouts | None:
    """The layouts under another order of all dims; None where Megatron refuses that order."""
    turned = {}
    for name, layout in layouts.items():
        # A dim that the layout does not have has size 1.
        sizes = {dim: layout.size_of(dim) for dim in order.split("-")}
        turned[name] = RankLayout.from_order(order, sizes, layout.offset)
    pipelined = [layout for layout in turned.values() if layout.size_of("pp") > 1]
    # The stages of a pipeline are the same ranks for dense layers and for experts.
    strides = {layout.stride("pp") for layout in pipelined}
    data_sizes = {layout.size_of("dp") for layout in pipelined}
    if len(strides) > 1 or (len(data_sizes) > 1 and not order.endswith("pp")):
        return None
    return turned


def dp_across(
    ranking: Sequence[RankedOrder],
    requested: RankedOrder,
    layouts: Layouts,
    hosts: Topology,
    places: str,
) -> str:
    """In words: the order in which dp alone leaves a host, or what makes that impossible.

    Empty without pipelines or data parallelism, as the ranking keeps the other groups inside, and
    where the ``requested`` order does so already. ``layouts`` are those of the requested order, and
    ``places`` what ``hosts`` are called.

    Hosts of 4 ranks, tp=2, pp=2, dp=2: under tp-pp-dp only dp touches two of them. Under tp-dp-pp,
    which the ranking prefers, as dp sends more, only pp does.
    """
    kinds = [kind for kind in requested.hosts if not kind.endswith("dp")]
    if "pp" not in kinds or "dp" not in requested.hosts:
        return ""
    inside = []
    for ranked in ranking:
        stays_inside = all(ranked.hosts[kind] == 1 for kind in kinds)
        if stays_inside:
            inside.append(ranked.order)
    if requested.order in inside:
        return ""
    named = ", ".join(kinds)
    if inside:
        return f"With order {inside[0]} groups of {named} stay inside {places}, and dp crosses."
    sentence = f"No order keeps {named} inside {places} with dp across them"
    ranks_of_place = int(np.bincount(hosts.numbers).max())
    data_sizes = []
    for name, layout in known(layouts).items():
        dims = [dim for dim in layout.trimmed.dims if dim != "dp"]
        ranks = layout.dim_size(dims)
        if ranks_of_place % ranks or layout.offset % ranks:
            return (
                f"{sentence}: {' x '.join(dims)} of the {name} is {ranks} ranks, which do not fill "
                f"{places} of {ranks_of_place}."
            )
        data_sizes.append(f"{name} {layout.size_of('dp')}")
    # They would fill hosts, in an order that ends in dp.
    return (
        f"{sentence}. Megatron refuses an order that does not end in pp: the data-parallel sizes, "
        f"{' and '.join(data_sizes)}, must be equal."
    )
