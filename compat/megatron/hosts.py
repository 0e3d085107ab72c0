"""On which hosts ranks are, and a warning where groups of tp span hosts that could hold them."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from compat.megatron.request import Request
from hypergrid import logs
from hypergrid.agreement.store import shared_store
from hypergrid.layout import RankLayout
from hypergrid.messages import few, one_line
from hypergrid.topology import Topology

_log = logging.getLogger("hypergrid.hosts")


def tell_host(request: Request) -> None:
    """Say in the store on which host this rank is, for the warning below. *Local*."""
    # The ranks of a pretended world have no hosts, and perhaps no store.
    if request.pretended_world is not None:
        return
    store = shared_store()
    if store is not None and request.decoder.dim_size("tp") > 1:
        store.set(_host_key(dist.get_rank()), socket.gethostname())


def _host_key(rank: int) -> str:
    return f"hypergrid/machine/{rank}"


def warn_of_tp_across_hosts(request: Request) -> None:
    """Warn where other places of the ranks, or another order of dims, keep tp inside hosts.

    *Local*, on one rank, when all ranks have their groups: all have told their hosts by then, and
    the store answers for all of them in one message.
    """
    layout = request.decoder
    # Outside code may have decided the ranks, or pretend that they are there.
    is_pretended = request.decides_ranks or request.pretended_world is not None
    if layout.dim_size("tp") == 1 or is_pretended:
        return
    store: Any = shared_store()
    keys = [_host_key(rank) for rank in layout.ranks]
    if store is None or not store.has_extended_api():  # it would answer once for each rank
        return
    if store.check(keys):
        hosts = [one_line(value.decode()) for value in store.multi_get(keys)]
        sentence = tp_across_hosts(layout, request.order, hosts)
        if sentence:
            logs.warn(sentence, _log)  # raises nothing: the other ranks have their groups


def tp_across_hosts(layout: RankLayout, order: str, hosts: Sequence[str]) -> str:
    """In words: how many groups of tp span hosts, and how fewer would; empty if none can help.

    ``hosts`` has the host of each rank of ``layout``. Ranks 0 to 3 on hosts a, b, a, b with tp=2:
    the groups 0, 1 and 2, 3 span both hosts, and with a, a, b, b none does.
    """
    crossing = _crossing(layout, hosts)
    if not crossing:
        return ""
    tp_size = layout.size_of("tp")
    ranks_of_host = Counter(hosts)
    # Hosts that hold whole groups come first: of 2, 4 and 2 ranks the 4 would be cut for tp=4.
    host_order = sorted(ranks_of_host, key=lambda host: ranks_of_host[host] % tp_size != 0)
    host_by_host = [host for host in host_order for _ in range(ranks_of_host[host])]
    tp_first = _with_tp_first(layout)
    other_dims = [dim for dim in order.split("-") if dim != "tp"]
    new_places = (
        f"the ranks of each host next to each other, hosts in the order {few(host_order)} "
        f"(srun --distribution=block, or arbitrary with that order in SLURM_HOSTFILE; a host file "
        f"with one line for each host; with Ray, ranks given to the bundles of the placement group "
        f"sorted by node)"
    )
    new_order = (
        f"the order {'-'.join(['tp', *other_dims])} (HYPERGRID_ORDER, or the launcher's --order)"
    )
    # The first of equally good ways is the least change.
    ways = [
        (_crossing(layout, host_by_host), new_places),
        (_crossing(tp_first, hosts), new_order),
        (_crossing(tp_first, host_by_host), f"{new_places} and {new_order}"),
    ]
    remaining, way = min(ways, key=lambda pair: len(pair[0]))
    if len(remaining) >= len(crossing):
        return ""
    group = crossing[0]
    hosts_of_group = dict.fromkeys(hosts[rank - layout.offset] for rank in group)
    return (
        f"{len(crossing)} of {layout.size // tp_size} groups of tp span hosts (ranks {few(group)} "
        f"are on {few(list(hosts_of_group))}), though a host could hold such a group: every "
        f"layer waits for the network. {len(remaining) or 'None'} would with {way}."
    )


def _crossing(layout: RankLayout, hosts: Sequence[str]) -> list[list[int]]:
    """The groups of tp whose ranks are on several hosts."""
    hosts_of_world = [*[""] * layout.offset, *hosts]  # by rank; those below the window are not used
    return Topology(layout, hosts_of_world).crossing("tp")


def _with_tp_first(layout: RankLayout) -> RankLayout:
    dims = ("tp", *(dim for dim in layout.dims if dim != "tp"))
    sizes = tuple(layout.size_of(dim) for dim in dims)
    return RankLayout(dims, sizes, offset=layout.offset)
