"""Where each rank of a layout is drawn: in which host's box, and in which group's colour."""

from __future__ import annotations

from collections.abc import Sequence

from hypergrid.layout import Dims, RankLayout
from hypergrid.topology import Topology


def ranks_by_host(layout: RankLayout, hosts: Topology) -> dict[str, list[int]]:
    """The ranks of ``layout`` on each host that has any, ascending; hosts by their first rank."""
    ranks_of: dict[str, list[int]] = {}
    for rank in layout.ranks:
        ranks_of.setdefault(hosts.host(rank), []).append(rank)
    return ranks_of


def domain_of(domains: Topology | None, ranks: Sequence[int]) -> str:
    """The NVLink domain of a host with these ranks; empty where domains are not known."""
    if domains is None:
        return ""
    return domains.host(ranks[0])


def group_numbers(layout: RankLayout, by: Dims) -> list[int]:
    """By rank, the number of its group over ``by`` in Megatron's order; -1 before the layout."""
    number_of_rank = [-1] * layout.stop
    groups = layout.groups(by).tolist()
    for number, ranks in enumerate(groups):
        for rank in ranks:
            number_of_rank[rank] = number
    return number_of_rank
