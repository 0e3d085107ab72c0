"""The first cause of a hang, told apart from those who wait because of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

from hypergrid.analysis.recording import Call, What
from hypergrid.analysis.waiting import Graph, Wait, Waiting, around, circle_in

Kind: TypeAlias = Literal[
    "ok",  # nothing is wrong
    "empty",  # nothing was recorded
    "mismatch",  # other operation, size, dtype or root at the same place of a group
    "order",  # the ranks wait for each other: other order, or a call left out
    "raised",  # the rank others wait for raised
    "no dump",  # it left no dump: ended, stopped, or unreachable
    "never entered",  # it is busy elsewhere
    "slow",  # all ranks are in it
]
Doubt: TypeAlias = Literal[
    "",
    "unseen",  # it is itself in a send or receive that is not recorded
    "dark",  # no stack and no record of sends and receives: it may be in one
    "guess",  # that others wait for it is guessed from stacks
    "alone",  # nobody is seen to wait for it
    "blind",  # the flight recorder of a rank is missing
    "unread",  # a file of the rank could not be read
    "mixed",  # the files seem to be of two jobs
    "old",  # its dump is older than the call that it misses
    "few",  # most ranks left no dump
]
Why: TypeAlias = Literal["operation", "root", "sizes", "dtypes"]
_TOGETHER = 10**9  # ns; ranks that raised within this of each other raised together


class Step(NamedTuple):
    """Two calls that follow each other on a rank, and what else follows the first one usually."""

    before: str
    after: str
    usual: str


class Mismatch(NamedTuple):
    """Calls with one number in one group that must not differ, and do."""

    group: str
    seq: int
    odd: tuple[int, ...]
    others: tuple[int, ...]
    calls: Mapping[int, Call]
    why: Why
    usual: str = ""  # the operation that others call there, where two differ
    shift: int = 0  # -1: the odd ranks left out a call, 1: they made one more

    @property
    def is_tied(self) -> bool:
        """Whether the majority does not say who is right."""
        return len(self.odd) == len(self.others)


@dataclass(frozen=True)
class Cause:
    """Why the others wait: what a rule found, as data."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    wait: Wait | None = None  # in which they are missed
    waits: Sequence[Wait] = ()  # others, the nearest first
    mismatch: Mismatch | None = None
    circle: Sequence[tuple[int, int, Wait | None]] = ()  # who waits for whom
    step: Step | None = None  # where they left the order
    doubt: Doubt = ""


class Rules:
    """Finds the first cause; the first rule that applies decides."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting, self.ranks, self.calls = waiting, waiting.ranks, waiting.calls

    def cause(self) -> Cause:
        """What is wrong."""
        found = self._decided()
        return replace(found, doubt="mixed") if self.waiting.recording.mixed else found

    def _decided(self) -> Cause:
        waiting = self.waiting
        if not any(mine.answered for mine in self.ranks.values()):
            return Cause("empty")
        mismatch = self._mismatch()
        if mismatch:
            ranks = (*mismatch.odd, *mismatch.others) if mismatch.is_tied else mismatch.odd
            return Cause("mismatch", tuple(sorted(ranks)), None, waiting.waits, mismatch)
        graph = waiting.graph()
        first = self._first(graph) or waiting.raised or waiting.gone
        if first:
            return self._absent(first)
        if graph:
            return self._circle(graph)
        if waiting.running:
            longest = max(waiting.running, key=lambda wait: wait.ns)
            return Cause("slow", longest.inside, longest, waiting.running)
        heard = self.ranks.keys() - waiting.blind - waiting.gone
        if not any(self.ranks[rank].calls for rank in heard):
            return Cause("empty")
        return Cause("ok", doubt=self._doubt("ok", {*self.ranks}, None))

    def _first(self, graph: Graph) -> set[int]:
        """Of the ranks that others wait for, those that wait for nobody; those that ended first."""
        needed = set().union(*graph.values())
        free = needed - graph.keys()
        waiting = self.waiting
        for some in (free & waiting.raised, free & waiting.gone, free - waiting.blind, free):
            if some:
                return some
        # A rank may be elsewhere while what it started earlier waits in the background.
        away = set(filter(waiting.is_away, needed))
        return away if len(away) < len(needed) else set()

    def _absent(self, first: set[int]) -> Cause:
        """Ranks that others wait for and that wait for nobody."""
        waiting = self.waiting
        kind: Kind = "never entered"
        if first & waiting.raised:
            kind = "raised"
            begun = min(self.ranks[rank].written for rank in first)
            first = {rank for rank in first if self.ranks[rank].written - begun < _TOGETHER}
        elif first & waiting.gone:
            kind = "no dump"
        waits = [wait for wait in waiting.waits if first.intersection(wait.absent)]
        wait = self._nearest(waits, first) if waits else None
        doubt = self._doubt(kind, first, wait)
        if doubt == "few":
            return Cause("no dump", _sorted(waiting.gone), wait, waiting.waits, doubt=doubt)
        named = first.intersection(wait.absent) if wait else first
        behind = waiting.behind(wait, named) if wait else ()
        return Cause(kind, _sorted(named), wait, behind, doubt=self._doubt(kind, named, wait))

    def _doubt(self, kind: Kind, named: set[int], wait: Wait | None) -> Doubt:
        waiting, mine = self.waiting, [self.ranks[rank] for rank in named if rank in self.ranks]
        if kind == "raised":
            return ""
        if named & waiting.gone & waiting.recording.unread:
            return "unread"
        if 2 * len(waiting.gone) > waiting.recording.world_size:
            return "few"
        if waiting.blind and (wait is None or kind != "no dump"):
            return "blind"
        if kind == "no dump" and wait is None:
            return "guess" if any(map(named.intersection, waiting.guessed.values())) else "alone"
        if kind == "no dump":
            return ""
        if named & waiting.unseen:
            return "unseen"
        if not all(each.stack or waiting.sees_p2p(each.rank) for each in mine):
            return "dark"
        if wait is None:
            return "" if kind == "ok" else "guess"
        return "old" if any(0 < each.written < wait.call.created for each in mine) else ""

    def _nearest(self, waits: Sequence[Wait], first: set[int]) -> Wait:
        """Where most of them are missed; of several, the call that they would have made first."""
        steps, last = self._steps, self.waiting.last
        before = {_title(self.waiting, last[rank]) for rank in first if rank in last}
        whole = all(self.ranks[wait.inside[0]].whole for wait in waits)

        def key(wait: Wait) -> tuple[int, int, int, int]:
            follows = sum(steps[each, _title(self.waiting, wait.call)] for each in before)
            made = len(self.ranks[wait.inside[0]].calls) if whole else 0
            return (len(first.intersection(wait.absent)), follows, -made, wait.ns)

        return max(waits, key=key)

    def _circle(self, graph: Graph) -> Cause:
        """All wait for each other: who left out a call, or the order of the others."""
        waiting, circle = self.waiting, circle_in(graph)
        near = around(circle[0], graph)
        unseen = waiting.unseen & near
        doubt: Doubt = "blind" if waiting.blind else "unseen" if unseen else ""
        found = self._skipped(near)
        if found:
            rank, missed, step = found
            behind = waiting.behind(missed, {rank})
            return Cause("never entered", (rank,), missed, behind, step=step, doubt=doubt)
        odd, left = self._deviants(near)
        if unseen and not left:
            # Most of a group are in a call: that the others are not is more than they can do.
            most = [w for w in waiting.waits if unseen.issuperset(w.absent) and _is_most(w)]
            if most:
                each = max(most, key=lambda each: len(each.inside))
                behind = waiting.behind(each, each.absent)
                return Cause("never entered", each.absent, each, behind, doubt=doubt)
            return Cause("order", _sorted(unseen), None, waiting.waits, doubt=doubt)
        of_odd = [each for rank in odd for each in waiting.edges.get(rank, {}).values()]
        if unseen:  # whom they wait for is not known, so neither is the circle
            wait = next(iter(of_odd), None)
            return Cause("order", _sorted(odd), wait, waiting.waits, step=left, doubt=doubt)
        edges = [
            (rank, other, waiting.edges.get(rank, {}).get(other))
            for rank, other in zip(circle, circle[1:] + circle[:1], strict=True)
        ]
        waits = [wait for *_, wait in edges if wait]
        wait = next((wait for wait in waits if wait in of_odd), next(iter(of_odd or waits), None))
        others = [each for each in waiting.waits if each not in waits]
        named = _sorted(odd or circle)
        return Cause("order", named, wait, others, circle=edges, step=left, doubt=doubt)

    def _skipped(self, within: Iterable[int]) -> tuple[int, Wait, Step] | None:
        """A rank of a circle that left out a call earlier, where it is missed, and what it did."""
        steps = self._steps
        for rank in sorted(within & self.ranks.keys()):
            waits = [wait for wait in self.waiting.waits if rank in wait.absent]
            missed = {_title(self.waiting, wait.call): wait for wait in waits}
            pairs = zip(self.ranks[rank].calls, self._pattern(rank), strict=True)
            for call, (before, after) in pairs:
                if call.done and steps[before, after] == 1:
                    usual = _usual(steps, before, after)
                    if usual in missed and steps[before, usual] > 1:
                        return rank, missed[usual], Step(before, named(self.waiting, call), usual)
        return None

    def _deviants(self, within: set[int]) -> tuple[list[int], Step | None]:
        """Ranks that did what neither others nor they themselves did before, and what."""
        steps = self._steps
        within = within & self.waiting.last.keys()
        rarest: dict[int, tuple[int, tuple[str, str]]] = {}
        for rank in within:
            pairs = self._pattern(rank)
            undone = (i for i, call in enumerate(self.ranks[rank].calls) if not call.done)
            start = min(next(undone, len(pairs)), len(pairs) - 1)
            new: list[tuple[int, tuple[str, str]]] = []
            known: dict[str, set[str]] = defaultdict(set)
            for i, (before, after) in enumerate(pairs):
                count = steps[before, after]
                # What came before it stopped counts if it was done once, by one rank.
                if after not in known[before] and (i >= start or (count == 1 and known[before])):
                    new.append((count, (before, after)))
                known[before].add(after)
            if new:
                rarest[rank] = min(new)
        least = min((count for count, _ in rarest.values()), default=0)
        odd = [rank for rank, (count, _) in rarest.items() if count == least]
        if len({rarest[rank] for rank in odd}) != 1 or 2 * len(odd) > len(within):
            return [], None
        before, after = rarest[odd[0]][1]
        own = Counter(self._pattern(odd[0])) if len(odd) == 1 else steps
        usual = _usual(own, before, after) or _usual(steps, before, after)
        return odd, Step(before, after, usual)

    @cached_property
    def _steps(self) -> Counter[tuple[str, str]]:
        """How often one call follows another, over all ranks."""
        steps: Counter[tuple[str, str]] = Counter()
        for rank in self.ranks:
            steps.update(self._pattern(rank))
        return steps

    def _pattern(self, rank: int) -> list[tuple[str, str]]:
        titles = (_title(self.waiting, call) for call in self.ranks[rank].calls)
        return [*pairwise(["", *titles])]

    # Calls that differ.

    def _mismatch(self) -> Mismatch | None:
        found: list[tuple[int, Mismatch]] = []
        for group, by_rank in self.calls.items():
            if len(by_rank) < 2:
                continue
            base_rank = max(by_rank, key=lambda rank: len(by_rank[rank]))
            base = by_rank[base_rank]
            places = {
                seq
                for rank, numbered in by_rank.items()
                if rank != base_rank
                for seq, call in numbered.items()
                if seq in base and base[seq][3] is not call[3] and base[seq][3] != call[3]
            }
            for seq in sorted(places):
                calls = {rank: each[seq] for rank, each in by_rank.items() if seq in each}
                mismatch = _judged(group, seq, calls)
                if mismatch and (mismatch.why == "operation" or self._ends_in(by_rank)):
                    found.append((min(call.created for call in calls.values()), mismatch))
                    break
        if not found:
            return None
        first = min(found, key=lambda each: each[0])[1]
        return first._replace(usual=self._usual_of(first), shift=self._shift(first))

    def _ends_in(self, by_rank: Mapping[int, Mapping[int, Call]]) -> bool:
        """Whether somebody is stuck in the group, or ended with an error after it."""
        stuck = any(not call.done for each in by_rank.values() for call in each.values())
        return stuck or any(self.ranks[rank].error for rank in by_rank)

    def _usual_of(self, found: Mismatch) -> str:
        """Which of two operations other ranks and earlier turns call there; "" if not known."""
        often = {}
        for rank in (found.odd[0], found.others[0]):
            call = found.calls[rank]
            pair = self._pattern(rank)[self.ranks[rank].calls.index(call)]
            often[call.what.name] = self._steps[pair] - 1
        return max(often, key=lambda name: often[name]) if len({*often.values()}) > 1 else ""

    def _shift(self, found: Mismatch) -> int:
        """-1 if the odd ranks go on with what the others did one call later, 1 if earlier."""
        by_rank, seq = self.calls[found.group], found.seq

        def same(odd: int, other: int) -> bool:
            calls = by_rank[found.odd[0]].get(odd), by_rank[found.others[0]].get(other)
            return calls[0] is not None and calls[1] is not None and calls[0].text == calls[1].text

        if found.why != "operation":
            return 0
        return same(seq + 1, seq) - same(seq, seq + 1)


def named(waiting: Waiting, call: Call) -> str:
    """Such as "all_reduce #3 of DATA_PARALLEL_GROUP"."""
    return f"{call.what.name} #{call.seq} of {waiting.recording.groups[call.group].shown}"


def _title(waiting: Waiting, call: Call) -> str:
    if call.p2p:
        return call.what.name
    return f"{call.what.name} of {waiting.recording.groups[call.group].shown}"


def _sorted(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))


def _is_most(wait: Wait) -> bool:
    return 0 < len(wait.absent) < len(wait.inside)


def _usual(steps: Counter[tuple[str, str]], before: str, after: str) -> str:
    """What else comes most often after ``before``; "" if nothing does."""
    others = {pair[1]: n for pair, n in steps.items() if pair[0] == before and pair[1] != after}
    return max(others, key=lambda title: others[title], default="")


_FREE: dict[str, tuple[str, ...]] = {  # what members may do differently
    "gather": ("outputs", "output_dtypes"),
    "scatter": ("inputs", "input_dtypes"),
    "reduce": ("outputs", "output_dtypes"),
    "broadcast": ("inputs", "input_dtypes"),
}
SIZES = ("inputs", "outputs")
DTYPES = ("input_dtypes", "output_dtypes")


def _judged(group: str, seq: int, calls: Mapping[int, Call]) -> Mismatch | None:
    """In what the calls of one number differ, if they must not."""
    for why, key in _MUST_AGREE.items():
        by_value: dict[Any, list[int]] = defaultdict(list)
        for rank, call in calls.items():
            by_value[key(call.what)].append(rank)
        if len(by_value) > 1:
            most = max(by_value.values(), key=len)
            odd = _sorted(
                rank for ranks in by_value.values() if ranks is not most for rank in ranks
            )
            return Mismatch(group, seq, odd, _sorted(most), calls, why)
    return None


def _compared(what: What, fields: Sequence[str]) -> tuple[str, ...]:
    name = what.name
    if name.startswith(("all_to_all", "alltoall")) or "_v" in name or name == "coalesced":
        return ()
    free = _FREE.get(name, ())
    return tuple(getattr(what, each) for each in fields if each not in free)


_MUST_AGREE: Mapping[Why, Callable[[What], Any]] = {
    "operation": lambda what: what.name,
    "root": lambda what: what.detail,
    "sizes": lambda what: _compared(what, SIZES),
    "dtypes": lambda what: _compared(what, DTYPES),
}
