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
        names, host = _placed(self.hosts, self.layout.stop)
        if len(host) < self.layout.stop:
            raise LayoutError(
                f"hosts={shown(self.hosts)} have {len(host)} ranks, and {self.layout} reaches to "
                f"rank {self.layout.stop - 1}. Name the host of every rank of the world."
            )
        host.setflags(write=False)
        self.__dict__.update(names=names, numbers=host)  # the dataclass is frozen

    def __str__(self) -> str:
        """One line per dim."""
        counts = {dim: len(self.crossing(dim)) for dim in self.layout.dims}
        return "\n".join(
            f"{dim}: " + (f"{count} groups cross hosts" if count else "inside a host")
            for dim, count in counts.items()
        )

    def host(self, rank: int) -> str:
        """The name of the host of ``rank``."""
        if rank not in self.layout:
            raise LayoutError(f"rank {shown(rank)} is outside {self.layout}.")
        return str(self.names[self.numbers[rank]])

    def hosts_of(self, dims: Dims, rank: int) -> tuple[str, ...]:
        """The hosts that the group of ``rank`` over ``dims`` touches."""
        return tuple(dict.fromkeys(map(self.host, self.layout.group(rank, dims))))

    def inside(self, dims: Dims, rank: int | None = None) -> bool:
        """Whether each group over ``dims``, or that of ``rank``, stays inside one host."""
        if rank is not None:
            return len(self.hosts_of(dims, rank)) == 1
        return not self._crosses(dims).any()

    def crossing(self, dims: Dims) -> list[list[int]]:
        """The groups over ``dims`` whose ranks are on several hosts."""
        groups: list[list[int]] = self.layout.groups(dims)[self._crosses(dims)].tolist()
        return groups

    def _crosses(self, dims: Dims) -> np.ndarray:
        hosts = self.numbers[self.layout.groups(dims)]
        crosses: np.ndarray = (hosts != hosts[:, :1]).any(axis=1)
        return crosses


def _placed(hosts: Hosts, ranks: int) -> tuple[tuple[str, ...], np.ndarray]:
    """The hosts' names, and the number of the host of each rank."""
    if _is_count(hosts):
        return tuple(f"host{i}" for i in range(-(-ranks // hosts))), np.arange(ranks) // hosts
    listed: Any = hosts if isinstance(hosts, Sequence) and not isinstance(hosts, str) else []
    if listed and all(isinstance(each, str) for each in listed):
        numbers = {name: number for number, name in enumerate(dict.fromkeys(listed))}
        return tuple(map(str, numbers)), np.array([numbers[name] for name in listed])
    sizes = hosts if isinstance(hosts, Mapping) else {f"host{i}": n for i, n in enumerate(listed)}
    if not sizes or not all(map(_is_count, sizes.values())):
        raise LayoutError(
            f"invalid hosts={shown(hosts)}; allowed: ranks per host (8), the ranks of each host "
            f"([8, 4]), the same by name ({{'a': 8, 'b': 4}}), or each rank's host (['a', 'a'])."
        )
    return tuple(map(str, sizes)), np.repeat(np.arange(len(sizes)), list(sizes.values()))


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0
