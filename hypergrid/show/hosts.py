"""Where each rank of a layout is drawn: in which host's box, and in which group's colour."""

from __future__ import annotations

import numpy as np

from hypergrid.layout import Dims, RankLayout
from hypergrid.topology import Topology


def ranks_by_host(layout: RankLayout, hosts: Topology) -> dict[str, list[int]]:
    """The ranks of ``layout`` on each host that has any, ascending; hosts by their first rank."""
    ranks_of: dict[str, list[int]] = {}
    for rank in layout.ranks:
        ranks_of.setdefault(hosts.host(rank), []).append(rank)
    return ranks_of


def group_numbers(layout: RankLayout, by: Dims) -> np.ndarray:
    """By rank, the number of its group over ``by`` in Megatron's order; -1 before the layout."""
    number_of_rank = np.full(layout.stop, -1)
    for number, ranks in enumerate(layout.groups(by)):
        number_of_rank[ranks] = number
    return number_of_rank
