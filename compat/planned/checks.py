"""The checks of Megatron's layouts: which placements are expensive, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from compat.planned.traffic import flows_of
from hypergrid.network.checks import Finding, Severity
from hypergrid.network.traffic import Layouts
from hypergrid.summary import hosts_touched
from hypergrid.topology import Topology

# Flow, the place that its groups should not leave, severity; and what it costs if they do.
_ACROSS: dict[tuple[str, str, Severity], str] = {
    ("tp", "host", "error"): (
        "Every layer waits for the network, forward and backward, several times."
    ),
    ("expert tp", "host", "error"): (
        "Every expert layer waits for the network, forward and backward, several times."
    ),
    ("ep", "host", "warning"): (
        "The tokens of every expert layer leave the host and come back, forward and backward."
    ),
    ("ep", "rack", "warning"): (
        "The tokens of every expert layer pass the links between racks, which all jobs share."
    ),
    ("cp", "host", "warning"): (
        "Keys and values of every attention layer go round over the network."
    ),
}


def faults(
    layouts: Layouts,
    hosts: Topology,
    racks: Topology | None = None,
    domains: Topology | None = None,
    user_buffers: bool = False,
) -> Iterator[Finding]:
    """Findings: what is expensive about ``layouts``.

    ``racks`` and NVLink ``domains`` of several hosts are for where they are known, ``user_buffers``
    whether Transformer Engine's are on.
    """
    # Inside an NVLink domain hosts are as near as the GPUs of one.
    near = ("host", hosts) if domains is None else ("NVLink domain", domains)
    yield from _across(layouts, {"host": near, "rack": ("rack", racks)})
    dense = layouts["decoder"]
    dims = dense.trimmed.dims
    apart = dense.stride("tp") if "tp" in dims else 1
    if {"cp", "tp"} <= {*dims} and dense.stride("cp") < apart:
        yield Finding(
            "cp-before-tp",
            "warning",
            f"cp comes before tp: neighbours on tp are {apart} ranks apart.",
            "The ring of context parallelism gets the nearest ranks, and tensor parallelism, which "
            "sends several times as much, farther ones.",
            "Put tp before cp in the order.",
        )
    if len(dims) > 1 and dims[0] == "pp":
        yield Finding(
            "pp-innermost",
            "warning",
            "pp is innermost: the stages of a pipeline are neighbouring ranks.",
            "Pipeline stages send the least, one tensor a micro-batch, and hold the nearest ranks, "
            "which have the fastest links.",
            "Put pp last in the order.",
        )
    if dense.size > 1 and "dp" not in dims:
        yield Finding(
            "dp-1",
            "note",
            "dp is 1: there are no replicas of the model.",
            "A distributed optimizer has nothing to shard over dp.",
            "Add ranks, or make the model-parallel sizes smaller, if memory allows.",
        )
    counts = np.unique(hosts.numbers[list(dense.ranks)], return_counts=True)[1]
    if counts.min() < counts.max():
        yield Finding(
            "uneven-hosts",
            "warning",
            f"hosts hold {counts.min()} to {counts.max()} ranks of the job.",
            "Groups that would fit into a host are cut by a border, differently on each host.",
            "Use whole hosts.",
        )
    if apart > 1:
        yield Finding(
            "user-buffers",
            "error" if user_buffers else "note",
            f"tp is not innermost: neighbours on tp are {apart} ranks apart.",
            "Transformer Engine's user buffers (--tp-comm-overlap) take consecutive ranks for the "
            "tensor-parallel groups, whatever the groups are"
            + (", and would exchange with the wrong ones." if user_buffers else "."),
            "Put tp first in the order, or leave out --tp-comm-overlap.",
        )


def host_order(given: float, cost: float) -> Iterator[Finding]:
    """Whether hosts come in an order that costs more than ``cost``, that of a better one."""
    if given > 1.01 * cost:
        yield Finding(
            "host-order",
            "warning",
            f"the hosts come in an order in which the traffic costs {given / cost:.2g} times what "
            f"it does in another one.",
            "Groups that would fit into an NVLink domain, a rack or a pod are cut by its border.",
            "`hypergrid place` with the same flags writes the better order.",
        )


def _across(
    layouts: Layouts, places: Mapping[str, tuple[str, Topology | None]]
) -> Iterator[Finding]:
    groups = {flow.name: flow.groups(layouts) for flow in flows_of(layouts)}
    for (name, place, severity), cost in _ACROSS.items():
        called, topology = places[place]
        if topology is None or name not in groups:
            continue
        touched = hosts_touched(groups[name], topology)
        many, crossing = len(touched), int((touched > 1).sum())
        if not crossing:
            continue
        if name == "tp":
            groups.pop("expert tp", None)  # the finding about tp covers it
        which = "each of the" if crossing == many else f"{crossing} of the"
        verb = "has" if crossing in (1, many) else "have"
        yield Finding(
            f"{name}-across-{called}s".replace(" ", "-").lower(),
            severity,
            f"{name} leaves the {called}: {which} {many} groups of {groups[name].shape[1]} ranks "
            f"{verb} ranks on up to {touched.max()} {called}s.",
            cost,
            f"No order avoids it without a more expensive fault. A smaller {name} would fit into "
            f"{'an' if called.startswith('N') else 'a'} {called}.",
        )
