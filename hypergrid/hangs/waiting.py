"""The graph of waiting ranks of a recording, from which a verdict is read."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hypergrid.hangs.recording import DEFAULT, Call, Calls, Recording, Title, What

OUTSIDE = -1  # stands, as a rank that nobody has seen, for all processes of other jobs
_NOWHERE = -1  # the last number of a rank that did not call a group
PATIENCE = 10**9  # ns; who waits for less is not stuck
_ALL = 1 << 62  # more than any number
# Errors of a call that say that another rank did not come, or called otherwise, and that a process
# ended. Data sets and storage raise the same words.
_NOT_COME = re.compile(r"timed? ?out|other rank|watchdog|abort|gloo.*(enforce|preamble)", re.I)
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process|peer closed|socket|"
    r"nccl(remote|system|internal)error",
    re.I,
)
# A call to torch waits or raises in one of these, or in the recorder that is around it.
_IN_A_CALL = re.compile(r"/torch/(distributed(?!/checkpoint)|autograd)/|/hypergrid/hangs/")
# A script may wait for a call in the compiled part of torch, which has no frame: the text of such
# an error names the backend.
_OF_A_BACKEND = re.compile(r"/gloo/|nccl|ProcessGroup", re.I)
_WRAPPER = "c10d_logger.py"  # is around every call of torch's
_OF_ANY_SIZE = ("all_to_all", "alltoall", "coalesced")  # the first words of a name
_PAIR = re.compile(r"(\d{1,9})(?:->|<-)(\d{1,9})")
# The members of a group need not agree on what only one of them gives, or takes.
_ONLY_INPUTS = ("gather", "reduce")
_ONLY_OUTPUTS = ("scatter", "broadcast")


@dataclass(frozen=True, eq=False)
class Wait:
    """Equal calls with one number in one group, which cannot end before others make them.

    ``absent`` have not called it, ``unlike`` have called something else in its place, ``behind``
    have it in their queue after calls that have not ended either. Of a group with members that are
    processes of another job, OUTSIDE is absent.
    """

    call: Call  # of ``rank``, which has been in it for longest
    rank: int
    at: int  # the place of the call among those of the rank
    inside: Set[int]
    absent: Set[int]
    unlike: Set[int]
    behind: Set[int]
    ns: int  # how long

    @property
    def place(self) -> Place:
        """The group, and the number of the call in it."""
        return self.call.group, self.call.seq

    @property
    def entered(self) -> Set[int]:
        """The ranks that are in it; of a call that all have only queued, none."""
        return self.inside - self.behind

    @property
    def missed(self) -> Set[int]:
        """All for whom somebody waits in it."""
        if self.entered:
            return self.absent | self.unlike | self.behind
        return self.absent | self.unlike

    def missed_by(self, rank: int) -> Set[int]:
        """The ranks for whom one rank waits: who has only queued it waits for who is not there."""
        if rank in self.entered:
            return self.missed
        return self.absent | self.unlike


# A call by its group and its number there.
Place: TypeAlias = tuple[str, int]


class _Pending(NamedTuple):
    """A call that has not ended."""

    at: int  # its place among the calls of its rank
    call: Call
    is_entered: bool  # else calls before it may hold it up


class _PairKey(NamedTuple):
    """All sends, or all receives, from one rank to another in one group."""

    group: str
    ranks: tuple[int, ...]  # from, to
    name: str  # "send" or "recv"

    @property
    def rank(self) -> int:
        """The rank that calls it."""
        source, target = self.ranks
        if self.name == "send":
            return source
        return target

    @property
    def answer(self) -> _PairKey:
        """Of a send the receive, and the reverse."""
        return self._replace(name="recv" if self.name == "send" else "send")


class Waiting:
    """The graph of what each rank of a recording waits for.

    ``waits`` are the calls that miss somebody, ``running`` those that all have entered; ``of`` are
    the waits that each blocked rank is in. ``gone`` are ranks without a dump, ``blind`` those with
    a stack and without a flight recorder, ``raised`` those with an error of their own, ``doubtful``
    one whose error may yet come from another rank, and ``victims`` those whose error does.
    ``unseen`` has the ranks that are in a call that is not recorded, and its name; they and victims
    are ``guessing``: each may wait for any other rank. ``unequal`` are the different calls that
    ranks made at one place of a group, those of the most ranks last. Of each set in ``last_ones``,
    whose ranks wait for nobody but each other, one has to move first.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.ranks = recording.ranks
        self.world = range(recording.world_size)
        answered = {rank for rank, recording in self.ranks.items() if recording.answered}
        self.gone = set(self.world) - answered
        self.blind = {rank for rank in answered if not self.ranks[rank].has_calls}
        self.raised: set[int] = set()
        self.doubtful: set[int] = set()
        self.victims: set[int] = set()
        self._end = 0  # of all recordings
        for rank, rank_recording in self.ranks.items():
            self._end = max(self._end, self.last_time(rank), rank_recording.written)
        self._sort_errors()
        self._last_numbers: dict[int, dict[str, int]] = {}  # of each rank in each group
        self._pending: dict[int, list[_Pending]] = {}
        for rank in self.ranks:
            self._find_pending(rank)
        self.waits: list[Wait] = []
        self.running: list[Wait] = []
        self.unequal: dict[Place, list[dict[int, Call]]] = {}
        self._find_collectives()
        self._find_pairs()
        self.of = self._waits_of_ranks()
        blocked = self.of.keys()
        self.unseen: dict[int, str] = {}
        without_wait = self.ranks.keys() - blocked - self.raised - self.victims
        for rank in sorted(without_wait):
            function = self._unrecorded_function(rank)
            # A rank that made a call a moment ago may leave this one at once.
            if function and self._is_idle(rank):
                self.unseen[rank] = function
        self.guessing = self.unseen.keys() | (self.victims - blocked)
        self.blocked = blocked | self.guessing
        self.last_ones = self._last_ones()

    def _sort_errors(self) -> None:
        """Tell errors of a rank's own from those that come from other ranks.

        An error comes from others if it ended a call to torch because another rank did not come, or
        lost a connection and is not the first end of a script that is known.
        """
        lost = []
        for rank, recording in self.ranks.items():
            error = recording.error
            # Without a stack, the words alone say where it was raised.
            is_of_a_call = (
                not recording.stack or self._is_in_a_call(rank) or _OF_A_BACKEND.search(error)
            )
            if is_of_a_call and _NOT_COME.search(error):
                self.victims.add(rank)
            elif is_of_a_call and _LOST.search(error):
                lost.append(rank)
            elif error:
                self.raised.add(rank)
        self.victims.update(lost)
        has_ended = any(recording.ended for recording in self.ranks.values())
        # A connection is lost because a process ended. Where no other end is known, it may be that
        # of the rank that wrote first.
        if lost and not (self.gone or self.raised or has_ended):
            first = min(lost, key=lambda rank: self.ranks[rank].written)
            self.doubtful.add(first)
            self.raised.add(first)
            self.victims.discard(first)

    def _is_in_a_call(self, rank: int) -> bool:
        """Whether it is in a call to torch, or was when it raised."""
        stack = self.ranks[rank].stack
        if not stack:
            return False
        innermost_file = stack[0].file
        return bool(_IN_A_CALL.search(innermost_file))

    def _waits_of_ranks(self) -> dict[int, list[Wait]]:
        """The waits that hold up each rank."""
        waits_of: dict[int, list[Wait]] = defaultdict(list)
        for wait in self.waits:
            for rank in wait.inside:
                # It has left the call with an error, whatever its recorder says.
                if rank in self.raised:
                    continue
                waits_of[rank].append(wait)
        for rank, waits in waits_of.items():
            # What is queued behind another call holds nobody up, as long as that has not ended.
            entered = [wait for wait in waits if rank not in wait.behind]
            waits_of[rank] = entered or waits
        return waits_of

    def members(self, key: str) -> Sequence[int]:
        """The ranks of a group; of one whose members are not known, those that called it."""
        group = self.recording.groups[key]
        if group.ranks:
            return group.ranks
        if group.label == DEFAULT:
            return self.world
        callers = []
        for rank, numbers in sorted(self._last_numbers.items()):
            if key in numbers:
                callers.append(rank)
        return callers

    @property
    def is_world_known(self) -> bool:
        """Whether a file says which ranks there are; else more may have left none."""
        groups = self.recording.groups.values()
        size = len(self.world)
        return any(len(group.ranks) == size for group in groups)

    def needs(self, rank: int) -> set[int]:
        """The ranks that it waits for."""
        # Nothing says whom a guessing rank waits for: it may be any other.
        needed = set(self.world) if rank in self.guessing else set()
        for wait in self.of.get(rank, []):
            needed |= wait.missed_by(rank)
        return needed - {rank, OUTSIDE}

    def _last_ones(self) -> list[set[int]]:
        # A rank leads to its waits, and a wait to all that it misses. None is the guess: any rank.
        graph: dict[Any, Iterable[Any]] = {wait: wait.missed for wait in self.waits}
        for rank, waits in self.of.items():
            targets: list[Any] = []
            for wait in waits:
                if rank in wait.entered:
                    targets.append(wait)
                else:
                    targets += wait.missed_by(rank)
            graph[rank] = targets
        for rank in self.guessing:
            graph[rank] = [None]
        graph[None] = self.world if self.guessing else ()
        last_ones = []
        for component in _last_components(graph):
            ranks = component.intersection((OUTSIDE, *self.world))
            if ranks:
                last_ones.append(ranks)
        return sorted(last_ones, key=min)

    def _unrecorded_function(self, rank: int) -> str:
        """The call to torch, not recorded, that its main thread is in; empty where it is in none.

        Such as a receive of gloo's, or ``new_group``, in which members wait for each other.
        """
        stack = self.ranks[rank].stack
        # It is in a call that is recorded.
        if self._pending.get(rank):
            return ""
        if not stack:
            return ""
        # The innermost frame is first: of those in torch, the last is what the script called.
        function = ""
        for frame in stack:
            if not _IN_A_CALL.search(frame.file):
                break
            if not frame.file.endswith(_WRAPPER):
                function = frame.function
        # Such as Megatron's p2p_communication.py, which may wait for a handle.
        _, _, name = stack[0].file.rpartition("/")
        if not function and "p2p" in name and not self.sees_p2p(rank):
            return "a send or recv"
        return function

    def sees_p2p(self, rank: int) -> bool:
        """Whether sends and receives of this rank would be recorded: NCCL's are, gloo's rarely."""
        calls = self.ranks[rank].calls
        titles = [calls.titles[place] for place in np.unique(calls.rows["title"])]
        on_gloo = [title for title in titles if title.is_on_gloo]
        # Who calls both may send on gloo, too.
        if any(title.p2p for title in on_gloo or titles):
            return True
        if on_gloo:
            return False
        # NCCL has several backends from torch 2.15 on, whose names begin alike.
        return any(title.backend.startswith("nccl") for title in titles)

    def last_time(self, rank: int) -> int:
        """When the rank last called something, or saw a call end; 0 if that is not known."""
        calls = self.ranks[rank].calls
        last_times = [
            calls.rows[name].max(initial=0) for name in ("created", "started", "completed")
        ]
        return int(max(last_times))

    def _call_of(self, rank: int, group: str, seq: int) -> Call | None:
        """The collective with this number that a rank made."""
        calls = self.ranks[rank].calls
        for at in np.flatnonzero(calls.rows["seq"] == seq).tolist():
            call = calls[at]
            # Sends and receives have numbers of their own.
            if call.p2p:
                continue
            if call.group == group:
                return call
        return None

    def _find_pending(self, rank: int) -> None:
        recording = self.ranks[rank]
        calls = recording.calls
        is_collective_title = [not title.p2p for title in calls.titles]
        # Without its type, the array of a rank without calls would be of floats.
        is_collective = np.array(is_collective_title, bool)[calls.rows["title"]]
        self._last_numbers[rank] = _last_numbers(calls, is_collective)
        if rank in self.raised and self._is_in_a_call(rank) and calls:
            return  # it is not in its last call any more
        ended = _last_numbers(calls, is_collective & calls.rows["done"])
        is_timed = bool(calls.rows["started"].any())
        pending: list[_Pending] = []
        for at in np.flatnonzero(~calls.rows["done"]).tolist():
            call = calls[at]
            if not call.p2p:
                # Calls of a group end in order, so the first is what it waits in; one whose handle
                # was dropped may never be marked.
                if call.seq <= ended.get(call.group, _NOWHERE):
                    continue
                ended[call.group] = _ALL
            if call.title.is_on_gloo:
                # Gloo has no kernels that wait behind each other on a stream.
                is_entered = True
            elif is_timed:
                is_entered = call.started > 0
            else:
                # No start was recorded: the first is entered, others are queued behind it. The
                # sends and receives of one batch have one number.
                first = call
                if pending:
                    first = pending[0].call
                is_entered = (first.group, first.seq) == (call.group, call.seq)
            pending.append(_Pending(at, call, is_entered))
        if not pending and rank in self.victims and calls:
            # It was marked as ended by the error.
            at = len(calls) - 1
            pending.append(_Pending(at, calls[at], is_entered=True))
        # A script that has ended waits for nobody, even if a handle was dropped.
        if not recording.ended:
            self._pending[rank] = pending

    def _find_collectives(self) -> None:
        """Calls that not all members of their group have entered alike."""
        pending_at: dict[Place, dict[int, _Pending]] = defaultdict(dict)
        pending_in: dict[tuple[int, str], _Pending] = {}  # of a rank, in a group
        for rank, all_pending in self._pending.items():
            for pending in all_pending:
                title = pending.call.title
                if title.p2p:
                    continue
                pending_at[title.group, pending.call.seq][rank] = pending
                pending_in[rank, title.group] = pending
        for (group, seq), pending_of in pending_at.items():
            absent = set()
            behind = set()
            # By what must be the same for all ranks.
            calls_of: dict[What, dict[int, Call]] = defaultdict(dict)
            for rank in self.members(group):
                last_number = self._last_numbers.get(rank, {}).get(group, _NOWHERE)
                if last_number < seq:
                    absent.add(rank)
                    continue
                # A rank whose recorder has overwritten its call came long ago: nobody misses it.
                call = self._call_of(rank, group, seq)
                if call is not None:
                    agreed_part = must_agree(call.what)
                    calls_of[agreed_part][rank] = call
                # It is in an earlier call of the group, or has queued this one.
                first = pending_in.get((rank, group))
                if first is not None and (first.call.seq, first.is_entered) < (seq, True):
                    behind.add(rank)
            outside = self.recording.groups[group].outside
            # Processes of another job left no files here: none of them is seen to enter.
            if outside:
                absent = (absent - outside) | {OUTSIDE}
            alike = sorted(calls_of.values(), key=len)
            if len(alike) > 1:
                self.unequal[group, seq] = alike
            recorded = set().union(*alike)
            for calls in alike:
                inside = {}
                for rank in calls:
                    if rank in pending_of:
                        inside[rank] = pending_of[rank]
                unlike = recorded - calls.keys()
                if inside:
                    self._add_wait(inside, absent, unlike, behind & calls.keys())

    def _add_wait(
        self,
        inside: Mapping[int, _Pending],
        absent: Set[int],
        unlike: Set[int],
        behind: Set[int],
    ) -> None:
        durations = [self._ns(rank, pending.call) for rank, pending in inside.items()]
        ns = max(durations)
        if not self._is_stuck(inside, ns):
            return
        first = min(inside, key=lambda rank: inside[rank].call.created)
        at, call, _ = inside[first]
        ranks = inside.keys()
        wait = Wait(call, first, at, ranks, absent, unlike, behind, ns)
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
        if not is_known:
            return True
        # A failed call ends the job: those that have just entered another will not leave it.
        if self.victims:
            return True
        return ns >= PATIENCE

    def _is_idle(self, rank: int) -> bool:
        """Whether it has called nothing for a while."""
        calls = self.ranks[rank].calls
        if not calls:
            return True
        ns = self._ns(rank, calls[-1])
        return self._is_stuck((rank,), ns)

    def _find_pairs(self) -> None:
        """Sends that nobody receives, and the reverse.

        Of three sends to a rank that made two receives, ended or not, the third waits for it. A
        recorder that does not reach back to the first call shows only those that have not ended.
        """
        pending_of: dict[_PairKey, list[_Pending]] = defaultdict(list)
        counts = self._ended_pairs()
        for rank, all_pending in self._pending.items():
            for pending in all_pending:
                key = self._pair_key(pending.call.title)
                if key is None:
                    continue
                # In a group over two jobs, members are numbered anew: it may name another rank.
                if rank == key.rank:
                    pending_of[key].append(pending)
                    counts[key] += 1
        for key, operations in pending_of.items():
            answer = key.answer
            answers = pending_of.get(answer)
            unanswered = counts[key] - counts[answer]
            operation = operations[0]
            absent = set()
            behind = set()
            if answer.rank in self.recording.groups[key.group].outside:
                absent.add(OUTSIDE)
            elif unanswered > 0:
                # Answers come in order: the last ones lack theirs, or all if fewer have not ended.
                operation = operations[-unanswered:][0]
                absent.add(answer.rank)
            elif answers and not answers[0].is_entered:
                behind.add(answer.rank)
            else:
                continue
            if not operation.is_entered:
                behind.add(key.rank)
            self._add_wait({key.rank: operation}, absent, set(), behind)

    def _ended_pairs(self) -> Counter[_PairKey]:
        """How many sends and receives have ended, of pairs whose recorders both are whole."""
        whole = {rank for rank, recording in self.ranks.items() if recording.whole}
        ended: Counter[_PairKey] = Counter()
        for recording in self.ranks.values():
            calls = recording.calls
            ended_titles = calls.rows["title"][calls.rows["done"]]
            for place, count in Counter(ended_titles.tolist()).items():
                key = self._pair_key(calls.titles[place])
                if key is None:
                    continue
                # What the other rank did is known only from its own recorder.
                if whole.issuperset(key.ranks):
                    ended[key] += count
        return ended

    def _pair_key(self, title: Title) -> _PairKey | None:
        """The key of a send or receive; None for another call."""
        if not title.p2p:
            return None
        operation = title.what
        members = self.members(title.group)
        ranks = pair_of(operation, members)
        if not ranks:
            return None
        return _PairKey(title.group, ranks, operation.name)


def _last_numbers(calls: Calls, mask: Any) -> dict[str, int]:
    """The last number of each group among some calls."""
    group_of_title = [title.group for title in calls.titles]
    rows = calls.rows[mask]
    groups = [group_of_title[place] for place in rows["title"].tolist()]
    numbers = rows["seq"].tolist()
    # Of equal keys, a dict keeps the value that came last.
    return dict(zip(groups, numbers, strict=True))


def must_agree(operation: What) -> What:
    """The part of a call that must be equal on all members of its group."""
    name = operation.name
    # Each member gives and takes sizes of its own.
    if name.startswith(_OF_ANY_SIZE) or "_v" in name:
        return What(name, operation.detail, "", "", "", "")
    if name in _ONLY_INPUTS:
        return operation._replace(outputs="", output_dtypes="")
    if name in _ONLY_OUTPUTS:
        return operation._replace(inputs="", input_dtypes="")
    return operation


def pair_of(operation: What, members: Sequence[int]) -> tuple[int, ...]:
    """The global ranks (from, to) of a send or receive: "1<-0" of (4, 6) is (4, 6); else none."""
    if operation.name not in ("send", "recv"):
        return ()
    match = _PAIR.fullmatch(operation.detail)
    if match is None:
        return ()
    caller, peer = map(int, match.groups())
    # The members that the files name may be too few.
    if max(caller, peer) >= len(members):
        return ()
    ranks = (members[caller], members[peer])
    if operation.name == "send":
        return ranks
    return ranks[::-1]


def _last_components(graph: Mapping[Any, Iterable[Any]]) -> Iterator[set[Any]]:
    """The strongly connected components from which no edge leads out.

    Of 0 -> 1 -> 2 -> 1 that is {1, 2}: from each of these, all that can be reached leads back.
    """
    reverse: dict[Any, list[Any]] = defaultdict(list)
    for node, targets in graph.items():
        for target in targets:
            reverse[target].append(node)
    done: set[Any] = set()
    for node in (*graph, *reverse):
        if node in done:
            continue
        ahead = _reachable(graph, node)
        behind = _reachable(reverse, node)
        while not ahead <= behind:
            # Some nodes ahead do not lead back: the last component is among them.
            node = next(iter(ahead - behind))
            ahead = _reachable(graph, node)
            behind = _reachable(reverse, node)
        yield ahead
        # All other nodes behind it lead into it, so that they are in no last component.
        done |= behind


def _reachable(graph: Mapping[Any, Iterable[Any]], start: Any) -> set[Any]:
    """The nodes to which edges lead from one, and that node."""
    reached = {start}
    to_visit = [start]
    while to_visit:
        node = to_visit.pop()
        targets = graph.get(node, ())
        new_nodes = set(targets) - reached
        reached |= new_nodes
        to_visit += new_nodes
    return reached
