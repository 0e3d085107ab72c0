"""GPU memory of a rank's communicators, before there are any: a range, from a model of NCCL's.

NCCL allocates whole granules of 2 MiB. A communicator has, for each channel, three small
allocations; and for each channel and each direction of a connection a buffer for the protocols
Simple, LL and LL128 where it receives, and one granule where it sends. Rings connect two
neighbours, trees the same two in the other direction too, sends each peer. Peers behind the network
share one buffer for all that is sent, one for all that is received. docs/placement.md has the
sources, and published figures beside what this predicts. NVLS and user buffers are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hypergrid.analysis.summary import kinds_of_ranks
from hypergrid.analysis.traffic import Pattern
from hypergrid.layout import LayoutError
from hypergrid.plan import GroupPlan, Ranks
from hypergrid.policy import CHOICES, Policy
from hypergrid.topology import Topology

KIB, MIB = 1 << 10, 1 << 20
_GRANULE = 2 * MIB
_LL, _LL128 = 512 * KIB, 4800 * KIB
_FIXED, _EACH_CHANNEL = 2 * _GRANULE, 3 * _GRANULE
_OF_ONE, _OF_SEVERAL, _SENDS = 64, (16, 32), 32  # channels
_CHUNK, _FAR_CHUNK, _STEPS = 512 * KIB, 128 * KIB, 16  # of the buffers behind the network
_NEAR_PEERS = 8  # up to as many each has all channels for sends

Range = tuple[int, int]


@dataclass(frozen=True)
class Buffers:
    """What decides NCCL's memory.

    Parameters
    ----------
    buffsize : int
        Bytes, NCCL_BUFFSIZE.
    channels : int, optional
        NCCL_MAX_NCHANNELS and NCCL_MAX_P2P_NCHANNELS; by default NCCL chooses: 16 to 32 for rings
        and trees, 32 for sends, 64 in groups of one.
    """

    buffsize: int = 4 * MIB
    channels: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.buffsize <= 1 << 30:
            raise LayoutError(f"NCCL_BUFFSIZE must be 1 to {1 << 30} bytes, got {self.buffsize}.")
        if self.channels is not None and not 0 < self.channels <= 64:
            raise LayoutError(f"NCCL has 1 to 64 channels, got {self.channels}.")

    @property
    def receive(self) -> int:
        """Bytes of one channel of one connection, where it receives."""
        return -(-(self.buffsize + _LL + _LL128) // _GRANULE) * _GRANULE

    def limited(self, channels: int) -> int:
        """That many, or fewer."""
        return channels if self.channels is None else min(channels, self.channels)


def communicator(
    members: int, near: int, patterns: Collection[Pattern] = (), buffers: Buffers = Buffers()
) -> Range:
    """Bytes of one NCCL communicator on one of its ranks once it is used, at least and at most.

    ``near`` of the ``members`` (this one included) are reached through NVLink, the others through
    the network. ``patterns`` are what it carries: rings need two neighbours, the others send and
    receive.
    """
    if members == 1:
        structures = _FIXED + buffers.limited(_OF_ONE) * _EACH_CHANNEL
        return structures, structures + buffers.limited(_OF_ONE) * _STEPS * _CHUNK
    few, many = map(buffers.limited, _OF_SEVERAL)
    half = buffers.receive + _GRANULE  # receives on one side, sends on the other
    # Before cuMem, NCCL's small allocations lay in one granule.
    low = _FIXED + few * half
    connections = min(2, members - 1) + (near < members)
    high = _FIXED + buffers.limited(_SENDS) * _EACH_CHANNEL + many * half * connections
    sends = {"all-to-all": members - 1, "neighbours": min(2, members - 1)}
    peers = max((sends.get(pattern, 0) for pattern in patterns), default=0)
    if peers:
        close, channels = min(peers, near - 1), buffers.limited(_SENDS)
        each = max(1, min(channels, channels * _NEAR_PEERS // max(1, close)))
        high += close * each * (half + _GRANULE)
        high += 2 * channels * _STEPS * _FAR_CHUNK * (near < members)
    return low, high


@dataclass(frozen=True)
class Bill:
    """A rank's communicators of one backend: how many, how many are of one rank, and bytes.

    Each is at least and at most, over the ranks. Bytes are on the GPU; None where it has none. A
    group that is never used costs nothing, so those of one rank count at most only.
    """

    communicators: Range
    alone: Range
    bytes: Range | None


def bills(
    plan: GroupPlan,
    near: Topology,
    patterns: Mapping[str, Collection[Pattern]],
    buffers: Buffers = Buffers(),
    backend: str = "nccl",
) -> dict[str, dict[str, Bill]]:
    """For each choice of ``share`` and each backend, what a rank's communicators take.

    Parameters
    ----------
    plan : GroupPlan
    near : Topology
        The hosts or NVLink domains of all ranks.
    patterns : mapping of str to collection of Pattern
        By a row's traffic what it sends; a ring if it is not there.
    buffers : Buffers, optional
    backend : str
        The default group's, for rows without one. The default group itself is left out.
    """
    ranks = kinds_of_ranks(plan)
    return {
        share: _over_ranks(
            [_of_rank(plan, r, share, near, patterns, buffers, backend) for r in ranks]
        )
        for share in CHOICES["share"]
    }


_Counts = dict[str, tuple[int, int, int, int]]  # by backend: communicators, alone, bytes


def _of_rank(
    plan: GroupPlan,
    rank: int,
    share: str,
    near: Topology,
    patterns: Mapping[str, Collection[Pattern]],
    buffers: Buffers,
    backend: str,
) -> _Counts:
    made: dict[str, tuple[str, Ranks, set[Pattern]]] = {}
    for row, ranks, owner in plan.sharing(rank, Policy(share=share)):
        kinds = set(patterns.get(row.traffic, ()))
        if owner is None:
            made[f"{row.label} {ranks}"] = (row.backend or backend, ranks, kinds)
        else:
            made[f"{owner} {ranks}"][2].update(kinds)
    counts: _Counts = {}
    for kind, ranks, sent in made.values():
        alone = len(ranks) == 1
        low = high = 0
        if kind == "nccl":
            host = near.numbers[rank]
            close = int((near.numbers[list(ranks)] == host).sum())
            low, high = communicator(len(ranks), close, sent, buffers)
        before = counts.get(kind, (0, 0, 0, 0))
        added = (1, int(alone), 0 if alone else low, high)
        counts[kind] = tuple(map(sum, zip(before, added, strict=True)))  # type: ignore[assignment]
    return counts


def _over_ranks(found: list[_Counts]) -> dict[str, Bill]:
    result = {}
    for kind in dict.fromkeys(kind for counts in found for kind in counts):
        many, alone, low, high = zip(*(c.get(kind, (0, 0, 0, 0)) for c in found), strict=True)
        spent = (min(low), max(high)) if kind == "nccl" else None
        result[kind] = Bill((min(many), max(many)), (min(alone), max(alone)), spent)
    return result
