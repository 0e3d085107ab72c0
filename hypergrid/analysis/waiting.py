"""Which ranks of a recording wait for which: the graph that a verdict is read from."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from hypergrid.analysis.recording import DEFAULT, Call, Frame, Recording

Graph: TypeAlias = Mapping[int, set[int]]  # the ranks that each waiting rank waits for
_NOWHERE = -1  # the last number of a rank that left no dump
_LAST = 8  # calls of a rank among which the latest time is looked for
P2P = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_OF_OTHERS = re.compile(
    r"timed? ?out|connection (was )?(closed|reset|refused)|broken pipe|remote process|"
    r"peer closed|socket|other rank|watchdog|aborted",
    re.IGNORECASE,
)


class Wait(NamedTuple):
    """Calls with one number in one group that cannot end before the ranks ``absent`` come."""

    group: str
    seq: int
    call: Call  # of the rank that has been in it for longest
    inside: tuple[int, ...]
    absent: tuple[int, ...]
    ns: int  # how long


class Waiting:
    """What the ranks of a recording wait for.

    ``waits`` are the calls that miss somebody, ``running`` those that all have entered. ``edges``
    has for each waiting rank the ranks that it waits for. ``gone`` are ranks without a dump,
    ``blind`` those with a stack and without a flight recorder, ``raised`` those with an error of
    their own and ``victims`` those whose error comes from another rank. ``unseen`` are in a send
    or receive that is not recorded; ``guessed`` has the ranks that one of them, or a victim, may
    wait for.
    """

    def __init__(self, recording: Recording, patience: float) -> None:
        self.recording, self.ranks = recording, recording.ranks
        self._patience = int(patience * 1e9)
        world = range(recording.world_size)
        self.gone = {r for r in world if r not in self.ranks or not self.ranks[r].answered}
        self.blind = {r for r in self.ranks.keys() - self.gone if not self.ranks[r].has_calls}
        self.calls: dict[str, dict[int, dict[int, Call]]] = defaultdict(dict)
        self.last: dict[int, Call] = {}
        self._p2p: dict[int, list[Call]] = {}  # those that are not done
        self._end = 0  # the latest time anywhere
        self._sort()
        failed = {rank: mine.error for rank, mine in self.ranks.items() if mine.error}
        # Its error is that another rank did not come, or closed its connections.
        self.victims = {rank for rank, error in failed.items() if _OF_OTHERS.search(error)}
        self.raised = failed.keys() - self.victims
        self.running: list[Wait] = []
        self.waits = [*self._collectives(), *self._pairs()]
        self.edges: dict[int, dict[int, Wait]] = {}
        for wait in self.waits:
            for rank in set(wait.inside) - self.raised if wait.absent else ():
                mine = self.edges.setdefault(rank, {})
                for other in wait.absent:
                    mine.setdefault(other, wait)
        self.unseen = {
            rank
            for rank in self.ranks.keys() - self.edges.keys() - self.raised
            if self.p2p_frame(rank) and not self.sees_p2p(rank) and self._is_idle(rank)
        }
        self.guessed = self._guesses()

    def members(self, key: str) -> tuple[int, ...]:
        """The ranks of a group; of one whose members are not known, those that called it."""
        group = self.recording.groups[key]
        if group.ranks:
            return group.ranks
        if group.label == DEFAULT:
            return tuple(range(self.recording.world_size))
        return tuple(sorted(self.calls.get(key, ())))

    def graph(self) -> dict[int, set[int]]:
        """Edges and guesses together."""
        graph = {rank: set(others) for rank, others in self.edges.items()}
        for rank, found in self.guessed.items():
            graph.setdefault(rank, set()).update(found)
        return graph

    def is_away(self, rank: int) -> bool:
        """Whether its stack is outside of all communication."""
        mine = self.ranks.get(rank)
        if mine is None or not mine.stack or self.p2p_frame(rank):
            return False
        if any("distributed" in f.file and "torch" in f.file for f in mine.stack[:4]):
            return False
        last = self.last.get(rank)
        # The call that it is in was made from a line that it still is at.
        lines = {(f.file, f.function) for f in last.frames[:4]} if last else set()
        here = {(f.file, f.function) for f in mine.stack[:2]}
        return not (last and not last.done and lines & here)

    def p2p_frame(self, rank: int) -> Frame | None:
        """The frame of a send or recv that its main thread is in."""
        mine = self.ranks.get(rank)
        for frame in mine.stack[:8] if mine else ():
            if frame.function in P2P and "distributed" in frame.file:
                return frame
            if "p2p" in frame.file.rpartition("/")[2]:
                return frame
        return None

    def sees_p2p(self, rank: int) -> bool:
        """Whether sends and receives of this rank would be recorded: NCCL's are, gloo's rarely."""
        return any(call.p2p or call.text.startswith("nccl:") for call in self.ranks[rank].calls)

    def behind(self, wait: Wait, first: Iterable[int]) -> list[Wait]:
        """What else waits because of it, the nearest first."""
        found: list[Wait] = []
        stopped = {*first, *wait.inside}
        left = [each for each in self.waits if each is not wait]
        while near := [each for each in left if stopped.intersection(each.absent)]:
            found += near
            left = [each for each in left if each not in near]
            stopped.update(rank for each in near for rank in each.inside)
        return found

    def _sort(self) -> None:
        for rank, mine in self.ranks.items():
            by_group: dict[str, dict[int, Call]] = {}
            for call in mine.calls:
                if call[2]:  # is point-to-point
                    if not call[7]:  # is not done
                        self._p2p.setdefault(rank, []).append(call)
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
            self._end = max(self._end, mine.written, *times)

    def _pending(self, rank: int, numbered: Mapping[int, Call]) -> list[int]:
        # Calls of a group end in order; one whose handle was dropped may never be marked as done.
        done = max((seq for seq, call in numbered.items() if call.done), default=_NOWHERE)
        found = [seq for seq, call in numbered.items() if not call.done and seq > done]
        last = self.last.get(rank)
        if not found and rank in self.victims and last in numbered.values():
            found = [max(numbered)]  # it is done, but with an error
        return sorted(found)

    def _collectives(self) -> Iterator[Wait]:
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
                if not all(map(self.is_away, ranks)):
                    self.running += self._wait(group, seq, ranks, ())

    def _wait(
        self, group: str, seq: int, ranks: Sequence[int], absent: tuple[int, ...]
    ) -> Iterator[Wait]:
        calls = {rank: self.calls[group][rank][seq] for rank in ranks}
        ns = max(self._ns(rank, call) for rank, call in calls.items())
        if self._is_stuck(ranks, ns):
            first = min(calls.values(), key=lambda call: call.created)
            yield Wait(group, seq, first, (*ranks,), absent, ns)

    def _ns(self, rank: int, call: Call) -> int:
        end = self.ranks[rank].written or self._end
        return max(0, end - call.created) if call.created else 0

    def _is_stuck(self, ranks: Iterable[int], ns: int) -> bool:
        # Only with the time of the dump it is known for how long a rank had waited.
        known = any(self.ranks[rank].written for rank in ranks)
        return not known or ns >= self._patience or bool(self.victims)

    def _is_idle(self, rank: int) -> bool:
        """Whether it has called nothing for a while."""
        last = self.last.get(rank)
        return last is None or self._is_stuck((rank,), self._ns(rank, last))

    def _pairs(self) -> Iterator[Wait]:
        """Sends that nobody receives, and the reverse."""
        pairs: dict[tuple[str, str], tuple[int, int] | None] = {}

        def end(call: Call) -> tuple[str, int, int] | None:
            key = call.group, call.text
            if key not in pairs:
                pairs[key] = pair_of(call, self.members(call.group))
            pair = pairs[key]
            return pair and (call.group, *pair)

        pending = [call for calls in self._p2p.values() for call in calls]
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
                    ns = self._ns(rank, late) if rank in self.ranks else 0
                    if self._is_stuck({rank} & self.ranks.keys(), ns):
                        yield Wait(group, late.seq, late, (rank,), (other,), ns)

    def _guesses(self) -> dict[int, tuple[int, ...]]:
        """The ranks that unseen ranks and victims may need: idle neighbours, else all neighbours.

        Without neighbours, all idle ranks, else all. Neighbours are next to each other in a group
        that has no collectives.
        """
        waiting = self.unseen | self.victims - self.edges.keys()
        near: dict[int, set[int]] = defaultdict(set)
        for key, group in self.recording.groups.items():
            if group.ranks and len(group.ranks) < self.recording.world_size:
                for rank in waiting.intersection(group.ranks) - self.calls.get(key, {}).keys():
                    place = group.ranks.index(rank)
                    near[rank].update(group.ranks[max(0, place - 1) : place + 2])
        idle = {
            rank
            for rank in range(self.recording.world_size)
            if rank in self.gone | self.raised
            or (rank not in self.edges.keys() | waiting and self.ranks[rank].stack)
        }
        guessed = {}
        for rank in waiting:
            found = near[rank] & idle
            found = found or (near[rank] or idle or {*self.ranks} if rank in self.unseen else idle)
            if found - {rank}:
                guessed[rank] = tuple(sorted(found - {rank}))
        return guessed


def pair_of(call: Call, members: Sequence[int]) -> tuple[int, int] | None:
    """The global ranks (from, to) of a point-to-point operation."""
    ends = re.findall(r"\d{1,9}", call.what.detail)
    if len(ends) != 2 or call.what.name not in ("send", "recv"):
        return None
    pair = (int(ends[0]), int(ends[1]))
    source, target = pair if "->" in call.what.detail else pair[::-1]
    if max(pair) >= len(members):
        return None
    return members[source], members[target]


def around(start: int, graph: Graph) -> set[int]:
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


def circle_in(graph: Graph) -> list[int]:
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
