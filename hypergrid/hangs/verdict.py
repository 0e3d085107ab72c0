"""The verdict on a hanging job's recording, in words: the rank that everyone waits for."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from hypergrid.hangs.causes import Cause, Kind, Rules
from hypergrid.hangs.history import Departure, History
from hypergrid.hangs.reading import Call, Frame, Recording
from hypergrid.hangs.waiting import P2P, Wait, Waiting, pair_of
from hypergrid.messages import span_of
from hypergrid.plan import GroupPlan

SCHEMA = 1
PATIENCE = 1.0  # seconds; who waits for less is not stuck
_LONGEST, _SHOWN = 12, 16  # lines of a chain, ranks that one rank waits for
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
    call there. ``chain`` is why, in sentences, from the cause outwards. ``waiting`` has the
    ranks that each waiting rank waits for, at most 16.
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


class _Words:
    """Says a cause in sentences."""

    def __init__(self, waiting: Waiting, plan: GroupPlan | None) -> None:
        self.waiting, self.ranks, self.plan = waiting, waiting.ranks, plan

    def sentence(self, cause: Cause) -> str:
        """The verdict."""
        say = {
            "ok": self._well,
            "empty": self._nothing,
            "slow": self._slow,
            "mismatch": self._differ,
            "order": self._circle,
        }.get(cause.kind, self._absent)
        return say(cause) + self._doubt(cause)

    def chain(self, cause: Cause) -> list[str]:
        """Why it is so, from the cause outwards."""
        made = self._unequal(cause) if cause.kind == "mismatch" else []
        at = {rank: _at(call.frames) for rank, call in made if call.frames}
        lines = [f"rank {rank} made the call in {where}." for rank, where in at.items()]
        for rank, other, wait in cause.circle:
            where = f"{self._call(wait)} and waits" if wait else "a send or recv and may wait"
            lines.append(f"rank {rank} is in {where} for rank {other}.")
        if cause.kind == "empty":
            lines += self._stacks(sorted(self.ranks))
        elif cause.doubt == "hidden":
            lines += self._stacks(sorted(self.waiting.unseen | {*self._guessing(cause)}))
        # A call that all ranks are in, or wait for in a circle, is among the others already.
        own = [cause.wait] if cause.wait and not cause.circle and cause.kind != "slow" else []
        waits = [*own, *(wait for wait in cause.waits if wait not in own)]
        lines += map(self._line, waits[: _LONGEST - len(cause.circle)])
        left = len(waits) - (_LONGEST - len(cause.circle))
        lines += [f"And {_many(left, 'more call')} that wait."] * (left > 0)
        return [*lines, *self._steps()] if waits else lines

    def _steps(self) -> list[str]:
        """The last step that each rank finished, where steps can be told."""
        steps = History(self.waiting.recording).steps()
        if steps is None:
            return []
        since = " since the recorders begin" * any(not m.whole for m in self.ranks.values())
        numbers = sorted({*steps.done.values()})[:6]
        by = {many: [r for r, done in steps.done.items() if done == many] for many in numbers}
        said = [f"{many} by {_ranks(ranks)}" for many, ranks in by.items()]
        title = f"{steps.call.what.name} of {self.waiting.recording.groups[steps.call.group].shown}"
        return [f"Steps finished{since}, each told by its {title}: {', '.join(said)}."]

    def _line(self, wait: Wait) -> str:
        gone = self.waiting.gone
        line = f"{self._call(wait)}: {_ranks(wait.inside)} in it{self._lasting(wait)}"
        for text, ranks in (
            ("not", [rank for rank in wait.absent if rank not in gone]),
            ("in another call", wait.unlike),
            ("on the way to it", wait.behind),
            ("without a dump", [rank for rank in wait.absent if rank in gone]),
        ):
            line += f", {_ranks(ranks)} {text}" if ranks else ""
        return f"{line}."

    def _stacks(self, ranks: Sequence[int]) -> list[str]:
        stacks = {rank: self.ranks[rank].stack for rank in ranks[:8] if rank in self.ranks}
        return [f"rank {rank} is in {_at(stack)}." for rank, stack in stacks.items() if stack]

    # The kinds.

    def _well(self, cause: Cause) -> str:
        calls = sum(len(mine.calls) for mine in self.ranks.values())
        well = "nobody is stuck"
        if all(mine.ended for mine in self.ranks.values()) and not self.waiting.gone:
            well = "the script of every rank ended, none by an exception"
        said = f"{_many(len(self.ranks), 'rank')} made {calls:,} calls, and {well}."
        said = f"nothing is wrong: {said}" if not cause.doubt else said
        return f"{said} Not all could be used." if self.waiting.recording.problems else said

    def _nothing(self, cause: Cause) -> str:
        keeps = (
            "Torch keeps calls with TORCH_FR_BUFFER_SIZE=2000 (TORCH_NCCL_TRACE_BUFFER_SIZE before "
            "torch 2.9) in the job's environment."
        )
        if any(mine.answered for mine in self.ranks.values()):
            only = any(mine.stack for mine in self.ranks.values()) * ", there are only stacks"
            return f"no collective is recorded{only}. {keeps}"
        return (
            "no rank has written what it was doing: no flight recorder, stack or error. Ranks that "
            "still run and record by hypergrid.record write on hypergrid diagnose --pid, or touch "
            f"DIR/asked. {keeps}"
        )

    def _slow(self, cause: Cause) -> str:
        wait = cause.wait
        assert wait is not None
        left = f"every rank has entered it, and {_ranks(wait.inside, 'has', 'have')} not finished"
        if len(wait.inside) == len(self.waiting.members(wait.group)):
            left = "all of its ranks are in it"
        return (
            f"{self._call(wait)} has been running{self._lasting(wait)}: {left}, with equal calls, "
            f"so nobody is missing. It is slow, or the network under it does not answer."
        )

    def _unequal(self, cause: Cause) -> list[tuple[int, Call]]:
        """A rank and its call, and another that called something else there."""
        wait = cause.wait
        assert wait is not None
        alike = self.waiting.unequal[wait[:2]]
        mine = next((ranks for ranks in alike if not ranks.isdisjoint(cause.ranks)), alike[0])
        theirs = next(ranks for ranks in alike[::-1] if ranks is not mine)
        ranks = min(mine.intersection(cause.ranks), default=min(mine)), min(theirs)
        found = ((rank, self.waiting.made(rank, *wait[:2])) for rank in ranks)
        return [(rank, call) for rank, call in found if call]

    def _differ(self, cause: Cause) -> str:
        wait = cause.wait
        assert wait is not None
        (_, mine), (rank, theirs) = self._unequal(cause)
        alike = next(ranks for ranks in self.waiting.unequal[wait[:2]] if rank in ranks)
        tied = rank in cause.ranks
        odd = [each for each in cause.ranks if each not in alike] if tied else cause.ranks
        how = cause.departure.how if cause.departure else ""
        how = {"skipped": " One call was skipped.", "added": " It is a call too many."}.get(how, "")
        return (
            f"{self._named(odd)} called {_shown(mine, theirs)} as #{wait.seq} of "
            f"{self._group(wait.group)}, where {_ranks(sorted(alike))} called "
            f"{_shown(theirs, mine)}.{how}{self._evidence(cause.departure)}"
        )

    def _departed(self, found: Departure) -> str:
        """The call of a rank and the call that was due, without the rank's number."""
        due = self._title(found.due)
        mine = self._title(self.ranks[found.rank].calls[found.at])
        after = f" after {self._title(found.after)}" if found.after else ""
        return {
            "skipped": f"skipped {due}: {mine} followed{after}.",
            "added": f"called {mine}{after}, where {due} is next: a call too many.",
            "swapped": f"called {mine} before {due}{after}.",
            "": f"called {mine}{after}, where {due} is next.",
        }[found.how]

    def _evidence(self, found: Departure | None) -> str:
        """The ranks that did otherwise."""
        if found is None:
            return ""
        due, rank = self._title(found.due), f"rank {found.rank}"
        if found.others and found.others >= found.alike:
            same = f"{_many(found.others, 'other rank')} that had done the same until then"
            also = f", as {rank} did in earlier steps" * bool(found.before)
            return f" There {same} called {due}{also}."
        earlier = f" There {rank} called {due.partition(' #')[0]} in earlier steps."
        return earlier * bool(found.before)

    def _absent(self, cause: Cause) -> str:
        wait, named_ranks = cause.wait, self._named(cause.ranks)
        if cause.doubt == "few":
            have = "have" if len(cause.ranks) > 1 else "has"
            there = _ranks(sorted(self.ranks.keys() - self.waiting.gone), "has", "have")
            said = f"only {there} left a dump, {named_ranks} {have} not."
            waits = _ranks(wait.inside, "waits", "wait") if wait else ""
            return f"{said} What {waits} for: {self._call(wait)}." if wait else said
        where = self._whereabouts(cause)
        if wait is None:
            others = self._guessing(cause)
            if not others:
                return f"{named_ranks} {where.removeprefix('it ').removeprefix('they ')}"
            frame = self.waiting.p2p_frame(others[0])
            does = frame.function if frame and frame.function in P2P else "a send or recv"
            return (
                f"{named_ranks} did not send or receive what {_ranks(others, 'waits', 'wait')} "
                f"for in {does}; {where}"
            )
        what = f"{self._call(wait)}{{}}{self._lasting(wait)}"
        inside = _ranks(wait.inside, "has", "have")
        if wait.call.p2p:
            verb = "received" if wait.call.what.name == "send" else "sent"
            text = f"never {verb} what {inside} been waiting for in {what.format('')}"
        else:
            text = f"never entered {what.format(f', which {inside} been in')}"
        behind = len({each.group for each in cause.waits})
        more = f" {_many(behind, 'other group')} wait{'s' * (behind == 1)} behind it."
        return f"{named_ranks} {text}; {where}{more * bool(behind)}"

    def _circle(self, cause: Cause) -> str:
        went, left = self._named(cause.ranks), cause.departure
        went = f"{went} {self._departed(left)}{self._evidence(left)}" if left else ""
        if went and not cause.circle:
            return f"{went} It is in {self._call(cause.wait)}." if cause.wait else went
        if not cause.circle:
            waiting = {rank for wait in cause.waits for rank in wait.inside}
            return (
                f"{_ranks(cause.ranks, 'is', 'are')} in a send or recv, and "
                f"{_many(len(waiting), 'other rank')} wait for them in collectives."
            )
        calls = [self._call(wait) for *_, wait in cause.circle if wait]
        circle = sorted(rank for rank, *_ in cause.circle)
        deadlock = f"deadlock: {_ranks(circle)} wait for each other in "
        deadlock += " and ".join([*dict.fromkeys(calls)][:2]) or "send and recv"
        return f"{went} That is a {deadlock}." if went else f"{deadlock}."

    def _doubt(self, cause: Cause) -> str:
        """The doubts: facts that the recording does not show."""
        if not cause.doubt:
            return ""
        it, its = ("they", "their") if len(cause.ranks) > 1 else ("it", "its")
        waiting, blind = self.waiting, sorted(self.waiting.blind)
        unseen = waiting.unseen.intersection(cause.ranks or waiting.unseen)
        no_sends, doubt = "sends and receives are not recorded", cause.doubt
        if doubt == "few":
            return " Is this the directory of all ranks?"
        if doubt == "hidden" and blind:
            said = f"the flight recorder of {_ranks(blind)} is missing or cut, and what was called "
            said += "there is not known"
        elif doubt == "hidden" and unseen:
            who = _ranks(sorted(waiting.unseen), "waits", "wait")
            said = f"{no_sends}, so for whom {who} in one is not known. HYPERGRID_RECORD_P2P=1 "
            said += "records them"
        elif doubt == "hidden" and (cause.wait or cause.kind == "ok"):
            said = f"{no_sends}, nor {its} stack: {it} may wait for others in one. "
            said += "hypergrid.record writes both"
        elif doubt == "either" and cause.kind in ("no dump", "never entered"):
            said = f"{it} may have done all, and who waits for {it} may have made one call too "
            said += "many; nobody else made that call"
        elif doubt == "either" and cause.departure:
            said = "too few ranks did the same until then to say that not the others are wrong"
        else:
            said = {
                "hidden": f"{no_sends}: who waits for whom in them is guessed from stacks. "
                "HYPERGRID_RECORD_P2P=1 records them",
                "alone": f"nobody is seen to wait for {it.replace('they', 'them')}",
                "unread": f"what {it} did is not known",
                "mixed": f"{waiting.recording.mixed}. The files seem to be of two jobs, or of two "
                "times",
                "old": f"{its} dump was written before that call, and {it} may have come since. "
                "Have all ranks write at the same time",
            }.get(doubt, "which of them did not do what was due cannot be seen")
        return f" Not certain: {said}."

    def _guessing(self, cause: Cause) -> list[int]:
        """The ranks that may wait for these in a send or receive that is not recorded."""
        guessed = self.waiting.guessed.items()
        return sorted(rank for rank, others in guessed if {*cause.ranks}.intersection(others))

    def _whereabouts(self, cause: Cause) -> str:
        """The known facts about where the first cause is."""
        rank, many = cause.ranks[0], len(cause.ranks) > 1
        mine = self.ranks.get(rank)
        it = f"rank {rank}" if many else "it"
        if cause.kind == "raised" and mine:
            error = mine.error.partition("\n")[0][:200]
            return f"{it} raised {error}{'.' * (error[-1:] != '.')}"
        if cause.doubt == "unread":
            return f"{'their dumps' if many else 'its dump'} could not be read."
        if cause.kind == "no dump":
            text = f"{'they' if many else 'it'} left no dump: ended, stopped or unreachable"
            known = f" (pid {mine.pid} on {mine.host})" if mine and mine.pid and not many else ""
            return f"{text}{known}."
        stack = f"{it} is in {_at(mine.stack)}, and " if mine and mine.stack else ""
        stack = f"the script of rank {rank} has ended, and " if mine and mine.ended else stack
        last = self.waiting.last.get(rank)
        if last is None:
            seen = rank not in self.waiting.blind
            said = f"{it} has called nothing so far" if seen else "its calls are not known"
            return f"{stack}{said}."
        its = "its" if stack or not many else f"rank {rank}'s"
        state = "" if last.done else ", not finished"
        return f"{stack}{its} last call was {self._title(last)}{state}."

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
        mine, places = self.ranks.get(rank), coordinate(self.waiting.recording, self.plan, rank)
        where = " ".join(f"{dim}={at}" for dim, at in places.items())
        known = ", ".join(filter(None, (mine.host if mine else "", where)))
        return f"rank {rank} ({known})" if known else f"rank {rank}"

    def _lasting(self, wait: Wait) -> str:
        """Such as " for 3.2 s"; nothing for an instant."""
        least = "at least " * (not any(self.ranks[r].written for r in wait.inside))
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
    if len(ranks) < 5 and ranks[-1] - ranks[0] >= len(ranks):
        return ", ".join(map(str, ranks))
    text = span_of(ranks)
    return text if len(text) <= 40 else f"{ranks[0]}..{ranks[-1]} ({len(ranks)} ranks)"


def _many(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
