"""Who is everyone waiting for? The verdict on what a hanging job left."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

from hypergrid.analysis.recording import DEFAULT, Call, Frame, Group, Recording
from hypergrid.messages import span_of
from hypergrid.plan import GroupPlan

SCHEMA = 1
PATIENCE = 1.0  # seconds; who waits for less is not stuck
_NOWHERE = -1  # the last number of a rank that left no dump
_LAST = 8  # calls before a hang whose order is compared
_LONGEST = 12  # lines of a chain

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
State: TypeAlias = Literal["cause", "raised", "no dump", "waiting", "running", "elsewhere"]


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong, and how it is known.

    ``ranks`` are the first cause, and everyone else waits because of them. ``group`` is the label
    and ``members`` the ranks of the group in which they are missed, ``seq`` the number of the
    call there. ``chain`` is why, in sentences, from the cause outwards. ``waiting`` has the ranks
    that each waiting rank waits for.
    """

    kind: Kind
    sentence: str
    ranks: tuple[int, ...] = ()
    group: str | None = None
    members: tuple[int, ...] = ()
    operation: str | None = None
    seq: int | None = None
    seconds: float | None = None  # since when others wait; a lower bound
    chain: tuple[str, ...] = ()
    waiting: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    states: Mapping[int, State] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.kind == "ok"

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {"schema": SCHEMA, "ok": self.ok, **vars(self)}


def diagnose(
    recording: Recording, plan: GroupPlan | None = None, *, patience: float = PATIENCE
) -> Diagnosis:
    """The first cause of a hang, told apart from those who wait because of it.

    With ``plan``, ranks are named by its coordinates, otherwise by those of the recorded groups.
    ``patience``: seconds; who has waited for less when the dumps were written is not stuck.
    """
    return _Case(recording, plan, patience).verdict()


class _Wait(NamedTuple):
    """Calls with one number in one group that cannot end before ``absent`` come."""

    group: str
    seq: int
    call: Call  # of the rank that has been in it for longest
    inside: tuple[int, ...]
    absent: tuple[int, ...]
    ns: int  # how long

    @property
    def is_p2p(self) -> bool:
        return self.call.p2p


class _Mismatch(NamedTuple):
    group: str
    seq: int
    odd: tuple[int, ...]
    others: tuple[int, ...]
    calls: Mapping[int, Call]
    why: str  # "operation", "sizes", "dtypes", "root"


class _Case:
    def __init__(self, recording: Recording, plan: GroupPlan | None, patience: float) -> None:
        self.recording, self.plan, self.patience = recording, plan, int(patience * 1e9)
        self.ranks = recording.ranks
        self.gone = {
            rank
            for rank in range(recording.world_size)
            if rank not in self.ranks or not self.ranks[rank].answered
        }
        self.calls: dict[str, dict[int, dict[int, Call]]] = defaultdict(dict)
        self.p2p: dict[int, list[Call]] = {}  # those that are not done
        self.last: dict[int, Call] = {}
        self.end = 0  # the latest time anywhere
        self._sort()
        self.victims = {r for r in self.ranks if self.ranks[r].error and self._is_victim(r)}
        self.raised = {r for r in self.ranks if self.ranks[r].error} - self.victims
        self.waits = [*self._collectives(), *self._pairs()]
        self.edges: dict[int, dict[int, _Wait]] = defaultdict(dict)
        for wait in self.waits:
            for rank in wait.inside:
                if rank not in self.raised:
                    for other in wait.absent:
                        self.edges[rank].setdefault(other, wait)
        self.guessed = self._guesses()  # gloo records no point-to-point operations

    def _sort(self) -> None:
        for rank, mine in self.ranks.items():
            by_group: dict[str, dict[int, Call]] = {}
            for call in mine.calls:
                if call[2]:  # is point-to-point
                    if not call[7]:  # is not done
                        self.p2p.setdefault(rank, []).append(call)
                    continue
                numbered = by_group.get(call[0])
                if numbered is None:
                    numbered = by_group[call[0]] = {}
                if numbered.setdefault(call[1], call) is not call and not call[7]:
                    # Operations that were coalesced have one number.
                    numbered[call[1]] = numbered[call[1]]._replace(done=False)
            for group, numbered in by_group.items():
                self.calls[group][rank] = numbered
            if mine.calls:
                self.last[rank] = mine.calls[-1]
                times = (max(call.created, call.completed) for call in mine.calls[-_LAST:])
                self.end = max(self.end, mine.written, *times)
            self.end = max(self.end, mine.written)

    def members(self, key: str) -> tuple[int, ...]:
        group = self.recording.groups.get(key)
        if group and group.ranks:
            return group.ranks
        if group and group.label == DEFAULT:
            return tuple(range(self.recording.world_size))
        return tuple(sorted(self.calls.get(key, ())))

    def _is_victim(self, rank: int) -> bool:
        """Whether its error is that another rank did not come, or closed its connections."""
        return bool(_OF_OTHERS.search(self.ranks[rank].error))

    def _pending(self, rank: int, numbered: Mapping[int, Call]) -> list[int]:
        # Calls of a group end in order; one whose handle was dropped may never be marked as done.
        done = max((seq for seq, call in numbered.items() if call.done), default=_NOWHERE)
        found = [seq for seq, call in numbered.items() if not call.done and seq > done]
        last = self.last.get(rank)
        if not found and rank in self.victims and last in numbered.values():
            found = [max(numbered)]  # it is done, but with an error
        return sorted(found)

    def _ns(self, rank: int, since: int) -> int:
        return max(0, (self.ranks[rank].written or self.end) - since) if since else 0

    def _is_stuck(self, ranks: Iterable[int], ns: int) -> bool:
        # Only with the time of the dump it is known for how long a rank had waited.
        known = any(self.ranks[rank].written for rank in ranks)
        return not known or ns >= self.patience or bool(self.victims)

    def _collectives(self) -> Iterator[_Wait]:
        self.running: list[_Wait] = []
        for group, by_rank in self.calls.items():
            pending = {rank: self._pending(rank, each) for rank, each in by_rank.items()}
            if not any(pending.values()):
                continue
            members = self.members(group)
            top = {
                rank: _NOWHERE if rank in self.gone else max(by_rank.get(rank, {0: None}))
                for rank in members
            }
            least = min(top.values(), default=0)
            inside: dict[int, list[int]] = defaultdict(list)
            running: dict[int, list[int]] = defaultdict(list)
            for rank, seqs in pending.items():
                missed = next((seq for seq in seqs if seq > least), None)
                if missed is not None:
                    inside[missed].append(rank)
                elif seqs:
                    running[seqs[0]].append(rank)
            for seq, ranks in inside.items():
                absent = tuple(rank for rank in members if top[rank] < seq)
                yield from self._wait(group, seq, ranks, absent)
            for seq, ranks in running.items():
                if all(self.ranks[rank].stack and not self._is_blocked(rank) for rank in ranks):
                    continue
                self.running += self._wait(group, seq, ranks, ())

    def _wait(
        self, group: str, seq: int, ranks: Sequence[int], absent: tuple[int, ...]
    ) -> Iterator[_Wait]:
        calls = [self.calls[group][rank][seq] for rank in ranks]
        ns = max(self._ns(r, call.created) for r, call in zip(ranks, calls, strict=True))
        if self._is_stuck(ranks, ns):
            yield _Wait(
                group, seq, min(calls, key=lambda call: call.created), (*ranks,), absent, ns
            )

    def _pairs(self) -> Iterator[_Wait]:
        """Sends that nobody receives, and the reverse."""
        pairs: dict[tuple[str, str], tuple[int, int] | None] = {}

        def end(call: Call) -> tuple[str, int, int] | None:
            key = call.group, call.text
            if key not in pairs:
                pairs[key] = _pair(call, self.members(call.group))
            pair = pairs[key]
            return pair and (call.group, *pair)

        pending = [call for calls in self.p2p.values() for call in calls]
        ends: dict[tuple[str, int, int], dict[str, list[Call]]] = {
            key: {"send": [], "recv": []} for key in map(end, pending) if key
        }
        # Where all are known, the how many-th send belongs to the same receive.
        involved = {rank for _, *both in ends for rank in both}
        whole = {rank for rank in involved if rank in self.ranks and self.ranks[rank].whole}
        for rank in whole:
            pending += [call for call in self.ranks[rank].calls if call.p2p and call.done]
        for call in sorted(pending, key=lambda call: call.created):
            key = end(call)
            if key in ends and (not call.done or whole.issuperset(key[1:])):
                ends[key][call.what.name].append(call)
        for (group, source, target), both in ends.items():
            for name, rank, other in (("send", source, target), ("recv", target, source)):
                mine, theirs = both[name], both["recv" if name == "send" else "send"]
                late = next((call for call in mine[len(theirs) :] if not call.done), None)
                if late is not None:
                    ns = self._ns(rank, late.created) if rank in self.ranks else 0
                    if self._is_stuck((rank,), ns):
                        yield _Wait(group, late.seq, late, (rank,), (other,), ns)

    def _guesses(self) -> dict[int, tuple[int, ...]]:
        """Ranks whose stack is in a send or recv that is not recorded: the ranks they may need."""
        inside = [
            rank
            for rank, mine in self.ranks.items()
            if rank not in self.edges and rank not in self.raised and rank not in self.p2p
            if self._p2p_frame(rank) or (rank in self.victims)
        ]
        near: dict[int, list[int]] = defaultdict(list)
        for key, group in self.recording.groups.items():
            # A group without collectives is one for point-to-point operations.
            if group.ranks and len(group.ranks) < self.recording.world_size:
                for rank in set(inside).intersection(group.ranks):
                    if rank not in self.calls.get(key, ()):
                        place = group.ranks.index(rank)
                        near[rank] += group.ranks[max(0, place - 1) : place + 2]
        guessed = {}
        for rank in inside:
            others = sorted({*near[rank]} - {rank})
            idle = [r for r in range(self.recording.world_size) if r != rank and self._is_idle(r)]
            close = [other for other in idle if other in others]
            found = close or (others if self._p2p_frame(rank) else []) or idle
            if found:
                guessed[rank] = tuple(found)
        return guessed

    def _is_idle(self, rank: int) -> bool:
        if rank in self.gone or rank in self.raised:
            return True
        busy = rank not in self.edges and rank not in self.victims and not self._p2p_frame(rank)
        return busy and bool(self.ranks[rank].stack)

    def _p2p_frame(self, rank: int) -> Frame | None:
        """The frame of a send or recv that its main thread is in."""
        mine = self.ranks.get(rank)
        for frame in mine.stack[:8] if mine else ():
            if frame.function in _P2P and "distributed" in frame.file:
                return frame
            if "p2p" in frame.file.rpartition("/")[2]:
                return frame
        return None

    # The verdict.

    def verdict(self) -> Diagnosis:
        recording = self.recording
        if not recording.ranks or not any(mine.answered for mine in self.ranks.values()):
            return self._empty()
        mismatch = self._mismatch()
        if mismatch:
            return self._of_mismatch(mismatch)
        graph = {rank: set(others) for rank, others in self.edges.items()}
        for rank, found in self.guessed.items():
            graph.setdefault(rank, set()).update(found)
        needed = set().union(*graph.values()) if graph else set()
        first = self._first(needed, graph)
        if first:
            return self._of_absent(first)
        if self.raised or self.gone:
            return self._of_absent(self.raised or self.gone)
        if graph:
            return self._of_circle(graph)
        if self.running:
            return self._of_running()
        return self._made("ok", self._all_well())

    def _first(self, needed: set[int], graph: Mapping[int, set[int]]) -> set[int]:
        """Of the ranks that others wait for, those that wait for nobody; those that ended first."""
        free = needed - set(graph)
        for some in (free & self.raised, free & self.gone, free):
            if some:
                return some
        # A rank may be elsewhere while what it started earlier waits in the background.
        away = {
            rank
            for rank in needed
            if rank in self.ranks and self.ranks[rank].stack and not self._is_blocked(rank)
        }
        return away if len(away) < len(needed) else set()

    def _is_blocked(self, rank: int) -> bool:
        stack = self.ranks[rank].stack
        if any("distributed" in f.file and "torch" in f.file for f in stack[:4]):
            return True
        if rank in self.p2p and self._p2p_frame(rank):
            return True
        last = self.last.get(rank)
        # The call that it is in was made from a line that it still is at.
        lines = {(f.file, f.function) for f in last.frames[:4]} if last else set()
        return bool(last and not last.done and lines & {(f.file, f.function) for f in stack[:2]})

    def _mismatch(self) -> _Mismatch | None:
        found: list[tuple[int, _Mismatch]] = []
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
                if mismatch and (mismatch.why == "operation" or self._ends_at(by_rank, seq)):
                    found.append((min(call.created for call in calls.values()), mismatch))
                    break
        return min(found, key=lambda each: each[0])[1] if found else None

    def _ends_at(self, by_rank: Mapping[int, Mapping[int, Call]], seq: int) -> bool:
        """Whether somebody is stuck there, or ended with an error after it."""
        stuck = any(not call.done for each in by_rank.values() for call in each.values())
        return stuck or any(self.ranks[rank].error for rank in by_rank)

    def _of_mismatch(self, found: _Mismatch) -> Diagnosis:
        calls, place = found.calls, f"#{found.seq} of {self._group(found.group)}"
        tied = len(found.odd) == len(found.others)
        one, other = found.odd[0], found.others[0]
        does = {rank: _shown(calls[rank], found.why) for rank in (one, other)}
        sentence = (
            f"{self._ranks(found.odd)} called {does[one]} as {place}, where "
            f"{self._ranks(found.others, short=True)} called {does[other]}"
            f"{self._usually(calls[one], calls[other], one, other) if tied else ''}."
        )
        if found.why == "operation":
            sentence += self._shifted(found, one, other)
        ranks = (*found.odd, *found.others) if tied else found.odd
        lines = [
            f"rank {rank} made the call in {_at(calls[rank].frames)}."
            for rank in (one, other)
            if calls[rank].frames
        ]
        return self._made(
            "mismatch",
            sentence,
            sorted(ranks),
            found.group,
            calls[one],
            chain=[*lines, *self._chain(self.waits)],
        )

    def _usually(self, call: Call, second: Call, one: int, other: int) -> str:
        """Which of two calls other ranks and earlier turns make there, where that is known."""
        steps, often = self._steps, {}
        for rank, mine in ((one, call), (other, second)):
            calls = self.ranks[rank].calls
            pair = self._pattern(rank)[calls.index(mine)]
            often[mine.what.name] = steps[pair] - 1
        usual = max(often, key=lambda name: often[name])
        if len(set(often.values())) < 2:
            return "; which of them is right cannot be seen"
        return f"; {usual} is what other ranks and earlier turns call there"

    def _shifted(self, found: _Mismatch, one: int, other: int) -> str:
        by_rank = self.calls[found.group]

        def same(ahead: int, behind: int) -> bool:
            calls = by_rank[one].get(found.seq + ahead), by_rank[other].get(found.seq + behind)
            return calls[0] is not None and calls[1] is not None and calls[0].text == calls[1].text

        they = "they" if len(found.odd) > 1 else "it"
        if same(0, 1) and not same(1, 0):
            return f" From there on {they} did what the others did one call later: one was skipped."
        if same(1, 0) and not same(0, 1):
            return f" From there on {they} did what the others did one call before: one was added."
        return ""

    def _of_absent(self, first: set[int]) -> Diagnosis:
        """Ranks that others wait for and that wait for nobody."""
        waits = [wait for wait in self.waits if first.intersection(wait.absent)]
        kind: Kind = "never entered"
        if first & self.raised:
            kind = "raised"
            begun = min(self.ranks[rank].written for rank in first)
            first = {rank for rank in first if self.ranks[rank].written - begun < 10**9}
        elif first & self.gone:
            kind = "no dump"
        if not waits:
            return self._of_unseen(kind, first)
        wait = self._nearest(waits, first)
        named = sorted(first.intersection(wait.absent))
        inside = self._ranks(wait.inside, short=True)
        has = "has" if len(wait.inside) == 1 else "have"
        lasted = self._lasting(wait)
        what = self._call(wait)
        sentence = (
            f"{self._ranks(named)} never entered {what}, which {inside} {has} been in{lasted}"
        )
        if wait.is_p2p:
            verb = "received" if wait.call.what.name == "send" else "sent"
            sentence = f"{self._ranks(named)} never {verb} what {inside} {has} been "
            sentence += f"waiting for in {what}{lasted}"
        sentence += f"; {self._whereabouts(kind, named)}"
        behind = self._behind(wait, set(named))
        if behind:
            sentence += f" {_many(len({each.group for each in behind}), 'other group')} "
            sentence += (
                "waits behind it." if len({e.group for e in behind}) == 1 else "wait behind it."
            )
        return self._made(
            kind, sentence, named, wait.group, wait.call, wait, self._chain([wait, *behind])
        )

    def _nearest(self, waits: Sequence[_Wait], first: set[int]) -> _Wait:
        """Where most of them are missed; of several, the call that they would have made first."""
        steps = self._steps
        last = {self._title(self.last[rank]) for rank in first if rank in self.last}
        whole = all(self.ranks[wait.inside[0]].whole for wait in waits)

        def key(wait: _Wait) -> tuple[int, int, int, int]:
            follows = sum(steps[before, self._title(wait.call)] for before in last)
            made = len(self.ranks[wait.inside[0]].calls) if whole else 0
            return (len(first.intersection(wait.absent)), follows, -made, wait.ns)

        return max(waits, key=key)

    def _of_unseen(self, kind: Kind, first: set[int]) -> Diagnosis:
        """No recorded call shows who waits: only stacks, or files that are missing, do."""
        named = sorted(first)
        waiting = sorted(r for r, others in self.guessed.items() if first.intersection(others))
        sentence = self._ranks(named)
        if waiting:
            frame = self._p2p_frame(waiting[0])
            does = frame.function if frame and frame.function in _P2P else "a send or recv"
            sentence += f" did not send or receive what {self._ranks(waiting, short=True)} "
            sentence += f"{'waits' if len(waiting) == 1 else 'wait'} for in {does}"
            sentence += "; " + self._whereabouts(kind, named)
        else:
            sentence += " " + self._whereabouts(kind, named).removeprefix("it ")
        return self._made(kind, sentence, named, None, None, chain=self._stacks(waiting[:4]))

    def _whereabouts(self, kind: Kind, named: Sequence[int]) -> str:
        """What is known about where the first cause is."""
        rank, many = named[0], len(named) > 1
        mine = self.ranks.get(rank)
        it = f"rank {rank}" if many else "it"
        if kind == "raised" and mine:
            return f"{it} raised {_one_line(mine.error)}{'.' * (mine.error[-1:] != '.')}"
        if kind == "no dump":
            it = "they" if many else "it"
            text = f"{it} left no dump: ended, stopped or unreachable"
            if mine and mine.pid and not many:
                text += f" (pid {mine.pid} on {mine.host})"
            return text + "."
        text = ""
        if mine and mine.stack:
            text = f"{it} is in {_at(_own(mine.stack))}, and "
        last = self.last.get(rank)
        its = f"rank {rank}'s" if many else "its"
        if last is None:
            return f"{text}{it} has called nothing so far."
        state = "" if last.done else ", not finished"
        if many and text:
            its = "its"
        return f"{text}{its} last call was {self._named(last)}{state}."

    def _of_circle(self, graph: Mapping[int, set[int]]) -> Diagnosis:
        circle = _circle(graph)
        skipped = self._skipped(_around(circle[0], graph))
        if skipped:
            return self._of_skipped(*skipped)
        deviants, pattern = self._deviants(circle, graph)
        steps = [*zip(circle, circle[1:] + circle[:1], strict=True)]
        chain, waits = [], []
        for rank, other in steps:
            wait = self.edges.get(rank, {}).get(other)
            if wait:
                waits.append(wait)
                chain.append(f"rank {rank} is in {self._call(wait)} and waits for rank {other}.")
            else:
                chain.append(f"rank {rank} is in a send or recv and may wait for rank {other}.")
        wait = next(
            (self.edges[r][o] for r, o in steps if r in deviants and o in self.edges[r]), None
        )
        wait = wait or (waits[0] if waits else None)
        calls = " and ".join(dict.fromkeys(self._call(each) for each in waits[:2]))
        all_of = self._ranks(sorted(circle), short=True)
        sentence = f"deadlock: {all_of} wait for each other"
        sentence += f" in {calls}." if calls else " in send and recv."
        if pattern:
            sentence = f"{self._ranks(deviants)} {pattern}. That is a {sentence}"
        named = deviants if pattern else sorted(circle)
        call = wait.call if wait else None
        others = [each for each in self.waits if each not in waits]
        return self._made(
            "order",
            sentence,
            named,
            wait.group if wait else None,
            call,
            wait,
            [*chain, *self._chain(others)][:_LONGEST],
        )

    def _of_skipped(self, rank: int, wait: _Wait, why: str) -> Diagnosis:
        sentence = (
            f"{self._ranks([rank])} {why}. So it never entered {self._call(wait)}, in which "
            f"{self._ranks(wait.inside, short=True)} "
            f"{'waits' if len(wait.inside) == 1 else 'wait'}; "
            f"{self._whereabouts('never entered', [rank])}"
        )
        chain = self._chain([wait, *self._behind(wait, {rank})])
        return self._made("never entered", sentence, [rank], wait.group, wait.call, wait, chain)

    @cached_property
    def _steps(self) -> Counter[tuple[str, str]]:
        """How often one call follows another, over all ranks."""
        steps: Counter[tuple[str, str]] = Counter()
        for rank in self.ranks:
            steps.update(self._pattern(rank))
        return steps

    def _pattern(self, rank: int) -> list[tuple[str, str]]:
        return [*pairwise(["", *map(self._title, self.ranks[rank].calls)])]

    def _skipped(self, within: Iterable[int]) -> tuple[int, _Wait, str] | None:
        """A rank of a circle that left out a call earlier: where it is missed, and what it did."""
        steps = self._steps
        for rank in sorted(within):
            missed = {self._title(w.call): w for w in self.waits if rank in w.absent}
            calls = self.ranks[rank].calls if rank in self.ranks else []
            for i, (before, after) in enumerate(self._pattern(rank) if calls else ()):
                if calls[i].done and steps[before, after] == 1:
                    usual = _usual(steps, before, after)
                    if usual in missed and steps[before, usual] > 1:
                        at = self._named(calls[i])
                        return rank, missed[usual], f"skipped {usual}: after {before} came {at}"
        return None

    def _deviants(
        self, circle: Sequence[int], graph: Mapping[int, set[int]]
    ) -> tuple[list[int], str]:
        """Whose order of calls is not found elsewhere: the ranks, and what they did."""
        steps = self._steps
        rarest: dict[int, tuple[bool, int, tuple[str, str]]] = {}  # who did it before comes last
        for rank in _around(circle[0], graph) & set(self.last):
            pairs = self._pattern(rank)
            undone = (i for i, call in enumerate(self.ranks[rank].calls) if not call.done)
            start = min(next(undone, len(pairs)), len(pairs) - 1)
            earlier = set(pairs[:start])
            rarest[rank] = min((pair in earlier, steps[pair], pair) for pair in pairs[start:])
        least = min((each[:2] for each in rarest.values()), default=None)
        odd = sorted(rank for rank, each in rarest.items() if each[:2] == least)
        if len({rarest[rank] for rank in odd}) != 1 or len(odd) == len(rarest):
            return [], ""
        before, after = rarest[odd[0]][2]
        went = f"went from {before} to {after}" if before else f"began with {after}"
        own = Counter(self._pattern(odd[0])) if len(odd) == 1 else steps
        usual = _usual(own, before, after) or _usual(steps, before, after)
        return odd, f"{went}, where {usual} is next on other ranks or in earlier turns" * bool(
            usual
        )

    def _title(self, call: Call) -> str:
        if call.p2p:
            return call.what.name
        return f"{call.what.name} of {self._label(call.group)}"

    def _of_running(self) -> Diagnosis:
        wait = max(self.running, key=lambda each: each.ns)
        members = self.members(wait.group)
        left = (
            "all of its ranks are in it"
            if len(wait.inside) == len(members)
            else (
                f"every rank has entered it, and {self._ranks(wait.inside, short=True)} "
                f"{'has' if len(wait.inside) == 1 else 'have'} not finished"
            )
        )
        lasted = self._lasting(wait)
        sentence = (
            f"{self._call(wait)} has been running{lasted}: {left}, with equal calls, so nobody is "
            f"missing. It is slow, or the network under it does not answer."
        )
        return self._made(
            "slow", sentence, wait.inside, wait.group, wait.call, wait, self._chain(self.running)
        )

    def _empty(self) -> Diagnosis:
        sentence = (
            "nothing is recorded: no flight recorder, stack or error. Set "
            "TORCH_FR_BUFFER_SIZE=2000 (TORCH_NCCL_TRACE_BUFFER_SIZE before torch 2.9) in the job."
        )
        return self._made("empty", sentence)

    def _all_well(self) -> str:
        many = len(self.ranks)
        calls = sum(len(mine.calls) for mine in self.ranks.values())
        said = f"nothing is wrong: {_many(many, 'rank')} made {calls:,} calls, and nobody is stuck."
        unread = len(self.recording.problems)
        return f"{said} {_many(unread, 'file')} could not be read." if unread else said

    def _made(
        self,
        kind: Kind,
        sentence: str,
        ranks: Sequence[int] = (),
        group: str | None = None,
        call: Call | None = None,
        wait: _Wait | None = None,
        chain: Iterable[str] = (),
    ) -> Diagnosis:
        waiting = {rank: tuple(sorted(others)) for rank, others in sorted(self.edges.items())}
        states: dict[int, State] = {}
        inside = {rank for each in self.running for rank in each.inside}
        for rank in range(self.recording.world_size):
            states[rank] = (
                "cause" if rank in ranks and kind != "slow"
                else "no dump" if rank in self.gone
                else "raised" if rank in self.raised
                else "waiting" if rank in self.edges or rank in self.guessed
                else "running" if rank in inside
                else "elsewhere"
            )  # fmt: skip
        return Diagnosis(
            kind,
            sentence[:1].upper() + sentence[1:] if kind != "slow" else sentence,
            tuple(ranks),
            self._label(group) if group is not None else None,
            self.members(group) if group is not None else (),
            call.what.name if call else None,
            call.seq if call else None,
            wait.ns / 1e9 if wait else None,
            tuple(chain),
            waiting | {r: each for r, each in self.guessed.items() if r not in waiting},
            states,
            tuple(self.recording.problems),
        )

    def _behind(self, wait: _Wait, first: set[int]) -> list[_Wait]:
        """What else waits because of it, the nearest first."""
        found: list[_Wait] = []
        stopped = first | set(wait.inside)
        left = [each for each in self.waits if each is not wait]
        while True:
            near = [each for each in left if stopped.intersection(each.absent)]
            if not near:
                return found
            found += near
            left = [each for each in left if each not in near]
            for each in near:
                stopped.update(each.inside)

    def _chain(self, waits: Sequence[_Wait]) -> list[str]:
        lines = []
        for wait in waits[:_LONGEST]:
            line = f"{self._call(wait)}: {self._ranks(wait.inside, short=True)} in it"
            line += self._lasting(wait)
            for text, ranks in (
                ("not", [rank for rank in wait.absent if rank not in self.gone]),
                ("without a dump", [rank for rank in wait.absent if rank in self.gone]),
            ):
                line += f", {self._ranks(ranks, short=True)} {text}" if ranks else ""
            lines.append(f"{line}.")
        left = len(waits) - len(lines)
        return [*lines, f"And {_many(left, 'more call')} that wait."] if left > 0 else lines

    def _stacks(self, ranks: Iterable[int]) -> list[str]:
        return [
            f"rank {rank} is in {_at(_own(self.ranks[rank].stack))}."
            for rank in ranks
            if rank in self.ranks and self.ranks[rank].stack
        ]

    # Names.

    def _label(self, key: str) -> str:
        group = self.recording.groups.get(key, Group(key))
        return "the default group" if group.label == DEFAULT else group.label or f"group {key}"

    def _group(self, key: str) -> str:
        members = self.members(key)
        return f"{self._label(key)} {_span(members)}"

    def _call(self, wait: _Wait) -> str:
        what = wait.call.what
        if wait.is_p2p:
            pair = _pair(wait.call, self.members(wait.group)) or ("?", "?")
            return f"{what.name} from rank {pair[0]} to rank {pair[1]} of {self._label(wait.group)}"
        return f"{what.name} #{wait.seq} of {self._group(wait.group)}"

    def _named(self, call: Call) -> str:
        return f"{call.what.name} #{call.seq} of {self._label(call.group)}"

    def _ranks(self, ranks: Sequence[int], short: bool = False) -> str:
        if len(ranks) > 1:
            return f"ranks {_span(sorted(ranks))}"
        rank = ranks[0]
        if short:
            return f"rank {rank}"
        mine = self.ranks.get(rank)
        where = " ".join(
            f"{dim}={at}" for dim, at in coordinate(self.recording, self.plan, rank).items()
        )
        known = ", ".join(filter(None, (mine.host if mine else "", where)))
        return f"rank {rank} ({known})" if known else f"rank {rank}"

    def _lasting(self, wait: _Wait) -> str:
        """Such as " for 3.2 s"; nothing for an instant."""
        exact = any(self.ranks[r].written for r in wait.inside if r in self.ranks)
        least = "" if exact else "at least "
        return f" for {least}{lasting(wait.ns)}" if wait.ns >= 10**8 else ""


def coordinate(recording: Recording, plan: GroupPlan | None, rank: int) -> dict[str, int]:
    """From the rank's grid in the plan, or from the places in the largest group over each dim."""
    if plan is not None:
        name, layout = plan.home(rank) or ("", None)
        which = f"{name} " if plan.grids else ""
        found = layout.trimmed.coordinate(rank) if layout is not None else {}
        return {which + dim: at for dim, at in found.items()}
    best: dict[str, tuple[int, ...]] = {}
    for group in recording.groups.values():
        if len(group.dims) == 1 and group.ranks and rank in group.ranks:
            (dim,) = group.dims
            if len(group.ranks) > len(best.get(dim, (0,))):
                best[dim] = group.ranks
    return {dim: ranks.index(rank) for dim, ranks in best.items()}


_P2P = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_OF_OTHERS = re.compile(
    r"timed? ?out|connection (was )?(closed|reset|refused)|broken pipe|remote process|"
    r"peer closed|socket|other rank|watchdog|aborted",
    re.IGNORECASE,
)


def _pair(call: Call, members: Sequence[int]) -> tuple[int, int] | None:
    """The global ranks (from, to) of a point-to-point operation."""
    ends = re.findall(r"\d{1,9}", call.what.detail)
    if len(ends) != 2 or call.what.name not in ("send", "recv"):
        return None
    pair = (int(ends[0]), int(ends[1]))
    source, target = pair if "->" in call.what.detail else pair[::-1]
    if max(pair) >= len(members):
        return None
    return members[source], members[target]


_FREE: dict[str, tuple[str, ...]] = {  # what members may do differently
    "gather": ("outputs", "output_dtypes"),
    "scatter": ("inputs", "input_dtypes"),
    "reduce": ("outputs", "output_dtypes"),
    "broadcast": ("inputs", "input_dtypes"),
}
_SIZES = ("inputs", "outputs")
_DTYPES = ("input_dtypes", "output_dtypes")


def _judged(group: str, seq: int, calls: Mapping[int, Call]) -> _Mismatch | None:
    """In what the calls of one number differ, if they must not."""
    for why, key in (
        ("operation", lambda what: what.name),
        ("root", lambda what: what.detail),
        ("sizes", lambda what: _compared(what, _SIZES)),
        ("dtypes", lambda what: _compared(what, _DTYPES)),
    ):
        by_value: dict[Any, list[int]] = defaultdict(list)
        for rank, call in calls.items():
            by_value[key(call.what)].append(rank)
        if len(by_value) > 1:
            most = max(by_value.values(), key=len)
            odd = sorted(rank for ranks in by_value.values() if ranks is not most for rank in ranks)
            return _Mismatch(group, seq, tuple(odd), tuple(sorted(most)), calls, why)
    return None


def _compared(what: Any, fields: Sequence[str]) -> tuple[str, ...]:
    if (
        what.name.startswith(("all_to_all", "alltoall"))
        or "_v" in what.name
        or what.name == "coalesced"
    ):
        return ()
    free = _FREE.get(what.name, ())
    return tuple(getattr(what, each) for each in fields if each not in free)


def _shown(call: Call, why: str) -> str:
    what = call.what
    if why == "operation":
        return what.name
    if why == "root":
        return f"{what.name} with {what.detail or 'no root'}"
    values = [getattr(what, each) for each in (_SIZES if why == "sizes" else _DTYPES)]
    values = [each[1:-1].replace("'", "") or "none" for each in values]
    text = values[0] if values[0] == values[1] else " -> ".join(values)
    return f"{what.name} of {why.removesuffix('s')} {text[:80]}"


def _usual(steps: Counter[tuple[str, str]], before: str, after: str) -> str:
    """What else comes most often after ``before``; "" if nothing does."""
    others = {pair[1]: n for pair, n in steps.items() if pair[0] == before and pair[1] != after}
    return max(others, key=lambda title: others[title], default="")


def _around(start: int, graph: Mapping[int, set[int]]) -> set[int]:
    """The ranks that wait for ``start`` and for which it waits."""
    behind: dict[int, set[int]] = defaultdict(set)
    for rank, others in graph.items():
        for other in others:
            behind[other].add(rank)

    def reached(step: Callable[[int], Iterable[int]]) -> set[int]:
        seen, stack = {start}, [start]
        while stack:
            for other in step(stack.pop()):
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        return seen

    return reached(lambda rank: graph.get(rank, ())) & reached(lambda rank: behind[rank])


def _circle(graph: Mapping[int, set[int]]) -> list[int]:
    """A short circle; every rank in the graph's values waits for another."""
    rank, seen = min(graph), set()
    while rank not in seen:
        seen.add(rank)
        rank = min(graph[rank])
    came: dict[int, int] = {}
    turn = [rank]
    while rank not in came:
        turn_next = []
        for each in turn:
            for other in sorted(graph.get(each, ())):
                if other not in came:
                    came[other] = each
                    turn_next.append(other)
        turn = turn_next
    circle = [came[rank]]
    while circle[-1] != rank:
        circle.append(came[circle[-1]])
    return circle[::-1]


def _own(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    """From the innermost frame that is not torch's."""
    for i, frame in enumerate(stack):
        if "/torch/" not in frame.file:
            return tuple(stack[i:])
    return tuple(stack)


def _at(frames: Sequence[Frame]) -> str:
    frame = next(iter(_own(frames)))
    return f"{frame.function} ({frame.file}:{frame.line})"


def _span(ranks: Sequence[int]) -> str:
    if len(ranks) < 5 and ranks[-1] - ranks[0] >= len(ranks):
        return ", ".join(map(str, ranks))
    text = span_of(ranks)
    return text if len(text) <= 40 else f"{ranks[0]}..{ranks[-1]} ({len(ranks)} ranks)"


def _one_line(text: str) -> str:
    return text.partition("\n")[0][:200]


def _many(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def lasting(ns: int) -> str:
    """A duration, in two units at most."""
    seconds = ns / 1e9
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
