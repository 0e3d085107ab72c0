"""Phase 1 of the two-phase commit: ranks agree on what they will create, how, and the epoch."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hypergrid import __version__
from hypergrid.errors import AgreementError
from hypergrid.groups.commit import clear_commit
from hypergrid.groups.creation import Abilities, abilities, split_off
from hypergrid.groups.store import (
    another_connection,
    bounded,
    decide,
    decided,
    forget,
    missing,
    noticing_a_dead_link,
    shared_store,
    stay_until,
    telling_of_a_lost_store,
)
from hypergrid.messages import shown, some_of, span_of
from hypergrid.policy import Policy

DEFAULT_TIMEOUT = timedelta(minutes=30)
# Number of agreements of each span without a store. A new default group starts at 0 again, as a
# restarted process does: all ranks must count alike.
_alone: WeakKeyDictionary[object, Counter[str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Agreement:
    """What the ranks of a window have agreed on."""

    epoch: str  # part of every group's name; never used twice in the life of the store
    way: str = "members"  # who creates groups that torch splits off a bound default group
    others: str = "members"  # who creates all others: "members" or "everyone"
    why: str = ""  # why members alone cannot create; empty if they can
    lazy: bool = False  # whether gloo connects on first use

    def way_of(self, backend: str | None) -> str:
        """Who creates groups of ``backend``; the same on all ranks."""
        return self.way if self.way == self.others or split_off(backend) else self.others


def agree(
    ranks: Sequence[int],
    proposal: Mapping[str, Any],
    policy: Policy,
    timeout: timedelta | None = None,
    life: int | None = None,
) -> Agreement:
    """Compare ``proposal`` and what each process can do over ``ranks``. *Collective* over them.

    Each rank writes one key and counts itself; the last one checks whether all are equal and tells
    the others. Costs a constant number of store operations per rank; proposals of other ranks are
    read only if they differ. ``HYPERGRID_AGREEMENT=0`` on all ranks leaves the comparison out.

    Parameters
    ----------
    ranks : sequence of int
        The ranks that create groups together, ascending, with this one.
    proposal : mapping
        What this rank will create, as values that JSON can hold.
    policy : Policy
        Compared too. "auto" is the best way that all ranks support.
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
    with one_thread(ranks, proposal) as turn:
        try:
            return _agree(ranks, proposal, policy, timeout, life)
        finally:
            turn.decided.set()


def _agree(
    ranks: Sequence[int],
    proposal: Mapping[str, Any],
    policy: Policy,
    timeout: timedelta | None,
    life: int | None,
) -> Agreement:
    can, store = abilities(policy.creation), shared_store()
    if store is None:
        return _accept(_choose(f"{span_of(ranks)}/alone/{_counted(ranks)}", policy, [can]))
    everything = {**proposal, **asdict(policy), "hypergrid": __version__}
    timeout = bounded(DEFAULT_TIMEOUT if timeout is None else timeout)
    with noticing_a_dead_link(store, timeout), telling_of_a_lost_store():
        here = _Round(store, ranks, life)
        if not here.arrive(everything, can, policy):
            here.wait(timeout)
            here = _Round(store, ranks, life)
            here.arrive(everything, can, policy)
        return _accept(here.wait(timeout))


def _counted(ranks: Sequence[int]) -> int:
    count = _alone.setdefault(dist.group.WORLD, Counter())
    count[span_of(ranks)] += 1
    return count[span_of(ranks)]


def expected(policy: Policy) -> Agreement:
    """What the ranks will probably agree on, as seen from this one; or AgreementError. *Local*."""
    return _accept(_choose("", policy, [abilities(policy.creation)]))


def refuse(ranks: Sequence[int], error: BaseException, life: int | None = None) -> None:
    """Tell the other ranks that this one has refused its arguments, so that none waits for it.

    The others raise with this error's text once all have arrived. This rank waits for that ten
    seconds at most, so that it is not a call ahead.
    """
    if not dist.is_initialized() or dist.get_rank() not in ranks:
        return
    store, first = shared_store(), _turn
    if store is None:
        _counted(ranks)  # as the others do, who cannot be told and try what was refused here
    else:
        if first is not None and first.thread != threading.get_ident():
            store = another_connection(store)
            if list(first.ranks) == list(ranks):
                first.decided.wait()  # this refusal is for the next round
        text = f"{type(error).__name__}: {str(error)[:2000]}"
        here = _Round(store, ranks, life)
        if here.arrive({"refused": text}, Abilities(), Policy()):
            here.here.wait(["prepare"], timedelta(seconds=10))
            here.tidy(failed=True)


@contextmanager
def telling_others(ranks: Callable[[], Sequence[int]], life: int | None = None) -> Iterator[None]:
    """Tell ``ranks()`` about an error inside, by ``refuse``."""
    try:
        yield
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
    except Exception as error:
        if dist.is_initialized() and dist.get_rank() in ranks:
            with suppress(Exception):  # the refusal itself is what the caller must see
                text = f"{type(error).__name__}: {error}"
                agree(ranks, {"refused": text}, policy, timedelta(minutes=1))
        raise


@dataclass
class _Turn:
    """The one thread of this process that creates groups; any other fails meanwhile."""

    ranks: Sequence[int]
    proposal: Mapping[str, Any]
    thread: int = field(default_factory=threading.get_ident)
    decided: threading.Event = field(default_factory=threading.Event)  # its agreement is over
    mistakable: str = ""  # why other ranks may have agreed with another thread

    def end(self) -> None:
        """Fail if other ranks may have agreed with another thread. Called before the commit."""
        if self.mistakable:
            raise AgreementError(self.mistakable)


_turn: _Turn | None = None
_alternately = threading.RLock()


@contextmanager
def one_thread(ranks: Sequence[int], proposal: Mapping[str, Any]) -> Iterator[_Turn]:
    """Only one thread of this process may agree or create: another fails on all ranks.

    Ranks cannot know which groups belong together if their threads take turns in different orders.
    If another thread asks for the same groups at the same time, other ranks may have agreed with
    it instead: ``end`` then makes both fail.
    """
    global _turn
    if not _alternately.acquire(blocking=False):
        first, error = _turn, _two_threads(ranks)
        if first is not None and (list(first.ranks), first.proposal) == (list(ranks), proposal):
            first.mistakable = str(error)
        with suppress(Exception):  # the refusal itself is what the caller must see
            refuse(ranks, error)
        raise error
    outer = _turn
    try:
        _turn = outer or _Turn(ranks, proposal)
        yield _turn
    finally:
        if outer is None and _turn is not None:
            _turn.decided.set()
        _turn = outer
        _alternately.release()


def _two_threads(ranks: Sequence[int]) -> AgreementError:
    return AgreementError(
        f"two threads of rank {dist.get_rank()} create groups at the same time, one of them those "
        f"of ranks {span_of(ranks)}, and other ranks cannot know which of them belong together. "
        f"Create them in one thread, or one after the other, in the same order on all ranks."
    )


class _Round:
    """One prepare phase of ``ranks``. The next one begins when its outcome is decided.

    A rank that arrives again before that, as the new process after a restart, replaces its
    proposal and is counted once. A refusal stays: a rank that refused takes part again in the next
    round, when the others know of its refusal.
    """

    def __init__(self, store: Store, ranks: Sequence[int], life: int | None = None) -> None:
        self.rank, self.ranks, self.store, self.life = dist.get_rank(), ranks, store, life
        self.board = PrefixStore(f"hypergrid/{span_of(ranks)}", store)
        self.number = self.board.add("round", 0)
        self.here = PrefixStore(str(self.number), self.board)
        self.alike = ""  # key of the number of ranks with the same proposal

    def arrive(self, proposal: dict[str, Any], can: Abilities, policy: Policy) -> bool:
        """Post this rank's proposal; the last rank also decides the outcome.

        Returns False, without posting, if this rank has refused in this round.
        """
        own, text = f"proposal/{self.rank}", json.dumps(proposal, sort_keys=True, default=str)
        again = self.here.add(f"came/{self.rank}", 1) > 1
        if again:
            before = self.here.get(own).decode()
            if "refused" in json.loads(before):
                return False
            self.here.add(_alike(before), -1)
        self.here.set(own, text)
        self.alike = _alike(text)
        self.here.add(self.alike, 1)
        if can != Abilities():  # defaults need no key
            self.here.set(f"abilities/{self.here.add('abilities', 1)}", json.dumps(asdict(can)))
        if again:
            return True
        arrived = self.here.add("arrived", 1)
        if arrived == 1 and self.life is not None and self.overlaps(self.life):
            return True
        if arrived == len(self.ranks):
            if self.here.add(self.alike, 0) == len(self.ranks) and "refused" not in proposal:
                everybody = _all_abilities(self.here, len(self.ranks))
                outcome = _choose(f"{span_of(self.ranks)}/{self.number}", policy, everybody)
            else:
                outcome = {"error": _difference(self.here, self.ranks)}
            _decide(self.board, self.number, outcome)
        return True

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
            found, spans = True, sorted((span_of(ranks), span_of(self.ranks)))
            error = (
                f"the windows {spans[0]} and {spans[1]} overlap: "
                f"{some_of(both, range(dist.get_world_size()))} are in both, and each would "
                f"wait for them. Give all ranks of a window the same rank_offset and "
                f"local_world_size."
            )
            board = PrefixStore(f"hypergrid/{span_of(ranks)}", self.store)
            if board.add("round", 0) == number:  # it still waits; else it has its groups
                _decide(board, number, {"error": error})
            _decide(self.board, self.number, {"error": error})
        return found

    def wait(self, timeout: timedelta) -> dict[str, Any]:
        """The outcome; after ``timeout``, one that names the ranks that are missing."""

        def late() -> None:
            absent = missing(self.here, "arrived", "came", self.ranks)
            error = (
                f"{absent} did not reach group creation within {timeout}. Look at their logs, or "
                f"give them more time by distributed_timeout_minutes."
            )
            _decide(self.board, self.number, {"error": error})

        outcome = decided(self.here, "prepare", timeout, late)
        with suppress(RuntimeError):  # the outcome holds also when the store is lost now
            self.tidy("error" in outcome)
        return outcome

    def tidy(self, failed: bool) -> None:
        """Delete this rank's keys, and the shared ones once all ranks have read them."""
        forget(self.here, f"proposal/{self.rank}", f"came/{self.rank}")
        if failed:  # a late rank must still find the outcome
            if self.here.add(self.alike, -1) == 0:
                forget(self.here, self.alike)
            self.here.add("read", 1)
            stay_until(lambda: self.here.add("read", 0) >= self.here.add("arrived", 0), self.store)
        elif self.here.add("read", 1) == len(self.ranks):
            forget(self.here, self.alike)
            _clear_prepare(self.here)  # others may be in its commit phase
            for number in range(self.number - 1, -1, -1):  # no rank is in rounds that failed
                old = PrefixStore(str(number), self.board)
                if not old.check(["prepare"]) and not old.check(["commit"]):
                    break
                _clear_prepare(old)
                clear_commit(old)


def _decide(board: Store, number: int, outcome: dict[str, Any]) -> None:
    """End a round, unless a rank has; the next one begins before the outcome can be read."""
    decide(PrefixStore(str(number), board), "prepare", outcome, lambda: board.add("round", 1))


def _clear_prepare(here: Store) -> None:
    posted = here.add("abilities", 0)
    keys = ["arrived", "prepare/decided", "prepare/late", "prepare", "read", "abilities"]
    forget(here, *keys, *(f"abilities/{i + 1}" for i in range(posted)))


def _all_abilities(here: Store, count: int) -> list[Abilities]:
    """Those that were posted, and the defaults once if any rank posted nothing."""
    posted = here.add("abilities", 0)
    told = [Abilities(**json.loads(here.get(f"abilities/{i + 1}"))) for i in range(posted)]
    return told if posted == count else [*told, Abilities()]


def _choose(epoch: str, policy: Policy, everybody: Sequence[Abilities]) -> dict[str, Any]:
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


def _accept(outcome: dict[str, Any]) -> Agreement:
    if "error" in outcome:
        raise AgreementError(outcome["error"])
    return Agreement(**outcome)


def _difference(here: Store, ranks: Sequence[int]) -> str:
    """In words: the lowest rank that refused, or that differs from the first rank, and how."""
    if not here.check([f"proposal/{rank}" for rank in ranks]):
        return "the round has failed"  # with another outcome: this one is never read
    first = json.loads(here.get(f"proposal/{ranks[0]}"))
    for rank in ranks:
        other = json.loads(here.get(f"proposal/{rank}"))
        if "refused" in other:
            return (
                f"rank {rank} refused its arguments, so no rank of {span_of(ranks)} created a "
                f"group: {other['refused']}"
            )
        if other != first:
            break
    keys = [k for k in sorted(first.keys() | other.keys()) if first.get(k) != other.get(k)]
    fields = "; ".join(
        f"{key} is {shown(other.get(key))} on rank {rank} and {shown(first.get(key))} on rank "
        f"{ranks[0]}"
        for key in keys
        if key != "plan" or keys == ["plan"]  # the plan's digest says less than other fields
    )
    return (
        f"ranks {span_of(ranks)} were asked for different groups: "
        f"{fields or 'one of them changed its arguments meanwhile'}. "
        f"Start all of them with the same arguments. No group was created."
    )


def _alike(text: str) -> str:
    return "alike/" + hashlib.sha256(text.encode()).hexdigest()
