"""The hosts of a job's ranks, as the ranks say them: for a report of how ranks lie on hosts."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from hypergrid.groups.store import get_all, shared_store
from hypergrid.layout import LayoutError
from hypergrid.network import Network
from hypergrid.network_text import from_addresses


def tell_host() -> None:
    """Say in the store where this rank is. *Local*; the ranks' agreement makes it known to all."""
    store = shared_store()
    if store is not None:
        address = [os.environ.get(f"SLURM_TOPOLOGY_ADDR{end}", "") for end in ("", "_PATTERN")]
        said = [socket.gethostname(), " ".join(address).strip()]
        store.set(_place(dist.get_rank()), json.dumps(said))


def told_hosts(ranks: Sequence[int]) -> tuple[list[str], Network | None] | None:
    """The host of each of ``ranks``, and their network where SLURM knows it. *Local*.

    None if not all ranks have said it. Hosts of the network come in the order of their first rank.
    """
    store = shared_store()
    places = [_place(rank) for rank in ranks]
    if store is None or not store.check(places):
        return None
    said = [json.loads(text) for text in get_all(store, places)]
    hosts = [str(host) for host, _ in said]
    addresses = dict(said)
    if not all(addresses.values()):
        return hosts, None
    many = Counter(hosts)
    try:
        units = from_addresses(addresses.values(), 1).units
        return hosts, Network(tuple(many), tuple(many.values()), units)
    except LayoutError:  # a report must not end the job
        return hosts, None


def _place(rank: int) -> str:
    return f"hypergrid/machine/{rank}"
