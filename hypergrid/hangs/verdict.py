"""The verdict on a hanging job's recording, in words: the rank that everyone waits for."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from hypergrid.hangs.causes import Cause, Kind, Rules
from hypergrid.hangs.history import Departure
from hypergrid.hangs.recording import Call, Frame, RankRecording, Ranks, Recording
from hypergrid.hangs.waiting import Place, Wait, Waiting, pair_of
from hypergrid.messages import span_of

SCHEMA = 1
PATIENCE = 1.0  # seconds; who waits for less is not stuck
_SHOWN = 16  # ranks that one rank waits for
# Torch, in whichever directory it is (a job's own may be called torch too), the standard library,
# and this package.
_FOREIGN = re.compile(
    r"/torch/(_\w+|amp|autograd|cuda|distributed|fx|multiprocessing|nn|optim|utils|functional\.py)\b"
    r"|/hypergrid/(groups|agreement|hangs)/|/lib/python[^/]*/(?!(site|dist)-packages)|^<frozen|"
    rf"^({'|'.join(sorted(sys.stdlib_module_names))})\.py$"
)

State: TypeAlias = Literal["cause", "raised", "no dump", "waiting", "running", "elsewhere"]


@dataclass(frozen=True)
class Diagnosis:
    """The fault, and how it is known.

    ``ranks`` are the first cause, and everyone else waits because of them; if not ``certain``,
    it may also be a rank for which they wait where nothing is recorded. ``group`` is the label
    and ``members`` the ranks of the group in which they are missed, ``seq`` the number of the
    call there. ``chain`` follows the sentence, in at most four lines: where the ranks are, what
    the others do, and what to look at next; where the cause is certain, only what is needed to
    act. ``waiting`` has the ranks that each waiting rank waits for, at most 16.
    """

    kind: Kind
    sentence: str
    ranks: Ranks = ()
    certain: bool = True
    group: str | None = None
    members: Ranks = ()
    operation: str | None = None
    seq: int | None = None
    seconds: float | None = None  # since when others wait; a lower bound
    chain: tuple[str, ...] = ()
    waiting: Mapping[int, Ranks] = field(default_factory=dict)
    states: Mapping[int, State] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.kind == "ok"

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {"schema": SCHEMA, "ok": self.ok, **vars(self)}


def diagnose(recording: Recording, *, patience: float = PATIENCE) -> Diagnosis:
    """The first cause of a hang, told apart from those who wait because of it.

    ``patience``: seconds; who has waited for less when the dumps were written is not stuck.
    """
    waiting = Waiting(recording, patience)
    cause = Rules(waiting).cause()
    words = _Words(waiting, cause)
    sentence = words.sentence()
    if cause.kind != "slow":  # it begins with the name of a call
        sentence = sentence[:1].upper() + sentence[1:]
    needed = {}
    for rank in sorted(waiting.blocked):
        needed_ranks = sorted(waiting.needs(rank))
        needed[rank] = tuple(needed_ranks[:_SHOWN])
    diagnosis = Diagnosis(
        cause.kind,
        sentence,
        cause.ranks,
        certain=not cause.doubt,
        chain=tuple(words.chain()),
        waiting=needed,
        states=_states(waiting, cause),
        problems=tuple(recording.problems),
    )
    wait = cause.wait
    if wait is None:
        return diagnosis
    group, seq = wait.place
    return replace(
        diagnosis,
        group=recording.groups[group].shown,
        members=tuple(waiting.members(group)),
        operation=wait.call.what.name,
        seq=seq,
        seconds=wait.ns / 1e9,
    )


def _states(waiting: Waiting, cause: Cause) -> dict[int, State]:
    """The state of each rank; of several that hold, the last of these."""
    states: dict[int, State] = {}
    states |= dict.fromkeys(waiting.world, "elsewhere")
    for wait in waiting.running:
        states |= dict.fromkeys(wait.inside, "running")
    states |= dict.fromkeys(waiting.blocked, "waiting")
    states |= dict.fromkeys(waiting.raised, "raised")
    states |= dict.fromkeys(waiting.gone, "no dump")
    states |= dict.fromkeys(cause.ranks, "cause")
    return states


# What to look at next, by the kind of a verdict.
_NEXT = {
    "mismatch": "compare the lines of the script that make these two calls.",
    "order": "find the condition in the script that only some ranks meet before these calls.",
    "raised": "read the error in the output of {ranks}.",
    "no dump": "look for {ranks} in the kernel's log of the host, and in the scheduler's log.",
    "outside": "look at the process that is that member, such as an inference engine.",
    "never entered": "read the stack of {ranks}, and ask again: if the rank is only slow, the "
    "number of its last call grows.",
    "root": "compare the roots that the ranks name, then look at the network and the devices.",
    "slow": "look at the network and the devices of the ranks in that call.",
}
_DOUBTS = {
    "few": "this may not be the directory of all ranks",
    "unlisted": "that member may be a rank of this job that did not create the group",
    "sounds": "the error of {ranks} may come from another rank, whose clock is behind",
    "alone": "nobody is seen to wait for {ranks}",
    "partial": "a rank may be missing that these files do not show",
    "root": "torch does not record roots, and the ranks may have named different ones",
    "unread": "the calls of {ranks} are not known",
    "mixed": "{mixed}. The files seem to be of two jobs, or of two times",
    "old": "a dump of {ranks} was written before that call, or while the rank still worked, and "
    "the rank may have come since. Have all ranks write at the same time",
    "hidden": "ranks may wait for others in a call that is not recorded. HYPERGRID_RECORD_P2P=1 "
    "records the sends and receives of gloo",
    "blind": "the flight recorder of {blind} is missing or cut, and what was called there is not "
    "known",
    "either": "{ranks} may be right, and another rank made a call too many or too few",
    "which": "which of them did not do what was due cannot be seen",
}
_KEEPS = (
    "Torch keeps calls with TORCH_FR_BUFFER_SIZE=2000 (TORCH_NCCL_TRACE_BUFFER_SIZE before torch "
    "2.9) in the job's environment."
)


class _Words:
    """Says a cause in sentences."""

    def __init__(self, waiting: Waiting, cause: Cause) -> None:
        self.waiting = waiting
        self.ranks = waiting.ranks
        self.groups = waiting.recording.groups
        self.cause = cause

    def sentence(self) -> str:
        """The verdict."""
        sentences = {
            "ok": self._well,
            "empty": self._nothing,
            "slow": self._slow,
            "mismatch": self._mismatch,
            "order": self._order,
            "outside": self._outside,
        }
        to_text = sentences.get(self.cause.kind, self._absent)
        text = to_text()
        if not self.cause.doubt:
            return text
        doubt = _DOUBTS[self.cause.doubt].format(
            ranks=_ranks(self.cause.ranks),
            blind=_ranks(self.waiting.blind),
            mixed=self.waiting.recording.mixed,
        )
        return f"{text} Not certain: {doubt}."

    def chain(self) -> list[str]:
        """Where the ranks are, what the others do, and what to look at next."""
        cause = self.cause
        lines = self._places()[:2]
        waiting_ranks = self._waiting_elsewhere()
        calls: set[Place] = set()
        for rank in waiting_ranks:
            for wait in self.waiting.of[rank]:
                calls.add(wait.place)
        if calls:
            ranks = _ranks(waiting_ranks, "waits", "wait")
            number = _many(len(calls), "call")
            lines.append(f"{ranks} in {number}.")
        advice = _NEXT.get("root" if cause.doubt == "root" else cause.kind)
        if advice is not None:
            ranks = _ranks(cause.ranks)
            lines.append(f"Next: {advice.format(ranks=ranks)}")
        return lines

    def _waiting_elsewhere(self) -> set[int]:
        """The waiting ranks that are in no line before."""
        cause = self.cause
        waiting_ranks = set(self.waiting.of)
        waiting_ranks.difference_update(cause.ranks)
        if self._names_circle:
            for rank, _, _ in cause.circle:
                waiting_ranks.discard(rank)
        elif cause.wait is not None and not cause.circle:
            waiting_ranks -= cause.wait.inside
        return waiting_ranks

    @property
    def _names_circle(self) -> bool:
        """Whether the ranks that wait for each other are of use: who is guilty is not certain."""
        return bool(self.cause.circle and self.cause.doubt)

    def _places(self) -> list[str]:
        """Where the ranks of the cause are, or those that wait for them."""
        cause = self.cause
        if self._names_circle:
            return [self._step(*step) for step in cause.circle]
        lines = []
        if cause.kind == "mismatch":
            for rank, calls in self._unequal():
                frames = calls[rank].frames
                if frames:
                    place = _at(frames)
                    lines.append(f"rank {rank} made the call in {place}.")
        elif cause.wait is not None:
            # The sentences on these say who is in the call, as do those of all that is certain.
            if cause.doubt and cause.kind not in ("slow", "outside"):
                line = self._line(cause.wait)
                lines.append(line)
        elif cause.kind == "empty" or (cause.kind == "order" and self.waiting.unseen):
            stuck_ranks = self.waiting.unseen or self.ranks
            for rank in sorted(stuck_ranks):
                stack = self.ranks[rank].stack
                if stack:
                    place = _at(stack)
                    lines.append(f"rank {rank} is in {place}.")
        return lines

    def _step(self, rank: int, needed: int, wait: Wait | None) -> str:
        """Who waits for whom in a circle."""
        if wait is None:
            function = self.waiting.unseen.get(rank, "a call")
            return f"rank {rank} is in {function} and may wait for rank {needed}."
        call = self._call(wait)
        state = "is in"
        if rank in wait.behind:
            state = "has queued"
        return f"rank {rank} {state} {call} and waits for rank {needed}."

    def _line(self, wait: Wait) -> str:
        """Who is in a call, and for whom these ranks wait."""
        # A rank that has queued the call is not in it, and the others wait for it.
        entered = wait.inside - wait.behind or wait.inside
        missed = wait.missed - entered or wait.missed
        inside = _ranks(entered, "is in it and waits", "are in it and wait")
        call = self._call(wait)
        return f"{call}: {inside} for {_ranks(missed)}."

    # The kinds.

    def _well(self) -> str:
        calls = 0
        running = len(self.waiting.gone)
        for recording in self.ranks.values():
            calls += len(recording.calls)
            running += not recording.ended
        well = "nobody is stuck"
        if not running:
            well = "the script of every rank ended, none by an exception"
        ranks = _many(len(self.ranks), "rank")
        text = f"{ranks} made {calls:,} calls, and {well}."
        if self.cause.doubt:
            return text
        return f"nothing is wrong: {text}"

    def _nothing(self) -> str:
        if any(recording.answered for recording in self.ranks.values()):
            return f"no collective is recorded. {_KEEPS}"
        return (
            "no rank has written what it was doing: no flight recorder, stack or error. Ranks that "
            "still run and record by hypergrid.record write on hypergrid diagnose --ask DIR. "
            f"{_KEEPS}"
        )

    def _slow(self) -> str:
        wait = self._wait()
        inside = self._inside(wait, "in it")
        text = f"{self._call(wait)}: {inside}, with equal calls"
        if self.cause.doubt:
            return f"{text}."
        return f"{text}, so nobody is missing. It is slow, or the network under it does not answer."

    def _outside(self) -> str:
        wait = self._wait()
        waiters = _ranks(wait.inside, "waits", "wait")
        members = _span(sorted(wait.outside))
        is_one = len(wait.outside) == 1
        whose = f"member {members} is" if is_one else f"members {members} are"
        call = self._title(wait.call)
        return f"{waiters} in {call}{self._lasting(wait)}, whose {whose} outside of this job."

    def _wait(self) -> Wait:
        assert self.cause.wait is not None
        return self.cause.wait

    def _unequal(self) -> list[tuple[int, dict[int, Call]]]:
        """A rank of the cause and all that called the same; then those of another call there."""
        parts = self.waiting.unequal[self._wait().place]
        cause_ranks = set(self.cause.ranks)
        named = next(part for part in parts if cause_ranks & part.keys())
        # Of the other calls the one that most ranks made.
        largest = parts[-1]
        if named is largest:
            largest = parts[-2]
        unequal = []
        for part in (named, largest):
            ranks = cause_ranks & part.keys() or part
            unequal.append((min(ranks), part))
        return unequal

    def _mismatch(self) -> str:
        (rank, calls), (other_rank, other_calls) = self._unequal()
        call = calls[rank]
        other_call = other_calls[other_rank]
        # Of two ranks that differ, both are the cause.
        named = [rank for rank in self.cause.ranks if rank not in other_calls]
        group = self._group(call.group)
        shown = _shown(call, other_call)
        other_shown = _shown(other_call, call)
        return (
            f"{self._named(named)} called {shown} as #{call.seq} of {group}, where "
            f"{_ranks(other_calls)} called {other_shown}.{self._evidence()}"
        )

    def _evidence(self) -> str:
        """The ranks that did otherwise."""
        departure = self.cause.departure
        if departure is None:
            return ""
        rank = departure.rank
        due = self._title(departure.due)
        if not departure.peers:
            name, _, _ = due.partition(" #")
            return f" There rank {rank} called {name} in earlier steps."
        peers = _many(departure.peers, "other rank")
        text = f" There {peers} that had done the same until then called {due}"
        if departure.before:
            text += f", as rank {rank} did in earlier steps"
        return f"{text}."

    def _absent(self) -> str:
        wait = self.cause.wait
        ranks = self.cause.ranks
        named = self._named(ranks)
        where = self._whereabouts()
        if wait is not None:
            missed = self._missed(wait)
        elif self.waiting.guessing.issubset(ranks):
            return f"{named} {where}"  # nobody is seen to wait
        else:
            missed = self._missed_unrecorded()
        subject = f"rank {ranks[0]}"
        if len(ranks) == 1:
            subject = "it"
        elif self.cause.kind == "no dump":
            subject = "they"
        return f"{named} {missed}; {subject} {where}"

    def _missed(self, wait: Wait) -> str:
        """The call in which others wait for the first cause."""
        call = self._call(wait)
        if not wait.call.p2p:
            return f"never entered {call}, which {self._inside(wait, 'in')}"
        verb = "sent"
        if wait.call.what.name == "send":
            verb = "received"
        waiters = _ranks(wait.inside, "has", "have")
        lasting = self._lasting(wait)
        return f"never {verb} what {waiters} been waiting for in {call}{lasting}"

    def _missed_unrecorded(self) -> str:
        """The call, not recorded, in which others wait."""
        waiting_ranks = self.waiting.guessing.difference(self.cause.ranks)
        function = self.waiting.unseen.get(min(waiting_ranks), "a call")
        waiters = _ranks(waiting_ranks, "waits", "wait")
        return f"did not take part in {function}, in which {waiters}"

    def _whereabouts(self) -> str:
        """The known facts about where the first cause is, in words that follow its name."""
        cause = self.cause
        rank = cause.ranks[0]
        recording = self.ranks.get(rank, RankRecording(rank))
        if cause.doubt == "unread":
            return "left a dump that could not be read."
        if cause.kind == "no dump":
            process = ""
            if recording.pid and len(cause.ranks) == 1:
                process = f" (pid {recording.pid} on {recording.host})"
            return f"left no dump: ended, stopped or unreachable{process}."
        if cause.kind == "raised":
            error = recording.error[:200]
            return f"raised {error.rstrip('.')}."
        facts = []
        if recording.ended:
            facts.append("has ended its script")
        elif recording.stack:
            facts.append(f"is in {_at(recording.stack)}")
        if recording.calls:
            last = recording.calls[-1]
            unfinished = "" if last.done else ", not finished"
            facts.append(f"last called {self._title(last)}{unfinished}")
        elif rank in self.waiting.blind:
            facts.append("left no flight recorder")
        else:
            facts.append("has called nothing so far")
        text = ", and ".join(facts)
        return f"{text}."

    def _order(self) -> str:
        cause = self.cause
        departure = cause.departure
        if departure is None and not cause.circle:
            return self._unseen()
        texts = []
        if departure is not None:
            named = self._named(cause.ranks)
            departed = self._departed(departure)
            texts.append(f"{named} {departed}.{self._evidence()}")
        if self._names_circle:
            title = "That is a deadlock" if texts else "deadlock"
            deadlock = self._deadlock()
            texts.append(f"{title}: {deadlock}.")
        elif cause.wait is not None and not cause.circle:
            call = self._call(cause.wait)
            texts.append(f"Ranks wait in {call}.")
        return " ".join(texts)

    def _unseen(self) -> str:
        """The calls, not recorded, in which all wait."""
        unseen = self.waiting.unseen
        ranks_in: dict[str, list[int]] = defaultdict(list)
        for rank, function in unseen.items():
            ranks_in[function].append(rank)
        named_first = sorted(ranks_in, key=lambda name: ranks_in[name][0] not in self.cause.ranks)
        texts = []
        for function in named_first:
            ranks = _ranks(ranks_in[function], "is", "are")
            texts.append(f"{ranks} in {function}")
        return f"{', and '.join(texts)}."

    def _departed(self, departure: Departure) -> str:
        """The call that was made instead of the one that was due."""
        at = departure.at
        calls = self.ranks[departure.rank].calls
        call = self._title(calls[at])
        due = self._title(departure.due)
        if at > 0:
            call_before = self._title(calls[at - 1])
            call = f"{call} after {call_before}"
        return f"called {call}, where {due} is next"

    def _deadlock(self) -> str:
        ranks = []
        calls = []
        for rank, _, wait in self.cause.circle:
            ranks.append(rank)
            if wait is not None:
                calls.append(self._call(wait))
        # Several ranks can be in one call.
        first_calls = list(dict.fromkeys(calls))[:2]
        where = " and ".join(first_calls) or "calls that are not recorded"
        return f"{_ranks(ranks)} wait for each other in {where}"

    # Names.

    def _title(self, call: Call) -> str:
        """Such as "all_reduce #3 of DATA_PARALLEL_GROUP"."""
        name = call.what.name
        if call.p2p:
            name = f"{name} {call.what.detail}"
        return f"{name} #{call.seq} of {self.groups[call.group].shown}"

    def _group(self, key: str) -> str:
        """Such as "DATA 0, 2"."""
        group = self.groups[key]
        members = _span(self.waiting.members(key))
        if group.ranks and not group.label:
            return f"the group of ranks {members}"
        return f"{group.shown} {members}"

    def _call(self, wait: Wait) -> str:
        """Such as "all_reduce #3 of DATA 0, 2", or "send from rank 0 to rank 2 of PIPELINE"."""
        group, seq = wait.place
        operation = wait.call.what
        if not wait.call.p2p:
            return f"{operation.name} #{seq} of {self._group(group)}"
        label = self.groups[group].shown
        members = self.waiting.members(group)
        pair = pair_of(operation, members)
        if pair is None:
            return f"{operation.name} of {label}"
        source, target = pair
        return f"{operation.name} from rank {source} to rank {target} of {label}"

    def _named(self, ranks: Sequence[int]) -> str:
        """With its host and coordinates, if it is one."""
        if len(ranks) > 1:
            return _ranks(ranks)
        (rank,) = ranks
        facts = []
        if rank in self.ranks:
            facts.append(self.ranks[rank].host)
        facts.append(_coordinate(self.waiting.recording, rank))
        known_facts = [fact for fact in facts if fact]
        if not known_facts:
            return f"rank {rank}"
        return f"rank {rank} ({', '.join(known_facts)})"

    def _inside(self, wait: Wait, place: str) -> str:
        """Such as "rank 4 has been in it for 3.2 s"."""
        lasting = self._lasting(wait)
        if not lasting:
            return f"{_ranks(wait.inside, 'is', 'are')} {place}"
        return f"{_ranks(wait.inside, 'has', 'have')} been {place}{lasting}"

    def _lasting(self, wait: Wait) -> str:
        """Such as " for 3.2 s"; nothing for an instant."""
        if wait.ns < 10**8:
            return ""
        duration = lasting(wait.ns)
        # Without the time of the dump, the time until the last event of any rank is known.
        is_known = any(self.ranks[rank].written for rank in wait.inside)
        if not is_known:
            duration = f"at least {duration}"
        return f" for {duration}"


def _coordinate(recording: Recording, rank: int) -> str:
    """A rank's places in the largest recorded group over each dim: "tp=1 dp=0"."""
    largest: dict[str, Ranks] = {}
    for group in recording.groups.values():
        if len(group.dims) != 1 or rank not in group.ranks:
            continue
        (dim,) = group.dims
        # A group of one rank says nothing about the size of its dim.
        least_size = len(largest.get(dim, (rank,)))
        if len(group.ranks) > least_size:
            largest[dim] = group.ranks
    places = []
    for dim, members in largest.items():
        places.append(f"{dim}={members.index(rank)}")
    return " ".join(places)


def lasting(ns: int) -> str:
    """A duration, in two units at most."""
    seconds = ns / 1e9
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def _shown(call: Call, other_call: Call) -> str:
    """A call by that in which it differs from another: "all_reduce of size [4]"."""
    operation = call.what
    other_operation = other_call.what
    if operation.name != other_operation.name:
        return operation.name
    if operation.detail != other_operation.detail:
        return f"{operation.name} with {operation.detail or 'no root'}"
    kind = "size"
    values = (operation.inputs, operation.outputs)
    other_values = (other_operation.inputs, other_operation.outputs)
    if values == other_values:
        kind = "dtype"
        values = (operation.input_dtypes, operation.output_dtypes)
    texts = []
    for value in dict.fromkeys(values):
        text = value[1:-1].replace("'", "")
        texts.append(text or "none")
    joined = " -> ".join(texts)
    return f"{operation.name} of {kind} {joined[:80]}"


def _at(stack: Sequence[Frame]) -> str:
    """The innermost frame of the job's own code: neither torch's nor the standard library's."""
    shown = stack[0]
    for frame in stack:
        if not _FOREIGN.search(frame.file):
            shown = frame
            break
    return f"{shown.function} ({shown.file}:{shown.line})"


def _ranks(ranks: Iterable[int], verb: str = "", plural_verb: str = "") -> str:
    """The ranks, and the verb that belongs to one or to several."""
    ranks = sorted(ranks)
    text = f"ranks {_span(ranks)} {plural_verb}"
    if len(ranks) == 1:
        text = f"rank {ranks[0]} {verb}"
    return text.rstrip()


def _span(ranks: Sequence[int]) -> str:
    text = span_of(ranks)
    spaced = text.replace(",", ", ")
    if len(spaced) > 40:
        return f"{ranks[0]}..{ranks[-1]} ({len(ranks)} ranks)"
    return spaced


def _many(number: int, word: str) -> str:
    if number == 1:
        return f"1 {word}"
    return f"{number} {word}s"
