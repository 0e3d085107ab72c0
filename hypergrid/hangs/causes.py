"""The first cause of a hang, told apart from those who wait because of it.

Three principles decide. Ranks that wait wait for others, those for others again, and so on: at the
end of every such chain is one set of ranks of which one has to move before anybody can; with one
fault, the guilty rank is in it. If the set is one rank that waits for nobody, it is that rank. If
they wait for each other, one of them did not do what was due: what ranks of its role did that had
done the same until then, and what it did itself in earlier steps. And a verdict is certain only if
no other rank can have caused the same recording.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    "hidden",  # it may wait itself, in what is not recorded
    "alone",  # nobody is seen to wait for it
    "old",  # its dump is older than the call that it misses
    "slow",
    "either",  # it may be the others who are wrong
]
_TOGETHER = 10**9  # ns; ranks that raised within this of each other raised together
_BEFORE = 8  # calls of a group before the one that it waits in, which may be the one that failed
import os
LIMIT = int(os.environ.get('LIMIT', '0'))
MODE = int(os.environ.get('MODE', '0'))
_MANY = 4  # as many times more ranks are right where only their number speaks


@dataclass(frozen=True)
class Cause:
    """Why the others wait, as data."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    wait: Wait | None = None  # in which they are missed
    waits: Sequence[Wait] = ()  # others, the nearest first
    circle: Sequence[tuple[int, int, Wait | None]] = ()  # who waits for whom
    departure: Departure | None = None  # where they did not do what was due
    doubt: Doubt = ""


class Rules:
    """Finds the first cause."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting, self.ranks = waiting, waiting.ranks

    def cause(self) -> Cause:
        """The fault."""
        found = self._decided()
        return replace(found, doubt="mixed") if self.waiting.recording.mixed else found

    @cached_property
    def history(self) -> History:
        """The usual course of the ranks; only some verdicts need it."""
        return History(self.waiting.recording)

    def _decided(self) -> Cause:
        waiting = self.waiting
        if not any(mine.answered for mine in self.ranks.values()):
            return Cause("empty")
        ends = waiting.last_ones()
        free = {rank for some in ends if len(some) == 1 for rank in some}
        free = free - waiting.in_motion or free
        if free - waiting.in_motion or (not ends and (waiting.raised or waiting.gone)):
            return self._free(free or waiting.raised or waiting.gone)
        if ends and not free:
            return self._circle(max(ends, key=len))
        if waiting.running:
            longest = max(waiting.running, key=lambda wait: wait.ns)
            sure = not waiting.gone and not waiting.waits and self.is_slow(longest)
            return Cause("slow", (), longest, waiting.running, doubt="" if sure else "slow")
        if not any(self.ranks[rank].calls for rank in self.ranks.keys() - waiting.blind):
            return Cause("empty")
        return Cause("ok", doubt="hidden" if self._is_hidden({*self.ranks}) else "")

    def is_slow(self, wait: Wait) -> bool:
        group = self.waiting.recording.groups[wait.group]
        members = self.waiting.members(wait.group)
        known = group.ranks
        rooted = wait.call.what.name in ("broadcast", "reduce", "gather", "scatter")
        whole = all(self.ranks[r].whole for r in self.ranks)
        return bool(known) and {*members} == {*wait.inside} and not rooted and whole and not self.waiting.gone

    def _free(self, free: set[int]) -> Cause:
        """Ranks that others wait for and that wait for nobody."""
        waiting = self.waiting
        kind: Kind = "never entered"
        waits = [wait for wait in waiting.waits if not free.isdisjoint(wait.missed)]
        gone = free & waiting.gone
        if free & waiting.raised:
            kind, named = "raised", free & waiting.raised
            begun = min(self.ranks[rank].written for rank in named)
            named = {rank for rank in named if self.ranks[rank].written - begun < _TOGETHER}
        else:
            suspects = free.union(*(wait.inside + wait.unlike for wait in waits))
            found = self._departures(suspects, alone=bool(gone))
            fatal = [each for each in found if self._is_proven(each) or self._is_fatal(each, gone)]
            if gone and not fatal:
                every = self._departures({*self.ranks} - waiting.gone)
                fatal = [d for d in every if d.at >= len(self.ranks[d.rank].calls) // 2 and not self.history.is_confirmed(d.rank) and self._speaks(d)]
            odd = self._departed(fatal, waits) or self._minority(waits, found)
            if odd:
                return odd
            named = free - waiting.blind - waiting.gone or gone or free
            if 2 * len(waiting.gone) > waiting.recording.world_size:
                named = free - waiting.gone or waiting.gone
            kind = "no dump" if named <= waiting.gone else kind
        waits = [wait for wait in waits if not named.isdisjoint(wait.missed)]
        wait = max(waits, key=lambda each: self._nearness(named, each), default=None)
        doubt = self._doubt(kind, named, waits)
        if wait and doubt != "few":
            named = named.intersection(wait.missed)
        behind = waiting.behind(wait, named) if wait else ()
        return Cause(kind, tuple(sorted(named)), wait, behind, doubt=doubt)

    def _minority(self, waits: Sequence[Wait], found: Sequence[Departure]) -> Cause | None:
        """Of the ranks that made different calls at one place of a group, the fewer."""
        for (group, seq), (*odd, most) in self.waiting.unequal.items():
            named = sorted(set().union(*odd))
            there = next((wait for wait in waits if wait.group == group), None)
            if there and len(named) < len(most):
                there = there._replace(seq=seq)
                doubt: Doubt = "" if len(most) >= _MANY * len(named) else "either"
                left = next((each for each in found if each.rank in named), None)
                return Cause("mismatch", tuple(named), there, self.waiting.waits, (), left, doubt)
        return None

    def _speaks(self, d: Departure) -> bool:
        return (d.others > d.alike) if MODE == 0 else (d.others >= d.alike and d.before is not False) if MODE == 1 else d.before is True or d.others > d.alike

    def _is_fatal(self, found: Departure, gone: set[int]) -> bool:
        """Whether a call that was not due may have ended others: gloo's ranks do not survive it."""
        calls = self.ranks[found.rank].calls
        title = calls[found.at].title
        late = found.at >= len(calls) - _BEFORE and found.weight[0] > 0
        mine = title.backend == "gloo" and not title.p2p
        return late and mine and not gone.isdisjoint(self.waiting.members(title.group))

    def _doubt(self, kind: Kind, named: set[int], waits: Sequence[Wait]) -> Doubt:
        """Why others may be the cause of what these ranks seem to be."""
        waiting = self.waiting
        if kind == "raised":
            return ""
        if named & waiting.gone & waiting.recording.unread:
            return "unread"
        if 2 * len(waiting.gone) > waiting.recording.world_size:
            return "few"
        if kind != "no dump" and self._is_hidden(named):
            return "hidden"
        if not waits:
            hidden = any(not named.isdisjoint(others) for others in waiting.guessed.values())
            return "hidden" if hidden else "alone"
        written = [self.ranks[rank].written for rank in named if rank in self.ranks]
        if kind != "no dump" and any(0 < at < waits[0].call.created for at in written):
            return "old"
        for rank in named & self.ranks.keys():
            mine = self.ranks[rank]
            moment = mine.written or mine.latest
            last = int(mine.calls.columns[2:5, -1].max()) if mine.calls else 0
            if kind != "no dump" and moment and (moment - last < waiting._patience or moment < waits[0].call.created):
                return "old"
        if kind == "no dump" and (len(waiting.gone) > 1 or waiting.raised or not self._is_alone(named)):
            return "either"
        if kind == "no dump" and (any(d.weight[0] > 1 for d in self.history.departures(sorted(self.ranks.keys()), alone=True)) or not all(self.history.is_confirmed(r) for r in self.ranks.keys() - waiting.gone)):
            return "either"
        for rank in named:
            # One rank may wait in a call that should not be, for ranks that have done all.
            most = 0
            for wait in waits:
                if rank in wait.absent + wait.unlike:
                    usual = self.history.is_usual(wait.rank, wait.at)
                    makers = self.history.makers(wait.rank, wait.at)
                    most = max(most, makers * (usual is not False or makers >= _MANY * len(named)))
            if most <= max(1, len(named)):
                return "either"
        return ""

    def _is_alone(self, gone: set[int]) -> bool:
        """Whether no last call can have ended ranks, as one of another size can on gloo."""
        waiting, history = self.waiting, self.history
        if waiting.unequal or waiting.blind:
            return False
        for rank, mine in self.ranks.items():
            for at in range(max(0, len(mine.calls) - _BEFORE), len(mine.calls)):
                title = waiting.recording.titles[mine.calls.title[at]]
                members = waiting.recording.groups[title.group].ranks
                apart = members and gone.isdisjoint(members)
                if apart or title.p2p or title.backend != "gloo":
                    continue
                if not history.is_usual(rank, at) and history.makers(rank, at) < _MANY:
                    return False
        return True

    def _is_hidden(self, ranks: set[int]) -> bool:
        """Whether one of them may wait in a call that is not recorded."""
        waiting = self.waiting
        return bool(ranks & (waiting.unseen | waiting.blind | waiting.of.keys())) or any(
            not self.ranks[rank].stack and not waiting.sees_p2p(rank)
            for rank in ranks & self.ranks.keys()
        )

    def _nearness(self, named: set[int], wait: Wait) -> tuple[int, ...]:
        """How many of them are missed there; then whether the call is due, and its age."""
        missed = named.intersection(wait.missed)
        due = self.history.is_due(min(missed), wait.call)
        return (len(missed), due, -wait.at * self.ranks[wait.rank].whole, wait.ns)

    def _departures(self, ranks: set[int], *, alone: bool = True) -> list[Departure]:
        found = self.history.departures(sorted(ranks), alone=alone)
        return sorted(found, key=lambda each: each.weight, reverse=True)

    def _circle(self, within: set[int]) -> Cause:
        """All wait for each other: who did not do what was due."""
        waiting = self.waiting
        found = self._departures(within)
        waits = [w for rank in sorted(within) for w in waiting.of.get(rank, ())]
        strong = [each for each in found if each.weight[0] > 2]
        odd = self._departed(strong, waits) or self._minority(waits, found)
        odd = odd or self._departed(found, waits)
        if odd:
            return odd
        unseen = waiting.unseen & within
        # Most of a group are in a call: that the others are not is more than they can do.
        most = [w for w in waiting.waits if 0 < len(w.absent) < len(w.inside)]
        most = [wait for wait in most if unseen.issuperset(wait.absent)]
        if most:
            wait = max(most, key=lambda each: len(each.inside))
            behind = waiting.behind(wait, wait.absent)
            return Cause("never entered", wait.absent, wait, behind, doubt="hidden")
        if unseen:
            return Cause("order", tuple(sorted(unseen)), None, waiting.waits, doubt="hidden")
        circle = waiting.circle(within)
        in_circle = [wait for *_, wait in circle if wait]
        first = next(iter(in_circle), None)
        kind: Kind = "mismatch" if first and first.unlike else "order"
        others = [each for each in waiting.waits if each not in in_circle]
        return Cause(
            kind, tuple(sorted(each for each, *_ in circle)), first, others, circle, doubt="either"
        )

    def _is_proven(self, found: Departure) -> bool:
        """Without its sends and receives, a stage looks as another until others wait for it."""
        if not found.is_proven or found.due is None or self.waiting.sees_p2p(found.rank):
            return found.is_proven
        groups, due = self.waiting.recording.groups, found.due
        call = self.ranks[found.rank].calls[found.at]
        return (call.group, call.seq) in self.waiting.unequal or any(
            (wait.seq, groups[wait.group].label) == (due.seq, groups[due.group].label)
            for wait in self.waiting.waits
            if found.rank in wait.absent + wait.unlike
        )

    def _departed(self, found: Sequence[Departure], waits: Sequence[Wait]) -> Cause | None:
        """The ranks that most clearly did not do what was due."""
        if not found:
            return None
        first, waiting = found[0], self.waiting
        alike = 1 if first.is_proven else None
        named = {each.rank for each in found if each.weight[:alike] == first.weight[:alike]}
        own = [wait for rank in sorted(named) for wait in waiting.of.get(rank, ())]
        unlike = [wait for wait in own if wait.unlike]
        wait = next(iter([*unlike, *own, *waits]), None)
        ends = waiting.last_ones()
        circle = waiting.circle(ends[0]) if len(ends) == 1 < len(ends[0]) and not unlike else ()
        behind = waiting.behind(wait, named) if wait else ()
        sure = all(self._is_proven(each) for each in found if each.rank in named)
        most = first.others > max(1, first.alike) and first.before is not False and not first.is_new
        rest = self.ranks.keys() - named - waiting.gone
        if most and len(named) == 1 and not self.history.is_confirmed(first.rank) and all(self.history.is_confirmed(r) for r in rest):
            sure = True
        kind: Kind = "mismatch" if unlike else "order"
        return Cause(
            kind, tuple(sorted(named)), wait, behind, circle, first, doubt="" if sure else "either"
        )
