"""Which host gets which ranks: an order of hosts in which a layout's flows cost least. No torch.

Up to eight hosts every order that differs is tried: hosts of equal size in one unit are the same,
and so are untouched units that hold the same. For more, a few orders are built and the best is
taken, the given one included: hosts are packed into segments as long as the layout's blocks (all
ranks of a tp group, of a tp-ep group, ...), each inside the innermost unit that has room for it;
what is left over in a unit is packed in the unit around it. That costs O(n log n) for n ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import TypeAlias

import numpy as np

from hypergrid.analysis.traffic import Flow, Layouts, by_level, crossing
from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import few
from hypergrid.network import Network
from hypergrid.topology import Topology

ALL_ORDERS = 8  # hosts up to which every order is tried
_AT_ONCE = 1 << 18  # ranks of orders that are compared in one go


@dataclass(frozen=True)
class Placement:
    """An order of hosts, and what the flows cost in it.

    Costs are of a rank on average: seconds if volumes are in GB.
    """

    order: tuple[int, ...]  # numbers of the network's hosts, in the order of their ranks
    spare: tuple[int, ...]  # hosts that get no ranks
    given: float  # cost in the given order of hosts
    cost: float
    exact: bool  # whether no order of hosts costs less


def place(layouts: Layouts, network: Network, flows: Sequence[Flow]) -> Placement:
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
    return Placement(tuple(best[:used]), tuple(sorted(rest)), cost, least[0], exact)


def interleaved(layouts: Layouts, hosts: Sequence[str], flows: Sequence[Flow]) -> str | None:
    """What is expensive about ranks whose hosts are ``hosts``; None if each has consecutive ones.

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
    """What orders of hosts cost, several at once."""

    def __init__(self, layouts: Layouts, network: Network, flows: Sequence[Flow]) -> None:
        self.ranks = max(layout.ranks.stop for layout in layouts.values())
        if sum(network.ranks) < self.ranks:
            raise LayoutError(
                f"the network has {sum(network.ranks)} ranks on {len(network.hosts)} hosts, and "
                f"the job has {self.ranks}. Add hosts, or make the job smaller."
            )
        self.size = max(layout.size for layout in layouts.values())
        self.at_once = max(1, _AT_ONCE // self.ranks)
        speeds = network.speeds
        self.prices = np.array([1 / speeds[level] for level in network.levels])
        each = [(flow, flow.groups(layouts)) for flow in flows]
        self.groups = [(flow, groups) for flow, groups in each if groups.shape[1] > 1]
        self.of_host = np.array(network.ranks)
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
    hosts = range(len(network.hosts))
    # Of each host the first one of its unit, which stands for the unit; the outermost level first.
    outer_first = []
    for names in list(network.units.values())[::-1]:
        first: dict[str, int] = {}
        outer_first.append([first.setdefault(name, host) for host, name in enumerate(names)])
    held = [Counter(units) for units in outer_first]
    lengths = _blocks(layouts, Counter(network.ranks).most_common(1)[0][0], len(hosts))
    as_given = [[units[host] for units in outer_first] for host in hosts]
    by_size = [
        [(-many[units[host]], units[host]) for units, many in zip(outer_first, held, strict=True)]
        for host in hosts
    ]
    orders = [sorted(hosts, key=as_given.__getitem__), sorted(hosts, key=by_size.__getitem__)]
    for in_units in orders[: 1 if orders[0] == orders[1] else 2]:
        yield in_units
        for blocks in lengths:
            yield _packed(in_units, outer_first, blocks)


def _blocks(layouts: Layouts, per_host: int, hosts: int) -> list[tuple[int, ...]]:
    """Lengths of the layouts' blocks in hosts, the smallest first; and each of them alone."""
    found: dict[tuple[int, ...], None] = {}
    for layout in layouts.values():
        ends = [s * n for s, n in zip(layout.strides, layout.sizes, strict=True) if n > 1]
        whole = dict.fromkeys(n // per_host for n in ends if n % per_host == 0)
        blocks = tuple(n for n in whole if 1 < n < hosts)
        found |= dict.fromkeys([blocks, *((n,) for n in blocks)])
    return [blocks for blocks in found if blocks]


_Segment: TypeAlias = tuple[tuple[int, ...], int]  # hosts, and of how many levels they share a unit


def _packed(
    hosts: Sequence[int], outer_first: Sequence[Sequence[int]], blocks: Sequence[int]
) -> list[int]:
    """The hosts, sorted by units, in segments of the first length, these in segments of the next.

    Each segment is inside the innermost unit that has room for it. What no segment has room for
    comes last.
    """
    everything = [0] * len(hosts)
    levels = [everything, *outer_first]
    position = [dict[int, int]() for _ in levels]
    for at, units in zip(position, levels, strict=True):
        for number, host in enumerate(hosts):
            at.setdefault(units[host], number)
    places = list(zip(position, levels, strict=True))

    def place_of(item: _Segment) -> list[int]:
        members, depth = item
        inside = [at[units[members[0]]] for at, units in places[: depth + 1]]
        return inside + [len(hosts)] * (len(places) - len(inside))

    items: list[_Segment] = [((host,), len(outer_first)) for host in hosts]
    rest: list[tuple[int, ...]] = []
    length = 1
    for block in blocks:
        many, length = block // length, block
        made, left = list[_Segment](), items
        for depth in reversed(range(len(levels))):
            by_unit: dict[int, list[tuple[int, ...]]] = defaultdict(list)
            wide, units = list[_Segment](), levels[depth]
            for item in left:
                if item[1] < depth:
                    wide.append(item)  # it spans several units of this level
                else:
                    by_unit[units[item[0][0]]].append(item[0])
            left = wide
            for members in by_unit.values():
                whole = len(members) // many * many
                for start in range(0, whole, many):
                    segment = (*chain.from_iterable(members[start : start + many]),)
                    made.append((segment, depth))
                left += [(member, depth) for member in members[whole:]]
        rest = [segment for segment, _ in left] + rest
        # Segments of one unit stay neighbours, those that span units come last.
        items = sorted(made, key=place_of)
    return [host for segment in [*(segment for segment, _ in items), *rest] for host in segment]
