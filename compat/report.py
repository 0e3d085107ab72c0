"""Output of ``--report``: the groups of one rank, a line each, and how ranks lie on hosts."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby

import torch.distributed as dist

from compat.megatron.request import in_words
from compat.planned.layouts import most_hosts
from compat.state import ParallelState
from hypergrid import of_torch
from hypergrid.agreement.store import get_all, shared_store
from hypergrid.groups.pool import GroupPool
from hypergrid.layout import RankLayout
from hypergrid.messages import few, one_line
from hypergrid.plan import GroupPlan
from hypergrid.summary import dims_in_words, long_dims
from hypergrid.topology import Topology


def report(state: ParallelState) -> str:
    """How groups were made, and one line for each of this rank's: name, dims, ranks, sharing."""
    planned_rows, pool = state.planned, state.pool
    if planned_rows is None or pool is None:
        return "hypergrid: no groups on this rank"
    request = planned_rows.request
    made, live = pool.agreement, [pooled for pooled in pool.groups if pooled.shares is None]
    chosen = {"order": request.order, **asdict(request.policy)}
    lines = [
        f"rank {dist.get_rank()} of {request.decoder.trimmed}; "
        f"expert grid {request.expert.trimmed}"
        + (f"; encoder {request.encoder.trimmed}" if request.encoder else ""),
        f"{len(pool.groups)} groups on {len(live)} communicators, created by {made.way}"
        + (f" ({made.why})" if made.why else "")
        + _connected(pool),
        ", ".join(f"{name}={value} ({request.sources[name]})" for name, value in chosen.items()),
    ]
    if request.helpers:
        lines.append(f"outside code has replaced {in_words(request.helpers)}")
    lines = [
        f"hypergrid: {line}"
        for line in (*lines, *of_torch.lacking(), *_on_hosts(planned_rows.plan))
    ]
    rows = {planned.plan_row.label: planned for planned in planned_rows.rows}
    for pooled in pool.groups:
        planned = rows.get(pooled.label)
        dims, backend = "", "default"
        if planned is not None:
            dims = dims_in_words(
                long_dims(planned_rows.plan, planned.plan_row), planned.table_row.pick
            )
            dims = dims if planned.chosen is None else "chosen"
            backend = planned.plan_row.backend or backend
        lines.append(
            f"  {pooled.label:<56} {dims:<17} {backend:<8} {len(pooled.ranks):>5} ranks: "
            f"{few(pooled.ranks)}" + (f"  = {pooled.shares}" if pooled.shares else "")
        )
    return "\n".join(lines)


def tell_host() -> None:
    """Say in the store on which host this rank is. *Local*; before the ranks agree on groups."""
    store = shared_store()
    if store is not None:
        store.set(_host_key(dist.get_rank()), socket.gethostname())


def _host_key(rank: int) -> str:
    return f"hypergrid/machine/{rank}"


def _on_hosts(plan: GroupPlan) -> Iterator[str]:
    """A sentence if ranks are interleaved over hosts, and all ranks have reported their hosts."""
    ranks = range(plan.window.stop)
    keys = [_host_key(rank) for rank in ranks]
    store = shared_store()
    if store is None or not store.check(keys):
        return
    hosts = [one_line(value.decode()) for value in get_all(store, keys)]
    runs_of_host = Counter(host for host, _ in groupby(hosts))
    host = next((host for host, runs in runs_of_host.items() if runs > 1), None)
    if host is None:
        return
    ranks_of_host = [rank for rank in ranks if hosts[rank] == host]
    sentence = f"ranks are interleaved over hosts: {host} has ranks {few(ranks_of_host)}"
    world = RankLayout(("rank",), (len(hosts),))
    consecutive = most_hosts(plan.layouts, Topology(world, dict(Counter(hosts))))
    for kind, number in most_hosts(plan.layouts, Topology(world, hosts)).items():
        if number > consecutive[kind]:
            sentence += (
                f"; {kind} groups touch up to {number} hosts, and {consecutive[kind]} with "
                f"consecutive ranks"
            )
    yield (
        f"{sentence}. Start with srun --distribution=block, or a host file that lists each host "
        f"once"
    )


def _connected(pool: GroupPool) -> str:
    connect = pool.policy.connect
    if connect == "torch":
        return ""
    if connect == "eager":
        return ", each connected at creation"
    if pool.agreement.lazy:
        return ", connected on first use"
    return ", connected at once: not every rank's torch can connect on first use"
