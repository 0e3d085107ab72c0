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

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from hypergrid.hangs.history import Departure, History
from hypergrid.hangs.recording import Call, Ranks
from hypergrid.hangs.waiting import OUTSIDE, PATIENCE, Wait, Waiting

Kind: TypeAlias = Literal[
    "ok",  # nothing is wrong
    "empty",  # nothing was recorded
    "mismatch",  # other operation, size, dtype or root at the same place of a group
    "order",  # the ranks wait for each other: other order, or a call left out
    "raised",  # the rank others wait for raised
    "no dump",  # it left no dump: ended, stopped, or unreachable
    "never entered",  # it is busy elsewhere
    "outside",  # ranks wait for a process that is none of the job
    "slow",  # all ranks are in it
]
Doubt: TypeAlias = Literal[
    "",
    "mixed",  # the files seem to be of two jobs
    "blind",  # a flight recorder is missing
    "hidden",  # it may wait itself, in what is not recorded
    "unlisted",  # a member may be a rank that did not create the group
    "sounds",  # its error may come from another rank
    "alone",  # nobody is seen to wait for it
    "old",  # its dump is older than the call that it misses
    "partial",  # somebody may be missing in a call that all known ranks are in
    "root",  # the ranks may have named different roots
    "either",  # it may be the others who are wrong
    "which",  # it may be any of them
]
_BOTH = 3  # the score of a departure against which its own past and other ranks speak
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


@dataclass(frozen=True)
class Cause:
    """Why the others wait, as data."""

    kind: Kind
    ranks: Ranks = ()
    wait: Wait | None = None  # in which they are missed
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
        ends = [ranks for ranks in waiting.last_ones if OUTSIDE not in ranks]
        if ends:
            free: set[int] = set()
            for ranks in ends:
                # One rank alone waits for nobody, several wait for each other.
                if len(ranks) == 1:
                    free |= ranks
            if not free:
                return self._circle(ends[0])
            # A rank whose own call all ranks are in moves as soon as that ends.
            at_rest = free.difference(*(wait.inside for wait in waiting.running))
        else:
            waits_outside = self._waits_for({OUTSIDE})
            if waits_outside:
                return self._outside(waits_outside)
            at_rest = waiting.raised or waiting.gone
        if at_rest:
            return self._free(at_rest)
        # Nobody is missed in these calls: their own work is slow, or the network.
        if waiting.running:
            return self._slow()
        if not any(recording.has_calls and recording.calls for recording in self.ranks.values()):
            return Cause("empty")
        return Cause("ok", doubt=self._hidden(self.ranks))

    def _outside(self, waits: Sequence[Wait]) -> Cause:
        """Ranks wait for a process of another job, and for no rank of this one."""
        longest = max(waits, key=lambda wait: wait.ns)
        group = self.waiting.recording.groups[longest.call.group]
        is_beyond = max(group.outside) >= len(self.waiting.world)
        return Cause(
            "outside",
            tuple(sorted(longest.inside)),
            longest,
            doubt="" if is_beyond else "unlisted",
        )

    def _slow(self) -> Cause:
        """All known ranks are in a call."""
        waiting = self.waiting
        longest = max(waiting.running, key=lambda wait: wait.ns)
        group = waiting.recording.groups[longest.call.group]
        has_all_members = longest.inside == set(group.ranks)
        is_whole = all(recording.whole for recording in self.ranks.values())
        is_known = is_whole and has_all_members
        doubt: Doubt = ""
        if longest.call.what.name in _ROOTED:
            # No recorder has the root, so that calls with two roots look alike.
            doubt = "root"
        elif waiting.waits or not is_known:
            doubt = "partial"
        return Cause("slow", wait=longest, doubt=doubt)

    # One rank that waits for nobody.

    def _free(self, free: set[int]) -> Cause:
        """Ranks that others wait for and that wait for nobody."""
        waiting = self.waiting
        raised = free & waiting.raised
        if raised:
            # The errors of ranks that raised later may be its consequences.
            first = min(raised, key=lambda rank: self.ranks[rank].written)
            return self._missed("raised", {first})
        departed = self._departed_among(free)
        if departed is not None:
            return departed
        # What is seen comes before what is only missing.
        recorded = free - waiting.gone
        if recorded:
            return self._missed("never entered", recorded)
        return self._missed("no dump", free)

    def _missed(self, kind: Kind, named: set[int]) -> Cause:
        """The ranks that are missed in the first of all calls that wait for one of them."""
        waits = self._waits_for(named)
        waits.sort(key=lambda wait: self._lateness(named, wait))
        first = None
        if waits:
            first = waits[0]
        # Of all that nobody explains, also of those that are missed elsewhere.
        doubt = self._doubt(kind, named, first)
        if first is not None:
            named = named & first.missed
        return Cause(kind, tuple(sorted(named)), first, doubt=doubt)

    def _lateness(self, named: set[int], wait: Wait) -> tuple[bool, int, int]:
        """Whether the call is not due, how late in the program it is, and how short its wait."""
        missed_rank = min(named & wait.missed)
        is_due = self.history.is_due(missed_rank, wait.call)
        return (not is_due, wait.at, -wait.ns)

    def _waits_for(self, ranks: set[int]) -> list[Wait]:
        """The calls in which at least one of the ranks is missed."""
        waits = []
        for wait in self.waiting.waits:
            if not ranks.isdisjoint(wait.missed):
                waits.append(wait)
        return waits

    def _departed_among(self, free: set[int]) -> Cause | None:
        """A rank that did not do what was due, and so made ``free`` seem to be the cause."""
        waits = self._waits_for(free)
        # Ranks that made a call too many are in it, and wait for those that are right.
        suspects = set(free)
        for wait in waits:
            suspects |= wait.inside
        departures = self.history.departures(suspects)
        guilty = [departure for departure in departures if self._is_proven(departure)]
        without_dump = free & self.waiting.gone
        has_most_dumps = 2 * len(self.waiting.gone) <= len(self.waiting.world)
        if without_dump and not guilty and has_most_dumps:
            # What a rank did may have ended another, far from where it is missed.
            recorded_ranks = self.ranks.keys() - without_dump
            for departure in self.history.departures(recorded_ranks):
                if self._is_late(departure):
                    guilty.append(departure)
        cause = self._departed(guilty, waits)
        if cause is None:
            cause = self._minority(waits, departures)
        return cause

    def _is_late(self, departure: Departure) -> bool:
        """Whether it is of the last calls, and nobody made the calls of this rank in that order.

        Where several left no file, nobody who did the same may be left to compare with: then only
        a call that has not ended counts.
        """
        rank = departure.rank
        calls = self.ranks[rank].calls
        is_recent = departure.at >= len(calls) // 2
        if len(self.waiting.gone) > 1 and not departure.peers:
            is_recent = not calls[departure.at].done
        return is_recent and not self.history.is_confirmed(rank)

    # Ranks that wait for each other.

    def _circle(self, within: set[int]) -> Cause:
        """All wait for each other: who did not do what was due."""
        waiting = self.waiting
        waits = []
        for rank in sorted(within):
            waits += waiting.of.get(rank, [])
        departures = self.history.departures(within)
        strong = [departure for departure in departures if departure.score == _BOTH]
        # The clearest evidence comes first: each of these finds a cause where the ones before it
        # find none.
        cause = (
            self._departed(strong, waits)
            or self._minority(waits, departures)
            or self._departed(departures, waits)
            or self._few_missing(within)
        )
        if cause is not None:
            return cause
        functions = {}
        for rank, name in waiting.unseen.items():
            if rank in within:
                functions[rank] = name
        if functions:
            # Stacks are evidence too: of ranks in different calls, those in a rarer one.
            ((usual, count),) = Counter(functions.values()).most_common(1)
            named = [rank for rank, name in functions.items() if name != usual]
            if not 0 < len(named) < count:
                named = sorted(functions)
            return Cause("order", tuple(named), doubt=self._hidden(functions))
        first = None
        if waits:
            first = waits[0]
        return Cause("order", tuple(sorted(within)), first, doubt="which")

    def _few_missing(self, within: set[int]) -> Cause | None:
        """If most of a group are in a call, the few that are not: the members who agree count."""
        waits = []
        for wait in self.waiting.waits:
            if wait.absent <= within and 0 < len(wait.absent) < len(wait.entered):
                waits.append(wait)
        if not waits:
            return None
        fullest = max(waits, key=lambda wait: len(wait.inside))
        is_seen = within.isdisjoint(self.waiting.unseen)
        ranks = sorted(fullest.absent)
        return Cause(
            "never entered",
            tuple(ranks),
            fullest,
            doubt="either" if is_seen else "hidden",
        )

    def _minority(self, waits: Sequence[Wait], departures: Sequence[Departure]) -> Cause | None:
        """Of the ranks that made different calls at one place of a group, the fewer."""
        for wait in waits:
            parts = self.waiting.unequal.get(wait.place, [{}])
            *smaller_parts, largest = parts
            named: set[int] = set().union(*smaller_parts)
            # Of two equal halves, neither is the minority.
            if not 0 < len(named) < len(largest):
                continue
            # What the minority did instead of what was due.
            of_named = (departure for departure in departures if departure.rank in named)
            departure = next(of_named, None)
            ranks = sorted(named)
            return Cause("mismatch", tuple(ranks), wait, departure=departure, doubt="either")
        return None

    def _departed(self, departures: Sequence[Departure], waits: Sequence[Wait]) -> Cause | None:
        """The ranks that most clearly did not do what was due."""
        if not departures:
            return None
        first = departures[0]
        named = []
        named_waits = []
        for departure in departures:
            if departure.weight == first.weight:
                named.append(departure.rank)
                named_waits += self.waiting.of.get(departure.rank, [])
        # A call that others made differently shows the fault best.
        unlike = [wait for wait in named_waits if wait.unlike]
        best_first = [*unlike, *named_waits, *waits]
        is_proven = self._is_proven(first) or (len(named) == 1 and self._is_only_one(first))
        # A member without a file may have called as this rank did.
        is_certain = is_proven and not any(map(self._may_turn, unlike))
        return Cause(
            "mismatch" if unlike else "order",
            tuple(sorted(named)),
            best_first[0] if best_first else None,
            departure=first,
            doubt="" if is_certain else "either",
        )

    # Whether others may have caused the same recording.

    def _doubt(self, kind: Kind, named: set[int], wait: Wait | None) -> Doubt:
        """Why others may be the cause of what these ranks seem to be."""
        waiting = self.waiting
        if kind == "raised":
            if named & waiting.doubtful:
                return "sounds"
            return ""
        if kind == "no dump":
            # Nobody waits for it: it may have ended after the fault, because of another rank.
            if wait is None:
                return "blind"
            if self._is_outnumbered(named, wait):
                return "blind"
            if self._is_everyone_right():
                return ""
            return "blind"
        hidden = self._hidden(named)
        if hidden:
            return hidden
        if wait is None:
            if waiting.guessing:
                return "hidden"
            return "alone"
        if any(self._is_old(rank, wait) for rank in named):
            return "old"
        if self._is_outnumbered(named, wait):
            return "either"
        # The call that others wait in may be queued behind one that the recorder has lost.
        if not self._shows_its_stop(wait.rank):
            return "either"
        return ""

    def _is_outnumbered(self, named: set[int], wait: Wait) -> bool:
        """Whether as many ranks may have left the call out as are in such a call.

        A few ranks may wait in a call that should not be, for more ranks that are right; those
        without a file may have done as these.
        """
        makers = self.history.makers(wait.rank, wait.at)
        may_have_left_out = named | self.waiting.gone
        return makers <= len(may_have_left_out)

    def _is_old(self, rank: int, wait: Wait) -> bool:
        """Whether the rank still worked when it wrote, or wrote before the call that it misses."""
        recording = self.ranks[rank]
        moment = recording.written or recording.latest
        last_time = self.waiting.last_time(rank)
        idle_from = last_time + PATIENCE
        return 0 < moment < max(wait.call.created, idle_from)

    def _hidden(self, ranks: Iterable[int]) -> Doubt:
        """Whether one of them may wait in a call that is not recorded."""
        waiting = self.waiting
        if waiting.blind.intersection(ranks):
            return "blind"
        for rank in ranks:
            if rank in waiting.unseen:
                return "hidden"
            # The calls that a rank has queued may wait for a send that the recorder has lost.
            if rank in waiting.of:
                return "hidden"
            # A rank without a file has no stack and no calls to look at.
            if rank not in self.ranks:
                continue
            # Without a stack, a rank that looks busy may be in a send or receive.
            if not self.ranks[rank].stack and not waiting.sees_p2p(rank):
                return "hidden"
        return ""

    def _is_everyone_right(self) -> bool:
        """Whether every other rank is known, and none of them can be the cause."""
        waiting = self.waiting
        # Each of several ends of the chains may be where the fault began.
        if len(waiting.last_ones) > 1:
            return False
        if len(waiting.gone) > 1:
            return False
        if waiting.raised:
            return False
        # A rank that no file names may have left none.
        if not waiting.is_world_known:
            return False
        recorded_ranks = self.ranks.keys() - waiting.gone
        # A rank that is in no recorded call may be in one that is not recorded.
        if self._hidden(recorded_ranks - waiting.of.keys()):
            return False
        for wait in waiting.waits:
            if not self._is_usual(wait):
                return False
        for rank in recorded_ranks:
            if not self._shows_its_stop(rank):
                return False
            if not self.history.is_confirmed(rank):
                return False
        for departure in self.history.departures(recorded_ranks):
            if departure.before:
                return False
            # Where it did as always, and most ranks did otherwise, the others are suspects.
            if departure.before is False and departure.is_outvoted:
                return False
        return True

    def _is_usual(self, wait: Wait) -> bool:
        """Whether a call was made in earlier steps, or by most ranks of the job.

        Another call may have ended the rank that is missed in it: gloo ends a rank that receives
        too much.
        """
        makers = self.history.makers(wait.rank, wait.at)
        is_of_most = 2 * makers > len(self.waiting.world)
        if is_of_most:
            return True
        return self.history.was_made_before(wait.rank, wait.at)

    def _shows_its_stop(self, rank: int) -> bool:
        """Whether the recorder still has the call that a rank is in, and not only later ones."""
        recording = self.ranks[rank]
        if recording.whole:
            return True
        # Of a rank that queues calls, a short recorder may hold only those behind the call.
        return bool(recording.calls.rows["done"][:1].all())

    def _is_proven(self, departure: Departure) -> bool:
        """Whether its past and other ranks speak against it, and it is of the role that it seems.

        Without all of its calls, a stage looks as another until others wait for it: sends and
        receives may not be recorded, and a short recorder has lost earlier calls.
        """
        if departure.before is not True:
            return False
        if not departure.is_outvoted:
            return False
        rank = departure.rank
        if self.waiting.sees_p2p(rank) and self.ranks[rank].whole:
            return True
        groups = self.waiting.recording.groups

        def place(call: Call) -> tuple[bool, str, int]:
            """Equal for the calls of other ranks in groups of their own."""
            return (call.title.is_on_gloo, groups[call.group].label, call.seq)

        for wait in self.waiting.waits:
            is_due = place(wait.call) == place(departure.due)
            if is_due and rank in wait.absent | wait.unlike:
                return True
        return False

    def _may_turn(self, wait: Wait) -> bool:
        """Whether members without a file may turn the vote of those that called differently."""
        without_dump = wait.absent & self.waiting.gone
        if not without_dump:
            return False
        *smaller_parts, largest = self.waiting.unequal[wait.place]
        most = len(without_dump) + sum(map(len, smaller_parts))
        return len(largest) <= most

    def _is_only_one(self, departure: Departure) -> bool:
        """Whether most others did otherwise, and every other rank's calls are confirmed."""
        history = self.history
        rank = departure.rank
        # A rank without a file cannot be confirmed.
        if self.waiting.gone or not self.waiting.is_world_known:
            return False
        if not departure.is_outvoted:
            return False
        # It did as always: then the others changed.
        if departure.before is False:
            return False
        # Most of a role may have met one wrong condition, if another role does as this rank.
        if departure.before is None and history.is_shared(rank, departure.at):
            return False
        unconfirmed_ranks = [member for member in self.ranks if not history.is_confirmed(member)]
        return unconfirmed_ranks == [rank]
