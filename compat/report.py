"""Output of ``--report``: the groups of one rank, a line each, and how ranks lie on hosts."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch.distributed as dist

from compat.megatron.planning import Request
from compat.megatron.replaced import in_words
from compat.planned.traffic import flows_of
from compat.state import ParallelState
from hypergrid import of_torch
from hypergrid.agreement.store import get_all, shared_store
from hypergrid.groups.pool import GroupPool
from hypergrid.layout import LayoutError
from hypergrid.messages import few
from hypergrid.network.files import from_addresses, hostlist
from hypergrid.network.levels import Network
from hypergrid.network.placement import interleaved, place
from hypergrid.summary import dims_in_words, long_dims


def report(state: ParallelState) -> str:
    """How groups were made, and one line for each of this rank's: name, dims, ranks, sharing."""
    request, pool = state.request, state.pool
    if request is None or pool is None:
        return "hypergrid: no groups on this rank"
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
    lines = [f"hypergrid: {line}" for line in (*lines, *of_torch.lacking(), *_on_hosts(request))]
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
            f"{few(pooled.ranks)}" + (f"  = {pooled.shares}" if pooled.shares else "")
        )
    return "\n".join(lines)


def tell_host() -> None:
    """Say in the store on which host this rank is. *Local*; before the ranks agree on groups."""
    store = shared_store()
    if store is not None:
        address = [os.environ.get(f"SLURM_TOPOLOGY_ADDR{end}", "") for end in ("", "_PATTERN")]
        said = [socket.gethostname(), " ".join(address).strip()]
        store.set(_host_key(dist.get_rank()), json.dumps(said))


def _hosts_of_ranks(ranks: Sequence[int]) -> tuple[list[str], Network | None] | None:
    """The host of each rank, and the network where SLURM knows it; None if a rank did not say it.

    Hosts of the network come in the order of their first rank.
    """
    store, keys = shared_store(), [_host_key(rank) for rank in ranks]
    if store is None or not store.check(keys):
        return None
    said = [json.loads(text) for text in get_all(store, keys)]
    hosts, addresses = [str(host) for host, _ in said], dict(said)
    if not all(addresses.values()):
        return hosts, None
    many = Counter(hosts)
    try:
        units = from_addresses(addresses.values(), 1).units
        return hosts, Network(tuple(many), tuple(many.values()), units)
    except LayoutError:  # a report must not end the job
        return hosts, None


def _host_key(rank: int) -> str:
    return f"hypergrid/machine/{rank}"


def _on_hosts(request: Request) -> Iterator[str]:
    """The cost of how the ranks lie on hosts, in words, if the ranks have reported their hosts."""
    said = _hosts_of_ranks(range(request.plan.window.stop))
    if said is None:
        return
    hosts, network = said
    flows = flows_of(request.layouts)
    apart = interleaved(request.layouts, hosts, flows)
    if apart is not None:
        yield apart
    elif network is not None:
        found = place(request.layouts, network, flows)
        if found.cost < found.given:
            names = hostlist(network.hosts[i] for i in found.order)
            yield (
                f"another order of the hosts costs {1 - found.cost / found.given:.0%} less: {names}"
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
