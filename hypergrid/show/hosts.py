"""Which ranks of a layout each host has: the boxes that every drawing consists of."""

from __future__ import annotations

from hypergrid.layout import RankLayout
from hypergrid.topology import Hosts, Topology


def ranks_by_host(layout: RankLayout, hosts: Hosts) -> dict[str, list[int]]:
    """The ranks of ``layout`` on each host that has any, ascending; hosts by their first rank."""
    topology, boxes = Topology(layout, hosts), dict[str, list[int]]()
    for rank in layout.ranks:
        boxes.setdefault(topology.host(rank), []).append(rank)
    return boxes
