"""The first cause of a hang, told apart from those who wait because of it.

Four principles decide. Ranks that wait wait for others, those for others again, and so on: at the
end of every such chain is one set of ranks of which one has to move before anybody can; with one
fault, the guilty rank is in it. If the set is one rank that waits for nobody, it is that rank, and
a rank that is seen not to have entered comes before one without a file. If they wait for each
other, one of them did not do what was due: what ranks of its role did that had done the same until
then, and what it did itself in earlier steps. And a verdict is certain only if no other rank can
have caused the same recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from hypergrid.hangs.history import Departure, History
from hypergrid.hangs.waiting import Wait, Waiting

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
    "mixed",  # the files seem to be of two jobs
    "few",  # most ranks left no dump
    "unread",  # a file of the rank could not be read
    "blind",  # a flight recorder is missing
    "hidden",  # it may wait itself, in what is not recorded
    "alone",  # nobody is seen to wait for it
    "old",  # its dump is older than the call that it misses
    "partial",  # somebody may be missing in a call that all known ranks are in
    "root",  # the ranks may have named different roots
    "either",  # it may be the others who are wrong
    "which",  # it may be any of them
]
_BEFORE = 8  # last calls of a rank, one of which may have ended another rank
_TOGETHER = 10**9  # ns; ranks that raised within this of each other raised together
_MANY = 4  # as many times more ranks are right where only their number speaks
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


@dataclass(frozen=True)
class Cause:
    """Why the others wait, as data."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    wait: Wait | None = None  # in which they are missed
    circle: Sequence[tuple[int, int, Wait | None]] = ()  # who waits for whom
    departure: Departure | None = None  # where they did not do what was due
    doubt: Doubt = ""


class Rules:
    """Finds the first cause."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self.ranks = waiting.ranks

    def cause(self) -> Cause:
        """The fault."""
        cause = self._decided()
        return replace(cause, doubt="mixed") if self.waiting.recording.mixed else cause

    @cached_property
    def history(self) -> History:
        """The usual course of the ranks; only some verdicts need it."""
        return History(self.waiting.recording)

    def _decided(self) -> Cause:
        waiting = self.waiting
        if not any(recording.answered for recording in self.ranks.values()):
            return Cause("empty")
        ends = waiting.last_ones
        free = {rank for end in ends if len(end) == 1 for rank in end}
        # A rank whose own call all ranks are in moves as soon as that ends.
        in_motion = {rank for wait in waiting.running for rank in wait.inside}
        at_rest = free - in_motion if ends else waiting.raised or waiting.gone
        if at_rest:
            return self._free(at_rest)
        if ends and not free:
            return self._circle(max(ends, key=len))
        if waiting.running:
            return self._slow()
        if not any(self.ranks[rank].calls for rank in self.ranks.keys() - waiting.blind):
            return Cause("empty")
        return Cause("ok", doubt=self._hidden({*self.ranks}))

    def _slow(self) -> Cause:
        """All known ranks are in a call."""
        waiting = self.waiting
        longest = max(waiting.running, key=lambda wait: wait.ns)
        members = waiting.recording.groups[longest.group].ranks or ()
        is_whole = all(recording.whole for recording in self.ranks.values())
        doubt: Doubt = ""
        if longest.call.what.name in _ROOTED:
            doubt = "root"
        elif waiting.waits or waiting.gone or not is_whole or {*members} != {*longest.inside}:
            doubt = "partial"
        return Cause("slow", (), longest, doubt=doubt)

    # One rank that waits for nobody.

    def _free(self, free: set[int]) -> Cause:
        """Ranks that others wait for and that wait for nobody."""
        waiting = self.waiting
        kind: Kind = "never entered"
        raised = free & waiting.raised
        if raised:
            kind = "raised"
            first_error = min(self.ranks[rank].written for rank in raised)
            named = {r for r in raised if self.ranks[r].written - first_error < _TOGETHER}
        else:
            departed = self._departed_among(free)
            if departed is not None:
                return departed
            # What is seen comes before what is only missing.
            named = free - waiting.blind - waiting.gone or free & waiting.gone or free
            kind = "no dump" if named <= waiting.gone else kind
        waits = self._waits_for(named)
        # In which most of them are missed; of such calls the one that has lasted longest.
        nearest = max(
            waits, key=lambda wait: (len(named.intersection(wait.missed)), wait.ns), default=None
        )
        # Of all that nobody explains, also of those that are missed elsewhere.
        doubt = self._doubt(kind, named, nearest)
        if nearest is not None:
            named = named.intersection(nearest.missed)
        return Cause(kind, self._most_missed_first(named), nearest, doubt=doubt)

    def _waits_for(self, ranks: set[int]) -> list[Wait]:
        return [wait for wait in self.waiting.waits if not ranks.isdisjoint(wait.missed)]

    def _departed_among(self, free: set[int]) -> Cause | None:
        """A rank that did not do what was due, and so made ``free`` seem to be the cause."""
        waiting = self.waiting
        gone = free & waiting.gone
        waits = self._waits_for(free)
        suspects = free.union(*(wait.inside + wait.unlike for wait in waits))
        departures = self._departures(suspects, alone=bool(gone))
        guilty = [departure for departure in departures if self._is_proven(departure)]
        if gone and not guilty and not self._most_are_gone():
            guilty = [d for d in self._departures(self.ranks.keys() - gone) if self._is_late(d)]
        return self._departed(guilty, waits) or self._minority(waits, departures)

    def _most_are_gone(self) -> bool:
        return 2 * len(self.waiting.gone) > len(self.waiting.world)

    def _most_missed_first(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The rank that most others are seen to wait for comes first."""
        waiters = dict.fromkeys(sorted(ranks), 0)
        for wait in self.waiting.waits:
            for rank in waiters.keys() & {*wait.missed}:
                waiters[rank] += len(wait.inside)
        return tuple(sorted(waiters, key=lambda rank: -waiters[rank]))

    def _is_late(self, departure: Departure) -> bool:
        """Whether it is of the last calls, and nothing but this rank's own calls explains it."""
        calls = self.ranks[departure.rank].calls
        speaks = departure.before is True or departure.others > departure.alike
        is_recent = departure.at >= len(calls) // 2
        return speaks and is_recent and not self.history.is_confirmed(departure.rank)

    # Ranks that wait for each other.

    def _circle(self, within: set[int]) -> Cause:
        """All wait for each other: who did not do what was due."""
        waiting = self.waiting
        departures = self._departures(within)
        waits = [wait for rank in sorted(within) for wait in waiting.of.get(rank, ())]
        strong = [departure for departure in departures if departure.weight[0] > 2]
        cause = self._departed(strong, waits) or self._minority(waits, departures)
        cause = cause or self._departed(departures, waits)
        if cause is not None:
            return cause
        unseen = waiting.unseen & within
        # Most of a group are in a call: that the others are not is more than they can do.
        most = [wait for wait in waiting.waits if 0 < len(wait.absent) < len(wait.inside)]
        most = [wait for wait in most if unseen.issuperset(wait.absent)]
        if most:
            wait = max(most, key=lambda wait: len(wait.inside))
            return Cause("never entered", wait.absent, wait, doubt="hidden")
        if unseen:
            return Cause("order", tuple(sorted(unseen)), doubt="hidden")
        circle = waiting.circle(within)
        first = next((wait for *_, wait in circle if wait), None)
        kind: Kind = "mismatch" if first and first.unlike else "order"
        ranks = tuple(sorted(rank for rank, *_ in circle))
        return Cause(kind, ranks, first, circle, doubt="which")

    def _minority(self, waits: Sequence[Wait], departures: Sequence[Departure]) -> Cause | None:
        """Of the ranks that made different calls at one place of a group, the fewer."""
        for (group, seq), (*smaller, largest) in self.waiting.unequal.items():
            named = sorted(set().union(*smaller))
            wait = next((wait for wait in waits if wait.group == group), None)
            if wait is not None and len(named) < len(largest):
                departure = next((d for d in departures if d.rank in named), None)
                doubt: Doubt = "" if len(largest) >= _MANY * len(named) else "either"
                wait = wait._replace(seq=seq)
                return Cause("mismatch", tuple(named), wait, (), departure, doubt)
        return None

    def _departures(self, ranks: Iterable[int], *, alone: bool = True) -> list[Departure]:
        departures = self.history.departures(sorted(ranks), alone=alone)
        return sorted(departures, key=lambda departure: departure.weight, reverse=True)

    def _departed(self, departures: Sequence[Departure], waits: Sequence[Wait]) -> Cause | None:
        """The ranks that most clearly did not do what was due."""
        if not departures:
            return None
        first = departures[0]
        waiting = self.waiting
        compared = 1 if first.is_proven else None
        named = {d.rank for d in departures if d.weight[:compared] == first.weight[:compared]}
        own_waits = [wait for rank in sorted(named) for wait in waiting.of.get(rank, ())]
        unlike = [wait for wait in own_waits if wait.unlike]
        wait = next(iter([*unlike, *own_waits, *waits]), None)
        ends = waiting.last_ones
        is_circle = len(ends) == 1 < len(ends[0]) and not unlike
        circle = waiting.circle(ends[0]) if is_circle else ()
        is_sure = all(self._is_proven(d) for d in departures if d.rank in named)
        is_sure = is_sure or (len(named) == 1 and self._is_only_one(first))
        kind: Kind = "mismatch" if unlike else "order"
        doubt: Doubt = "" if is_sure else "either"
        return Cause(kind, tuple(sorted(named)), wait, circle, first, doubt)

    # Whether others may have caused the same recording.

    def _doubt(self, kind: Kind, named: set[int], wait: Wait | None) -> Doubt:
        """Why others may be the cause of what these ranks seem to be."""
        waiting = self.waiting
        is_gone = kind == "no dump"
        hidden = self._hidden(named)
        if kind == "raised":
            return ""
        if named & waiting.gone & waiting.recording.unread:
            return "unread"
        if is_gone and self._most_are_gone():
            return "few"
        if hidden and not is_gone:
            return hidden
        if wait is None:
            return "hidden" if waiting.guessing else "alone"
        if not is_gone and any(self._is_old(rank, wait) for rank in named):
            return "old"
        # One rank may wait in a call that should not be, for ranks that have done all.
        makers = self.history.makers(wait.rank, wait.at)
        is_unusual = self.history.is_usual(wait.rank, wait.at) is False
        is_common = makers > max(1, len(named)) and (not is_unusual or makers >= _MANY * len(named))
        if not is_common or (is_gone and not self._is_everyone_right()):
            return "either"
        return ""

    def _is_old(self, rank: int, wait: Wait) -> bool:
        """Whether the rank still worked when it wrote, or wrote before the call that it misses."""
        recording = self.ranks[rank]
        moment = recording.written or recording.latest
        last = self.waiting.last_time(rank)
        return 0 < moment < max(wait.call.created, last + self.waiting.patience)

    def _hidden(self, ranks: set[int]) -> Doubt:
        """Whether one of them may wait in a call that is not recorded."""
        waiting = self.waiting
        if ranks & waiting.blind:
            return "blind"
        if ranks & (waiting.unseen | waiting.of.keys()):
            return "hidden"
        for rank in ranks & self.ranks.keys():
            if not self.ranks[rank].stack and not waiting.sees_p2p(rank):
                return "hidden"
        return ""

    def _is_everyone_right(self) -> bool:
        """Whether no rank with a file can be the cause that another left none."""
        history = self.history
        waiting = self.waiting
        seen = self.ranks.keys() - waiting.gone
        if (
            len(waiting.last_ones) > 1
            or len(waiting.gone) > 1
            or waiting.raised
            or waiting.unequal
            or waiting.blind
        ):
            return False
        # A rank that is in no recorded call may be in one that is not recorded.
        if self._hidden(seen - waiting.of.keys()):
            return False
        if any(departure.weight[0] > 1 for departure in self._departures(seen)):
            return False
        return all(history.is_confirmed(rank) and self._is_harmless(rank) for rank in seen)

    def _is_harmless(self, rank: int) -> bool:
        """Whether its last calls cannot have ended a rank: gloo ends one that receives too much."""
        calls = self.ranks[rank].calls
        for at in range(max(0, len(calls) - _BEFORE), len(calls)):
            title = calls[at].title
            is_common = self.history.makers(rank, at) >= _MANY
            is_common = is_common or bool(self.history.is_usual(rank, at))
            if title.backend == "gloo" and not title.p2p and not is_common:
                return False
        return True

    def _is_proven(self, departure: Departure) -> bool:
        """Without its sends and receives, a stage looks as another until others wait for it."""
        due = departure.due
        if not departure.is_proven or due is None or self.waiting.sees_p2p(departure.rank):
            return departure.is_proven
        groups = self.waiting.recording.groups
        call = self.ranks[departure.rank].calls[departure.at]
        if (call.group, call.seq) in self.waiting.unequal:
            return True
        label = groups[due.group].label
        return any(
            (wait.seq, groups[wait.group].label) == (due.seq, label)
            for wait in self.waiting.waits
            if departure.rank in wait.absent + wait.unlike
        )

    def _is_only_one(self, departure: Departure) -> bool:
        """Whether most others did otherwise, and every other rank's calls are confirmed."""
        if departure.before is False or self.waiting.gone:
            return False
        if departure.before is None and self.history.is_shared(departure.rank, departure.at):
            return False
        others = self.ranks.keys() - {departure.rank}
        return (
            departure.others > max(1, departure.alike)
            and not self.history.is_confirmed(departure.rank)
            and all(self.history.is_confirmed(rank) for rank in others)
        )
