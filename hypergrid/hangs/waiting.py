"""The graph of waiting ranks of a recording, from which a verdict is read."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hypergrid.hangs.reading import DEFAULT, Call, Frame, Recording, What

Graph: TypeAlias = Mapping[int, Sequence[int]]
_NOWHERE, _ALL = -1, 1 << 62  # the last number of a rank that did not call a group; any number
_P2P = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
# Calls that gloo's recorder may lack, and the stacks show.
UNRECORDED = (*_P2P, "monitored_barrier", "gather", "gather_object", "scatter")
_OF_OTHERS = re.compile(
    r"timed? ?out|connection (was )?(closed|reset|refused)|broken pipe|remote process|"
    r"peer closed|socket|other rank|watchdog|abort|gloo.*(enforce|preamble)|nccl\w*error",
    re.IGNORECASE,
)
_FREE: dict[str, tuple[str, ...]] = {  # what members of a group may do differently
    "gather": ("outputs", "output_dtypes"),
    "scatter": ("inputs", "input_dtypes"),
    "reduce": ("outputs", "output_dtypes"),
    "broadcast": ("inputs", "input_dtypes"),
}
_SHAPES = ("inputs", "outputs", "input_dtypes", "output_dtypes")


class Wait(NamedTuple):
    """Equal calls with one number in one group, which cannot end before others make them.

    ``absent`` have not called it, ``unlike`` have called something else in its place, ``behind``
    have it in their queue after calls that have not ended either.
    """

    group: str
    seq: int
    call: Call  # of ``rank``, which has been in it for longest
    rank: int
    at: int  # the place of the call among those of the rank
    inside: tuple[int, ...]
    absent: tuple[int, ...]
    unlike: tuple[int, ...]
    behind: tuple[int, ...]
    ns: int  # how long

    @property
    def missed(self) -> tuple[int, ...]:
        """All for whom it waits."""
        return self.absent + self.unlike + self.behind


class _Pending(NamedTuple):
    """A call that has not ended."""

    at: int  # its place among the calls of its rank
    group: str
    seq: int
    entered: bool  # else calls before it may hold it up


class Waiting:
    """The graph of what each rank of a recording waits for.

    ``waits`` are the calls that miss somebody, ``running`` those that all have entered; ``of`` are
    the waits that each blocked rank is in. ``gone`` are ranks without a dump, ``blind`` those with
    a stack and without a flight recorder, ``raised`` those with an error of their own and
    ``victims`` those whose error comes from another rank. ``unseen`` are in a send or receive that
    is not recorded; ``guessed`` has the ranks that one of them, or a victim, may wait for.
    ``unequal`` are the ranks that made different calls at one place of a group, the most ranks
    last; ``last`` is the last call of each rank.
    """

    def __init__(self, recording: Recording, patience: float) -> None:
        self.recording, self.ranks = recording, recording.ranks
        self.patience = int(patience * 1e9)  # ns
        world = range(recording.world_size)
        self.gone = {r for r in world if r not in self.ranks or not self.ranks[r].answered}
        self.blind = {r for r in self.ranks.keys() - self.gone if not self.ranks[r].has_calls}
        failed = {rank: mine.error for rank, mine in self.ranks.items() if mine.error}
        # Its error is that another rank did not come, or closed its connections.
        self.victims = {rank for rank, error in failed.items() if _OF_OTHERS.search(error)}
        self.raised = failed.keys() - self.victims
        self.last = {rank: mine.calls[-1] for rank, mine in self.ranks.items() if mine.calls}
        latest = (int(mine.calls.columns[2:5].max()) for mine in self.ranks.values() if mine.calls)
        self._end = max([0, *latest, *(mine.written for mine in self.ranks.values())])
        self._device = [title.backend != "gloo" for title in recording.titles]
        self.top: dict[int, dict[str, int]] = {}  # the last number of each group
        self.unequal: dict[tuple[str, int], list[set[int]]] = {}
        self._pending: dict[int, list[_Pending]] = {}
        self._first: dict[tuple[int, str], _Pending] = {}  # collective of a group
        self._sort()
        found = [*self._collectives(), *self._pairs()]
        self.waits = [wait for wait in found if wait.missed]
        self.running = [wait for wait in found if not wait.missed]
        self.in_motion = {
            rank
            for wait in self.running
            for rank in wait.inside
            if (self._pending[rank][0].group, self._pending[rank][0].seq) == wait[:2]
        }
        self.of: dict[int, list[Wait]] = defaultdict(list)
        for wait in self.waits:
            for rank in wait.inside:
                if rank not in self.raised | self.in_motion:
                    self.of[rank].append(wait)
        self.unseen = {
            rank
            for rank in self.ranks.keys() - self.of.keys() - self.raised - self.in_motion
            if self.unrecorded_frame(rank) and self._is_idle(rank)
        }
        self.guessed = self._guesses()
        self.blocked = self.of.keys() | self.guessed.keys()

    def members(self, key: str) -> tuple[int, ...]:
        """The ranks of a group; of one whose members are not known, those that called it."""
        group = self.recording.groups[key]
        if group.ranks:
            return group.ranks
        if group.label == DEFAULT:
            return tuple(range(self.recording.world_size))
        return tuple(rank for rank, top in sorted(self.top.items()) if key in top)

    def needs(self, rank: int) -> dict[int, Wait | None]:
        """The ranks that it waits for, and where; None if that is guessed."""
        found: dict[int, Wait | None] = dict.fromkeys(self.guessed.get(rank, ()))
        # A call that the rank is in says more than one that is queued behind it.
        for wait in sorted(self.of.get(rank, ()), key=lambda wait: rank not in wait.behind):
            found |= dict.fromkeys(wait.missed, wait)
        found.pop(rank, None)
        return found

    def last_ones(self) -> list[set[int]]:
        """Sets of ranks that wait for nobody but each other: one of each has to move first."""
        places = {id(wait): ~i for i, wait in enumerate(self.waits)}  # a wait is a node, too
        graph: dict[int, list[int]] = {~i: [*wait.missed] for i, wait in enumerate(self.waits)}
        for rank in self.of.keys() | self.guessed.keys():
            graph[rank] = [places[id(wait)] for wait in self.of.get(rank, ())]
            graph[rank] += self.guessed.get(rank, ())
        sets = (set(some) for some in _last_components(graph))
        return [{node for node in some if node >= 0} for some in sets]

    def circle(self, within: set[int]) -> list[tuple[int, int, Wait | None]]:
        """A circle among ranks that wait for each other: who waits for whom, and where."""
        came: dict[int, tuple[int, int, Wait | None]] = {}
        rank = min(within)
        while rank not in came:
            needs = self.needs(rank)
            to = min(
                within.intersection(needs),
                key=lambda other: (rank in getattr(needs[other], "behind", ()), other),
            )
            came[rank] = rank, to, needs[to]
            rank = to
        return [*came.values()][[*came].index(rank) :]

    def unrecorded_frame(self, rank: int) -> Frame | None:
        """The frame of a call, not recorded, that its main thread is in: mostly a send or recv."""
        recording = self.ranks.get(rank)
        for frame in recording.stack[:8] if recording else ():
            if frame.function in UNRECORDED and "distributed" in frame.file:
                is_recorded = frame.function in _P2P and self.sees_p2p(rank)
                return None if is_recorded else frame
            if "p2p" in frame.file.rpartition("/")[2] and not self.sees_p2p(rank):
                return frame
        return None

    def sees_p2p(self, rank: int) -> bool:
        """Whether sends and receives of this rank would be recorded: NCCL's are, gloo's rarely."""
        calls = self.ranks[rank].calls
        places = np.unique(calls.title).tolist()
        return any(calls.titles[at].p2p or calls.titles[at].backend == "nccl" for at in places)

    def behind(self, wait: Wait, first: Iterable[int]) -> list[Wait]:
        """The other ranks that wait because of this cause, the nearest first."""
        found: list[Wait] = []
        left = [each for each in self.waits if each is not wait]
        stopped, near = {*first, *wait.inside}, True
        while near:
            split: tuple[list[Wait], list[Wait]] = [], []
            for each in left:
                split[stopped.isdisjoint(each.missed)].append(each)
            near, left = bool(split[0]), split[1]
            found += split[0]
            stopped.update(rank for each in split[0] for rank in each.inside)
        return found

    def last_time(self, rank: int) -> int:
        """When the rank last called something, or saw a call end; 0 if that is not known."""
        calls = self.ranks[rank].calls
        return int(calls.columns[2:5, -1].max()) if calls else 0

    def made(self, rank: int, group: str, seq: int) -> Call | None:
        """The collective with this number that a rank made."""
        calls = self.ranks[rank].calls
        found = (calls[at] for at in np.flatnonzero(calls.seq == seq).tolist())
        return next((call for call in found if call.group == group and not call.p2p), None)

    def _sort(self) -> None:
        titles = self.recording.titles
        groups = [title.group for title in titles]
        p2p = np.array([title.p2p for title in titles], bool)
        for rank, mine in self.ranks.items():
            calls = mine.calls
            done, collective = calls.done, ~p2p[calls.title]
            ended: dict[str, int] = {}
            for into, some in (
                (self.top.setdefault(rank, {}), collective),
                (ended, collective & done),
            ):
                of = map(groups.__getitem__, calls.title[some].tolist())
                into |= zip(of, calls.seq[some].tolist(), strict=True)
            found: list[_Pending] = []
            timed = bool((calls.started > 0).any())
            for at in np.flatnonzero(~done & (not mine.ended)).tolist():
                place, seq = int(calls.title[at]), int(calls.seq[at])
                group = groups[place]
                # Calls of a group end in order, so the first is what it waits in; one whose handle
                # was dropped may never be marked.
                if collective[at] and seq <= ended.get(group, _NOWHERE):
                    continue
                if collective[at]:
                    ended[group] = _ALL
                entered = not self._device[place] or not found or found[0][1:3] == (group, seq)
                entered = calls.started[at] > 0 if timed and self._device[place] else entered
                found.append(_Pending(at, group, seq, bool(entered)))
                if collective[at]:
                    self._first[rank, group] = found[-1]
            if not found and rank in self.victims and len(calls):
                at = len(calls) - 1  # it is done, but with an error
                found = [_Pending(at, groups[calls.title[at]], int(calls.seq[at]), True)]
            if found:
                self._pending[rank] = found

    def _collectives(self) -> Iterator[Wait]:
        meets: dict[tuple[str, int], dict[int, _Pending]] = defaultdict(dict)
        for rank, pending in self._pending.items():
            titles = self.recording.titles
            for each in pending:
                if not titles[self.ranks[rank].calls.title[each.at]].p2p:
                    meets[each.group, each.seq].setdefault(rank, each)
        for (group, seq), inside in meets.items():
            absent, there = list[int](), list[int]()
            for rank in self.members(group):
                come = rank not in self.gone and self.top[rank].get(group, _NOWHERE) >= seq
                (there if come else absent).append(rank)
            behind = {rank for rank in there if not self._entered(rank, group, seq)}
            alike = self.alike(group, seq, there)
            # A rank whose recorder has overwritten its call came long ago: it is missed by nobody.
            recorded = set().union(*alike)
            for ranks in alike:
                unlike = tuple(sorted(recorded - ranks))
                mine = [rank for rank in ranks if rank in inside]
                later = tuple(behind.intersection(ranks))
                at = {rank: inside[rank].at for rank in mine}
                yield from self._wait(group, seq, at, tuple(absent), unlike, later)

    def _entered(self, rank: int, group: str, seq: int) -> bool:
        """Whether a rank is in a call that it has made, or behind it."""
        first = self._first.get((rank, group))
        return first is None or seq < first.seq or (seq == first.seq and first.entered)

    def alike(self, group: str, seq: int, ranks: Iterable[int]) -> list[set[int]]:
        """The ranks that made a call, by what must be the same for all of them, the most last."""
        found: dict[Any, set[int]] = defaultdict(set)
        for rank in ranks:
            call = self.made(rank, group, seq)
            if call is not None:
                found[must_agree(call.what)].add(rank)
        alike = sorted(found.values(), key=len)
        if len(alike) > 1:
            self.unequal[group, seq] = alike
        return alike

    def _wait(
        self,
        group: str,
        seq: int,
        inside: Mapping[int, int],
        absent: tuple[int, ...],
        unlike: tuple[int, ...] = (),
        behind: tuple[int, ...] = (),
    ) -> Iterator[Wait]:
        if not inside:
            return
        calls = {rank: self.ranks[rank].calls[at] for rank, at in inside.items()}
        ns = max(self._ns(rank, call) for rank, call in calls.items())
        if self._is_stuck(inside, ns):
            first = min(calls, key=lambda rank: calls[rank].created)
            called = (calls[first], first, inside[first])
            yield Wait(group, seq, *called, (*inside,), absent, unlike, behind, ns)

    def _ns(self, rank: int, call: Call) -> int:
        return max(0, (self.ranks[rank].written or self._end) - call.created) if call.created else 0

    def _is_stuck(self, ranks: Iterable[int], ns: int) -> bool:
        # Only with the time of the dump it is known for how long a rank had waited.
        known = any(self.ranks[rank].written for rank in ranks)
        return not known or ns >= self.patience or bool(self.victims)

    def _is_idle(self, rank: int) -> bool:
        """Whether it has called nothing for a while."""
        last = self.last.get(rank)
        return last is None or self._is_stuck((rank,), self._ns(rank, last))

    def _pairs(self) -> Iterator[Wait]:
        """Sends that nobody receives, and the reverse: the first of those with the first of these.

        Where both recorders reach back to the first call, also those that ended are counted.
        """
        titles = self.recording.titles
        pairs = {
            at: (title.group, pair_of(title.what, self.members(title.group)))
            for at, title in enumerate(titles)
            if title.p2p
        }
        left: dict[Any, dict[str, list[_Pending]]] = {}  # that have not ended
        ended: Counter[Any] = Counter()
        for rank, pending in self._pending.items():
            calls = self.ranks[rank].calls
            for each in pending:
                title = int(calls.title[each.at])
                if title in pairs and pairs[title][1]:
                    both = left.setdefault(pairs[title], {"send": [], "recv": []})
                    both[titles[title].what.name].append(each)
        near = {rank for _, pair in left for rank in pair}
        for calls in (self.ranks[rank].calls for rank in near & self.ranks.keys()):
            made = np.unique(calls.title[calls.done], return_counts=True)
            for title, many in zip(*(each.tolist() for each in made), strict=True):
                if pairs.get(title) in left:
                    ended[pairs[title], titles[title].what.name] += many
        for (group, pair), both in left.items():
            whole = all(rank in self.ranks and self.ranks[rank].whole for rank in pair)
            for name, rank, other in (("send", *pair), ("recv", *pair[::-1])):
                back = "recv" if name == "send" else "send"
                mine, theirs = both[name], both[back]
                ahead = (ended[(group, pair), name] - ended[(group, pair), back]) * whole
                alone = mine[max(0, len(theirs) - ahead) :]  # nobody has made their other end
                if not mine or rank not in self.ranks:
                    continue
                each = (alone or mine)[0]
                met = theirs[ahead] if 0 <= ahead < len(theirs) else None
                if alone and each.entered:
                    yield from self._wait(group, each.seq, {rank: each.at}, (other,))
                elif alone or (met and not met.entered):
                    yield from self._wait(group, each.seq, {rank: each.at}, (), (), (other,))

    def _guesses(self) -> dict[int, tuple[int, ...]]:
        """The ranks that unseen ranks and victims may need: who waits for nobody, else all."""
        waiting = self.unseen | self.victims - self.of.keys()
        busy = self.of.keys() | waiting | self.gone
        idle = {rank for rank in self.ranks.keys() - busy if self.ranks[rank].stack}
        idle |= self.gone | self.raised
        guessed: dict[int, tuple[int, ...]] = {}
        for rank in waiting:
            found = idle or {*self.ranks} if rank in self.unseen else idle
            if found - {rank}:
                guessed[rank] = tuple(sorted(found - {rank}))
        return guessed


def must_agree(what: What) -> tuple[str, ...]:
    """The part of a call that must be equal on all members of its group."""
    name = what.name
    if name.startswith(("all_to_all", "alltoall")) or "_v" in name or name == "coalesced":
        return (name, what.detail)
    free = _FREE.get(name, ())
    return (name, what.detail, *(getattr(what, each) * (each not in free) for each in _SHAPES))


def pair_of(what: What, members: Sequence[int]) -> tuple[int, int] | None:
    """The global ranks (from, to) of a point-to-point operation."""
    ends = re.findall(r"\d{1,9}", what.detail)
    if len(ends) != 2 or what.name not in ("send", "recv"):
        return None
    pair = (int(ends[0]), int(ends[1]))
    source, target = pair if "->" in what.detail else pair[::-1]
    if max(pair) >= len(members):
        return None
    return members[source], members[target]


def _last_components(graph: Graph) -> Iterator[list[int]]:
    """The strongly connected components from which no edge leads out, by Tarjan's algorithm."""
    index, low = dict[int, int](), dict[int, int]()
    stack, closed = list[int](), set[int]()
    for root in graph:
        todo = [(root, iter(graph.get(root, ())))] if root not in index else []
        while todo:
            node, others = todo[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
            for other in others:
                if other not in index:
                    todo.append((other, iter(graph.get(other, ()))))
                    break
                if other not in closed:
                    low[node] = min(low[node], index[other])
            else:
                todo.pop()
                if todo:
                    low[todo[-1][0]] = min(low[todo[-1][0]], low[node])
                if low[node] == index[node]:
                    some = [stack.pop()]
                    while some[-1] != node:
                        some.append(stack.pop())
                    closed.update(some)
                    inside = set(some)
                    if all(inside.issuperset(graph.get(each, ())) for each in some):
                        yield some
