"""Judgement of a layout on its hosts: what is dear about it, in kind, and which order avoids it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hypergrid.analysis.summary import hosts_touched
from hypergrid.analysis.traffic import Layouts, Ranked, flows_of
from hypergrid.layout import RankLayout
from hypergrid.topology import Topology

Severity = Literal["error", "warning", "note"]
TopologyOf = Callable[[RankLayout], Topology]


@dataclass(frozen=True)
class Finding:
    """One thing to know about a layout.

    Parameters
    ----------
    rule : str
        Its short name, for scripts.
    severity : {"error", "warning", "note"}
        "error": it will not run as asked, or runs many times slower; "warning": it costs; "note":
        it may be meant so.
    what, cost, remedy : str
        What is so, what that costs in kind, and what to do; sentences.
    order : str, optional
        The order that avoids it, where one does.
    """

    rule: str
    severity: Severity
    what: str
    cost: str
    remedy: str
    order: str | None = None


@dataclass(frozen=True)
class _Rule:
    name: str
    severity: Severity
    cost: str
    # What is so, in words, or None; asked again of other orders to find one that avoids it.
    finds: Callable[[Layouts, Topology], str | None]
    otherwise: str  # what to do where no order helps
    of_racks: bool = False


def findings(
    layouts: Layouts,
    topology_of: TopologyOf,
    better: Sequence[tuple[Ranked, Layouts]] = (),
    *,
    racks_of: TopologyOf | None = None,
    user_buffers: bool = False,
) -> list[Finding]:
    """What there is to say about a layout, the gravest first.

    Parameters
    ----------
    layouts : mapping of str to RankLayout
        "decoder", for dense layers, and "expert".
    topology_of, racks_of : function
        The hosts, and the racks if they are known, under a layout.
    better : sequence of (Ranked, layouts)
        Orders that send no more between hosts, the best first: a remedy is looked for among them.
    user_buffers : bool
        Whether Transformer Engine's user buffers are asked for.
    """
    found = []
    for rule in _rules(user_buffers):
        place = racks_of if rule.of_racks else topology_of
        if place is None:
            continue
        what = rule.finds(layouts, place(layouts["decoder"]))
        if what is not None:
            order = next(
                (
                    each.order
                    for each, others in better
                    if rule.finds(others, place(others["decoder"])) is None
                ),
                None,
            )
            remedy = rule.otherwise if order is None else f"order={order} avoids it."
            found.append(Finding(rule.name, rule.severity, what, rule.cost, remedy, order))
    gravity = ("error", "warning", "note")
    return sorted(found, key=lambda finding: gravity.index(finding.severity))


def _rules(user_buffers: bool) -> Iterator[_Rule]:
    yield from _RULES
    takes = "Transformer Engine's user buffers (--tp-comm-overlap) take consecutive ranks for the "
    takes += "tensor-parallel groups, whatever the groups are"
    yield _Rule(
        "user-buffers",
        "error" if user_buffers else "note",
        takes + (", and would exchange with the wrong ones." if user_buffers else "."),
        _tp_not_innermost,
        "Put tp first in the order, or leave out --tp-comm-overlap.",
    )


def _across(name: str, severity: Severity, cost: str, place: str = "host") -> _Rule:
    def finds(layouts: Layouts, topology: Topology) -> str | None:
        flow = next((flow for flow in flows_of(layouts) if flow.name == name), None)
        if flow is None:
            return None
        groups = flow.groups(layouts)
        touched = hosts_touched(groups, topology)
        crossing, most = int((touched > 1).sum()), int(touched.max())
        if not crossing or (name == "expert tp" and not topology.inside("tp")):
            return None  # tp's own finding says it all
        many = "each of the" if crossing == len(touched) else f"{crossing} of the"
        verb = "has" if crossing == len(touched) or crossing == 1 else "have"
        return (
            f"{name} leaves the {place}: {many} {len(touched)} groups of "
            f"{groups.shape[1]} ranks {verb} ranks on up to {most} {place}s."
        )

    return _Rule(
        f"{name.replace(' ', '-')}-across-{place}s",
        severity,
        cost,
        finds,
        f"No order avoids it without a dearer fault. A smaller {name} would fit into a {place}.",
        place == "rack",
    )


def _cp_before_tp(layouts: Layouts, _: Topology) -> str | None:
    layout = layouts["decoder"]
    if min(_size(layout, "cp"), _size(layout, "tp")) < 2:
        return None
    if layout.stride("cp") > layout.stride("tp"):
        return None
    return f"cp comes before tp: neighbours on tp are {layout.stride('tp')} ranks apart."


def _pp_innermost(layouts: Layouts, _: Topology) -> str | None:
    layout = layouts["decoder"]
    if _size(layout, "pp") < 2 or layout.stride("pp") > 1 or _size(layout, "pp") == layout.size:
        return None
    return "pp is innermost: the stages of a pipeline are neighbouring ranks."


def _tp_not_innermost(layouts: Layouts, _: Topology) -> str | None:
    layout = layouts["decoder"]
    if _size(layout, "tp") < 2 or layout.stride("tp") == 1:
        return None
    return f"tp is not innermost: neighbours on tp are {layout.stride('tp')} ranks apart."


def _dp_of_one(layouts: Layouts, _: Topology) -> str | None:
    layout = layouts["decoder"]
    if layout.size == 1 or _size(layout, "dp") > 1:
        return None
    return "dp is 1: there are no replicas of the model."


def _uneven(layouts: Layouts, topology: Topology) -> str | None:
    numbers = topology.numbers[layouts["decoder"].ranks.start :]
    counts = np.unique(numbers, return_counts=True)[1]
    if counts.min() == counts.max():
        return None
    return f"hosts hold {counts.min()} to {counts.max()} ranks of the job."


def _size(layout: RankLayout, dim: str) -> int:
    return layout.dim_size(dim) if dim in layout.dims else 1


_RULES = (
    _across(
        "tp",
        "error",
        "Every layer waits for the network, forward and backward, several times.",
    ),
    _across(
        "expert tp",
        "error",
        "Every expert layer waits for the network, forward and backward, several times.",
    ),
    _across(
        "ep",
        "warning",
        "The tokens of every expert layer leave the host and come back, forward and backward.",
    ),
    _across(
        "ep",
        "warning",
        "The tokens of every expert layer pass the links between racks, which all jobs share.",
        "rack",
    ),
    _across(
        "cp",
        "warning",
        "Keys and values of every attention layer go round over the network.",
    ),
    _Rule(
        "cp-before-tp",
        "warning",
        "The ring of context parallelism gets the nearest ranks, and tensor parallelism, which "
        "sends several times as much, farther ones.",
        _cp_before_tp,
        "Put tp before cp in the order.",
    ),
    _Rule(
        "pp-innermost",
        "warning",
        "Pipeline stages send the least, one tensor a micro-batch, and hold the nearest ranks, "
        "which have the fastest links.",
        _pp_innermost,
        "Put pp last in the order.",
    ),
    _Rule(
        "dp-1",
        "note",
        "A distributed optimizer has nothing to shard over dp.",
        _dp_of_one,
        "Add ranks, or make the model-parallel sizes smaller, if memory allows.",
    ),
    _Rule(
        "uneven-hosts",
        "warning",
        "Groups that would fit into a host are cut by a border, differently on each host.",
        _uneven,
        "Use whole hosts.",
    ),
)
