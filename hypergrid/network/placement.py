"""Placement: an order of hosts in which a layout's flows cost least. Needs no torch.

Up to eight hosts every order that differs is tried: hosts of equal size in one unit are the same,
and so are untouched units that hold the same. For more, a few orders are built and the best is
taken, the given one included: hosts are packed into segments as long as the layout's blocks (all
ranks of a tp group, of a tp-ep group, ...), each inside the innermost unit that it fits into;
what is left over in a unit is packed in the unit around it. That costs O(n log n) for n ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np

from hypergrid.layout import RankLayout
from hypergrid.messages import few
from hypergrid.network.levels import Network
from hypergrid.network.traffic import Flow, Layouts, by_level, crossing
from hypergrid.topology import Topology

ALL_ORDERS = 8  # hosts up to which every order is tried
_AT_ONCE = 1 << 18  # ranks of orders that are compared in one go
_IN_CACHE = 1 << 14  # ranks


@dataclass(frozen=True)
class HostOrder:
    """An order of hosts, and what the flows cost in it.

    Costs are of a rank on average: seconds if volumes are in GB.
    """

    order: tuple[int, ...]  # numbers of the network's hosts, in the order of their ranks
    spare: tuple[int, ...]  # hosts that get no ranks
    given: float  # cost in the given order of hosts
    cost: float
    exact: bool  # whether no order of hosts costs less


def place(layouts: Layouts, network: Network, flows: Sequence[Flow]) -> HostOrder:
    """The order of the network's hosts that costs least, or the given one if none costs less.

    *Local*: arithmetic. Of equal costs, less over the outer levels is better. ``network`` may have
    more hosts than the layouts need. LayoutError if it has fewer.

    >>> from hypergrid.layout import RankLayout
    >>> network = Network(["a", "b", "c", "d"], 4, {"rack": ["r", "s", "r", "s"]})
    >>> tp = Flow("tp", "all", ("tp",), "ring", 1.0)
    >>> found = place({"all": RankLayout(("tp", "dp"), (8, 2))}, network, [tp])
    >>> [network.hosts[i] for i in found.order]
    ['a', 'c', 'b', 'd']
    """
    orders = _Orders(layouts, network, flows)
    given = list(range(len(network.hosts)))
    exact = len(given) <= ALL_ORDERS
    tried = _distinct(network, orders.ranks) if exact else _candidates(layouts, network)
    best, least = given, orders.keys([given])[0]
    cost = least[0]
    while some := list(islice(tried, orders.at_once)):
        keys = orders.keys(some)
        at = min(range(len(some)), key=keys.__getitem__)
        if keys[at] < least:
            best, least = some[at], keys[at]
    used = orders.used(best)
    rest = set(given) - set(best[:used])
    return HostOrder(tuple(best[:used]), tuple(sorted(rest)), cost, least[0], exact)


def interleaved(layouts: Layouts, hosts: Sequence[str], flows: Sequence[Flow]) -> str | None:
    """The cost of ranks interleaved over ``hosts``, in words; None if each host's are consecutive.

    The cost is the volume that crosses hosts, beside that of the same hosts with consecutive ranks.
    """
    runs = Counter(name for name, _ in groupby(hosts))
    apart = next((name for name, many in runs.items() if many > 1), None)
    if apart is None:
        return None
    world = RankLayout(("rank",), (len(hosts),))
    there = [rank for rank, host in enumerate(hosts) if host == apart]
    sent = [
        sum(crossing(layouts, Topology(world, each), flows).values())
        for each in (list(hosts), dict(Counter(hosts)))
    ]
    cost = f"what crosses hosts is {sent[0]:.4g}, and {sent[1]:.4g} with consecutive ranks"
    return (
        f"ranks are interleaved over hosts: {apart} has ranks {few(there)}; {cost}. Start "
        f"with srun --distribution=block, or a host file that lists each host once"
    )


class _Orders:
    """The costs of several orders of hosts."""

    def __init__(self, layouts: Layouts, network: Network, flows: Sequence[Flow]) -> None:
        self.ranks = max(layout.stop for layout in layouts.values())
        network.numbers(self.ranks)  # refuses too few
        self.size = max(layout.size for layout in layouts.values())
        self.at_once = max(1, _AT_ONCE // self.ranks)
        self.prices = network.prices
        each = [(flow, flow.groups(layouts)) for flow in flows]
        # In parts that stay in the cache.
        self.groups = [
            (flow, part)
            for flow, groups in each
            if groups.shape[1] > 1
            for part in np.array_split(groups, -(-groups.size // _IN_CACHE))
        ]
        self.of_host = np.minimum(network.ranks, self.ranks)
        names = [range(len(network.hosts)), *network.units.values()]
        numbers = [np.unique(list(level), return_inverse=True)[1] for level in names]
        self.units = np.array(numbers, dtype=np.int32)  # half as much to read

    def keys(self, orders: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """For each order its cost, then what it sends over the outermost level, the next, ..."""
        ranked = [
            np.repeat(order, self.of_host[order])[: self.ranks] for order in map(list, orders)
        ]
        units = self.units[:, np.array(ranked)]
        volumes = np.zeros((len(ranked), len(self.prices)))
        for flow, groups in self.groups:
            volumes += flow.volume * by_level(groups, units, flow.pattern).sum(axis=-2)
        costs = volumes @ self.prices / self.size
        # Sums of the same numbers in another order differ in the last digits.
        rows = np.column_stack([costs, volumes[:, ::-1]])
        return [tuple(float(f"{value:.9g}") for value in row) for row in rows]

    def used(self, order: Sequence[int]) -> int:
        """How many hosts of the order get ranks."""
        return int(np.searchsorted(np.cumsum(self.of_host[list(order)]), self.ranks)) + 1


def _distinct(network: Network, ranks: int) -> Iterator[list[int]]:
    """All orders of hosts for that many ranks, but one of those that are the same by symmetry."""
    outer_first = list(network.units.values())[::-1]
    shape: list[dict[str, object]] = [{} for _ in outer_first]  # of each unit: what it holds
    inside: dict[int, object] = dict(enumerate(network.ranks))
    for depth in reversed(range(len(outer_first))):
        held: dict[str, dict[str, object]] = defaultdict(dict)
        for host, unit in enumerate(outer_first[depth]):
            inner = outer_first[depth + 1][host] if depth + 1 < len(outer_first) else str(host)
            held[unit][inner] = inside[host]
        shape[depth] = {unit: tuple(sorted(map(repr, of.values()))) for unit, of in held.items()}
        inside = {host: shape[depth][unit] for host, unit in enumerate(outer_first[depth])}

    def extended(order: list[int], left: int) -> Iterator[list[int]]:
        if left <= 0:
            yield order
            return
        touched = [{names[host] for host in order} for names in outer_first]
        seen = set()
        for host, many in enumerate(network.ranks):
            if host in order:
                continue
            key = [
                unit if (unit := names[host]) in touched[depth] else (shape[depth][unit],)
                for depth, names in enumerate(outer_first)
            ]
            if (*key, many) not in seen:
                seen.add((*key, many))
                yield from extended([*order, host], left - many)

    return extended([], ranks)


def _candidates(layouts: Layouts, network: Network) -> Iterator[list[int]]:
    """Orders worth trying: hosts packed into blocks, with units as given or the largest first."""
    many = len(network.hosts)
    lengths = _blocks(layouts, Counter(network.ranks).most_common(1)[0][0], many)
    # Of each host the first one of its unit, which stands for the unit; the outermost level first.
    outer_first = np.zeros((len(network.units), many), dtype=int)
    given, by_size = np.arange(many), [np.arange(many)]  # sorted by the last first
    for level, names in enumerate(network.units.values(), 1):
        _, first, number, held = np.unique(
            names, return_index=True, return_inverse=True, return_counts=True
        )
        outer_first[-level] = first[number]
        by_size += [first[number], -held[number]]
    orders = [np.lexsort([given, *outer_first[::-1]]), np.lexsort(by_size)]
    for hosts in orders[: 1 if (orders[0] == orders[1]).all() else 2]:
        yield hosts.tolist()
        for blocks in lengths:
            yield _packed(hosts, outer_first, blocks)


def _blocks(layouts: Layouts, per_host: int, hosts: int) -> list[tuple[int, ...]]:
    """Lengths of the layouts' blocks in hosts, the smallest first; and each of them alone."""
    found: dict[tuple[int, ...], None] = {}
    for layout in layouts.values():
        ends = [s * n for s, n in zip(layout.strides, layout.sizes, strict=True) if n > 1]
        whole = dict.fromkeys(n // per_host for n in ends if n % per_host == 0)
        blocks = tuple(n for n in whole if 1 < n < hosts)
        found |= dict.fromkeys([blocks, *((n,) for n in blocks)])
    return [blocks for blocks in found if blocks]


def _packed(hosts: np.ndarray, outer_first: np.ndarray, blocks: Sequence[int]) -> list[int]:
    """The hosts, sorted by units, in segments of the first length, these in segments of the next.

    Each segment is inside the innermost unit that it fits into. Hosts that are in no segment come
    last.
    """
    # By level the unit of each host, numbered in the order of ``hosts``; all hosts are one.
    levels = np.zeros((len(outer_first) + 1, len(hosts)), dtype=int)
    for level, units in enumerate(outer_first, 1):
        _, first, number = np.unique(units[hosts], return_index=True, return_inverse=True)
        levels[level, hosts] = first[number]
    # Segments, and the innermost level of which each is inside one unit.
    segments, inside = hosts[:, np.newaxis], np.full(len(hosts), len(outer_first))
    rest: list[int] = []
    for block in blocks:
        many = block // segments.shape[1]
        made, made_inside, left = list[np.ndarray](), list[int](), np.arange(len(segments))
        for level in reversed(range(len(levels))):
            spans = inside[left] < level
            near = left[~spans]
            near = near[np.argsort(levels[level, segments[near, 0]], kind="stable")]
            _, start, count = np.unique(
                levels[level, segments[near, 0]], return_index=True, return_counts=True
            )
            place = np.arange(len(near)) - np.repeat(start, count)
            fits = place < np.repeat(count // many * many, count)
            made.append(segments[near[fits]].reshape(-1, block))
            made_inside += [level] * len(made[-1])
            left = np.concatenate([left[spans], near[~fits]])
        rest = [*segments[left].ravel().tolist(), *rest]
        segments, inside = np.concatenate(made), np.array(made_inside, dtype=int)
        # Segments of one unit stay neighbours, those that span units come last.
        known = np.arange(len(levels))[:, np.newaxis] <= inside
        order = np.lexsort(np.where(known, levels[:, segments[:, 0]], len(hosts))[::-1])
        segments, inside = segments[order], inside[order]
    return [*segments.ravel().tolist(), *rest]
