"""The verdict on a hanging job's recording, in words: the rank that everyone waits for."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from hypergrid.hangs.causes import Cause, Kind, Rules
from hypergrid.hangs.history import Departure
from hypergrid.hangs.reading import Call, Frame, Recording
from hypergrid.hangs.waiting import UNRECORDED, Wait, Waiting, pair_of
from hypergrid.messages import span_of
from hypergrid.plan import GroupPlan

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


def diagnose(
    recording: Recording, plan: GroupPlan | None = None, *, patience: float = PATIENCE
) -> Diagnosis:
    """The first cause of a hang, told apart from those who wait because of it.

    With ``plan``, ranks are named by its coordinates, otherwise by those of the recorded groups.
    ``patience``: seconds; who has waited for less when the dumps were written is not stuck.
    """
    waiting = Waiting(recording, patience)
    cause = Rules(waiting).cause()
    words = _Words(waiting, plan)
    wait = cause.wait
    sentence = words.sentence(cause)
    return Diagnosis(
        cause.kind,
        sentence[:1].upper() + sentence[1:] if cause.kind != "slow" else sentence,
        cause.ranks,
        not cause.doubt,
        recording.groups[wait.group].shown if wait else None,
        waiting.members(wait.group) if wait else (),
        wait.call.what.name if wait else None,
        wait.seq if wait else None,
        wait.ns / 1e9 if wait else None,
        tuple(words.chain(cause)),
        {rank: (*waiting.needs(rank),)[:_SHOWN] for rank in sorted(waiting.blocked)},
        _states(waiting, cause),
        tuple(recording.problems),
    )


def _states(waiting: Waiting, cause: Cause) -> dict[int, State]:
    layers: dict[State, Iterable[int]] = {
        "elsewhere": range(waiting.recording.world_size),
        "running": {rank for wait in waiting.running for rank in wait.inside},
        "waiting": waiting.blocked | waiting.unseen,
        "raised": waiting.raised,
        "no dump": waiting.gone,
        "cause": cause.ranks,
    }
    return {rank: state for state, ranks in layers.items() for rank in ranks}


# What to look at next, by the kind of a verdict.
_NEXT = {
    "mismatch": "compare the lines of the script that make these two calls.",
    "order": "find the condition in the script that only some ranks meet before these calls.",
    "raised": "read the error in the output of that rank.",
    "no dump": "look for that rank in the log of its host's kernel, and in that of the scheduler.",
    "never entered": "read the stack of that rank, and ask again: if it is only slow, the number "
    "of its last call grows.",
    "slow": "look at the network and the devices of these ranks.",
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


class _Words:
    """Says a cause in sentences."""

    def __init__(self, waiting: Waiting, plan: GroupPlan | None) -> None:
        self.waiting = waiting
        self.ranks = waiting.ranks
        self.plan = plan

    def sentence(self, cause: Cause) -> str:
        """The verdict."""
        kinds = {
            "ok": self._well,
            "empty": self._nothing,
            "slow": self._slow,
            "mismatch": self._mismatch,
            "order": self._order,
        }
        text = kinds.get(cause.kind, self._absent)(cause)
        if not cause.doubt:
            return text
        they, their, them = (
            ("they", "their", "them") if len(cause.ranks) > 1 else ("it", "its", "it")
        )
        blind = _ranks(sorted(self.waiting.blind)) if self.waiting.blind else ""
        mixed = self.waiting.recording.mixed
        doubt = _DOUBTS[cause.doubt].format(
            they=they, their=their, them=them, blind=blind, mixed=mixed
        )
        return f"{text} Not certain: {doubt}."

    def chain(self, cause: Cause) -> list[str]:
        """Why it is so, what the others do, and what to look at next."""
        lines = self._places(cause)
        waits = self.waiting.waits
        if cause.wait is not None and not cause.circle and cause.kind != "slow":
            lines.append(self._line(cause.wait))
            waits = [wait for wait in waits if wait[:2] != cause.wait[:2]]
        elsewhere = {rank for wait in waits for rank in wait.inside} - {*cause.ranks}
        elsewhere -= {rank for rank, *_ in cause.circle}
        if elsewhere and cause.kind != "slow":
            calls = len({wait[:2] for wait in waits if elsewhere.intersection(wait.inside)})
            lines.append(f"{_ranks(sorted(elsewhere), 'waits', 'wait')} in {_many(calls, 'call')}.")
        if cause.kind in _NEXT:
            lines.append(f"Next: {_NEXT[cause.kind]}")
        return lines

    def _places(self, cause: Cause) -> list[str]:
        """Where the ranks of the cause are, in a few lines."""
        lines = []
        for rank, needed, wait in cause.circle[:2]:
            if wait is None:
                where = "is in a send or recv and may wait"
            elif rank in wait.behind:
                where = f"has queued {self._call(wait)} behind another call, and waits"
            else:
                where = f"is in {self._call(wait)} and waits"
            lines.append(f"rank {rank} {where} for rank {needed}.")
        if cause.kind == "mismatch" and not cause.circle:
            calls = [(rank, call.frames) for rank, call in self._unequal(cause) if call.frames]
            lines = [f"rank {rank} made the call in {_at(frames)}." for rank, frames in calls]
        if cause.doubt == "hidden" or cause.kind == "empty":
            shown = sorted(self.waiting.unseen or self.ranks)
            stacks = [(rank, self.ranks[rank].stack) for rank in shown]
            lines = [f"rank {rank} is in {_at(stack)}." for rank, stack in stacks if stack][:2]
        return lines

    def _line(self, wait: Wait) -> str:
        """Who is in a call, and for whom these ranks wait."""
        entered = sorted({*wait.inside} - {*wait.behind}) or wait.inside
        inside = _ranks(entered, "is in it and waits", "are in it and wait")
        missed = _ranks(sorted({*wait.missed} - {*entered} or wait.missed))
        return f"{self._call(wait)}: {inside} for {missed}."

    # The kinds.

    def _well(self, cause: Cause) -> str:
        calls = sum(len(recording.calls) for recording in self.ranks.values())
        well = "nobody is stuck"
        if all(recording.ended for recording in self.ranks.values()) and not self.waiting.gone:
            well = "the script of every rank ended, none by an exception"
        text = f"{_many(len(self.ranks), 'rank')} made {calls:,} calls, and {well}."
        return text if cause.doubt else f"nothing is wrong: {text}"

    def _nothing(self, cause: Cause) -> str:
        keeps = (
            "Torch keeps calls with TORCH_FR_BUFFER_SIZE=2000 (TORCH_NCCL_TRACE_BUFFER_SIZE before "
            "torch 2.9) in the job's environment."
        )
        if any(recording.answered for recording in self.ranks.values()):
            return f"no collective is recorded. {keeps}"
        return (
            "no rank has written what it was doing: no flight recorder, stack or error. Ranks that "
            "still run and record by hypergrid.record write on hypergrid diagnose --pid, or touch "
            f"DIR/asked. {keeps}"
        )

    def _slow(self, cause: Cause) -> str:
        wait = cause.wait
        assert wait is not None
        inside = _ranks(wait.inside, "has", "have")
        text = f"{self._call(wait)}: {inside} been in it{self._lasting(wait)}, with equal calls"
        if cause.doubt:
            return f"{text}."
        return f"{text}, so nobody is missing. It is slow, or the network under it does not answer."

    def _unequal(self, cause: Cause) -> list[tuple[int, Call]]:
        """A rank and its call, and another that called something else there."""
        wait = cause.wait
        assert wait is not None
        alike = self.waiting.unequal[wait[:2]]
        named = next((ranks for ranks in alike if not ranks.isdisjoint(cause.ranks)), alike[0])
        others = next(ranks for ranks in alike[::-1] if ranks is not named)
        pair = (min(named.intersection(cause.ranks) or named), min(others))
        calls = [(rank, self.waiting.made(rank, *wait[:2])) for rank in pair]
        return [(rank, call) for rank, call in calls if call]

    def _mismatch(self, cause: Cause) -> str:
        wait = cause.wait
        assert wait is not None
        (_, call), (other, other_call) = self._unequal(cause)
        alike = next(ranks for ranks in self.waiting.unequal[wait[:2]] if other in ranks)
        # Of two ranks both are named.
        named = [rank for rank in cause.ranks if rank not in alike]
        return (
            f"{self._named(named)} called {_shown(call, other_call)} as #{wait.seq} of "
            f"{self._group(wait.group)}, where {_ranks(sorted(alike))} called "
            f"{_shown(other_call, call)}.{self._evidence(cause.departure)}"
        )

    def _evidence(self, departure: Departure | None) -> str:
        """The ranks that did otherwise."""
        if departure is None:
            return ""
        due = self._title(departure.due)
        rank = f"rank {departure.rank}"
        if departure.others and departure.others >= departure.alike:
            others = _many(departure.others, "other rank")
            before = f", as {rank} did in earlier steps" if departure.before else ""
            return f" There {others} that had done the same until then called {due}{before}."
        if departure.before:
            return f" There {rank} called {due.partition(' #')[0]} in earlier steps."
        return ""

    def _absent(self, cause: Cause) -> str:
        wait = cause.wait
        named = self._named(cause.ranks)
        where = self._whereabouts(cause)
        if wait is None:
            waiting = sorted(self.waiting.guessing - {*cause.ranks})
            if not waiting:
                return f"{named} {where.removeprefix('it ').removeprefix('they ')}"
            frame = self.waiting.unrecorded_frame(waiting[0])
            function = (
                frame.function if frame and frame.function in UNRECORDED else "a send or recv"
            )
            waits = _ranks(waiting, "waits", "wait")
            return f"{named} did not take part in {function}, in which {waits}; {where}"
        inside = _ranks(wait.inside, "has", "have")
        lasting = self._lasting(wait)
        if not wait.call.p2p:
            call = self._call(wait)
            return f"{named} never entered {call}, which {inside} been in{lasting}; {where}"
        verb = "received" if wait.call.what.name == "send" else "sent"
        waited = f"what {inside} been waiting for in {self._call(wait)}{lasting}"
        return f"{named} never {verb} {waited}; {where}"

    def _order(self, cause: Cause) -> str:
        texts = []
        departure = cause.departure
        if departure is not None:
            call = self._title(self.ranks[departure.rank].calls[departure.at])
            after = f" after {self._title(departure.after)}" if departure.after else ""
            due = f"where {self._title(departure.due)} is next"
            evidence = self._evidence(departure)
            texts.append(f"{self._named(cause.ranks)} called {call}{after}, {due}.{evidence}")
        if cause.circle:
            calls = dict.fromkeys(self._call(wait) for *_, wait in cause.circle if wait)
            circle = _ranks(sorted(rank for rank, *_ in cause.circle))
            where = " and ".join([*calls][:2]) or "send and recv"
            is_a = "That is a deadlock" if texts else "deadlock"
            texts.append(f"{is_a}: {circle} wait for each other in {where}.")
        elif departure is None:
            texts.append(f"{_ranks(cause.ranks, 'is', 'are')} in a send or recv.")
        elif cause.wait:
            texts.append(f"It is in {self._call(cause.wait)}.")
        return " ".join(texts)

    def _whereabouts(self, cause: Cause) -> str:
        """The known facts about where the first cause is."""
        rank = cause.ranks[0]
        many = len(cause.ranks) > 1
        they = "they" if many else "it"
        recording = self.ranks.get(rank)
        if cause.doubt == "unread":
            return f"{'their dumps' if many else 'its dump'} could not be read."
        if cause.kind == "no dump" or recording is None:
            known = ""
            if recording and recording.pid and not many:
                known = f" (pid {recording.pid} on {recording.host})"
            return f"{they} left no dump: ended, stopped or unreachable{known}."
        subject = f"rank {rank}" if many else "it"
        if cause.kind == "raised":
            error = recording.error.partition("\n")[0][:200]
            return f"{subject} raised {error.rstrip('.')}."
        facts = []
        if recording.ended:
            facts.append(f"the script of rank {rank} has ended")
        elif recording.stack:
            facts.append(f"{subject} is in {_at(recording.stack)}")
        last = self.waiting.last.get(rank)
        if last is not None:
            its = f"rank {rank}'s" if many and not facts else "its"
            facts.append(
                f"{its} last call was {self._title(last)}{', not finished' * (not last.done)}"
            )
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
        detail = f" {call.what.detail}" * call.p2p
        label = self.waiting.recording.groups[call.group].shown
        return f"{call.what.name}{detail} #{call.seq} of {label}"

    def _group(self, key: str) -> str:
        label = self.waiting.recording.groups[key].shown
        return f"{label} {_span(self.waiting.members(key))}"

    def _call(self, wait: Wait) -> str:
        call = wait.call
        if call.p2p:
            pair = pair_of(call.what, self.waiting.members(wait.group)) or ("?", "?")
            label = self.waiting.recording.groups[wait.group].shown
            return f"{call.what.name} from rank {pair[0]} to rank {pair[1]} of {label}"
        return f"{call.what.name} #{wait.seq} of {self._group(wait.group)}"

    def _named(self, ranks: Sequence[int]) -> str:
        """With its host and coordinates, if it is one."""
        if len(ranks) > 1:
            return _ranks(ranks)
        (rank,) = ranks
        host = self.ranks[rank].host if rank in self.ranks else ""
        places = coordinate(self.waiting.recording, self.plan, rank)
        where = " ".join(f"{dim}={place}" for dim, place in places.items())
        known = ", ".join(filter(None, (host, where)))
        return f"rank {rank} ({known})" if known else f"rank {rank}"

    def _lasting(self, wait: Wait) -> str:
        """Such as " for 3.2 s"; nothing for an instant."""
        is_known = any(self.ranks[rank].written for rank in wait.inside)
        least = "" if is_known else "at least "
        return f" for {least}{lasting(wait.ns)}" if wait.ns >= 10**8 else ""


def coordinate(recording: Recording, plan: GroupPlan | None, rank: int) -> dict[str, int]:
    """From the plan's layout, or from the places in the largest group over each dim."""
    if plan is not None:
        return plan.layout.trimmed.coordinate(rank) if rank in plan.layout else {}
    best: dict[str, tuple[int, ...]] = {}
    for group in recording.groups.values():
        if len(group.dims) == 1 and group.ranks and rank in group.ranks:
            (dim,) = group.dims
            if len(group.ranks) > len(best.get(dim, (0,))):
                best[dim] = group.ranks
    return {dim: ranks.index(rank) for dim, ranks in best.items()}


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
    """A call by that in which it differs from another."""
    what, than = call.what, other.what
    if what.name != than.name:
        return what.name
    if what.detail != than.detail:
        return f"{what.name} with {what.detail or 'no root'}"
    sizes, dtypes = (what.inputs, what.outputs), (what.input_dtypes, what.output_dtypes)
    kind, values = ("size", sizes) if sizes != (than.inputs, than.outputs) else ("dtype", dtypes)
    plain = [value[1:-1].replace("'", "") or "none" for value in values]
    return f"{what.name} of {kind} {' -> '.join(dict.fromkeys(plain))[:80]}"


def _at(stack: Sequence[Frame]) -> str:
    """The innermost frame of the job's own code: neither torch's nor the standard library's."""
    frame = next((frame for frame in stack if not _FOREIGN.search(frame.file)), stack[0])
    return f"{frame.function} ({frame.file}:{frame.line})"


def _ranks(ranks: Sequence[int], one: str = "", several: str = "") -> str:
    """The ranks, and the verb that belongs to one or to several."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}".rstrip()
    return f"ranks {_span(sorted(ranks))} {several}".rstrip()


def _span(ranks: Sequence[int]) -> str:
    text = span_of(ranks).replace(",", ", ")
    return text if len(text) <= 40 else f"{ranks[0]}..{ranks[-1]} ({len(ranks)} ranks)"


def _many(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
