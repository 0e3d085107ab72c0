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

    one: str
    many: str
    place_of: Mapping[int, str]  # by rank the name of its domain, or of its host


def boundary_of(ranks_of: Mapping[str, list[int]], within: Mapping[str, str]) -> Boundary:
    """The boundary between these hosts; ``within`` has the NVLink domain of each."""
    place_of = {}
    for host, ranks in ranks_of.items():
        for rank in ranks:
            place_of[rank] = within.get(host, host)
    if within:
        return Boundary("an NVLink domain", "NVLink domains", place_of)
    return Boundary("a host", "hosts", place_of)


def group_numbers(layout: RankLayout, by: Dims) -> list[int]:
    """By rank, the number of its group over ``by`` in Megatron's order; -1 before the layout."""
    groups = layout.groups(by)
    numbers = np.full(layout.stop, -1)
    numbers[groups] = np.arange(len(groups))[:, np.newaxis]
    number_of_rank: list[int] = numbers.tolist()
    return number_of_rank
