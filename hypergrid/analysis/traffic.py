"""A simple model of what a layout sends between hosts, and the orders ranked by it.

Each flow is a set of groups whose ranks send a volume per training step, in a unit of the caller's.
A ring moves at the pace of its slowest link: where a group touches several hosts, all that each of
its members sends counts. In an all-to-all a rank sends 1/n of its volume to each of n members, and
what goes to other hosts counts; of neighbours, each pair of consecutive stages on different hosts.
Links inside a host cost nothing and those between hosts the same; congestion and overlap are left
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal, TypeAlias

import numpy as np

from hypergrid.analysis.summary import hosts_touched
from hypergrid.layout import RankLayout
from hypergrid.topology import Topology

Layouts: TypeAlias = Mapping[str, RankLayout]
Pattern: TypeAlias = Literal["ring", "all-to-all", "neighbours"]


@dataclass(frozen=True)
class Flow:
    """What the groups over ``dims`` of one layout send in a step, per rank."""

    name: str
    layout: str
    dims: tuple[str, ...]
    pattern: Pattern
    volume: float

    def groups(self, layouts: Layouts) -> np.ndarray:
        """Its groups, of shape (groups, size)."""
        layout = layouts[self.layout]
        return layout.groups([dim for dim in self.dims if dim in layout.dims])


@dataclass(frozen=True)
class Ranked:
    """One order, and what waits for links between hosts in a step: the total, and by flow."""

    order: str
    total: float
    flows: Mapping[str, float]


def crossing(layouts: Layouts, topology: Topology, flows: Iterable[Flow]) -> dict[str, float]:
    """What each flow sends at the pace of links between hosts in a step, over the whole job.

    Flows whose groups have one rank are left out.
    """
    groups = [(flow, flow.groups(layouts)) for flow in flows]
    return {
        flow.name: flow.volume * _between_hosts(each, topology, flow.pattern)
        for flow, each in groups
        if each.shape[1] > 1
    }


def _between_hosts(groups: np.ndarray, topology: Topology, pattern: Pattern) -> float:
    """How many ranks' volumes go at the pace of links between hosts."""
    hosts, size = topology.numbers[groups], groups.shape[1]
    if pattern == "ring":
        return float((hosts_touched(groups, topology) > 1).sum() * size)
    if pattern == "neighbours":
        return float((hosts[:, 1:] != hosts[:, :-1]).sum())
    # Each member sends 1/size to each of those that are elsewhere.
    ordered = np.sort(hosts, axis=1)
    starts = np.ones_like(ordered, dtype=bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    together = np.diff(np.append(np.flatnonzero(starts), ordered.size))
    return float((together * (size - together)).sum() / size)


def ranked(
    asked: str,
    layouts_of: Callable[[str], Layouts | None],
    topology: Topology,
    flows_of: Callable[[Layouts], Sequence[Flow]],
) -> list[Ranked]:
    """All orders that differ, the one that sends least between hosts first.

    Of equally good orders ``asked`` comes first. ``layouts_of`` returns the layouts under an order,
    all over the ranks of ``topology``, or None where the order is not allowed; ``flows_of`` what is
    sent under given layouts.
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
        sent = crossing(layouts, topology, flows)
        total = sum(sent.values())
        # Of orders that send the same, the one whose heavier flows have nearer neighbours.
        strides = [
            layouts[flow.layout].stride(flow.dims[0])
            for flow in sorted(flows, key=lambda flow: -flow.volume)
            if flow.name in sent and flow.dims[0] in layouts[flow.layout].dims
        ]
        found.append(((round(total, 6), order != asked, strides), Ranked(order, total, sent)))
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]


def _orders(asked: str, layouts: Layouts | None) -> Iterable[str]:
    """``asked``, then every order of the dims that are larger than 1 in its ``layouts``."""
    yield asked
    dims = dict.fromkeys(asked.lower().split("-"))
    if layouts is not None:
        used = {dim for layout in layouts.values() for dim in layout.trimmed.dims}
        dims = {dim: None for dim in dims if dim in used}
    yield from map("-".join, permutations(dims))
