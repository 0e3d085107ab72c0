"""A simple model of what a layout sends over each level of a network, and the orders ranked by it.

Each flow is a set of groups whose ranks send a volume per training step, in a unit of the caller's.
Two ranks communicate at the pace of the innermost level that they share: a host, a unit around it,
the world. A ring moves at the pace of its slowest link, so all that its members send counts there.
In an all-to-all a rank sends 1/n of its volume to each of n members, each at the pace of that pair.
Of neighbours, each pair of consecutive stages counts. A level has a price: 1 / bandwidth. With two
levels, where links inside a host cost nothing and those between hosts 1, the cost is the volume
that crosses hosts. Congestion is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Literal, TypeAlias

import numpy as np

from hypergrid.layout import RankLayout
from hypergrid.network.levels import Network
from hypergrid.topology import Topology

Layouts: TypeAlias = Mapping[str, RankLayout]
Pattern: TypeAlias = Literal["ring", "all-to-all", "neighbours"]

# Part of a link's rate that large messages reach at least where nothing is wrong: docs/placement.md
LEAST_REACHED = 0.8


@dataclass(frozen=True)
class Flow:
    """The volume that the groups over ``dims`` of one layout send in a step, per rank."""

    name: str
    layout: str
    dims: tuple[str, ...]
    pattern: Pattern
    volume: float
    hidden: bool = False  # whether computation can go on while it is sent

    def groups(self, layouts: Layouts) -> np.ndarray:
        """Its groups, of shape (groups, size)."""
        layout = layouts[self.layout]
        return layout.groups([dim for dim in self.dims if dim in layout.dims])


@dataclass(frozen=True)
class Cost:
    """The volume of one flow over each level, and its cost at the levels' prices."""

    volumes: Mapping[str, float]  # over the job, by level
    total: float  # volume x price, over the job
    slowest: float  # of a rank in the slowest group


@dataclass(frozen=True)
class Ranked:
    """One order, and what its links cost in a step: the total, and by flow.

    Over the job, in the unit of the volumes; over a priced network, seconds of a rank on average.
    """

    order: str
    total: float
    flows: Mapping[str, float]


@dataclass(frozen=True)
class Estimate:
    """Seconds in a step that a rank waits for the network, and what dominates them.

    ``low``: links at their rate, and what computation can hide is hidden. ``high``: links at the
    least part of it that healthy ones reach, each flow as slow as its slowest group, one after the
    other.
    """

    low: float
    high: float
    flow: str | None  # the largest, and the level on which it sends most of it
    level: str | None
    costs: Mapping[str, Cost] = field(repr=False)


def by_level(groups: np.ndarray, units: np.ndarray, pattern: Pattern) -> np.ndarray:
    """How many members' volumes each group sends at the pace of each level.

    ``units`` has the number of each rank's unit, of shape (levels but the last, ..., ranks), the
    innermost level first; the result is of shape (..., groups, levels).
    """
    at, size = units[..., groups], groups.shape[1]
    levels = range(len(units) + 1)
    if pattern == "ring":
        apart = (at != at[..., :1]).any(axis=-1).sum(axis=0)
        return np.stack([(apart == level) * float(size) for level in levels], axis=-1)
    if pattern == "neighbours":
        apart = (at[..., 1:] != at[..., :-1]).sum(axis=0)
        return np.stack([(apart == level).sum(axis=-1) * 1.0 for level in levels], axis=-1)
    # Pairs of members, themselves included, that share the unit of each level; then all pairs.
    shared = np.full((len(units) + 2, *at.shape[1:-1]), float(size))
    shared[-1] = size**2
    for level, each in enumerate(at, 1):
        ordered = np.sort(each, axis=-1)
        starts = np.ones(ordered.shape, dtype=bool)
        starts[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
        first = np.flatnonzero(starts)
        together = np.diff(np.append(first, ordered.size)).astype(float)
        sums = np.bincount(first // size, together**2, ordered.size // size)
        shared[level] = sums.reshape(ordered.shape[:-1])
    counts: np.ndarray = np.moveaxis(np.diff(shared, axis=0), 0, -1) / size
    return counts


def costs(layouts: Layouts, network: Network, flows: Iterable[Flow]) -> dict[str, Cost]:
    """The cost of each flow in seconds, if volumes are in GB. Flows of groups of one are left out.

    LayoutError if the network has fewer ranks than the layouts.
    """
    units = network.numbers(max(layout.stop for layout in layouts.values()))
    prices = network.prices
    found = {}
    for flow in flows:
        groups = flow.groups(layouts)
        if groups.shape[1] == 1:
            continue
        counts = flow.volume * by_level(groups, units, flow.pattern)
        volumes = counts.sum(axis=0)
        slowest = float((counts @ prices).max()) / groups.shape[1]
        by_name = dict(zip(network.levels, volumes.tolist(), strict=True))
        found[flow.name] = Cost(by_name, float(volumes @ prices), slowest)
    return found


def crossing(layouts: Layouts, topology: Topology, flows: Iterable[Flow]) -> dict[str, float]:
    """The volume of each flow at the pace of links between hosts in a step, over the whole job.

    Flows whose groups have one rank are left out.
    """
    units = topology.numbers[np.newaxis]
    groups = [(flow, flow.groups(layouts)) for flow in flows]
    return {
        flow.name: flow.volume * float(by_level(each, units, flow.pattern)[:, 1].sum())
        for flow, each in groups
        if each.shape[1] > 1
    }


def estimate(layouts: Layouts, network: Network, flows: Sequence[Flow]) -> Estimate:
    """Seconds of a step for flows whose volumes are in GB."""
    found = costs(layouts, network, flows)
    ranks = max(layout.size for layout in layouts.values())
    hidden = {flow.name for flow in flows if flow.hidden}
    low = sum(cost.total / ranks for name, cost in found.items() if name not in hidden)
    high = sum(cost.slowest for cost in found.values()) / LEAST_REACHED
    flow = max(found, key=lambda name: found[name].slowest, default=None)
    level = None
    if flow is not None:
        speeds, sent = network.speeds, found[flow].volumes
        level = max(sent, key=lambda name: sent[name] / speeds[name])
    return Estimate(low, high, flow, level, found)


def ranked(
    asked: str,
    layouts_of: Callable[[str], Layouts | None],
    network: Topology | Network,
    flows_of: Callable[[Layouts], Sequence[Flow]],
) -> list[Ranked]:
    """All orders that differ, the one that costs least first.

    Of equally good orders ``asked`` comes first. ``layouts_of`` returns the layouts under an order,
    all over the ranks of ``network``, or None where the order is not allowed; ``flows_of`` what is
    sent under given layouts. On a Topology the cost is the volume that crosses hosts.
    """
    differ: dict[object, tuple[str, Layouts]] = {}
    for order in _orders(asked, layouts_of(asked)):
        layouts = layouts_of(order)
        if layouts is not None:
            key = tuple(layout.trimmed for _, layout in sorted(layouts.items()))
            differ.setdefault(key, (order, layouts))
    found: list[tuple[tuple[object, ...], Ranked]] = []
    for order, layouts in differ.values():
        flows = flows_of(layouts)
        if isinstance(network, Topology):
            sent = crossing(layouts, network, flows)
        else:
            ranks = max(layout.size for layout in layouts.values())
            each = costs(layouts, network, flows)
            sent = {name: cost.total / ranks for name, cost in each.items()}
        total = sum(sent.values())
        # Of orders that cost the same, the one whose heavier flows have nearer neighbours.
        strides = [
            layouts[flow.layout].stride(flow.dims[0])
            for flow in sorted(flows, key=lambda flow: -flow.volume)
            if flow.name in sent and flow.dims[0] in layouts[flow.layout].dims
        ]
        rounded = float(f"{total:.9g}")
        found.append(((rounded, order != asked, strides), Ranked(order, total, sent)))
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]


def _orders(asked: str, layouts: Layouts | None) -> Iterable[str]:
    """``asked``, then every order of the dims that are larger than 1 in its ``layouts``."""
    yield asked
    dims = dict.fromkeys(asked.lower().split("-"))
    if layouts is not None:
        used = {dim for layout in layouts.values() for dim in layout.trimmed.dims}
        dims = {dim: None for dim in dims if dim in used}
    yield from map("-".join, permutations(dims))
