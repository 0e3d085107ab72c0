"""The verdict on a hanging job's recording, in words: the rank that everyone waits for."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from hypergrid.hangs.causes import Cause, Kind, Rules
from hypergrid.hangs.recording import Call, Frame, Recording
from hypergrid.hangs.waiting import UNRECORDED, Wait, Waiting, pair_of
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
    call there. ``chain`` is why, in at most four sentences: where the ranks are, what the others
    do, and what to look at next. ``waiting`` has the ranks that each waiting rank waits for, at
    most 16.
    """

    kind: Kind
    sentence: str
    ranks: tuple[int, ...] = ()
    certain: bool = True
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
    needed = {rank: tuple(waiting.needs(rank))[:_SHOWN] for rank in sorted(waiting.blocked)}
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
    return replace(
        diagnosis,
        group=recording.groups[wait.group].shown,
        members=waiting.members(wait.group),
        operation=wait.call.what.name,
        seq=wait.seq,
        seconds=wait.ns / 1e9,
    )


def _states(waiting: Waiting, cause: Cause) -> dict[int, State]:
    """The state of each rank; of several that hold, the last of these."""
    states: dict[int, State] = dict.fromkeys(waiting.world, "elsewhere")
    for wait in waiting.running:
        states.update(dict.fromkeys(wait.inside, "running"))
    states.update(dict.fromkeys(waiting.blocked, "waiting"))
    states.update(dict.fromkeys(waiting.raised, "raised"))
    states.update(dict.fromkeys(waiting.gone, "no dump"))
    states.update(dict.fromkeys(cause.ranks, "cause"))
    return states


# What to look at next, by the kind of a verdict.
_NEXT = {
    "mismatch": "compare the lines of the script that make these two calls.",
    "order": "find the condition in the script that only some ranks meet before these calls.",
    "raised": "read the error in the output of {rank}.",
    "no dump": "look for {rank} in the kernel's log of the host, and in the scheduler's log.",
    "never entered": "read the stack of {rank}, and ask again: if the rank is only slow, the "
    "number of its last call grows.",
    "root": "compare the roots that the ranks name, then look at the network and the devices.",
    "slow": "look at the network and the devices of the ranks in that call.",
}
_DOUBTS = {
    "few": "this may not be the directory of all ranks",
    "alone": "nobody is seen to wait for {them}",
    "partial": "a rank may be missing that these files do not show",
    "root": "torch does not record roots, and the ranks may have named different ones",
    "unread": "what {they} did is not known",
    "mixed": "{mixed}. The files seem to be of two jobs, or of two times",
    "old": "{their} dump was written before that call, or while {they} still worked, and {they} "
    "may have come since. Have all ranks write at the same time",
    "hidden": "sends and receives are not recorded, and ranks may wait for others in one. "
    "HYPERGRID_RECORD_P2P=1 records them",
    "blind": "the flight recorder of {blind} is missing or cut, and what was called there is not "
    "known",
    "either": "{they} may be right, and another rank made a call too many or too few",
    "which": "which of them did not do what was due cannot be seen",
}


_SINGULAR = {
    "they": "it",
    "their": "its",
    "them": "it",
    "They are": "It is",
    "dumps": "its dump",
}
_PLURAL = {
    "they": "they",
    "their": "their",
    "them": "them",
    "They are": "They are",
    "dumps": "their dumps",
}


class _Words:
    """Says a cause in sentences."""

    def __init__(self, waiting: Waiting, cause: Cause) -> None:
        self.waiting = waiting
        self.ranks = waiting.ranks
        self.groups = waiting.recording.groups
        self.cause = cause
        self.is_plural = len(cause.ranks) > 1
        self.pronouns = _PLURAL if self.is_plural else _SINGULAR

    def sentence(self) -> str:
        """The verdict."""
        sentences = {
            "ok": self._well,
            "empty": self._nothing,
            "slow": self._slow,
            "mismatch": self._mismatch,
            "order": self._order,
        }
        text = sentences.get(self.cause.kind, self._absent)()
        if not self.cause.doubt:
            return text
        doubt = _DOUBTS[self.cause.doubt].format(
            **self.pronouns,
            blind=_ranks(sorted(self.waiting.blind)),
            mixed=self.waiting.recording.mixed,
        )
        return f"{text} Not certain: {doubt}."

    def chain(self) -> list[str]:
        """Why it is so, what the others do, and what to look at next."""
        cause = self.cause
        lines = self._places()
        if cause.kind != "slow":
            lines += self._waits()
        advice = _NEXT.get("root" if cause.doubt == "root" else cause.kind)
        if advice is not None:
            lines.append(f"Next: {advice.format(rank=_ranks(cause.ranks))}")
        return lines

    def _waits(self) -> list[str]:
        """Who misses the cause, and how many ranks wait elsewhere."""
        cause = self.cause
        lines = []
        shown_place = None
        if cause.wait is not None and not cause.circle:
            lines.append(self._line(cause.wait))
            shown_place = cause.wait[:2]
        shown_ranks = set(cause.ranks)
        for rank, _, _ in cause.circle:
            shown_ranks.add(rank)
        elsewhere: set[int] = set()
        calls = set()
        for wait in self.waiting.waits:
            waiting_ranks = {*wait.inside} - shown_ranks
            if waiting_ranks and wait[:2] != shown_place:
                elsewhere |= waiting_ranks
                calls.add(wait[:2])
        if elsewhere:
            ranks = _ranks(sorted(elsewhere), "waits", "wait")
            lines.append(f"{ranks} in {_many(len(calls), 'call')}.")
        return lines

    def _places(self) -> list[str]:
        """Where the ranks of the cause are, in at most two lines."""
        cause = self.cause
        if cause.circle:
            return [self._step(*step) for step in cause.circle[:2]]
        lines = []
        if cause.kind == "mismatch":
            for rank, call, _ in self._unequal():
                if call.frames:
                    lines.append(f"rank {rank} made the call in {_at(call.frames)}.")
        # The sentence says where a rank is that never entered a call.
        elif cause.kind == "empty" or (cause.kind == "order" and cause.doubt == "hidden"):
            for rank in sorted(self.waiting.unseen or self.ranks):
                stack = self.ranks[rank].stack
                if stack:
                    lines.append(f"rank {rank} is in {_at(stack)}.")
        return lines[:2]

    def _step(self, rank: int, needed: int, wait: Wait | None) -> str:
        """Who waits for whom in a circle."""
        if wait is None:
            return f"rank {rank} is in a send or recv and may wait for rank {needed}."
        if rank in wait.behind:
            queued = f"rank {rank} has queued {self._call(wait)} behind another call"
            return f"{queued}, and waits for rank {needed}."
        return f"rank {rank} is in {self._call(wait)} and waits for rank {needed}."

    def _line(self, wait: Wait) -> str:
        """Who is in a call, and for whom these ranks wait."""
        # A rank that has queued the call is not in it, and the others wait for it.
        entered = sorted({*wait.inside} - {*wait.behind})
        if not entered:
            entered = sorted(wait.inside)
        missed = sorted({*wait.missed} - {*entered})
        if not missed:
            missed = sorted(wait.missed)
        inside = _ranks(entered, "is in it and waits", "are in it and wait")
        return f"{self._call(wait)}: {inside} for {_ranks(missed)}."

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
        text = f"{_many(len(self.ranks), 'rank')} made {calls:,} calls, and {well}."
        if self.cause.doubt:
            return text
        return f"nothing is wrong: {text}"

    def _nothing(self) -> str:
        keeps = (
            "Torch keeps calls with TORCH_FR_BUFFER_SIZE=2000 (TORCH_NCCL_TRACE_BUFFER_SIZE before "
            "torch 2.9) in the job's environment."
        )
        if any(recording.answered for recording in self.ranks.values()):
            return f"no collective is recorded. {keeps}"
        return (
            "no rank has written what it was doing: no flight recorder, stack or error. Ranks that "
            "still run and record by hypergrid.record write on hypergrid diagnose --ask DIR. "
            f"{keeps}"
        )

    def _slow(self) -> str:
        wait = self._wait()
        inside = self._inside(wait, "in it")
        text = f"{self._call(wait)}: {inside}, with equal calls"
        if self.cause.doubt:
            return f"{text}."
        return f"{text}, so nobody is missing. It is slow, or the network under it does not answer."

    def _wait(self) -> Wait:
        assert self.cause.wait is not None
        return self.cause.wait

    def _unequal(self) -> list[tuple[int, Call, set[int]]]:
        """A rank, its call and the ranks that called the same; then those of another call there."""
        wait = self._wait()
        parts = self.waiting.unequal[wait[:2]]
        named = parts[0]
        for ranks in reversed(parts):
            if not ranks.isdisjoint(self.cause.ranks):
                named = ranks
        # Of the other calls the one that most ranks made.
        largest = parts[-1]
        if largest is named:
            largest = parts[-2]
        calls = []
        for ranks in (named, largest):
            rank = min(ranks.intersection(self.cause.ranks) or ranks)
            call = self.waiting.call_of(rank, *wait[:2])
            if call is not None:
                calls.append((rank, call, ranks))
        return calls

    def _mismatch(self) -> str:
        wait = self._wait()
        (_, call, _), (_, other_call, others) = self._unequal()
        named = [rank for rank in self.cause.ranks if rank not in others]  # of two ranks both are
        return (
            f"{self._named(named)} called {_shown(call, other_call)} as #{wait.seq} of "
            f"{self._group(wait.group)}, where {_ranks(sorted(others))} called "
            f"{_shown(other_call, call)}.{self._evidence()}"
        )

    def _evidence(self) -> str:
        """The ranks that did otherwise."""
        departure = self.cause.departure
        if departure is None:
            return ""
        due = self._title(departure.due)
        if departure.others and departure.others >= departure.alike:
            others = _many(departure.others, "other rank")
            text = f" There {others} that had done the same until then called {due}"
            if departure.before:
                text = f"{text}, as rank {departure.rank} did in earlier steps"
            return f"{text}."
        if departure.before:
            name, _, _ = due.partition(" #")
            return f" There rank {departure.rank} called {name} in earlier steps."
        return ""

    def _absent(self) -> str:
        wait = self.cause.wait
        named = self._named(self.cause.ranks)
        where = self._whereabouts()
        if wait is None:
            missed = self._missed_unrecorded()
            if missed:
                return f"{named} {missed}; {where}"
            subject = f"{self.pronouns['they']} "
            return f"{named} {where.removeprefix(subject)}"
        call = self._call(wait)
        if not wait.call.p2p:
            return f"{named} never entered {call}, which {self._inside(wait, 'in')}; {where}"
        verb = "received" if wait.call.what.name == "send" else "sent"
        waiters = _ranks(wait.inside, "has", "have")
        lasting = self._lasting(wait)
        return f"{named} never {verb} what {waiters} been waiting for in {call}{lasting}; {where}"

    def _missed_unrecorded(self) -> str:
        """The call, not recorded, in which others wait; nothing if nobody is seen to wait."""
        guessing = sorted(self.waiting.guessing - {*self.cause.ranks})
        if not guessing:
            return ""
        frame = self.waiting.unrecorded_frame(guessing[0])
        function = "a send or recv"
        if frame is not None and frame.function in UNRECORDED:
            function = frame.function
        return f"did not take part in {function}, in which {_ranks(guessing, 'waits', 'wait')}"

    def _order(self) -> str:
        cause = self.cause
        departure = cause.departure
        if departure is None and not cause.circle:
            return f"{_ranks(cause.ranks, 'is', 'are')} in a send or recv."
        texts = []
        if departure is not None:
            call = self._title(self.ranks[departure.rank].calls[departure.at])
            if departure.after is not None:
                call = f"{call} after {self._title(departure.after)}"
            due = f"where {self._title(departure.due)} is next"
            texts.append(f"{self._named(cause.ranks)} called {call}, {due}.{self._evidence()}")
        if cause.circle:
            texts.append(self._deadlock("That is a deadlock" if texts else "deadlock"))
        elif cause.wait is not None:
            texts.append(f"{self.pronouns['They are']} in {self._call(cause.wait)}.")
        return " ".join(texts)

    def _deadlock(self, title: str) -> str:
        ranks = []
        calls: list[str] = []
        for rank, _, wait in self.cause.circle:
            ranks.append(rank)
            if wait is not None and self._call(wait) not in calls:
                calls.append(self._call(wait))
        where = " and ".join(calls[:2]) or "send and recv"
        return f"{title}: {_ranks(ranks)} wait for each other in {where}."

    def _whereabouts(self) -> str:
        """The known facts about where the first cause is."""
        cause = self.cause
        rank = cause.ranks[0]
        recording = self.ranks.get(rank)
        if cause.doubt == "unread":
            return f"{self.pronouns['dumps']} could not be read."
        if cause.kind == "no dump" or recording is None:
            process = ""
            if recording is not None and recording.pid and not self.is_plural:
                process = f" (pid {recording.pid} on {recording.host})"
            return f"{self.pronouns['they']} left no dump: ended, stopped or unreachable{process}."
        subject = f"rank {rank}" if self.is_plural else "it"
        if cause.kind == "raised":
            error, _, _ = recording.error.partition("\n")
            return f"{subject} raised {error[:200].rstrip('.')}."
        facts = []
        if recording.ended:
            facts.append(f"the script of rank {rank} has ended")
        elif recording.stack:
            facts.append(f"{subject} is in {_at(recording.stack)}")
        last = self.waiting.last.get(rank)
        if last is not None:
            owner = "its" if facts or not self.is_plural else f"rank {rank}'s"
            unfinished = "" if last.done else ", not finished"
            facts.append(f"{owner} last call was {self._title(last)}{unfinished}")
        elif rank in self.waiting.blind:
            facts.append(f"the calls of rank {rank} are not known")
        else:
            facts.append(f"{subject} has called nothing so far")
        return f"{', and '.join(facts)}."

    # Names.

    def _title(self, call: Call | None) -> str:
        """Such as "all_reduce #3 of DATA_PARALLEL_GROUP"."""
        if call is None:
            return "nothing"
        name = call.what.name
        if call.p2p:
            name = f"{name} {call.what.detail}"
        return f"{name} #{call.seq} of {self.groups[call.group].shown}"

    def _group(self, key: str) -> str:
        """Such as "DATA 0, 2"."""
        members = self.waiting.members(key)
        return f"{self.groups[key].shown} {_span(members)}"

    def _call(self, wait: Wait) -> str:
        """Such as "all_reduce #3 of DATA 0, 2", or "send from rank 0 to rank 2 of PIPELINE"."""
        operation = wait.call.what
        if not wait.call.p2p:
            return f"{operation.name} #{wait.seq} of {self._group(wait.group)}"
        group = self.groups[wait.group].shown
        pair = pair_of(operation, self.waiting.members(wait.group))
        if pair is None:
            return f"{operation.name} of {group}"
        source, target = pair
        return f"{operation.name} from rank {source} to rank {target} of {group}"

    def _named(self, ranks: Sequence[int]) -> str:
        """With its host and coordinates, if it is one."""
        if len(ranks) > 1:
            return _ranks(ranks)
        (rank,) = ranks
        facts = []
        if rank in self.ranks and self.ranks[rank].host:
            facts.append(self.ranks[rank].host)
        places = coordinate(self.waiting.recording, rank)
        if places:
            facts.append(" ".join(f"{dim}={place}" for dim, place in places.items()))
        if not facts:
            return f"rank {rank}"
        return f"rank {rank} ({', '.join(facts)})"

    def _inside(self, wait: Wait, place: str) -> str:
        """Such as "rank 4 has been in it for 3.2 s"."""
        lasting = self._lasting(wait)
        if lasting:
            return f"{_ranks(wait.inside, 'has', 'have')} been {place}{lasting}"
        return f"{_ranks(wait.inside, 'is', 'are')} {place}"

    def _lasting(self, wait: Wait) -> str:
        """Such as " for 3.2 s"; nothing for an instant."""
        if wait.ns < 10**8:
            return ""
        # Without the time of the dump, the time until the last event of any rank is known.
        is_known = any(self.ranks[rank].written for rank in wait.inside)
        least = "" if is_known else "at least "
        return f" for {least}{lasting(wait.ns)}"


def coordinate(recording: Recording, rank: int) -> dict[str, int]:
    """A rank's coordinate: its places in the largest recorded group over each dim."""
    largest: dict[str, tuple[int, ...]] = {}
    for group in recording.groups.values():
        if len(group.dims) != 1 or rank not in group.ranks:
            continue
        (dim,) = group.dims
        # A group of one rank says nothing about the size of its dim.
        if len(group.ranks) > len(largest.get(dim, (0,))):
            largest[dim] = group.ranks
    return {dim: members.index(rank) for dim, members in largest.items()}


def lasting(ns: int) -> str:
    """A duration, in two units at most."""
    seconds = ns / 1e9
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _shown(call: Call, other: Call) -> str:
    """A call by that in which it differs from another: "all_reduce of size [4]"."""
    operation = call.what
    other_operation = other.what
    if operation.name != other_operation.name:
        return operation.name
    if operation.detail != other_operation.detail:
        return f"{operation.name} with {operation.detail or 'no root'}"
    kind = "size"
    values = [operation.inputs, operation.outputs]
    if values == [other_operation.inputs, other_operation.outputs]:
        kind = "dtype"
        values = [operation.input_dtypes, operation.output_dtypes]
    if values[0] == values[1]:
        del values[1]
    texts = [value[1:-1].replace("'", "") or "none" for value in values]
    return f"{operation.name} of {kind} {' -> '.join(texts)[:80]}"


def _at(stack: Sequence[Frame]) -> str:
    """The innermost frame of the job's own code: neither torch's nor the standard library's."""
    shown = stack[0]
    for frame in stack:
        if not _FOREIGN.search(frame.file):
            shown = frame
            break
    return f"{shown.function} ({shown.file}:{shown.line})"


def _ranks(ranks: Sequence[int], one: str = "", several: str = "") -> str:
    """The ranks, and the verb that belongs to one or to several."""
    if not ranks:
        return ""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}".rstrip()
    return f"ranks {_span(sorted(ranks))} {several}".rstrip()


def _span(ranks: Sequence[int]) -> str:
    text = span_of(ranks).replace(",", ", ")
    if len(text) > 40:
        return f"{ranks[0]}..{ranks[-1]} ({len(ranks)} ranks)"
    return text


def _many(number: int, word: str) -> str:
    if number == 1:
        return f"1 {word}"
    return f"{number} {word}s"
