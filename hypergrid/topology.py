"""The hosts of ranks, and which groups of a layout stay inside one host. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from hypergrid.layout import Dims, LayoutError, RankLayout
from hypergrid.messages import shown

Hosts: TypeAlias = int | Sequence[str]


@dataclass(frozen=True)
class Topology:
    """The hosts under a layout. *Local*: arithmetic, no communication.

    Parameters
    ----------
    layout : RankLayout
        The layout of the ranks.
    hosts : int, or sequence of str
        Ranks per host, equal for all; or the name of each rank's host. The first host has rank 0,
        also if the layout has an offset. LayoutError if they are invalid or have too few ranks.

    Examples
    --------
    >>> topology = Topology(RankLayout(("tp", "dp"), (4, 4)), hosts=8)
    >>> topology.inside("tp"), topology.inside("dp")
    (True, False)
    >>> topology.host(9)
    'host1'
    """

    layout: RankLayout
    hosts: Hosts
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    # By global rank the number of its host, which is its place in names: an int array.
    numbers: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Hosts count from rank 0 on, also for a layout that begins later.
        needed = self.layout.stop
        names, numbers = _numbered(self.hosts, needed)
        count = len(numbers)
        if count < needed:
            raise LayoutError(
                f"hosts={shown(self.hosts)} have {count} ranks, and {self.layout} reaches to rank "
                f"{needed - 1}. Name the host of every rank of the world."
            )
        # A caller that has the array must not move a rank to another host.
        numbers.setflags(write=False)
        # The dataclass is frozen.
        self.__dict__.update(names=names, numbers=numbers)

    def host(self, rank: int) -> str:
        """The name of the host of ``rank``."""
        if rank not in self.layout:
            raise LayoutError(f"rank {shown(rank)} is outside {self.layout}.")
        number: int = self.numbers[rank]
        return self.names[number]

    def inside(self, dims: Dims) -> bool:
        """Whether each group over ``dims`` stays inside one host."""
        return not self.crossing(dims)

    def crossing(self, dims: Dims) -> list[list[int]]:
        """The groups over ``dims`` whose ranks are on several hosts."""
        groups = self.layout.groups(dims)
        counts = self.touched(groups)
        crossing_groups: list[list[int]] = groups[counts > 1].tolist()
        return crossing_groups

    def touched(self, groups: np.ndarray) -> np.ndarray:
        """How many hosts each of ``groups``, of shape (groups, size), has ranks on."""
        # A group on the hosts 0, 3, 3, 5 changes the host twice: it touches three.
        hosts = self.numbers[groups]
        ascending = np.sort(hosts, axis=1)
        changes = np.diff(ascending, axis=1) != 0
        counts: np.ndarray = changes.sum(axis=1) + 1
        return counts


def _numbered(hosts: Any, ranks: int) -> tuple[tuple[str, ...], np.ndarray]:
    """The hosts' names, and the number of the host of each rank."""
    # True is an int, too.
    is_count = isinstance(hosts, int | np.integer) and not isinstance(hosts, bool)
    if is_count and hosts > 0:
        # Of 10 ranks with 4 on a host, the third host has the last two.
        numbers = np.arange(ranks) // int(hosts)
        host_count = numbers[-1] + 1
        names = [f"host{number}" for number in range(host_count)]
        return tuple(names), numbers
    # A text is a sequence of texts, too: its letters are no hosts.
    is_list = isinstance(hosts, Sequence) and not isinstance(hosts, str)
    if not is_list or not hosts or not all(isinstance(name, str) for name in hosts):
        raise LayoutError(
            f"invalid hosts={shown(hosts)}; allowed: ranks per host (8), or the name of each "
            f"rank's host (['a', 'a', 'b'])."
        )
    # The hosts b, a, b have the numbers 0, 1, 0.
    number_of_host: dict[str, int] = {}
    for name in hosts:
        number_of_host.setdefault(name, len(number_of_host))
    numbers = np.array([number_of_host[name] for name in hosts])
    return tuple(number_of_host), numbers
