"""The hosts of ranks, and which groups of a layout stay inside one host. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from hypergrid.layout import Dims, LayoutError, RankLayout
from hypergrid.messages import shown

Hosts: TypeAlias = int | Sequence[int] | Sequence[str] | Mapping[str, int]


@dataclass(frozen=True)
class Topology:
    """The hosts under a layout. *Local*: arithmetic, no communication.

    Parameters
    ----------
    layout : RankLayout
        The layout of the ranks.
    hosts : int, sequence of int, mapping of str to int, or sequence of str
        Ranks per host, equal for all; the number of ranks of each host; the same by the host's
        name; or the name of each rank's host. The first host has rank 0, also if the layout has
        an offset. LayoutError if they are invalid or have too few ranks.

    Examples
    --------
    >>> topology = Topology(RankLayout(("tp", "dp"), (4, 4)), hosts=8)
    >>> topology.inside("tp"), topology.inside("dp")
    (True, False)
    >>> topology.hosts_of("dp", rank=5)
    ('host0', 'host1')
    """

    layout: RankLayout
    hosts: Hosts
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    # By global rank the number of its host, which is its place in names: an int array.
    numbers: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names, numbers = _numbered(self.hosts, self.layout.stop)
        if len(numbers) < self.layout.stop:
            raise LayoutError(
                f"hosts={shown(self.hosts)} have {len(numbers)} ranks, and {self.layout} reaches "
                f"to rank {self.layout.stop - 1}. Name the host of every rank of the world."
            )
        numbers.setflags(write=False)
        # The dataclass is frozen.
        self.__dict__.update(names=names, numbers=numbers)

    def host(self, rank: int) -> str:
        """The name of the host of ``rank``."""
        if rank not in self.layout:
            raise LayoutError(f"rank {shown(rank)} is outside {self.layout}.")
        return str(self.names[self.numbers[rank]])

    def hosts_of(self, dims: Dims, rank: int) -> tuple[str, ...]:
        """The hosts that the group of ``rank`` over ``dims`` touches."""
        member_ranks = self.layout.group(rank, dims)
        return tuple(dict.fromkeys(map(self.host, member_ranks)))

    def inside(self, dims: Dims) -> bool:
        """Whether each group over ``dims`` stays inside one host."""
        return not self.crossing(dims)

    def crossing(self, dims: Dims) -> list[list[int]]:
        """The groups over ``dims`` whose ranks are on several hosts."""
        groups = self.layout.groups(dims)
        # The groups [[0, 8], [1, 2]] may be on the hosts [[0, 1], [0, 0]]: the first one crosses.
        hosts = self.numbers[groups]
        first_hosts = hosts[:, :1]
        crosses = (hosts != first_hosts).any(axis=1)
        crossing_groups: list[list[int]] = groups[crosses].tolist()
        return crossing_groups


def _numbered(hosts: Hosts, ranks: int) -> tuple[tuple[str, ...], np.ndarray]:
    """The hosts' names, and the number of the host of each rank."""
    if _is_count(hosts):
        host_count = -(-ranks // hosts)  # the last one may have fewer ranks
        names = [f"host{number}" for number in range(host_count)]
        return tuple(names), np.arange(ranks) // hosts
    sizes: dict[str, Any] = {}  # by host
    if isinstance(hosts, Mapping):
        for name, size in hosts.items():
            sizes[str(name)] = size
    # A text is a sequence of texts, too.
    elif isinstance(hosts, Sequence) and not isinstance(hosts, str):
        if hosts and all(isinstance(name, str) for name in hosts):
            return _numbered_names(hosts)
        for number, ranks_of_host in enumerate(hosts):
            sizes[f"host{number}"] = ranks_of_host
    if not sizes or not all(map(_is_count, sizes.values())):
        raise LayoutError(
            f"invalid hosts={shown(hosts)}; allowed: ranks per host (8), the ranks of each host "
            f"([8, 4]), the same by name ({{'a': 8, 'b': 4}}), or each rank's host (['a', 'a'])."
        )
    # The sizes 2 and 3 make the numbers 0, 0, 1, 1, 1.
    host_numbers = np.arange(len(sizes))
    return tuple(sizes), np.repeat(host_numbers, list(sizes.values()))


def _numbered_names(host_of_rank: Sequence[Any]) -> tuple[tuple[str, ...], np.ndarray]:
    # The hosts b, a, b have the numbers 0, 1, 0.
    number_of_host: dict[str, int] = {}
    numbers = []
    for name in host_of_rank:
        number = number_of_host.setdefault(str(name), len(number_of_host))
        numbers.append(number)
    return tuple(number_of_host), np.array(numbers)


def _is_count(value: object) -> TypeGuard[int]:
    # True is an Integral, too.
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0
