"""Stragglers: the ranks that make others wait in collectives, and for how long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypergrid.hangs.history import History
from hypergrid.hangs.reading import Group, Recording
from hypergrid.plan import GroupPlan

_LEAST = 0.01  # of the recorded time
_FEW = 0.5  # of what the ranks at one coordinate cost, for those at the others to cost little


@dataclass(frozen=True)
class Late:
    """How long others waited for one rank, or for the ranks at one coordinate of a dim."""

    dim: str | None  # None: a rank
    at: int  # the coordinate, or the rank
    seconds: float  # that would be saved without it; of a coordinate, the mean of its ranks
    share: float  # of the recorded time, 0 to 1
    calls: int  # in which others waited
    label: str  # of the group, and
    operation: str  # the collective in which they waited for longest
    per_step: float | None  # seconds; None where steps cannot be told

    @property
    def stands_out(self) -> bool:
        """Whether it costs more than 1% of the time."""
        return self.share >= _LEAST


def stragglers(recording: Recording, plan: GroupPlan | None = None) -> list[Late]:
    """The ranks that made others wait, the longest first. Other ranks have no row.

    A collective counts if all members recorded it. A rank comes when its device starts the call,
    or when the rank makes it, by the clock of its host: clocks of hosts must agree to less than
    what is looked for. Others wait for the last rank from when the one before it came, but only as
    long as it was busy for longer than they were since its own last call: who is late because it
    waited itself is no straggler. With ``plan``, coordinates are those of its layouts, otherwise
    the places in groups over one dim.
    """
    lost: dict[int, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    begin, end = np.inf, -np.inf
    for rank, title, seconds in _lost(recording):
        lost[rank][recording.groups[title.group].shown, title.what.name].append(seconds)
    for mine in recording.ranks.values():
        if mine.calls:
            begin, end = min(begin, mine.calls.created[0]), max(end, mine.calls.created[-1])
    whole = max(1e-9, float(end - begin) / 1e9)
    steps = History(recording).steps() if lost else None

    def late(dim: str | None, at: int, ranks: Iterable[int]) -> Late:
        mine = [lost[rank] for rank in ranks if rank in lost]
        where: dict[tuple[str, str], float] = defaultdict(float)
        for each in mine:
            for key, some in each.items():
                where[key] += sum(some)
        seconds = sum(where.values()) / len([*ranks])
        calls = sum(len(some) for each in mine for some in each.values())
        per_step = seconds / steps.many if steps else None
        worst = max(where, key=lambda key: where[key])
        return Late(dim, at, seconds, seconds / whole, calls, *worst, per_step)

    alone = {rank: late(None, rank, (rank,)) for rank in lost}
    cost = {rank: row.seconds for rank, row in alone.items()}
    at: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for group in recording.groups.values():
        for rank in group.ranks or ():
            for dim, place in _places(group, rank, plan):
                at[dim][place].add(rank)
    found = [(row.seconds, row) for row in alone.values()]
    for dim, places in at.items():
        mean = {p: sum(cost.get(r, 0) for r in ranks) / len(ranks) for p, ranks in places.items()}
        place = max(mean, key=lambda each: mean[each])
        costs = [cost.get(rank, 0) for rank in places[place]]
        little = [each for each in mean.values() if each < _FEW * mean[place]]
        # All of its ranks cost much, and those at the other coordinates do not.
        if len(costs) > 1 and min(costs) > _FEW * mean[place] and len(little) == len(mean) - 1:
            found.append((max(costs), late(dim, place, sorted(places[place]))))
    return [row for _, row in sorted(found, key=lambda each: (-each[0], each[1].dim is None))]


def _lost(recording: Recording) -> Iterator[tuple[int, Any, float]]:
    """(last rank, title, seconds that others waited for it) of each call in which they did."""
    titles = recording.titles
    members: dict[str, tuple[int, ...]] = {}
    places: dict[tuple[str, int], tuple[Any, Any]] = {}  # numbers of the calls, and where
    came: dict[int, Any] = {}
    ends: dict[int, Any] = {}
    for rank, mine in recording.ranks.items():
        calls = mine.calls
        came[rank] = np.where(calls.started > 0, calls.started, calls.created)
        ends[rank] = np.maximum(calls.completed, came[rank])
        by_group: dict[str, list[int]] = defaultdict(list)
        for at, title in enumerate(calls.title.tolist()):
            if not titles[title].p2p:
                by_group[titles[title].group].append(at)
        for key, some in by_group.items():
            first, unique = np.unique(calls.seq[some], return_index=True)
            places[key, rank] = (first, np.array(some)[unique])
            members[key] = recording.groups[key].ranks or (*members.get(key, ()), rank)
    meets: list[tuple[tuple[int, ...], Any]] = []
    for key, ranks in members.items():
        if len(ranks) > 1 and all((key, rank) in places for rank in ranks):
            seqs = places[key, ranks[0]][0]
            for rank in ranks[1:]:
                seqs = np.intersect1d(seqs, places[key, rank][0], assume_unique=True)
            where = [places[key, r][1][np.searchsorted(places[key, r][0], seqs)] for r in ranks]
            meets.append((ranks, where))
            last = np.max([came[r][some] for r, some in zip(ranks, where, strict=True)], axis=0)
            for rank, some in zip(ranks, where, strict=True):
                ends[rank][some] = last
    busy = {
        rank: np.concatenate(([0], np.maximum(0, each[1:] - ends[rank][:-1])))
        for rank, each in came.items()
    }
    for ranks, at in meets:
        arrived = np.array([came[r][some] for r, some in zip(ranks, at, strict=True)])
        own = np.array([busy[r][some] for r, some in zip(ranks, at, strict=True)])
        last = arrived.argmax(axis=0)
        turns = np.arange(len(last))
        gap = np.diff(np.sort(arrived, axis=0)[-2:], axis=0)[0]
        longest = own[last, turns]
        own[last, turns] = -1  # so that the greatest is that of another
        seconds = np.minimum(gap, longest - own.max(axis=0)) / 1e9
        for turn in np.flatnonzero(seconds > 0).tolist():
            rank = ranks[last[turn]]
            calls = recording.ranks[rank].calls
            yield rank, titles[calls.title[at[last[turn]][turn]]], float(seconds[turn])


def _places(group: Group, rank: int, plan: GroupPlan | None) -> Iterator[tuple[str, int]]:
    if plan is None:
        if len(group.dims) == 1 and group.ranks:
            yield group.dims[0], group.ranks.index(rank)
        return
    if rank in plan.layout:
        at = plan.layout.coordinate(rank)
        yield from ((dim, at[dim]) for dim in group.dims if dim in at)
