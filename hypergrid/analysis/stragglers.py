"""Which ranks come last to the collectives, how often, and how long the others wait for them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import median

from hypergrid.analysis.recording import Call, Group, Recording
from hypergrid.plan import GroupPlan


@dataclass(frozen=True)
class Late:
    """How often one rank, or one coordinate on a dim, came last to the groups of a label."""

    label: str
    dim: str | None  # None: a rank
    at: int  # the coordinate, or the rank
    last: int
    calls: int  # in which it could have been last
    chance: float  # in how much of the calls it would be last if nobody were slow, 0 to 1
    seconds: float  # that the others waited for it, all together
    median: float  # seconds, of the calls in which it was last

    @property
    def share(self) -> float:
        """In how much of the calls it was last, 0 to 1."""
        return self.last / self.calls

    @property
    def stands_out(self) -> bool:
        """Whether that is more than chance explains: three standard deviations, and 20%."""
        spread = 3 * sqrt(self.chance * (1 - self.chance) / self.calls)
        return self.share > self.chance + max(spread, 0.2 * self.chance)


def last_arrivals(recording: Recording, plan: GroupPlan | None = None) -> list[Late]:
    """Who comes last, the most seconds lost first; dims before ranks. No row for who never does.

    A collective counts if all members recorded it. A rank comes when it makes the call, by the
    clock of its host: clocks of hosts must agree to less than what is looked for. What is lost in
    a call is the time between the last and the one before it. With ``plan``, coordinates are
    those of its first layout, otherwise the places in groups over one dim.
    """
    rows: dict[tuple[str, str | None, int], list[float]] = defaultdict(list)
    calls: dict[tuple[str, str | None, int], int] = defaultdict(int)
    expected: dict[tuple[str, str | None, int], float] = defaultdict(float)
    by_group: dict[str, dict[int, dict[int, Call]]] = defaultdict(dict)
    for rank, mine in recording.ranks.items():
        for call in mine.calls:
            if not call.p2p:
                by_group[call.group].setdefault(rank, {}).setdefault(call.seq, call)
    for key, by_rank in by_group.items():
        group = recording.groups[key]
        members = group.ranks or tuple(sorted(by_rank))
        if len(members) < 2 or not all(rank in by_rank for rank in members):
            continue
        places = {rank: [(None, rank), *_places(group, rank, plan)] for rank in members}
        complete = 0
        for _, late, lost in _lasts(members, by_rank):
            complete += 1
            for dim, at in places[late] if lost else ():
                rows[group.label, dim, at].append(lost)
        for (dim, at), ranks in Counter(p for some in places.values() for p in some).items():
            calls[group.label, dim, at] += complete
            expected[group.label, dim, at] += complete * ranks / len(members)
    found = [
        Late(
            label,
            dim,
            at,
            len(lost),
            calls[label, dim, at],
            expected[label, dim, at] / calls[label, dim, at],
            sum(lost),
            median(lost),
        )
        for (label, dim, at), lost in rows.items()
    ]
    return sorted(found, key=lambda row: (row.dim is None, -row.seconds))


def _lasts(
    members: tuple[int, ...], by_rank: Mapping[int, Mapping[int, Call]]
) -> Iterator[tuple[int, int, float]]:
    """(number, last rank, seconds until it came) of each collective that all recorded."""
    for seq in by_rank[members[0]]:
        came = []
        for rank in members:
            call = by_rank[rank].get(seq)
            if call is None or not call.created:
                break
            came.append((call.created, rank))
        else:
            before, (last, rank) = sorted(came)[-2:]
            yield seq, rank, (last - before[0]) / 1e9


def _places(group: Group, rank: int, plan: GroupPlan | None) -> Iterator[tuple[str, int]]:
    if plan is None:
        if len(group.dims) == 1 and group.ranks:
            yield group.dims[0], group.ranks.index(rank)
        return
    home = plan.home(rank)
    if home is not None:
        at = home[1].coordinate(rank)
        yield from ((dim, at[dim]) for dim in group.dims if dim in at)
