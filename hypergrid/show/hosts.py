"""Where each rank of a layout is drawn: in which host's box, and in which group's colour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hypergrid.layout import Dims, RankLayout
from hypergrid.topology import Hosts, Topology


def ranks_by_host(layout: RankLayout, hosts: Hosts) -> dict[str, list[int]]:
    """The ranks of ``layout`` on each host that has any, ascending; hosts by their first rank."""
    topology = Topology(layout, hosts)
    ranks_of: dict[str, list[int]] = {}
    for rank in layout.ranks:
        ranks_of.setdefault(topology.host(rank), []).append(rank)
    return ranks_of


@dataclass(frozen=True)
class Boundary:
    """The border that is expensive to cross: of an NVLink domain if those are known, or a host."""

    singular: str
    plural: str
    topology: Topology  # its hosts are the NVLink domains


def boundary_of(layout: RankLayout, hosts: Hosts, within: Mapping[str, str]) -> Boundary:
    """The boundary between the ranks; ``within`` has for each host's name its NVLink domain."""
    topology = Topology(layout, hosts)
    if not within:
        return Boundary("a host", "hosts", topology)
    domain_of_rank = [within[topology.names[number]] for number in topology.numbers]
    return Boundary("an NVLink domain", "NVLink domains", Topology(layout, domain_of_rank))


def group_numbers(layout: RankLayout, by: Dims) -> list[int]:
    """By rank, the number of its group over ``by`` in Megatron's order; -1 before the layout."""
    groups = layout.groups(by)
    numbers = np.full(layout.stop, -1)
    numbers[groups] = np.arange(len(groups))[:, np.newaxis]
    number_of_rank: list[int] = numbers.tolist()
    return number_of_rank
