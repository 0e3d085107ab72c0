"""The graph of waiting ranks of a recording, from which a verdict is read."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hypergrid.hangs.recording import DEFAULT, Call, Calls, Frame, Recording, Title, What

_NOWHERE = -1  # the last number of a rank that did not call a group
_ALL = 1 << 62  # more than any number
_P2P = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
# Calls that gloo's recorder may lack, and the stacks show.
UNRECORDED = (*_P2P, "monitored_barrier", "gather", "gather_object", "scatter")
_OF_OTHERS = re.compile(
    r"timed? ?out|connection (was )?(closed|reset|refused)|broken pipe|remote process|"
    r"peer closed|socket|other rank|watchdog|abort|gloo.*(enforce|preamble)|nccl\w*error",
    re.IGNORECASE,
)
# The members of a group need not agree on what only one of them gives, or takes.
_ONLY_INPUTS = ("gather", "reduce")
_ONLY_OUTPUTS = ("scatter", "broadcast")


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
    call: Call
    is_entered: bool  # else calls before it may hold it up


class _PairKey(NamedTuple):
    """All sends, or all receives, from one rank to another in one group."""

    group: str
    ranks: tuple[int, int]  # from, to
    name: str  # "send" or "recv"

    @property
    def rank(self) -> int:
        """The rank that calls it."""
        return self.ranks[self.name == "recv"]

    @property
    def answer(self) -> _PairKey:
        """Of a send the receive, and the reverse."""
        return self._replace(name="recv" if self.name == "send" else "send")


class Waiting:
    """The graph of what each rank of a recording waits for.

    ``waits`` are the calls that miss somebody, ``running`` those that all have entered; ``of`` are
    the waits that each blocked rank is in. ``gone`` are ranks without a dump, ``blind`` those with
    a stack and without a flight recorder, ``raised`` those with an error of their own and
    ``victims`` those whose error comes from another rank. ``unseen`` are in a send or receive that
    is not recorded; they and victims are ``guessing``: each may wait for any other rank.
    ``unequal`` are the ranks that made different calls at one place of a group, the most ranks
    last; ``last`` is the last call of each rank.
    """

    def __init__(self, recording: Recording, patience: float) -> None:
        self.recording = recording
        self.ranks = recording.ranks
        self.patience = int(patience * 1e9)  # ns
        self.world = range(recording.world_size)
        self.gone = set(self.world)
        self.blind: set[int] = set()
        self.raised: set[int] = set()
        self.victims: set[int] = set()
        self.last: dict[int, Call] = {}
        self.top: dict[int, dict[str, int]] = {}  # the last number of each group
        self._end = 0  # of all recordings
        self._pending: dict[int, list[_Pending]] = {}
        for rank in self.ranks:
            self._sort_in(rank)
        for rank in self.ranks:
            self._find_pending(rank)
        self.waits: list[Wait] = []
        self.running: list[Wait] = []
        self.unequal: dict[tuple[str, int], list[set[int]]] = {}
        self._find_collectives()
        self._find_pairs()
        self.of = self._waits_of_ranks()
        self.unseen: set[int] = set()
        for rank in self.ranks.keys() - self.of.keys() - self.raised - self.victims:
            if self.unrecorded_frame(rank) and self._is_idle(rank):
                self.unseen.add(rank)
        self.guessing = self.unseen | self.victims - self.of.keys()
        self.blocked = self.of.keys() | self.guessing
        self.last_ones = self._last_ones()

    def _sort_in(self, rank: int) -> None:
        """Whether a rank left a dump, which part of it, and whether it raised."""
        recording = self.ranks[rank]
        if recording.answered:
            self.gone.discard(rank)
            if not recording.has_calls:
                self.blind.add(rank)
        # The error of a victim is that another rank did not come, or closed connections.
        if recording.error and _OF_OTHERS.search(recording.error):
            self.victims.add(rank)
        elif recording.error:
            self.raised.add(rank)
        if recording.calls:
            self.last[rank] = recording.calls[-1]
        self._end = max(self._end, self.last_time(rank), recording.written)

    def _waits_of_ranks(self) -> dict[int, list[Wait]]:
        """The waits that hold up each rank."""
        all_waits: dict[int, list[Wait]] = defaultdict(list)
        for wait in self.waits:
            for rank in wait.inside:
                if rank not in self.raised:
                    all_waits[rank].append(wait)
        waits_of = {}
        for rank, waits in all_waits.items():
            # What is queued behind another call holds nobody up, as long as that has not ended.
            entered = [wait for wait in waits if rank not in wait.behind]
            waits_of[rank] = entered or waits
        return waits_of

    def members(self, key: str) -> tuple[int, ...]:
        """The ranks of a group; of one whose members are not known, those that called it."""
        group = self.recording.groups[key]
        if group.ranks:
            return group.ranks
        if group.label == DEFAULT:
            return tuple(self.world)
        return tuple(rank for rank, top in sorted(self.top.items()) if key in top)

    @property
    def is_world_known(self) -> bool:
        """Whether a file says which ranks there are; else more may have left none."""
        return any(len(group.ranks) == len(self.world) for group in self.recording.groups.values())

    def needs(self, rank: int) -> dict[int, Wait | None]:
        """The ranks that it waits for, and where; None if that is guessed."""
        needed: dict[int, Wait | None] = {}
        if rank in self.guessing:
            needed.update(dict.fromkeys(self.world))
        for wait in self.of.get(rank, ()):
            needed.update(dict.fromkeys(wait.missed, wait))
        needed.pop(rank, None)
        return needed

    def _last_ones(self) -> list[set[int]]:
        """Sets of ranks that wait for nobody but each other: one of each has to move first."""
        # Waits are nodes too, with negative numbers: a rank leads to its waits, and a wait to all
        # that it misses. -1 is the guess: any rank.
        graph: dict[int, Sequence[int]] = {}
        node_of: dict[int, int] = {}
        for number, wait in enumerate(self.waits):
            node_of[id(wait)] = -2 - number
            graph[-2 - number] = wait.missed
        for rank, waits in self.of.items():
            graph[rank] = [node_of[id(wait)] for wait in waits]
        for rank in self.guessing:
            graph[-1] = self.world
            graph[rank] = [*graph.get(rank, ()), -1]
        ranks = set(self.world)
        return [component & ranks for component in _last_components(graph)]

    def circle(self, within: set[int]) -> list[tuple[int, int, Wait | None]]:
        """A circle among ranks that wait for each other: who waits for whom, and where."""
        steps: list[tuple[int, int, Wait | None]] = []
        rank = min(within)
        walked: list[int] = []
        while rank not in walked:
            needs = self.needs(rank)
            needed = min(within.intersection(needs))
            steps.append((rank, needed, needs[needed]))
            walked.append(rank)
            rank = needed
        # The first steps may only lead to the circle.
        return steps[walked.index(rank) :]

    def unrecorded_frame(self, rank: int) -> Frame | None:
        """The frame of a call, not recorded, that its main thread is in: mostly a send or recv."""
        if rank not in self.ranks:
            return None
        sees_p2p = self.sees_p2p(rank)
        for frame in self.ranks[rank].stack[:8]:
            if frame.function in UNRECORDED and "distributed" in frame.file:
                if frame.function in _P2P and sees_p2p:
                    return None
                return frame
            # Such as Megatron's p2p_communication.py, which may wait for a handle.
            if "p2p" in frame.file.rpartition("/")[2] and not sees_p2p:
                return frame
        return None

    def sees_p2p(self, rank: int) -> bool:
        """Whether sends and receives of this rank would be recorded: NCCL's are, gloo's rarely."""
        calls = self.ranks[rank].calls
        for place in np.unique(calls.title):
            title = calls.titles[place]
            if title.p2p or title.backend == "nccl":
                return True
        return False

    def last_time(self, rank: int) -> int:
        """When the rank last called something, or saw a call end; 0 if that is not known."""
        calls = self.ranks[rank].calls
        return int(calls.columns[2:5].max()) if calls else 0

    def call_of(self, rank: int, group: str, seq: int) -> Call | None:
        """The collective with this number that a rank made."""
        calls = self.ranks[rank].calls
        for at in np.flatnonzero(calls.seq == seq).tolist():
            call = calls[at]
            if call.group == group and not call.p2p:
                return call
        return None

    def _find_pending(self, rank: int) -> None:
        recording = self.ranks[rank]
        calls = recording.calls
        is_collective = np.array([not title.p2p for title in calls.titles], bool)[calls.title]
        self.top[rank] = _last_numbers(calls, is_collective)
        ended = _last_numbers(calls, is_collective & calls.done)
        is_timed = bool((calls.started > 0).any())
        pending: list[_Pending] = []
        for at in np.flatnonzero(~calls.done).tolist():
            call = calls[at]
            if not call.p2p:
                # Calls of a group end in order, so the first is what it waits in; one whose handle
                # was dropped may never be marked.
                if call.seq <= ended.get(call.group, _NOWHERE):
                    continue
                ended[call.group] = _ALL
            is_entered = call.started > 0
            if call.title.backend == "gloo":
                is_entered = True
            elif not is_timed:
                # The sends and receives of one batch have one number.
                first = pending[0].call if pending else call
                is_entered = first.group == call.group and first.seq == call.seq
            pending.append(_Pending(at, call, is_entered))
        if not pending and rank in self.victims and calls:
            # It was marked as ended by the error.
            pending.append(_Pending(len(calls) - 1, calls[-1], True))
        if pending and not recording.ended:
            self._pending[rank] = pending

    def _find_collectives(self) -> None:
        """Calls that not all members of their group have entered alike."""
        inside: dict[tuple[str, int], dict[int, _Pending]] = defaultdict(dict)
        for rank, all_pending in self._pending.items():
            for pending in all_pending:
                if not pending.call.p2p:
                    inside[pending.call.group, pending.call.seq][rank] = pending
        for (group, seq), pending_of in inside.items():
            absent: list[int] = []
            called: list[int] = []
            behind: set[int] = set()
            for rank in self.members(group):
                last_number = self.top.get(rank, {}).get(group, _NOWHERE)
                if last_number < seq or rank in self.gone:
                    absent.append(rank)
                    continue
                called.append(rank)
                if not self._has_entered(rank, group, seq):
                    behind.add(rank)
            alike = self._alike(group, seq, called)
            # A rank whose recorder has overwritten its call came long ago: it is missed by nobody.
            recorded: set[int] = set().union(*alike)
            for ranks in alike:
                self._add_wait(
                    {rank: pending_of[rank] for rank in pending_of if rank in ranks},
                    absent=tuple(absent),
                    unlike=tuple(sorted(recorded - ranks)),
                    behind=tuple(behind & ranks),
                )

    def _has_entered(self, rank: int, group: str, seq: int) -> bool:
        """Whether a rank is in a call that it has made, or behind it."""
        for pending in self._pending.get(rank, ()):
            call = pending.call
            if call.group == group and not call.p2p:
                return seq < call.seq or (seq == call.seq and pending.is_entered)
        return True

    def _alike(self, group: str, seq: int, ranks: Iterable[int]) -> list[set[int]]:
        """The ranks that made a call, by what must be the same for all of them, the most last."""
        ranks_of: dict[tuple[str, ...], set[int]] = defaultdict(set)
        for rank in ranks:
            call = self.call_of(rank, group, seq)
            if call is not None:
                ranks_of[must_agree(call.what)].add(rank)
        alike = sorted(ranks_of.values(), key=len)
        if len(alike) > 1:
            self.unequal[group, seq] = alike
        return alike

    def _add_wait(
        self,
        inside: Mapping[int, _Pending],
        absent: tuple[int, ...] = (),
        unlike: tuple[int, ...] = (),
        behind: tuple[int, ...] = (),
    ) -> None:
        if not inside:
            return
        first = min(inside, key=lambda rank: inside[rank].call.created)
        at, call, _ = inside[first]
        ns = 0
        for rank, pending in inside.items():
            ns = max(ns, self._ns(rank, pending.call))
        if not self._is_stuck(inside, ns):
            return
        ranks = (tuple(inside), absent, unlike, behind)
        wait = Wait(call.group, call.seq, call, first, at, *ranks, ns)
        if wait.missed:
            self.waits.append(wait)
        else:
            self.running.append(wait)

    def _ns(self, rank: int, call: Call) -> int:
        """For how long a rank had been in a call when it wrote; 0 if that is not known."""
        if not call.created:
            return 0
        moment = self.ranks[rank].written or self._end
        return max(0, moment - call.created)

    def _is_stuck(self, ranks: Iterable[int], ns: int) -> bool:
        # Only with the time of the dump it is known for how long a rank had waited.
        is_known = any(self.ranks[rank].written for rank in ranks)
        return not is_known or ns >= self.patience or bool(self.victims)

    def _is_idle(self, rank: int) -> bool:
        """Whether it has called nothing for a while."""
        last = self.last.get(rank)
        return last is None or self._is_stuck((rank,), self._ns(rank, last))

    def _find_pairs(self) -> None:
        """Sends that nobody receives, and the reverse.

        Of three sends to a rank that made two receives, ended or not, the third waits for it. A
        recorder that does not reach back to the first call shows only those that have not ended.
        """
        pending_of: dict[_PairKey, list[_Pending]] = defaultdict(list)
        for rank, all_pending in self._pending.items():
            for pending in all_pending:
                key = self._pair_key(pending.call.title)
                if key is not None and rank == key.rank:
                    pending_of[key].append(pending)
        made = self._ended_pairs(pending_of)
        for key, operations in pending_of.items():
            made[key] += len(operations)
        for key, operations in pending_of.items():
            answer = key.answer
            unanswered = made[key] - made[answer]
            absent: tuple[int, ...] = ()
            behind: tuple[int, ...] = ()
            operation = operations[0]
            if unanswered > 0:
                operation = operations[max(0, len(operations) - unanswered)]
                absent = (answer.rank,)
            elif answer in pending_of and not pending_of[answer][0].is_entered:
                behind = (answer.rank,)
            else:
                continue
            if not operation.is_entered:
                behind = (*behind, key.rank)
            self._add_wait({key.rank: operation}, absent=absent, behind=behind)

    def _ended_pairs(self, keys: Iterable[_PairKey]) -> Counter[_PairKey]:
        """How many sends and receives have ended, of pairs whose recorders both are whole."""
        whole: set[int] = set()
        for key in keys:
            for rank in key.ranks:
                if rank in self.ranks and self.ranks[rank].whole:
                    whole.add(rank)
        ended: Counter[_PairKey] = Counter()
        for rank in whole:
            calls = self.ranks[rank].calls
            places, counts = np.unique(calls.title[calls.done], return_counts=True)
            for place, count in zip(places, counts, strict=True):
                ended_key = self._pair_key(calls.titles[place])
                # What the other rank did is known only from its own recorder.
                if ended_key is not None and whole.issuperset(ended_key.ranks):
                    ended[ended_key] += int(count)
        return ended

    def _pair_key(self, title: Title) -> _PairKey | None:
        """The key of a send or receive; None for another call."""
        if not title.p2p:
            return None
        ranks = pair_of(title.what, self.members(title.group))
        if ranks is None:
            return None
        return _PairKey(title.group, ranks, title.what.name)


def _last_numbers(calls: Calls, mask: Any) -> dict[str, int]:
    """The last number of each group among some calls."""
    groups = [calls.titles[place].group for place in calls.title[mask].tolist()]
    return dict(zip(groups, calls.seq[mask].tolist(), strict=True))


def must_agree(operation: What) -> tuple[str, ...]:
    """The part of a call that must be equal on all members of its group."""
    name = operation.name
    if name.startswith(("all_to_all", "alltoall")) or "_v" in name or name == "coalesced":
        return (name, operation.detail)
    inputs = (operation.inputs, operation.input_dtypes)
    outputs = (operation.outputs, operation.output_dtypes)
    if name in _ONLY_INPUTS:
        return (name, operation.detail, *inputs)
    if name in _ONLY_OUTPUTS:
        return (name, operation.detail, *outputs)
    return (name, operation.detail, *inputs, *outputs)


def pair_of(operation: What, members: Sequence[int]) -> tuple[int, int] | None:
    """The global ranks (from, to) of a point-to-point operation: "1<-0" of (4, 6) is (4, 6)."""
    places = [int(text) for text in re.findall(r"\d{1,9}", operation.detail)]
    if len(places) != 2 or operation.name not in ("send", "recv"):
        return None
    if max(places) >= len(members):
        return None
    if "->" not in operation.detail:
        places.reverse()
    source, target = places
    return members[source], members[target]


def _last_components(graph: Mapping[int, Sequence[int]]) -> Iterator[set[int]]:
    """The strongly connected components from which no edge leads out.

    Of 0 -> 1 -> 2 -> 1 that is {1, 2}: from each of these, all that can be reached leads back.
    """
    reverse: dict[int, list[int]] = defaultdict(list)
    for node, targets in graph.items():
        for target in targets:
            reverse[target].append(node)
    nodes_left = {*graph, *reverse}
    while nodes_left:
        node = min(nodes_left)
        ahead = _reachable(graph, node)
        behind = _reachable(reverse, node)
        while not ahead <= behind:
            # Some nodes ahead do not lead back: the last component is among them.
            node = min(ahead - behind)
            ahead = _reachable(graph, node)
            behind = _reachable(reverse, node)
        yield ahead
        # All other nodes behind it lead into it, so that they are in no last component.
        nodes_left -= behind


def _reachable(graph: Mapping[int, Sequence[int]], start: int) -> set[int]:
    """The nodes to which edges lead from one, and that node."""
    reached = {start}
    to_visit = [start]
    while to_visit:
        for target in graph.get(to_visit.pop(), ()):
            if target not in reached:
                reached.add(target)
                to_visit.append(target)
    return reached
