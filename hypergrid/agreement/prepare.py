"""Phase 1 of the two-phase commit: ranks agree on what they will create, how, and the epoch."""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hypergrid import __version__
from hypergrid.agreement.rendezvous import Phase, digest_of
from hypergrid.agreement.store import (
    another_connection,
    bounded,
    first_value,
    forget,
    noticing_a_dead_link,
    shared_store,
    telling_of_a_lost_store,
)
from hypergrid.errors import AbortedError, AgreementError
from hypergrid.messages import shown_apart, some_of, span_of
from hypergrid.policy import Policy

DEFAULT_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Abilities:
    """The abilities of this process, as ranks report them in the prepare phase.

    ``obstacle`` says why no group can be created by its members alone; ``bound`` why none of the
    default group's backend can: it is bound to a device, and each new group is split from it.
    """

    obstacle: str | None = None
    bound: str | None = None
    can_split: bool = False
    can_connect_lazily: bool = True


@dataclass(frozen=True)
class Agreement:
    """The result on which the ranks of a window have agreed."""

    epoch: str  # part of every group's name; never used twice in the life of the store
    way: str = "members"  # who creates groups that torch splits off a bound default group
    others: str = "members"  # who creates all others: "members" or "everyone"
    why: str = ""  # why members alone cannot create; empty if they can
    lazy: bool = False  # whether gloo connects on first use


def agree(
    ranks: Sequence[int],
    proposal: Mapping[str, Any],
    policy: Policy,
    can: Abilities,
    timeout: timedelta | None = None,
    life: int | None = None,
) -> Agreement:
    """Compare ``proposal`` and what each process ``can`` do over ``ranks``. *Collective* over them.

    Each rank adds a digest to one sum in the store; the last one sees from it whether all are
    equal. With the commit phase that costs six round trips to the store per rank, and a seventh
    at a process's first; proposals are written and read only if they differ.
    ``HYPERGRID_AGREEMENT=0`` on all ranks leaves the comparison out.

    Parameters
    ----------
    ranks : sequence of int
        The ranks that create groups together, ascending, with this one.
    proposal : mapping
        What this rank will create, as values that JSON can hold.
    policy : Policy
        Compared too. "auto" is the best way that all ranks support.
    can : Abilities
        Of this process, under this policy.
    timeout : timedelta, optional
        How long to wait for the last rank. Default 30 minutes.
    life : int, optional
        For windows of which a rank is in one at a time: this process's n-th one. Windows that
        overlap in the same life are refused, as one would wait for the ranks of the other.

    Raises
    ------
    AgreementError
        On every rank, with the same text: proposals differ, a rank has refused its own
        (``refuse``) or does not arrive within ``timeout``, the policy's way of creation is
        impossible, windows overlap, or two threads of a process create. Also on a lost store.
    """
    with one_thread(ranks):
        return _agree(ranks, proposal, policy, can, timeout, life)


def _agree(
    ranks: Sequence[int],
    proposal: Mapping[str, Any],
    policy: Policy,
    can: Abilities,
    timeout: timedelta | None,
    life: int | None,
) -> Agreement:
    store = shared_store()
    if store is None:
        return accept(choose(f"{span_of(ranks)}/alone/{_counted(ranks)}", policy, [can]))
    everything = {**proposal, **asdict(policy), "hypergrid": __version__}
    timeout = bounded(DEFAULT_TIMEOUT if timeout is None else timeout)
    with noticing_a_dead_link(store, timeout), telling_of_a_lost_store():
        memory = _memory()
        refused = memory.refused.get(span_of(ranks))
        if refused is not None:  # and the other ranks do not know it yet
            refused.outcome(timeout)
        here = _Round(store, ranks, memory, life)
        here.arrive(everything, can, policy)
        return accept(here.outcome(timeout))


def _counted(ranks: Sequence[int]) -> int:
    count, span = _memory().alone, span_of(ranks)
    count[span] += 1
    return count[span]


def refuse(ranks: Sequence[int], error: BaseException, life: int | None = None) -> None:
    """Tell the other ranks that this one has refused its arguments, so that none waits for it.

    The others raise with this error's text once all have arrived. This rank waits for that ten
    seconds at most, so that it is not a call ahead; and not at all while another of its threads
    creates groups.
    """
    if not dist.is_initialized() or dist.get_rank() not in ranks:
        return
    refusal = _Refusal(ranks, error, life)
    with _only_thread(ranks) as is_only:
        if not is_only:
            _refuse_beside(refusal)
            return
        tally = refusal.tell(shared_store())
    if tally is not None:
        tally.phase.store.wait(["outcome"], timedelta(seconds=10))
        tally.outcome(timedelta(seconds=10))


@contextmanager
def telling_others(ranks: Callable[[], Sequence[int]], life: int | None = None) -> Iterator[None]:
    """Tell ``ranks()`` about an error inside, by ``refuse``."""
    try:
        yield
    except AbortedError:
        raise
    except Exception as error:
        with suppress(Exception):  # the refusal itself is what the caller must see
            refuse(ranks(), error, life)
        raise


@contextmanager
def refusing_together(ranks: Sequence[int], policy: Policy) -> Iterator[None]:
    """An error inside is raised when the other ranks know of it. *Collective*.

    For calls that may fail several times in a row, on some ranks or on all: each takes part in one
    ``agree``, so that no rank is a call ahead. Waits a minute at most.
    """
    try:
        yield
    except AbortedError:
        raise
    except Exception as error:
        if dist.is_initialized() and dist.get_rank() in ranks:
            with suppress(Exception):  # the refusal itself is what the caller must see
                text = f"{type(error).__name__}: {error}"
                agree(ranks, {"refused": text}, policy, Abilities(), timedelta(minutes=1))
        raise


@dataclass(frozen=True)
class _Refusal:
    """What the other ranks are told by a rank that refuses."""

    ranks: Sequence[int]
    error: BaseException
    life: int | None = None

    def tell(self, store: Store | None) -> _Round | None:
        """Arrive in the next round as a rank that refuses. Waits for nobody."""
        if store is None:
            _counted(self.ranks)  # as the others do, who cannot be told and try what is refused
            return None
        memory = _memory()
        span = span_of(self.ranks)
        if span not in memory.refused:
            text = f"{type(self.error).__name__}: {str(self.error)[:2000]}"
            tally = _Round(store, self.ranks, memory, self.life)
            memory.refused[span] = tally
            with noticing_a_dead_link(store, timedelta(seconds=10)):
                tally.arrive({"refused": text}, Abilities(), Policy())
                # Now: this rank may be gone when the others compare.
                if tally.phase.tell(tally.digest, tally.entry):
                    tally.compare()
        return memory.refused[span]


# Held by the one thread of this process that agrees or creates, which may nest such calls.
_creating = threading.RLock()
_windows: list[list[int]] = []  # the ranks of that thread's calls, the outermost first
_untold: deque[_Refusal] = deque()  # by other threads, for the same ranks


@contextmanager
def _only_thread(ranks: Sequence[int]) -> Iterator[bool]:
    """Whether no other thread agrees or creates; inside, none can begin to."""
    if not _creating.acquire(blocking=False):
        yield False
        return
    _windows.append([*ranks])
    try:
        yield True
    finally:
        _windows.pop()
        _creating.release()
        _tell_untold()


@contextmanager
def one_thread(ranks: Sequence[int]) -> Iterator[None]:
    """Only one thread of this process may agree or create: another fails at once.

    Ranks cannot know which groups belong together if their threads take turns in different orders.
    The other ranks are told as of any refusal.
    """
    with _only_thread(ranks) as is_only:
        if not is_only:
            error = _two_threads(ranks)
            with suppress(Exception):  # the refusal itself is what the caller must see
                _refuse_beside(_Refusal(ranks, error))
            raise error
        yield


def _refuse_beside(refusal: _Refusal) -> None:
    """Refuse while another thread creates groups. Waits for nobody.

    In a round of the same ranks this rank may have arrived by the other thread, and would be
    counted twice: that thread tells of the refusal when it has ended its own call.
    """
    outermost = next(iter(_windows), None)
    if outermost is None or outermost == [*refusal.ranks]:
        _untold.append(refusal)
        _tell_untold()  # the other thread may have ended meanwhile
        return
    store = shared_store()
    # The other thread may be waiting in the store, and blocks calls through its connection.
    refusal.tell(None if store is None else another_connection(store))


def _tell_untold() -> None:
    while _untold and not _windows and _creating.acquire(blocking=False):
        try:
            with suppress(Exception):  # the store is lost; or another thread has told it
                _untold.popleft().tell(shared_store())
        finally:
            _creating.release()


def _two_threads(ranks: Sequence[int]) -> AgreementError:
    return AgreementError(
        f"two threads of rank {dist.get_rank()} create groups at the same time, one of them those "
        f"of ranks {span_of(ranks)}, and other ranks cannot know which of them belong together. "
        f"Create them in one thread, or one after the other, in the same order on all ranks."
    )


def _place(rank: int) -> str:
    return f"hypergrid/at/{rank}"


@dataclass
class _Memory:
    """The rounds of this process under one default group, by window."""

    rounds: dict[str, int] = field(default_factory=dict)  # the next one
    alone: Counter[str] = field(default_factory=Counter)  # agreements without a store
    refused: dict[str, _Round] = field(default_factory=dict)  # that the others do not know yet
    is_registered: bool = False


# A new default group starts with an empty one again, as a restarted process does: without a store
# all ranks must count alike.
_memories: WeakKeyDictionary[object, _Memory] = WeakKeyDictionary()


def _memory() -> _Memory:
    return _memories.setdefault(dist.group.WORLD, _Memory())


class _Round:
    """One rendezvous of ``ranks``; the next one begins when its outcome is published.

    A new process that replaces a dead one is counted once: one key per rank says in which round
    it arrived, and with which digest.
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        memory: _Memory,
        life: int | None = None,
    ) -> None:
        self.rank, self.ranks, self.store, self.life = dist.get_rank(), ranks, store, life
        self.span = span_of(ranks)
        self.board = PrefixStore(f"hypergrid/{self.span}", store)
        self.memory, self.number = memory, memory.rounds.get(self.span, 0)

    @property
    def epoch(self) -> str:
        return f"{self.span}/{self.number}"

    def _phase(self, number: int) -> Phase:
        here = PrefixStore(f"{number}/prepare", self.board)
        return Phase(here, self.ranks, self.rank, lambda: self.board.add("round", 1))

    def arrive(self, proposal: dict[str, Any], can: Abilities, policy: Policy) -> None:
        """Say what this rank proposes; the last of all publishes the outcome."""
        text = json.dumps([proposal, asdict(can)], sort_keys=True, default=str)
        self.digest = digest_of(text)
        self.entry = [self.rank, *json.loads(text)]
        self.policy, self.proposal, self.can = policy, proposal, can
        before, count = self._before(), len(self.ranks) + 1
        while count > len(self.ranks):
            self.phase = self._phase(self.number)
            instead_of = before[1] if before is not None and before[0] == self.number else None
            self.store.set(_place(self.rank), f"{self.span} {self.number} {self.digest}")
            count = self.phase.arrive(self.digest, instead_of)
            if count > len(self.ranks):  # closed meanwhile
                self.number = max(self.number + 1, self.board.add("round", 0))
        if count == 1 and self.life is not None and self.overlaps(self.life):
            return
        if count == len(self.ranks):
            if self.phase.all_equal(self.digest) and "refused" not in self.proposal:
                self.phase.publish(json.dumps(choose(self.epoch, self.policy, [self.can])))
            else:
                self.phase.ask()

    def _before(self) -> tuple[int, int] | None:
        """The round and the digest with which a dead process arrived here as this rank."""
        if self.memory.is_registered:
            return None
        self.memory.is_registered = True
        found = first_value(self.store, _place(self.rank), "here")
        if found == "here":
            return None
        self.number = self.board.add("round", 0)
        span, number, digest = [*found.split(" "), "", ""][:3]
        return (int(number), int(digest)) if span == self.span and digest else None

    def overlaps(self, life: int) -> bool:
        """Register this window; if it overlaps others of the same life, all of them fail."""
        lives = PrefixStore("hypergrid/windows", self.store)
        windows = PrefixStore(str(life), lives)
        known = windows.add("count", 1)
        windows.set(str(known), json.dumps([list(self.ranks), self.number]))
        if known == 1 and life > 2:
            past = PrefixStore(str(life - 2), lives)
            forget(past, *(str(i + 1) for i in range(past.add("count", 0))), "count")
        found = False
        for i in range(1, known):
            windows.wait([str(i)], timedelta(seconds=30))
            ranks, number = json.loads(windows.get(str(i)))
            both = sorted(set(ranks) & set(self.ranks))
            if not both or ranks == list(self.ranks):
                continue
            found, spans = True, sorted((span_of(ranks), self.span))
            outcome = {
                "error": f"the windows {spans[0]} and {spans[1]} overlap: "
                f"{some_of(both, range(dist.get_world_size()))} are in both, and each would "
                f"wait for them. Give all ranks of a window the same rank_offset and "
                f"local_world_size."
            }
            other = _Round(self.store, ranks, self.memory)
            if other.board.add("round", 0) == number:  # it waits; else it has its groups
                other._phase(number).publish(json.dumps(outcome), early=True)
            self.phase.publish(json.dumps(outcome), early=True)
        return found

    def outcome(self, timeout: timedelta) -> dict[str, Any]:
        """The decision; after ``timeout``, the ranks that are missing."""
        try:
            found = self._wait(timeout)
        except AbortedError:  # a rank that is still to arrive must not count on this one
            why = "left before all had arrived: hypergrid.abort() was called there"
            told = {"error": f"rank {self.rank} {why}. Call it on all ranks."}
            with suppress(RuntimeError):  # the store is lost
                self.phase.publish(json.dumps(told), early=True)
            raise
        finally:
            self.memory.rounds[self.span] = self.number + 1
            self.memory.refused.pop(self.span, None)
        outcome: dict[str, Any] = json.loads(found)
        if "error" in outcome:
            with suppress(RuntimeError):  # what has been read stands, also if the store is lost
                self.phase.leave_after_a_failure(self.store)
        return outcome

    def _wait(self, timeout: timedelta) -> str:
        def absent(missing: str) -> str:
            return json.dumps(
                {
                    "error": f"{missing} did not reach group creation within {timeout}. Look at "
                    f"their logs, or give them more time by distributed_timeout_minutes, or by "
                    f"the timeout of a grid."
                }
            )

        return self.phase.outcome(timeout, absent, self.compare)

    def compare(self) -> str:
        """The decision of the rank that is the last to say in full what it arrived with."""
        return self.phase.compare(self.digest, self.entry, self._decide)

    def _decide(self, entries: list[tuple[int, Any]]) -> str:
        said = [(proposal, rank, many) for many, (rank, proposal, _) in entries]
        if "refused" in said[0][0] or any(each[0] != said[0][0] for each in said):
            return json.dumps({"error": _difference(said, self.span)})
        everybody = [Abilities(**can) for _, (*_, can) in entries]
        return json.dumps(choose(self.epoch, self.policy, everybody))


def choose(epoch: str, policy: Policy, everybody: Sequence[Abilities]) -> dict[str, Any]:
    """The best way of creation that all ranks can use, or why the requested one is impossible."""
    obstacle = next((can.obstacle for can in everybody if can.obstacle), None)
    bound = next((can.bound for can in everybody if can.bound), None)
    why = {
        "members": obstacle or bound,
        "split": obstacle
        or (None if all(can.can_split for can in everybody) else "not every rank can split"),
        "everyone": None,
    }
    way = policy.creation
    if way == "auto":
        way = next(each for each, reason in why.items() if reason is None)
    elif why[way] is not None:
        return {"error": f"creation={way!r} is not possible here: {why[way]}. Use 'auto'."}
    # With a bound default group, ranks outside a gloo group wait in torch for a split.
    members_alone = obstacle is None and (policy.creation != "everyone" or bound is not None)
    return asdict(
        Agreement(
            epoch=epoch,
            way=way,
            others="members" if members_alone else "everyone",
            why=why["members"] or "",
            lazy=policy.connect == "lazy" and all(can.can_connect_lazily for can in everybody),
        )
    )


def accept(outcome: dict[str, Any]) -> Agreement:
    if "error" in outcome:
        raise AgreementError(outcome["error"])
    return Agreement(**outcome)


def _difference(said: list[tuple[dict[str, Any], int, int]], span: str) -> str:
    """In words: a rank that refused, or how the rarest proposal differs from the first rank's.

    Each comes with a rank that made it, and how many did.
    """
    for proposal, rank, _ in said:
        if "refused" in proposal:
            return (
                f"rank {rank} refused its arguments, so no rank of {span} created a group: "
                f"{proposal['refused']}"
            )
    first, base, _ = min(said, key=lambda each: each[1])
    others = [each for each in said if each[0] != first]
    other, rank, many = min(others, key=lambda each: (each[2], each[1]))
    where = f"rank {rank}" + f" (and {many - 1} more)" * (many > 1)
    keys = [k for k in sorted(first.keys() | other.keys()) if first.get(k) != other.get(k)]
    fields = "; ".join(
        "{} is {} on {where} and {} on rank {base}".format(
            key, *shown_apart(other.get(key), first.get(key)), where=where, base=base
        )
        for key in keys
        if key != "plan" or keys == ["plan"]  # the plan's digest says less than other fields
    )
    return (
        f"ranks {span} were asked for different groups: {fields}. "
        f"Start all of them with the same arguments. No group was created."
    )
