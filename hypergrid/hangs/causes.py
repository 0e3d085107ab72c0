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
_MANY = 4  # as many times more ranks are right where only their number speaks
_BOTH = 3  # the weight of a departure against which its own past and other ranks speak
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
        if self.waiting.recording.mixed:
            return replace(cause, doubt="mixed")
        return cause

    @cached_property
    def history(self) -> History:
        """The usual course of the ranks; only some verdicts need it."""
        return History(self.waiting.recording)

    def _decided(self) -> Cause:
        waiting = self.waiting
        if len(waiting.gone) == len(waiting.world):
            return Cause("empty")
        ends = waiting.last_ones
        free: set[int] = set()
        for ranks in ends:
            if len(ranks) == 1:
                free |= ranks
        at_rest = set(free)
        for wait in waiting.running:
            # A rank whose own call all ranks are in moves as soon as that ends.
            at_rest.difference_update(wait.inside)
        if not ends:
            at_rest = waiting.raised or waiting.gone
        if at_rest:
            return self._free(at_rest)
        if ends and not free:
            return self._circle(ends[0])
        if waiting.running:
            return self._slow()
        if waiting.last.keys() <= waiting.blind:
            return Cause("empty")
        return Cause("ok", doubt=self._hidden(self.ranks.keys()))

    def _slow(self) -> Cause:
        """All known ranks are in a call."""
        waiting = self.waiting
        longest = max(waiting.running, key=lambda wait: wait.ns)
        is_whole = all(recording.whole for recording in self.ranks.values())
        is_known = set(longest.inside) == set(waiting.recording.groups[longest.group].ranks)
        doubt: Doubt = ""
        if longest.call.what.name in _ROOTED:
            doubt = "root"
        elif waiting.waits or waiting.gone or not is_whole or not is_known:
            doubt = "partial"
        return Cause("slow", (), longest, doubt=doubt)

    # One rank that waits for nobody.

    def _free(self, free: set[int]) -> Cause:
        """Ranks that others wait for and that wait for nobody."""
        waiting = self.waiting
        raised = free & waiting.raised
        gone = free & waiting.gone
        kind: Kind = "never entered"
        if raised:
            kind = "raised"
            # The errors of ranks that raised later may be its consequences.
            named = {min(raised, key=lambda rank: self.ranks[rank].written)}
        else:
            departed = self._departed_among(free)
            if departed is not None:
                return departed
            # What is seen comes before what is only missing.
            named = free - waiting.blind - gone
            if not named and gone:
                kind = "no dump"
                named = gone
            # Every flight recorder among them is missing.
            named = named or free
        waits = self._waits_for(named)
        earliest = max(waits, key=lambda wait: self._earliness(named, wait), default=None)
        # Of all that nobody explains, also of those that are missed elsewhere.
        doubt = self._doubt(kind, named, earliest)
        if earliest is not None:
            named = named.intersection(earliest.missed)
        return Cause(kind, self._most_missed_first(named), earliest, doubt=doubt)

    def _earliness(self, named: set[int], wait: Wait) -> tuple[bool, int, int]:
        """Whether a call is due, how early in the program it is, and how long ranks are in it."""
        missed_rank = min(named.intersection(wait.missed))
        is_due = self.history.is_due(missed_rank, wait.call)
        # Places of calls can be compared only where recorders reach back to the first call.
        place = wait.at if self.ranks[wait.rank].whole else 0
        return (is_due, -place, wait.ns)

    def _waits_for(self, ranks: set[int]) -> list[Wait]:
        """The calls in which at least one of the ranks is missed."""
        waits = []
        for wait in self.waiting.waits:
            if not ranks.isdisjoint(wait.missed):
                waits.append(wait)
        return waits

    def _departed_among(self, free: set[int]) -> Cause | None:
        """A rank that did not do what was due, and so made ``free`` seem to be the cause."""
        gone = free & self.waiting.gone
        waits = self._waits_for(free)
        suspects = set(free)
        for wait in waits:
            suspects.update(wait.inside)
        departures = self._departures(suspects)
        guilty = [departure for departure in departures if self._is_proven(departure)]
        if gone and not guilty and not self._most_are_gone():
            # What a rank did may have ended another, far from where it is missed.
            every_departure = self._departures(self.ranks.keys() - gone)
            guilty = [departure for departure in every_departure if self._is_late(departure)]
        return self._departed(guilty, waits) or self._minority(waits, departures)

    def _most_are_gone(self) -> bool:
        return 2 * len(self.waiting.gone) > len(self.waiting.world)

    def _most_missed_first(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The rank that most ranks are seen to wait for comes first."""
        waiters = dict.fromkeys(sorted(ranks), 0)
        for wait in self.waiting.waits:
            for rank in wait.missed:
                if rank in waiters:
                    waiters[rank] += len(wait.inside)
        # Of ranks that equally many wait for, the lowest comes first.
        return tuple(sorted(waiters, key=lambda rank: -waiters[rank]))

    def _is_late(self, departure: Departure) -> bool:
        """Whether it is of the last calls, and nobody made the calls of this rank in that order."""
        calls = self.ranks[departure.rank].calls
        is_recent = departure.at >= len(calls) // 2
        return is_recent and not self.history.is_confirmed(departure.rank)

    # Ranks that wait for each other.

    def _circle(self, within: set[int]) -> Cause:
        """All wait for each other: who did not do what was due."""
        waiting = self.waiting
        departures = self._departures(within)
        strong = [departure for departure in departures if departure.weight[0] == _BOTH]
        waits = []
        for rank in sorted(within):
            waits += waiting.of.get(rank, [])
        cause = self._departed(strong, waits)
        if cause is None:
            cause = self._minority(waits, departures)
        if cause is None:
            cause = self._departed(departures, waits)
        if cause is not None:
            return cause
        unseen = waiting.unseen & within
        if unseen:
            return self._unseen(unseen)
        circle = waiting.circle(within)
        first = next((wait for _, _, wait in circle if wait is not None), None)
        kind: Kind = "order"
        if first is not None and first.unlike:
            kind = "mismatch"
        ranks = tuple(sorted(rank for rank, _, _ in circle))
        return Cause(kind, ranks, first, circle, doubt="which")

    def _unseen(self, unseen: set[int]) -> Cause:
        """Ranks that wait for each other are in sends or receives that are not recorded."""
        # If most of a group are in a call, the few that are not are the fault.
        fullest: Wait | None = None
        for wait in self.waiting.waits:
            is_fuller = fullest is None or len(wait.inside) > len(fullest.inside)
            is_most = 0 < len(wait.absent) < len(wait.inside)
            if is_fuller and is_most and unseen.issuperset(wait.absent):
                fullest = wait
        if fullest is not None:
            return Cause("never entered", fullest.absent, fullest, doubt="hidden")
        return Cause("order", tuple(sorted(unseen)), doubt="hidden")

    def _minority(self, waits: Sequence[Wait], departures: Sequence[Departure]) -> Cause | None:
        """Of the ranks that made different calls at one place of a group, the fewer."""
        for wait in waits:
            parts = self.waiting.unequal.get((wait.group, wait.seq), [])
            named: set[int] = set()
            for smaller_part in parts[:-1]:
                named |= smaller_part
            if not named or len(named) >= len(parts[-1]):
                continue
            # What the minority did instead of what was due.
            departure = None
            for candidate in reversed(departures):
                if candidate.rank in named:
                    departure = candidate
            doubt: Doubt = "either"
            if len(parts[-1]) >= _MANY * len(named):
                doubt = ""
            return Cause("mismatch", tuple(sorted(named)), wait, (), departure, doubt)
        return None

    def _departures(self, ranks: Iterable[int]) -> list[Departure]:
        """Calls that ranks made instead of the one that was due, the clearest first."""
        departures = self.history.departures(sorted(ranks))
        return sorted(departures, key=lambda departure: departure.weight, reverse=True)

    def _departed(self, departures: Sequence[Departure], waits: Sequence[Wait]) -> Cause | None:
        """The ranks that most clearly did not do what was due."""
        if not departures:
            return None
        waiting = self.waiting
        first = departures[0]
        named = []
        own_waits = []
        for departure in departures:
            if departure.weight == first.weight:
                named.append(departure.rank)
                own_waits += waiting.of.get(departure.rank, [])
        # A call that others made differently shows the fault best.
        unlike = [wait for wait in own_waits if wait.unlike]
        wait = next(iter([*unlike, *own_waits, *waits]), None)
        kind: Kind = "order"
        circle: Sequence[tuple[int, int, Wait | None]] = ()
        if unlike:
            kind = "mismatch"
        elif len(waiting.last_ones) == 1 < len(waiting.last_ones[0]):
            circle = waiting.circle(waiting.last_ones[0])
        doubt: Doubt = "either"
        if self._is_proven(first) or (len(named) == 1 and self._is_only_one(first)):
            doubt = ""
        return Cause(kind, tuple(sorted(named)), wait, circle, first, doubt)

    # Whether others may have caused the same recording.

    def _doubt(self, kind: Kind, named: set[int], wait: Wait | None) -> Doubt:
        """Why others may be the cause of what these ranks seem to be."""
        waiting = self.waiting
        if kind == "raised":
            return ""
        if named & waiting.gone & waiting.recording.unread:
            return "unread"
        is_gone = kind == "no dump"
        if is_gone and self._most_are_gone():
            return "few"
        if not is_gone:
            hidden = self._hidden(named)
            if hidden:
                return hidden
        if wait is None:
            return "hidden" if waiting.guessing else "alone"
        if not is_gone and any(self._is_old(rank, wait) for rank in named):
            return "old"
        # The call that others wait in may be queued behind one that the recorder has lost.
        if not self._shows_its_stop(wait.rank):
            return "either"
        # A few ranks may wait in a call that should not be, for more ranks that are right.
        if self.history.makers(wait.rank, wait.at) <= len(named):
            return "either"
        if is_gone and not self._is_everyone_right():
            return "either"
        return ""

    def _is_old(self, rank: int, wait: Wait) -> bool:
        """Whether the rank still worked when it wrote, or wrote before the call that it misses."""
        recording = self.ranks[rank]
        moment = recording.written or recording.latest
        idle_from = self.waiting.last_time(rank) + self.waiting.patience
        return 0 < moment < max(wait.call.created, idle_from)

    def _hidden(self, ranks: Iterable[int]) -> Doubt:
        """Whether one of them may wait in a call that is not recorded."""
        waiting = self.waiting
        if waiting.blind.intersection(ranks):
            return "blind"
        for rank in ranks:
            # The calls that a rank has queued may wait for a send that the recorder has lost.
            if rank in waiting.unseen or rank in waiting.of:
                return "hidden"
            # Without a stack, a rank that looks busy may be in a send or receive.
            if rank in self.ranks and not self.ranks[rank].stack and not waiting.sees_p2p(rank):
                return "hidden"
        return ""

    def _is_everyone_right(self) -> bool:
        """Whether every other rank is known, and none of them can be the cause."""
        waiting = self.waiting
        seen_ranks = self.ranks.keys() - waiting.gone
        if len(waiting.last_ones) > 1 or len(waiting.gone) > 1:
            return False
        if waiting.raised or waiting.unequal or waiting.blind:
            return False
        if not waiting.is_world_known or not all(map(self._shows_its_stop, seen_ranks)):
            return False
        # A rank that is in no recorded call may be in one that is not recorded.
        if self._hidden(seen_ranks - waiting.of.keys()):
            return False
        # Ranks may have made the call in place of another, however many they are.
        if any(map(self.history.is_disputed, seen_ranks)):
            return False
        for departure in self._departures(seen_ranks):
            # Where it did as always, and most ranks did otherwise, the others are suspects.
            is_outvoted = departure.before is False and departure.others > departure.alike
            if departure.before or is_outvoted:
                return False
        # A call that nobody else made may have ended it: gloo ends a rank that receives too much.
        return all(self.history.is_confirmed(rank) for rank in seen_ranks)

    def _shows_its_stop(self, rank: int) -> bool:
        """Whether the recorder still has the call that a rank is in, and not only later ones."""
        recording = self.ranks[rank]
        # Of a rank that queues calls, a short recorder may hold only those behind the call.
        return recording.whole or bool(recording.calls.done[:1].all())

    def _is_proven(self, departure: Departure) -> bool:
        """Without all of its calls, a stage looks as another until others wait for it.

        Sends and receives may not be recorded, and a short recorder has lost earlier calls.
        """
        rank = departure.rank
        due = departure.due
        has_all_calls = self.waiting.sees_p2p(rank) and self.ranks[rank].whole
        if not departure.is_proven or due is None or has_all_calls:
            return departure.is_proven
        groups = self.waiting.recording.groups
        for wait in self.waiting.waits:
            is_missed = rank in wait.absent or rank in wait.unlike
            is_due = groups[wait.group].label == groups[due.group].label and wait.seq == due.seq
            if is_missed and is_due:
                return True
        return False

    def _is_only_one(self, departure: Departure) -> bool:
        """Whether most others did otherwise, and every other rank's calls are confirmed."""
        history = self.history
        rank = departure.rank
        if self.waiting.gone or departure.others <= max(1, departure.alike):
            return False
        # Most of a role may have met one wrong condition, if another role does as this rank.
        is_shared = departure.before is None and history.is_shared(rank, departure.at)
        if departure.before is False or is_shared or history.is_confirmed(rank):
            return False
        return all(history.is_confirmed(other) for other in self.ranks if other != rank)
