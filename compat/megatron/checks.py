"""The checks of Megatron's layouts: which placements are expensive, and why."""

from __future__ import annotations

import numpy as np

from compat.megatron.traffic import flows_of
from hypergrid.analysis.checks import Rule, Severity
from hypergrid.analysis.summary import hosts_touched
from hypergrid.analysis.traffic import Layouts
from hypergrid.topology import Topology


def rules(user_buffers: bool = False) -> list[Rule]:
    """All checks; ``user_buffers``: whether Transformer Engine's are asked for."""
    takes = "Transformer Engine's user buffers (--tp-comm-overlap) take consecutive ranks for the "
    takes += "tensor-parallel groups, whatever the groups are"
    return [
        *_RULES,
        Rule(
            "user-buffers",
            "error" if user_buffers else "note",
            takes + (", and would exchange with the wrong ones." if user_buffers else "."),
            _tp_not_innermost,
            "Put tp first in the order, or leave out --tp-comm-overlap.",
        ),
    ]


def _across(name: str, severity: Severity, cost: str, place: str = "host") -> Rule:
    def finds(layouts: Layouts, topology: Topology) -> str | None:
        flow = next((flow for flow in flows_of(layouts) if flow.name == name), None)
        if flow is None:
            return None
        groups = flow.groups(layouts)
        touched = hosts_touched(groups, topology)
        crossing, most = int((touched > 1).sum()), int(touched.max())
        if not crossing:
            return None
        dense = hosts_touched(layouts["decoder"].groups("tp"), topology)
        if name == "expert tp" and (dense > 1).any():
            return None  # the finding about tp covers it
        many = "each of the" if crossing == len(touched) else f"{crossing} of the"
        verb = "has" if crossing == len(touched) or crossing == 1 else "have"
        return (
            f"{name} leaves the {place}: {many} {len(touched)} groups of "
            f"{groups.shape[1]} ranks {verb} ranks on up to {most} {place}s."
        )

    return Rule(
        f"{name.replace(' ', '-')}-across-{place}s",
        severity,
        cost,
        finds,
        f"No order avoids it without a more expensive fault. A smaller {name} would fit into "
        f"a {place}.",
        place == "rack",
    )


def _cp_before_tp(layouts: Layouts, _: Topology) -> str | None:
    layout = layouts["decoder"]
    if not {"cp", "tp"} <= {*layout.trimmed.dims} or layout.stride("cp") > layout.stride("tp"):
        return None
    return f"cp comes before tp: neighbours on tp are {layout.stride('tp')} ranks apart."


def _pp_innermost(layouts: Layouts, _: Topology) -> str | None:
    dims = layouts["decoder"].trimmed.dims
    if len(dims) < 2 or dims[0] != "pp":
        return None
    return "pp is innermost: the stages of a pipeline are neighbouring ranks."


def _tp_not_innermost(layouts: Layouts, _: Topology) -> str | None:
    layout = layouts["decoder"]
    if "tp" not in layout.trimmed.dims or layout.stride("tp") == 1:
        return None
    return f"tp is not innermost: neighbours on tp are {layout.stride('tp')} ranks apart."


def _dp_of_one(layouts: Layouts, _: Topology) -> str | None:
    layout = layouts["decoder"]
    if layout.size == 1 or "dp" in layout.trimmed.dims:
        return None
    return "dp is 1: there are no replicas of the model."


def _uneven(layouts: Layouts, topology: Topology) -> str | None:
    numbers = topology.numbers[layouts["decoder"].ranks.start :]
    counts = np.unique(numbers, return_counts=True)[1]
    if counts.min() == counts.max():
        return None
    return f"hosts hold {counts.min()} to {counts.max()} ranks of the job."


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
    Rule(
        "cp-before-tp",
        "warning",
        "The ring of context parallelism gets the nearest ranks, and tensor parallelism, which "
        "sends several times as much, farther ones.",
        _cp_before_tp,
        "Put tp before cp in the order.",
    ),
    Rule(
        "pp-innermost",
        "warning",
        "Pipeline stages send the least, one tensor a micro-batch, and hold the nearest ranks, "
        "which have the fastest links.",
        _pp_innermost,
        "Put pp last in the order.",
    ),
    Rule(
        "dp-1",
        "note",
        "A distributed optimizer has nothing to shard over dp.",
        _dp_of_one,
        "Add ranks, or make the model-parallel sizes smaller, if memory allows.",
    ),
    Rule(
        "uneven-hosts",
        "warning",
        "Groups that would fit into a host are cut by a border, differently on each host.",
        _uneven,
        "Use whole hosts.",
    ),
)
