"""The groups of one rank as text: one line per group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import torch.distributed as dist

from compat.megatron.planning import Request
from compat.megatron.releases import HAS
from compat.megatron.replaced import in_words
from compat.state import ParallelState
from hypergrid import policy
from hypergrid.analysis.summary import dims_in_words, long_dims
from hypergrid.groups import of_torch
from hypergrid.groups.pool import GroupPool
from hypergrid.layout import RankLayout


def report(state: ParallelState) -> str:
    """How groups were made, and one line for each of this rank's: name, dims, ranks, sharing."""
    request, pool = state.request, state.pool
    if request is None or pool is None:
        return "hypergrid: no groups on this rank"
    made, live = pool.agreement, [pooled for pooled in pool.groups if pooled.shares is None]
    lines = [
        f"hypergrid: rank {dist.get_rank()} of {_grid(request.decoder)}; "
        f"expert grid {_grid(request.expert)}"
        + (f"; encoder {_grid(request.encoder)}" if request.encoder else ""),
        f"hypergrid: {len(pool.groups)} groups on {len(live)} communicators, created by {made.way}"
        + (f" ({made.why})" if made.why else "")
        + _connected(pool),
    ]
    chosen = {"order": request.order, **asdict(request.policy)}
    lines.append(
        "hypergrid: "
        + ", ".join(f"{name}={value} ({request.sources[name]})" for name, value in chosen.items())
    )
    if request.helpers:
        lines.append(f"hypergrid: outside code has replaced {in_words(request.helpers)}")
    lines += map("hypergrid: {}".format, [*of_torch.lacking(), *_on_hosts(request)])
    rows = {p.group.label: p for p in request.planned}
    for pooled in pool.groups:
        planned = rows.get(pooled.label)
        dims, backend = "", "default"
        if planned is not None:
            dims = dims_in_words(long_dims(request.plan, planned.group), planned.row.pick)
            dims = dims if planned.chosen is None else "chosen"
            backend = planned.group.backend or backend
        lines.append(
            f"  {pooled.label:<56} {dims:<17} {backend:<8} {len(pooled.ranks):>5} ranks: "
            f"{_short(pooled.ranks)}"
            + (f"  = {pooled.shares}" if pooled.shares else "")
            + ("  connects on first use" if pool.waits(pooled) else "")
        )
    return "\n".join(lines)


def tell_host() -> None:
    """Say where this rank is, for the report of another. *Local*."""
    from hypergrid.groups import machines

    machines.tell_host()


def _on_hosts(request: Request) -> Iterator[str]:
    """What is expensive about how the ranks lie on hosts, where the ranks have said it."""
    from compat.megatron.traffic import flows_of  # here: every training script imports this file
    from hypergrid.analysis.placement import interleaved, place
    from hypergrid.groups.machines import told_hosts
    from hypergrid.network_text import hostlist

    ranks = range(request.plan.window.stop)
    told = told_hosts(ranks)
    if told is None:
        return
    hosts, network = told
    layouts = request.layouts
    flows = flows_of(layouts)
    apart = interleaved(layouts, hosts, flows)
    if apart is not None:
        yield apart
    elif network is not None:
        found = place(layouts, network, flows)
        if found.cost < found.given:
            names = hostlist(network.hosts[i] for i in found.order)
            yield (
                f"another order of the hosts costs {1 - found.cost / found.given:.0%} less: {names}"
            )


def _connected(pool: GroupPool) -> str:
    connect, most = pool.policy.connect, policy.LARGEST_MESH
    waiting = "" if connect == "lazy" else f"gloo groups of more than {most} ranks "
    if connect == "eager":
        return ", each connected at creation"
    if connect == "torch" or not any(pool.policy.waits(len(g.ranks)) for g in pool.groups):
        return ""
    if pool.agreement.lazy:
        return f", {waiting}connected on first use"
    return ", connected at once: not every rank's torch can connect on first use"


def _grid(layout: RankLayout) -> str:
    # A release without gtp_remat does not show it, unless it was set all the same.
    sizes = dict(zip(layout.dims, layout.sizes, strict=True))
    if not HAS["gtp_remat"] and sizes["gtp_remat"] == 1:
        del sizes["gtp_remat"]
    return repr(RankLayout(tuple(sizes), tuple(sizes.values())).on(layout.ranks))


def _short(ranks: tuple[int, ...], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (", ..." if len(ranks) > most else "")
