"""The network under a job: its hosts in the order of their ranks, and the units that they are in.

A unit is an NVLink domain, a rack, a pod or whatever else the network has; the units of a level lie
inside those of the next. Two ranks communicate at the pace of the innermost level that they share:
``"host"``, one of the units' levels, or ``"world"``. No torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import shown
from hypergrid.topology import Topology

# GB/s in which one rank sends, in one direction; docs/placement.md names the sources.
NVLINK4, NVLINK5, NDR = 450.0, 900.0, 50.0
BETWEEN_PODS = NDR / 7  # links to the switches above the pods are shared by seven
MOST_HOSTS = 1 << 18
_MOST_RANKS = 1 << 22


@dataclass(frozen=True)
class Network:
    """Hosts and the units that they are in. *Local*: arithmetic, no communication.

    Parameters
    ----------
    hosts : sequence of str
        Names, in the order of their ranks: the first host has rank 0. Unique.
    ranks : int or sequence of int
        How many ranks each host has, or all of them.
    units : mapping of str to sequence of str
        By level the name of the unit of each host, such as ``{"nvlink": ["d0", "d0"]}``. Levels are
        sorted, the innermost first; each unit must lie inside one unit of the next level.
    bandwidth : mapping of str to float
        GB/s in which a rank sends, by level, ``"host"`` and ``"world"`` included; for others there
        are defaults, see ``speeds``.

    Raises
    ------
    LayoutError
        Invalid names, numbers or levels, or units that do not lie inside each other.

    Examples
    --------
    >>> network = Network(["a", "b", "c"], 4, {"nvlink": ["d0", "d0", "d1"]})
    >>> network.levels
    ('host', 'nvlink', 'world')
    >>> network.in_order([2, 0, 1]).hosts
    ('c', 'a', 'b')
    """

    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bandwidth: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hosts = tuple(self.hosts)
        ranks: Any = self.ranks
        ranks = (ranks,) * len(hosts) if isinstance(ranks, int) else tuple(ranks)
        units = {level: tuple(names) for level, names in self.units.items()}
        if not hosts or not all(isinstance(name, str) and name for name in hosts):
            raise LayoutError(f"hosts must be names, at least one, got {shown(self.hosts)}.")
        odd = next((n for n in hosts if re.search(r"[\s\x00-\x1f\x7f-\x9f]|.{256}", n)), None)
        if odd is not None:
            raise LayoutError(
                f"the name of the host {shown(odd)} has a blank or a control character, or more "
                f"than 255 characters."
            )
        if len(set(hosts)) < len(hosts):
            twice = Counter(hosts).most_common(1)[0][0]
            raise LayoutError(f"the host {shown(twice)} is listed twice. List each host once.")
        if len(ranks) != len(hosts) or not all(type(n) is int and n > 0 for n in ranks):
            raise LayoutError(
                f"{len(hosts)} hosts need as many numbers of ranks, each at least 1, got "
                f"{shown(ranks)}."
            )
        for level, names in units.items():
            if level in ("host", "world") or not level:
                raise LayoutError(f"a level of units cannot be called {shown(level)}.")
            if len(names) != len(hosts):
                raise LayoutError(
                    f"the level {shown(level)} has {len(names)} names for {len(hosts)} hosts. "
                    f"Name the unit of every host."
                )
        # Where two levels have the same units, NVLink is what their ranks use.
        inner_first = sorted(units, key=lambda n: (-len(set(units[n])), n != "nvlink"))
        units = {level: units[level] for level in inner_first}
        for inner, outer in pairwise(inner_first):
            _refuse_crossing(inner, outer, units)
        for level, speed in self.bandwidth.items():
            known = ("host", *units, "world")
            if level not in known:
                raise LayoutError(
                    f"the bandwidth of {shown(level)} was given, and the network has the levels "
                    f"{', '.join(known)}."
                )
            if isinstance(speed, bool) or not isinstance(speed, Real) or not 0 < speed < math.inf:
                raise LayoutError(f"the bandwidth of {level} must be GB/s above 0, got {speed!r}.")
        speeds = {level: float(speed) for level, speed in self.bandwidth.items()}
        self.__dict__.update(hosts=hosts, ranks=ranks, units=units, bandwidth=speeds)  # frozen

    @classmethod
    def regular(
        cls,
        ranks: int,
        per_host: int,
        *,
        nvlink_domain: int | None = None,
        hosts_per_rack: int | None = None,
        racks_per_pod: int | None = None,
        bandwidth: Mapping[str, float] | None = None,
    ) -> Network:
        """Hosts and units of equal size for that many ranks; ``nvlink_domain`` counts ranks."""
        hosts, sizes = -(-ranks // per_host), dict[str, int]()
        if nvlink_domain is not None:
            if nvlink_domain < 1 or nvlink_domain % per_host:
                raise LayoutError(
                    f"an NVLink domain of {nvlink_domain} GPUs does not hold whole hosts of "
                    f"{per_host}. Give a multiple of the GPUs of a host."
                )
            sizes["nvlink"] = nvlink_domain // per_host
        if racks_per_pod is not None and hosts_per_rack is None:
            raise LayoutError("racks per pod need the hosts per rack, which are not given.")
        if hosts_per_rack is not None:
            sizes["rack"] = hosts_per_rack
            if racks_per_pod is not None:
                sizes["pod"] = hosts_per_rack * racks_per_pod
        for level, size in sizes.items():
            if size < 1:
                raise LayoutError(f"a {level} must have at least 1 host, got {size}.")
        return cls(
            tuple(f"host{i}" for i in range(hosts)),
            (per_host,) * hosts,
            {n: tuple(str(i // size) for i in range(hosts)) for n, size in sizes.items()},
            bandwidth or {},
        )

    @property
    def levels(self) -> tuple[str, ...]:
        """The innermost first: ``"host"``, those of the units, ``"world"``."""
        return ("host", *self.units, "world")

    @property
    def speeds(self) -> dict[str, float]:
        """GB/s in which a rank sends, by level: those given, else the defaults.

        NVLink reaches as far as the innermost level that has it. Links above pods are shared.
        """
        far = len(set(self.units.get("nvlink", self.hosts))) < len(self.hosts)
        above = self.levels[self.levels.index("pod") + 1 :] if "pod" in self.units else ()
        usual = dict.fromkeys(above, BETWEEN_PODS)
        usual |= {"host": NVLINK5 if far else NVLINK4, "nvlink": NVLINK5}
        return {n: self.bandwidth.get(n, usual.get(n, NDR)) for n in self.levels}

    @property
    def prices(self) -> np.ndarray:
        """Seconds for a GB of a rank, by level."""
        return np.array([1 / speed for speed in self.speeds.values()])

    @property
    def is_irregular(self) -> bool:
        """Whether it is more than hosts of equal size."""
        return bool(self.units or self.bandwidth) or len(set(self.ranks)) > 1

    @property
    def within(self) -> dict[str, str]:
        """By host the units that it is in, the outermost first: ``"rack r0, nvlink d0"``."""
        outer_first = [*self.units.items()][::-1]
        return {
            host: ", ".join(f"{level} {names[i]}" for level, names in outer_first)
            for i, host in enumerate(self.hosts)
        }

    def numbers(self, ranks: int | None = None) -> np.ndarray:
        """Of each rank the number of its host and of its units: shape (levels but one, ranks)."""
        if sum(self.ranks) > _MOST_RANKS:
            raise LayoutError(f"the hosts have more than {_MOST_RANKS:,} ranks, too many to plan.")
        by_host = [range(len(self.hosts)), *map(_numbered, self.units.values())]
        ends = np.cumsum(self.ranks)
        if ranks is not None and ends[-1] < ranks:
            raise LayoutError(
                f"the network has {ends[-1]} ranks on {len(self.hosts)} hosts, and the job has "
                f"{ranks}. Add hosts, or make the job smaller."
            )
        starts = ends - self.ranks
        used: Any = np.clip((ends[-1] if ranks is None else ranks) - starts, 0, self.ranks)
        every: np.ndarray = np.repeat(np.array(by_host), used, axis=1)
        return every

    def topology(self, ranks: int, level: str = "host") -> Topology:
        """The hosts of that many ranks, or their units of another level."""
        self.numbers(ranks)  # refuses too few
        if level == "host":
            return Topology(RankLayout(("rank",), (ranks,)), self._used(ranks))
        of_rank = [
            name for name, n in zip(self.units[level], self.ranks, strict=True) for _ in range(n)
        ]
        return Topology(RankLayout(("rank",), (ranks,)), of_rank)

    def in_order(self, order: Sequence[int]) -> Network:
        """The same network with its hosts, by their numbers here, in another order. *Local*."""
        return Network(
            tuple(self.hosts[i] for i in order),
            tuple(self.ranks[i] for i in order),
            {level: tuple(names[i] for i in order) for level, names in self.units.items()},
            self.bandwidth,
        )

    def _used(self, ranks: int) -> dict[str, int]:
        """The ranks of each host that has any of the job's."""
        used, left = {}, ranks
        for name, many in zip(self.hosts, self.ranks, strict=True):
            if left > 0:
                used[name] = many
            left -= many
        return used

    def to_json(self) -> dict[str, Any]:
        """``{"hosts": [{"name": ..., "gpus": ..., LEVEL: ...}], "bandwidth": {...}}``."""
        hosts = [
            {"name": name, "gpus": n, **{level: names[i] for level, names in self.units.items()}}
            for i, (name, n) in enumerate(zip(self.hosts, self.ranks, strict=True))
        ]
        return {"hosts": hosts, "bandwidth": dict(self.bandwidth)}


def _numbered(names: Sequence[str]) -> list[int]:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def _refuse_crossing(inner: str, outer: str, units: Mapping[str, tuple[str, ...]]) -> None:
    around: dict[str, str] = {}
    for small, large in zip(units[inner], units[outer], strict=True):
        if around.setdefault(small, large) != large:
            raise LayoutError(
                f"the {inner} {shown(small)} has hosts in the {outer} {shown(around[small])} and "
                f"in {shown(large)}. Units must lie inside each other."
            )
