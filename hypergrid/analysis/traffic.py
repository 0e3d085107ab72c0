"""A simple model of what a layout sends between hosts, and the orders ranked by it.

Each dim's groups send, per rank and training step, a volume in units of one activation tensor
(the micro-batch that a rank holds, of one layer, in 16 bits) per layer and micro-batch. A
transformer of hidden size 4096 with sequences of 8192, 8 layers a rank and 32 micro-batches gives:

======  ============  =======  ====================================================================
flow    pattern       volume   because
======  ============  =======  ====================================================================
tp      ring          8        forward and backward each gather and scatter the tensor twice
ep      all-to-all    8        each token goes to two experts and back, forward and backward
cp      ring          3        keys and values go round forward and backward, gradients backward
dp      ring          0.4      gradients and weights (12 x hidden^2) once a step, not a micro-batch
pp      neighbours    0.25     one tensor to the next stage and one back, for 8 layers
======  ============  =======  ====================================================================

A ring moves at the pace of its slowest link: where a group touches several hosts, all that each of
its members sends counts. In an all-to-all a rank sends 1/n of its volume to each of n members, and
what goes to other hosts counts; of neighbours, each pair of consecutive stages on different hosts.
Links inside a host cost nothing and those between hosts the same; congestion and overlap are left
out. What a model of other numbers sends, ``volumes`` says; only their ratios matter to the ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import numpy as np

from hypergrid.analysis.summary import hosts_touched
from hypergrid.layout import LayoutError, RankLayout
from hypergrid.topology import Topology

Layouts = Mapping[str, RankLayout]


@dataclass(frozen=True)
class Flow:
    """What the groups over some dims send to each other in a step."""

    name: str
    layout: Literal["decoder", "expert"]
    dims: tuple[str, ...]
    pattern: Literal["ring", "all-to-all", "neighbours"]
    volume: str  # whose it is

    def groups(self, layouts: Layouts) -> np.ndarray:
        """Its groups, of shape (groups, size)."""
        layout = layouts[self.layout]
        return layout.groups([dim for dim in self.dims if dim in layout.dims])


FLOWS = (
    Flow("tp", "decoder", ("tp",), "ring", "tp"),
    Flow("expert tp", "expert", ("tp",), "ring", "tp"),
    Flow("ep", "expert", ("ep",), "all-to-all", "ep"),
    Flow("cp", "decoder", ("cp",), "ring", "cp"),
    Flow("dp", "decoder", ("dp", "cp"), "ring", "dp"),  # gradients are summed over cp too
    Flow("expert dp", "expert", ("dp",), "ring", "dp"),
    Flow("pp", "decoder", ("pp",), "neighbours", "pp"),
)
VOLUMES: Mapping[str, float] = {"tp": 8, "ep": 8, "cp": 3, "dp": 0.4, "pp": 0.25}


@dataclass(frozen=True)
class Ranked:
    """One order and what waits for links between hosts in a step, in all and by flow."""

    order: str
    total: float
    flows: Mapping[str, float]


def crossing(
    layouts: Layouts, topology: Topology, volumes: Mapping[str, float] = VOLUMES
) -> dict[str, float]:
    """What each flow sends at the pace of links between hosts in a step, over the whole job."""
    return {
        flow.name: volumes[flow.volume] * _between_hosts(flow.groups(layouts), topology, flow)
        for flow in flows_of(layouts)
    }


def flows_of(layouts: Layouts) -> list[Flow]:
    """The flows that there are: groups of several ranks, and of experts only where there are."""
    with_experts = has_experts(layouts)
    return [
        flow
        for flow in FLOWS
        if (flow.layout == "decoder" or with_experts) and flow.groups(layouts).shape[1] > 1
    ]


def has_experts(layouts: Layouts) -> bool:
    """Whether expert layers are laid out otherwise than dense ones."""
    if "expert" not in layouts:
        return False
    dense, expert = layouts["decoder"], layouts["expert"]
    return expert.dim_size("ep") > 1 or expert.dim_size("tp") != dense.dim_size("tp")


def _between_hosts(groups: np.ndarray, topology: Topology, flow: Flow) -> float:
    """How many ranks' volumes go at the pace of links between hosts."""
    hosts, size = topology.numbers[groups], groups.shape[1]
    if flow.pattern == "ring":
        return float((hosts_touched(groups, topology) > 1).sum() * size)
    if flow.pattern == "neighbours":
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
    topology_of: Callable[[RankLayout], Topology],
    volumes: Mapping[str, float] = VOLUMES,
) -> list[Ranked]:
    """All orders that differ, the one that sends least between hosts first.

    Parameters
    ----------
    asked : str
        The order that the job has; of equally good orders it comes first.
    layouts_of : function
        The layouts under an order, or None where that order is not allowed.
    topology_of : function
        The hosts under a layout.
    volumes : mapping of str to float
        Per rank and step; see the head of this file.
    """
    unknown = set(volumes) ^ set(VOLUMES)
    if unknown:
        raise LayoutError(
            f"volumes are for {', '.join(VOLUMES)}; not {', '.join(sorted(unknown))}."
        )
    seen: set[object] = set()
    found: list[Ranked] = []
    strides: dict[str, list[int]] = {}
    heavy_first = sorted(FLOWS, key=lambda flow: -volumes[flow.volume])
    for order in orders(asked, layouts_of):
        layouts = layouts_of(order)
        if layouts is None:
            continue
        key = tuple(_long(layout) for _, layout in sorted(layouts.items()))
        if key not in seen:
            seen.add(key)
            flows = crossing(layouts, topology_of(layouts["decoder"]), volumes)
            found.append(Ranked(order, sum(flows.values()), flows))
            strides[order] = _strides(layouts, heavy_first)
    return sorted(
        found,
        key=lambda each: (round(each.total, 6), each.order != asked, strides[each.order]),
    )


def orders(asked: str, layouts_of: Callable[[str], Layouts | None]) -> Iterable[str]:
    """``asked``, then every order of the dims that are larger than 1."""
    yield asked
    layouts = layouts_of(asked)
    tokens = asked.lower().split("-")
    long = [
        token
        for token in dict.fromkeys(tokens)
        if layouts is None
        or any(token in each.dims and each.dim_size(token) > 1 for each in layouts.values())
    ]
    yield from map("-".join, permutations(long))


def _strides(layouts: Layouts, flows: Iterable[Flow]) -> list[int]:
    """Of orders that send the same, the one whose heavier flows have nearer neighbours."""
    return [
        layouts[flow.layout].stride(flow.dims[0])
        for flow in flows
        if flow in flows_of(layouts) and flow.dims[0] in layouts[flow.layout].dims
    ]


def _long(layout: RankLayout) -> tuple[tuple[str, int], ...]:
    return tuple((d, s) for d, s in zip(layout.dims, layout.sizes, strict=True) if s > 1)
