"""The verdict on a hanging job's recording, in words: the rank that everyone waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from hypergrid.hangs.causes import Cause, Kind, Rules
from hypergrid.hangs.history import Departure
from hypergrid.hangs.recording import Call, RankRecording, Ranks, Recording
from hypergrid.hangs.sentences import (
    DOUBTS,
    NEXT,
    SENTENCES,
    Members,
    counted,
    difference,
    lasting,
    place_of,
    shortened_span,
)
from hypergrid.hangs.waiting import OUTSIDE, Wait, Waiting, pair_of

SCHEMA = 1
_SHOWN = 16  # ranks that one rank waits for
_INSTANT = 10**8  # ns; how long ranks have been in a call is not said below that

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


def diagnose(recording: Recording) -> Diagnosis:
    """The first cause of a hang, told apart from those who wait because of it."""
    waiting = Waiting(recording)
    cause = Rules(waiting).cause()
    report = _Report(waiting, cause)
    needed = {}
    for rank in sorted(waiting.blocked):
        needed_ranks = sorted(waiting.needs(rank))
        needed[rank] = tuple(needed_ranks[:_SHOWN])
    diagnosis = Diagnosis(
        cause.kind,
        report.sentence(),
        cause.ranks,
        certain=not cause.doubt,
        chain=tuple(report.lines()),
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


class _Report:
    """The sentences on a cause; ``fields`` are those of their templates."""

    def __init__(self, waiting: Waiting, cause: Cause) -> None:
        self.waiting = waiting
        self.cause = cause
        self.ranks = waiting.ranks
        self.groups = waiting.recording.groups
        self.unequal: list[tuple[int, Call]] = []  # two ranks, and their calls at one place
        self.fields: dict[str, object] = {
            "ranks": Members(cause.ranks),
            "named": self._named(cause.ranks),
            "blind": Members(cause.ranks if cause.kind == "no dump" else waiting.blind),
            "mixed": waiting.recording.mixed,
            "evidence": "",
        }
        if cause.departure is not None:
            self._add_departure(cause.departure)
        if cause.wait is not None:
            self._add_wait(cause.wait)
            if cause.kind == "mismatch":
                self._add_unequal(waiting.unequal[cause.wait.place])
        if cause.ranks:
            self._add_rank(cause.ranks[0])

    def sentence(self) -> str:
        """The sentence that says what is wrong."""
        text = self._verdict()
        text = text[0].upper() + text[1:]
        if not self.cause.doubt:
            return text
        doubt = DOUBTS[self.cause.doubt].format(**self.fields)
        return f"{text} Not certain: {doubt}."

    def lines(self) -> list[str]:
        """Where the ranks are, what the others do, and what to look at next."""
        cause = self.cause
        lines = self._places()[:2]
        advice = NEXT.get("root" if cause.doubt == "root" else cause.kind)
        if advice is not None:
            lines.append(f"Next: {advice.format(**self.fields)}")
        return lines

    def _say(self, key: str, **fields: object) -> str:
        template = SENTENCES[key]
        return template.format(**self.fields | fields)

    def _verdict(self) -> str:
        kind = self.cause.kind
        recordings = self.ranks.values()
        if kind == "ok":
            key = "ok"
            if not self.waiting.gone and all(recording.ended for recording in recordings):
                key = "ended"
            return self._say(
                key,
                recorded=counted(len(recordings), "rank"),
                calls=sum(len(recording.calls) for recording in recordings),
            )
        if kind == "empty" and any(recording.answered for recording in recordings):
            return self._say("no calls")
        if kind == "slow" and not self.cause.doubt:
            return self._say("certainly slow")
        if kind == "order":
            return self._order()
        if kind in SENTENCES:
            return self._say(kind)
        return self._missed()

    def _order(self) -> str:
        cause = self.cause
        if cause.departure is not None:
            return self._say("departed")
        if cause.doubt == "which":
            waits: list[Wait] = []
            for rank in cause.ranks:
                waits += self.waiting.of.get(rank, ())
            # Several ranks can be in one call.
            calls = list(dict.fromkeys(map(self._call, waits)))
            where = " and ".join(calls[:2])
            return self._say("deadlock", circle=Members(cause.ranks), calls=where)
        # All are in calls that are not recorded.
        ranks_in: dict[str, list[int]] = defaultdict(list)
        for rank in dict.fromkeys((*cause.ranks, *self.waiting.unseen)):
            function = self.waiting.unseen[rank]
            ranks_in[function].append(rank)
        texts = []
        for function, ranks in ranks_in.items():
            texts.append(f"{Members(ranks):is|are} in {function}")
        return f"{', and '.join(texts)}."

    def _missed(self) -> str:
        """A rank that others wait for, and where it is."""
        cause = self.cause
        where = self._say(f"rank {cause.kind}")
        waiting_ranks = self.waiting.guessing.difference(cause.ranks)
        if cause.wait is not None:
            key = "missed"
            # Of a send, what is missing is the receive, and the reverse.
            if cause.wait.call.p2p:
                key = f"missed {cause.wait.call.what.name}"
            missing = self._say(key)
        elif waiting_ranks:
            function = self.waiting.unseen.get(min(waiting_ranks), "a call")
            guessing = Members(waiting_ranks)
            missing = self._say("missed unrecorded", function=function, guessing=guessing)
        else:
            return f"{self.fields['named']} {where}"
        return self._say("missing", missing=missing, where=where)

    def _places(self) -> list[str]:
        """Where the ranks of the cause are, or those that wait for them."""
        cause = self.cause
        lines = []
        if cause.kind == "mismatch":
            for rank, call in self.unequal:
                if call.frames:
                    lines.append(self._say("call at", rank=rank, place=place_of(call.frames)))
        elif cause.wait is not None:
            # The sentences on these say who is in the call, as do those of all that is certain.
            if cause.doubt and cause.kind not in ("slow", "outside"):
                lines.append(self._say("line"))
        elif cause.kind in ("empty", "order"):
            for rank in sorted(self.waiting.unseen or self.ranks):
                stack = self.ranks[rank].stack
                if stack:
                    lines.append(self._say("stack", rank=rank, place=place_of(stack)))
        return lines

    # The fields of what is known.

    def _add_rank(self, rank: int) -> None:
        """Where the first of the ranks is."""
        recording = self.ranks.get(rank, RankRecording(rank))
        is_one = len(self.cause.ranks) == 1
        several = "they" if self.cause.kind == "no dump" else f"rank {rank}"
        process = ""
        if recording.pid and is_one:
            process = f" (pid {recording.pid} on {recording.host})"
        state = ""
        if recording.ended:
            state = "has ended its script, and "
        elif recording.stack:
            state = f"is in {place_of(recording.stack)}, and "
        last = "has called nothing so far"
        if recording.calls:
            last_call = recording.calls[-1]
            last = f"last called {self._title(last_call)}"
            if not last_call.done:
                last += ", not finished"
        elif rank in self.waiting.blind:
            last = "left no flight recorder"
        self.fields |= {
            "it": "it" if is_one else several,
            "process": process,
            "error": recording.error[:200].rstrip("."),
            "state": state,
            "last": last,
        }

    def _add_wait(self, wait: Wait) -> None:
        """The call in which others wait for the cause."""
        # A rank that has queued the call is not in it, and the others wait for it.
        entered = wait.entered or wait.inside
        duration = ""
        if wait.ns >= _INSTANT:
            # Without the time of the dump, the time until the last event of any rank is known.
            is_known = any(self.ranks[rank].written for rank in wait.inside)
            bound = "" if is_known else "at least "
            duration = f" for {bound}{lasting(wait.ns)}"
        # Processes of other jobs have no rank to name: they are left out beside ranks of this job.
        missed = wait.missed - entered - {OUTSIDE} or wait.missed
        self.fields |= {
            "call": self._call(wait),
            "seq": wait.call.seq,
            "group": self._group(wait.call.group),
            "inside": Members(wait.inside),
            "entered": Members(entered),
            "missed": Members(missed),
            "outside": Members(self.groups[wait.call.group].outside, "member"),
            "lasting": duration,
        }

    def _add_departure(self, departure: Departure) -> None:
        """The call that was made instead of the one that was due."""
        calls = self.ranks[departure.rank].calls
        departed = self._title(calls[departure.at])
        if departure.at > 0:
            departed += f" after {self._title(calls[departure.at - 1])}"
        due = self._title(departure.due)
        self.fields |= {
            "departed": departed,
            "due": due,
            "due_name": due.partition(" #")[0],
            "rank_departed": departure.rank,
            "peers": counted(departure.peers, "other rank"),
        }
        key = "before"
        if departure.peers:
            key = "peers"
            if departure.before:
                key = "peers and before"
        self.fields["evidence"] = self._say(key)

    def _add_unequal(self, parts: Sequence[Mapping[int, Call]]) -> None:
        """The calls of the cause, and of those that made another call there."""
        cause_ranks = set(self.cause.ranks)
        # First the smallest part with a rank of the cause, last the largest without one.
        *smaller, largest = sorted(
            parts, key=lambda part: (cause_ranks.isdisjoint(part), len(part))
        )
        rank = min(cause_ranks & smaller[0].keys())
        call = smaller[0][rank]
        other_rank = min(largest)
        other_call = largest[other_rank]
        self.unequal = [(rank, call), (other_rank, other_call)]
        self.fields |= {
            # Of two ranks that differ, both are the cause.
            "named": self._named(sorted(cause_ranks - largest.keys())),
            "different": difference(call, other_call),
            "others": Members(largest),
            "other": difference(other_call, call),
        }

    # Names.

    def _title(self, call: Call) -> str:
        """Such as "all_reduce #3 of DATA_PARALLEL_GROUP"."""
        group = self.groups[call.group].shown
        name = call.what.name
        if call.p2p:
            name += f" {call.what.detail}"
        return f"{name} #{call.seq} of {group}"

    def _group(self, key: str) -> str:
        """Such as "DATA 0, 2"."""
        group = self.groups[key]
        members = shortened_span(self.waiting.members(key))
        if group.ranks and not group.label:
            return f"the group of ranks {members}"
        return f"{group.shown} {members}"

    def _call(self, wait: Wait) -> str:
        """Such as "all_reduce #3 of DATA 0, 2", or "send from rank 0 to rank 2 of PIPELINE"."""
        group, seq = wait.place
        operation = wait.call.what
        if not wait.call.p2p:
            return f"{operation.name} #{seq} of {self._group(group)}"
        source, target = pair_of(operation, self.waiting.members(group))
        shown = self.groups[group].shown
        return f"{operation.name} from rank {source} to rank {target} of {shown}"

    def _named(self, ranks: Sequence[int]) -> str:
        """With its host and coordinates, if it is one."""
        text = f"{Members(ranks)}"
        if len(ranks) != 1:
            return text
        (rank,) = ranks
        facts = []
        if rank in self.ranks and self.ranks[rank].host:
            facts.append(self.ranks[rank].host)
        # A rank's place in its largest group over each dim: "tp=1 dp=0".
        largest: dict[str, Ranks] = {}
        for group in self.groups.values():
            # A place in a group over several dims is no coordinate.
            if len(group.dims) != 1:
                continue
            if rank in group.ranks:
                (dim,) = group.dims
                largest[dim] = max(largest.get(dim, ()), group.ranks, key=len)
        # A group of one rank says nothing about its dim.
        places = []
        for dim, members in largest.items():
            if len(members) > 1:
                places.append(f"{dim}={members.index(rank)}")
        if places:
            facts.append(" ".join(places))
        if not facts:
            return text
        return f"{text} ({', '.join(facts)})"
