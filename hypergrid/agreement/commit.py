"""The two-phase commit: ranks agree on what they will create, and then all have it or none.

``creating`` surrounds both phases: one thread of this process, at the store that ranks share. In
phase 1, ``prepare``, each rank arrives in a ``_Round`` with a digest of its proposal. The last one
sees whether all are equal, and all get the ``Agreement``: an epoch for the names of the groups, and
the way of creation. In phase 2, ``all_or_none``, each arrives when it has its groups.

Both phases are a ``Phase``: arrivals are counted in one number at the store, and one outcome is
published for all. ``keys`` is the table of outcomes: who sets each, and what follows. On success a
phase costs two round trips, to arrive and to see the outcome, and a further one for each look of a
rank that waits. One that waits long says so (``waits``).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hypergrid import __version__
from hypergrid.agreement import keys, reports
from hypergrid.agreement.store import (
    LONG_WAIT,
    abortable,
    another_connection,
    append,
    first_value,
    forget,
    interval,
    lines,
    look_beside,
    look_until,
    noticing_a_dead_link,
    peek,
    raise_if_waits_ended,
    serves,
    shared_store,
    telling_of_a_lost_store,
)
from hypergrid.agreement.waits import Watch
from hypergrid.errors import AbortedError, AgreementError, CreationError
from hypergrid.layout import span_of
from hypergrid.messages import few, in_words, shortened
from hypergrid.policy import Abilities, Agreement, Policy, choose

DEFAULT_TIMEOUT = timedelta(minutes=30)
NO_ADDRESS = "published no address to connect to"  # in the error of a rank that waited for another
_FOR_VERDICT = timedelta(seconds=30)  # that ranks wait for the rank that gives it
_SILENCE = timedelta(seconds=4)  # without an answer, after which a rank that arrived has ended
_FEWEST_BITS = 32  # of a digest, of which the ranks compare a sum
_DEFAULTS = Policy()
_NO_OBSTACLE = Abilities()
_log = logging.getLogger(__name__)


@contextmanager
def creating(ranks: Sequence[int], timeout: timedelta | None) -> Iterator[Store | None]:
    """Surrounds both phases; gives the store of ``ranks``, None if they share none.

    Inside, ``hypergrid.abort()`` ends what this thread waits for, and another thread of this
    process that creates groups fails at once. Ranks cannot know which groups belong together if
    their threads take turns in different orders. The other ranks are told as of any refusal.
    """
    limit = _bounded(timeout)
    with _only_thread(ranks) as is_only, abortable():
        if not is_only:
            error = AgreementError(
                f"two threads of rank {dist.get_rank()} create groups at the same time, one of "
                f"them those of ranks {span_of(ranks)}, and other ranks cannot know which of them "
                f"belong together. Create them in one thread, or one after the other, in the same "
                f"order on all ranks."
            )
            with suppress(Exception):  # the refusal itself is what the caller must see
                _refuse_beside(ranks, error)
            raise error
        store = shared_store()
        if store is None:
            yield None
            return
        with noticing_a_dead_link(store, limit):
            yield store


def prepare(
    store: Store | None,
    ranks: Sequence[int],
    proposal: Mapping[str, Any],
    policy: Policy = _DEFAULTS,
    abilities: Abilities = _NO_OBSTACLE,
    timeout: timedelta | None = None,
    life: int | None = None,
    call: str = "creating groups",
) -> Agreement:
    """Phase 1: compare the proposals and abilities of ``ranks``. *Collective* over them.

    Each rank adds a digest to one sum in the store; the last one sees from it whether all are
    equal. With phase 2 that costs four round trips to the store per rank, a fifth at a process's
    first, and one for each further look of a rank that waits; proposals are written and read only
    if they differ.
    ``HYPERGRID_AGREEMENT=0`` on all ranks leaves both phases out.

    ``store`` is that of ``creating``; ``ranks`` ascend, with this one. JSON can hold what is in
    the ``proposal``. The ``policy`` is compared too; its "auto" is the best way that all ranks
    support. ``timeout`` is for the last rank to arrive, by default 30 minutes. Where a rank is in
    one window at a time, ``life`` is this process's n-th one: windows that overlap in the same life
    are refused, as one would wait for the ranks of the other. ``call`` is what ranks do together,
    for messages of one that waits.

    Raises
    ------
    AgreementError
        On every rank, with the same text: proposals differ, a rank has refused its own
        (``telling_others``) or does not arrive within ``timeout``, the policy's way of creation is
        impossible, or windows overlap. Also on a lost store.
    """
    memory = _memory()
    if store is None:
        return choose(memory.epoch_alone(ranks), policy, [abilities])
    timeout = _bounded(timeout)
    begin = time.monotonic()
    round_ = _Round(store, ranks, memory, life, call)
    with telling_of_a_lost_store():
        refused = memory.refused.get(round_.span)
        if refused is not None:  # the other ranks do not know it yet: this call is theirs
            refused.outcome(timeout)
        round_.arrive({**proposal, **asdict(policy), "hypergrid": __version__}, abilities, policy)
        outcome = round_.outcome(timeout)
        if not _is_agreement(outcome):
            raise AgreementError(outcome)
        agreement = Agreement(**json.loads(outcome))
        _log.info(
            "%s: ranks %s agreed in %.3f s, epoch %s, created by %s",
            call,
            round_.span,
            time.monotonic() - begin,
            agreement.epoch,
            agreement.way,
        )
    return agreement


def _bounded(timeout: timedelta | None) -> timedelta:
    """A time that a store can wait for: torch's stores take 0 as no limit."""
    if timeout is None:
        timeout = DEFAULT_TIMEOUT
    return min(max(timeout, timedelta(seconds=1)), timedelta(days=10))


@contextmanager
def all_or_none(
    store: Store | None,
    epoch: str,
    ranks: Sequence[int],
    timeout: timedelta | None,
    call: str = "creating groups",
) -> Iterator[None]:
    """Phase 2: all ``ranks`` create the groups that are created inside, or every rank raises.

    *Collective* over ``ranks``, once for each ``epoch`` that they have agreed on. A rank that fails
    tells those that are there. The caller destroys its groups.

    Raises
    ------
    CreationError
        Another rank failed, has ended, or did not finish within ``timeout`` and a little.
    """
    if store is None:
        yield
        return
    timeout = _bounded(timeout)
    rank = dist.get_rank()
    commit_store = PrefixStore(f"hypergrid/{epoch}/commit", store)
    phase = Phase(commit_store, ranks, rank, call=call, done="have created their groups")
    phase.timeout = timeout
    phase.label = "its first group"
    absent = f"did not finish creating groups within {timeout}. Look at their logs."
    try:
        with look_beside(phase.look):
            _creations.append(phase)
            try:
                yield
            finally:
                phase.label = ""  # it creates no group any more
                _creations.pop()
    except BaseException as error:
        raise_if_waits_ended()  # nothing is to wait any more, also not for the store
        reason = str(error) if isinstance(error, CreationError) else in_words(error)
        first = phase.fail(reason, timeout, absent)
        # A rank that only waited for this one is no cause of this one's failure.
        only_waited = NO_ADDRESS in first and NO_ADDRESS not in reason
        if isinstance(error, CreationError) and first != reason and not only_waited:
            text = f"{shortened(reason, 200)} The first to fail: {first}"
            raise CreationError(text) from error.__cause__
        raise
    begin = time.monotonic()
    with telling_of_a_lost_store():
        if phase.arrive() == len(ranks):
            phase.publish(keys.CREATED)
            with suppress(RuntimeError):  # what is published stands
                reports.clear_before(store, epoch)
        # A rank that is stuck in torch finds out after the timeout, and knows better why.
        outcome = phase.outcome(timeout + timedelta(seconds=5), absent)
    if outcome != keys.CREATED:
        phase.leave_after_a_failure()
        raise CreationError(
            f"rank {rank} rolled back its groups, as another rank could not create its own: "
            f"{outcome}"
        )
    _log.info("%s: confirmed by all ranks in %.3f s", call, time.monotonic() - begin)


_creations: list[Phase] = []  # phase 2 of what this process creates, the outermost first


def at_label(label: str) -> None:
    """This process now creates the groups of ``label``."""
    if _creations:
        _creations[-1].label = label


def another_rank_failed() -> bool:
    """Whether a rank that creates groups with this one has failed.

    Called while this rank waits for others, which it tells them the first time.
    """
    if not _creations:
        return False
    phase = _creations[-1]
    if not phase.is_known_to_wait:
        phase.is_known_to_wait = True
        append(phase.store, keys.WAITING, str(phase.rank))
    # Before this rank has arrived, there is an outcome only after a failure.
    return phase.published() is not None


def let_waiting_ranks_fail_first(ranks: Collection[int], timeout: timedelta) -> None:
    """Before this rank gives up on ``ranks``: those that wait themselves know better for whom.

    Rank 3 waits for rank 2, which waits for rank 0, which has ended: rank 2 is to name rank 0.
    """
    if not _creations:
        return
    phase = _creations[-1]
    waiting = {int(line) for line in lines(phase.store, keys.WAITING)}
    if not waiting.isdisjoint(ranks):
        with suppress(RuntimeError):  # they have ended meanwhile
            look_until(phase.published, timeout)


# Held by the one thread of this process that agrees or creates, which may nest such calls.
_lock = threading.RLock()
_windows: list[list[int]] = []  # the ranks of that thread's calls, the outermost first
_untold: deque[Callable[[], object]] = deque()  # refusals by other threads, for the same ranks


@contextmanager
def _only_thread(ranks: Sequence[int]) -> Iterator[bool]:
    """Whether no other thread agrees or creates; inside, none can begin to."""
    if not _lock.acquire(blocking=False):
        yield False
        return
    _windows.append([*ranks])
    try:
        yield True
    finally:
        _windows.pop()
        _lock.release()
        _tell_untold()


@contextmanager
def telling_others(
    ranks: Callable[[], Sequence[int]],
    life: int | None = None,
    patience: timedelta = timedelta(seconds=10),
) -> Iterator[None]:
    """Tell ``ranks()`` about an error inside, so that none waits for this rank.

    The others raise with this error's text once all have arrived. This rank waits for that
    ``patience`` at most, so that it is not a call ahead; and not at all while another of its
    threads creates groups.
    """
    try:
        yield
    except AbortedError:
        raise
    except Exception as error:
        with suppress(Exception):  # the refusal itself is what the caller must see
            _refuse(ranks(), error, life, patience)
        raise


def _refuse(
    ranks: Sequence[int], error: BaseException, life: int | None, patience: timedelta
) -> None:
    if not dist.is_initialized() or dist.get_rank() not in ranks:
        return
    with _only_thread(ranks) as is_only:
        if not is_only:
            _refuse_beside(ranks, error, life)
            return
        earlier = _memory().refused.get(span_of(ranks))
        if earlier is not None:  # the others are at that call: this error is of the next one
            earlier.wait(patience)
        refused = _tell(shared_store(), ranks, error, life)
    if refused is not None:
        refused.wait(patience)


def _refuse_beside(ranks: Sequence[int], error: BaseException, life: int | None = None) -> None:
    """Refuse while another thread creates groups. Waits for nobody.

    In a round of the same ranks this rank may have arrived by the other thread, and would be
    counted twice: that thread tells of the refusal when it has ended its own call.
    """
    outermost = next(iter(_windows), None)
    if outermost is None or outermost == [*ranks]:
        _untold.append(lambda: _tell(shared_store(), ranks, error, life))
        _tell_untold()  # the other thread may have ended meanwhile
        return
    store = shared_store()
    if store is not None:  # where the other thread may be waiting: it blocks its connection
        store = another_connection(store)
    _tell(store, ranks, error, life)


def _tell_untold() -> None:
    while _untold and not _windows and _lock.acquire(blocking=False):
        try:
            with suppress(Exception):  # the store is lost; or another thread has told it
                _untold.popleft()()
        finally:
            _lock.release()


def _tell(
    store: Store | None, ranks: Sequence[int], error: BaseException, life: int | None
) -> _Round | None:
    """Arrive in the next round as a rank that refuses. Waits for nobody."""
    memory = _memory()
    if store is None:
        # The others, who cannot be told and try what is refused, count this call too.
        memory.epoch_alone(ranks)
        return None
    round_ = _Round(store, ranks, memory, life)
    if round_.span not in memory.refused:
        memory.refused[round_.span] = round_
        text = f"{type(error).__name__}: {str(error)[:2000]}"
        with noticing_a_dead_link(store, timedelta(seconds=10)):
            round_.arrive({"refused": text})
            round_.report()  # now: this rank may be gone when the others compare
    return memory.refused[round_.span]


@dataclass
class _Memory:
    """The rounds of this process under one default group, by window."""

    rounds: Counter[str] = field(default_factory=Counter)  # the number of the next one
    refused: dict[str, _Round] = field(default_factory=dict)  # that the others do not know yet
    is_registered: bool = False

    def epoch_alone(self, ranks: Sequence[int]) -> str:
        """The epoch of the next agreement of ``ranks`` without a store."""
        span = span_of(ranks)
        self.rounds[span] += 1
        return f"{span}/alone/{self.rounds[span]}"


# A new default group starts with an empty one again, as a restarted process does: without a store
# all ranks must count alike.
_memories: WeakKeyDictionary[object, _Memory] = WeakKeyDictionary()


def _memory() -> _Memory:
    return _memories.setdefault(dist.group.WORLD, _Memory())


@dataclass
class _Round:
    """One rendezvous of ``ranks``; the next one begins when its outcome is published.

    A new process that replaces a dead one is counted once: one key per rank says in which round
    it arrived, and with which digest.
    """

    store: Store
    ranks: Sequence[int]
    memory: _Memory
    life: int | None = None
    call: str = "creating groups"

    def __post_init__(self) -> None:
        self.rank = dist.get_rank()
        self.span = span_of(self.ranks)
        self.window_store = PrefixStore(f"hypergrid/{self.span}", self.store)
        # Says for each rank where it arrived last: window, round, digest.
        self._arrival_key = f"hypergrid/at/{self.rank}"

    def _phase(self, number: int) -> Phase:
        store = PrefixStore(f"{number}/prepare", self.window_store)
        begin_next_round = functools.partial(self.window_store.add, "round", 1)
        return Phase(store, self.ranks, self.rank, begin_next_round, self.call)

    def arrive(
        self,
        proposal: dict[str, Any],
        abilities: Abilities = _NO_OBSTACLE,
        policy: Policy = _DEFAULTS,
    ) -> None:
        """Arrive with what this rank proposes; the last of all publishes the outcome."""
        self.entry = json.dumps([proposal, asdict(abilities)], sort_keys=True, default=str)
        digest = hashlib.sha256(self.entry.encode()).digest()
        self.digest = int.from_bytes(digest[:8], "big")
        self.policy = policy
        self.number = self.memory.rounds[self.span]
        digest_of_dead_process = self._arrival_of_dead_process()
        while True:
            self.phase = self._phase(self.number)
            self.store.set(self._arrival_key, f"{self.span} {self.number} {self.digest}")
            # A dead process that this one replaces may have arrived in the same round: then its
            # digest is taken back, or the rank would count twice.
            arrivals = self.phase.arrive(self.digest, digest_of_dead_process.get(self.number))
            if arrivals <= len(self.ranks):
                break
            # The others gave up on this round before this rank came: join the one that is open.
            self.number = max(self.number + 1, self.window_store.add("round", 0))
        if arrivals == 1 and self.life is not None:
            self._register_window(self.life)  # for all of its ranks
        if arrivals == len(self.ranks):
            outcome = keys.COMPARE
            if self.phase.all_equal(self.digest) and "refused" not in proposal:
                # All have the abilities and the policy of this rank.
                outcome = self._choose([abilities])
            self.phase.publish(outcome)

    def _arrival_of_dead_process(self) -> dict[int, int]:
        """By round, the digest with which a dead process arrived here as this rank; often none."""
        if self.memory.is_registered:
            return {}
        self.memory.is_registered = True
        arrival = first_value(self.store, self._arrival_key, "here")
        if arrival == "here":  # no process was here before
            return {}
        self.number = self.window_store.add("round", 0)
        # Such as "0..7 3 9114861777597660798": window, round, digest.
        span, number, digest = arrival.split(" ")
        return {int(number): int(digest)} if span == self.span else {}

    def _register_window(self, life: int) -> None:
        """Register this window; if it overlaps others of the same life, all of them fail."""
        key = f"hypergrid/windows/{life}"
        append(self.store, key, json.dumps([list(self.ranks), self.number]))
        windows = lines(self.store, key)
        if len(windows) == 1 and life > 2:
            forget(self.store, f"hypergrid/windows/{life - 2}")
        for window in windows:
            ranks, number = json.loads(window)
            common = sorted(set(ranks) & set(self.ranks))
            if not common or ranks == list(self.ranks):
                continue
            first, second = sorted([self.span, span_of(ranks)])
            error = (
                f"the windows {first} and {second} overlap: {len(common)} ranks ({few(common)}) "
                f"are in both, and each would wait for them. Give all ranks of a window the same "
                f"rank_offset and local_world_size."
            )
            other = _Round(self.store, ranks, self.memory)
            if other.window_store.add("round", 0) == number:  # it waits; else it has its groups
                other._phase(number).publish(error, early=True)
            self.phase.publish(error, early=True)

    def wait(self, patience: timedelta) -> None:
        """Wait for the outcome; after ``patience`` RuntimeError, and no roll call."""
        look_until(self.phase.published, patience)
        self.outcome(patience)

    def outcome(self, timeout: timedelta) -> str:
        """The agreement as JSON, or an error; after ``timeout``, the ranks that are missing."""
        absent = (
            f"did not reach group creation within {timeout}. Look at their logs, or give them more "
            f"time by distributed_timeout_minutes, or by the timeout of a grid."
        )
        self.phase.begin = time.monotonic()  # what this rank has refused may be long ago
        try:
            outcome = self.phase.outcome(timeout, absent)
            if outcome == keys.COMPARE:
                self.report()
                outcome = self.phase.first(keys.VERDICT, _FOR_VERDICT, self._verdict)
        except AbortedError:  # a rank that is still to arrive must not count on this one
            error = (
                f"rank {self.rank} left before all had arrived: hypergrid.abort() was called "
                f"there. Call it on all ranks."
            )
            with suppress(RuntimeError):  # the store is lost
                self.phase.publish(error, early=True)
            raise
        finally:
            self.memory.rounds[self.span] = self.number + 1
            self.memory.refused.pop(self.span, None)
        if not _is_agreement(outcome):
            self.phase.leave_after_a_failure()
        return outcome

    def report(self) -> None:
        """Report in full, once, what this rank arrived with; the last one gives the verdict."""
        if self.phase.has_reported:
            return
        self.phase.has_reported = True
        is_first = self.rank == self.ranks[0]
        count = reports.report(self.phase.store, self.rank, self.digest, self.entry, is_first)
        if count == len(self.ranks):
            first_value(self.phase.store, keys.VERDICT, self._verdict())

    def _verdict(self) -> str:
        store = self.phase.store
        reported = reports.entries(store)
        error = reports.difference(reported, self.span)
        if error:
            return error
        if store.add(keys.REPORTED, 0) < len(self.ranks):
            return (
                f"{reports.missing(store, self.ranks)} did not say within {_FOR_VERDICT} what they "
                f"propose, where ranks {self.span} differ. Look at their logs."
            )
        return self._choose([Abilities(**entry.abilities) for entry in reported])

    def _choose(self, abilities: Sequence[Abilities]) -> str:
        """The outcome where all propose the same: the agreement as JSON, or an error."""
        try:
            agreement = choose(f"{self.span}/{self.number}", self.policy, abilities)
        except AgreementError as error:
            return str(error)
        return json.dumps(asdict(agreement))


def _is_agreement(outcome: str) -> bool:
    return outcome.startswith("{")  # no error does


@dataclass(eq=False)
class Phase:
    """One question to all ranks: which have arrived, whether all said the same, what came of it.

    ``store`` is for this phase alone; ``keys`` says what it holds. The rank that closes the phase
    calls ``closing`` before the outcome can be read. ``call``, ``done``, ``all_connected`` and
    ``timeout`` are those of its ``Watch``; ``label`` is of the groups that this rank creates at
    the moment. ``is_known_to_wait``: this rank has told the others that it waits for addresses of
    theirs. ``has_reported``: it has reported what it proposes, and is counted.
    """

    store: Store
    ranks: Sequence[int]
    rank: int
    closing: Callable[[], object] = bool
    call: str = "creating groups"
    done: str = "are here"
    all_connected: bool = True
    timeout: timedelta | None = None
    label: str = ""
    is_known_to_wait: bool = False
    has_reported: bool = False
    _tally: int = 0
    _has_arrived: bool = False
    _some_are_absent: bool = False

    def __post_init__(self) -> None:
        self.begin = time.monotonic()
        # One number of 62 bits holds the arrivals and, above them, the sum of the digests. For
        # 8 ranks: 6 bits count up to 8, as many again when the tally is closed, and late ones;
        # 52 bits of each digest are added, whose sum has 56. For 4,096 ranks 34 bits are left.
        count_bits = len(self.ranks).bit_length()
        self._shift = count_bits + 2
        self._arrivals_mask = (1 << self._shift) - 1
        self._digest_bits = 62 - self._shift - count_bits
        self._modulus = 1 << self._digest_bits
        # For a million ranks only 18: the next 41 bits are added up under a key of their own.
        self._further_modulus = 0
        if self._digest_bits < _FEWEST_BITS:
            self._further_modulus = 1 << (62 - count_bits)

    def arrive(self, digest: int = 0, replaced_digest: int | None = None) -> int:
        """Add this rank to the tally; gives how many have arrived, more than all if it is closed.

        ``replaced_digest`` is that of a process that arrived as this rank and is dead.
        """
        amount = self._share_of_sum(digest)
        further_amount = self._further_bits(digest)
        if replaced_digest is None:
            amount += 1  # one more arrival
        else:
            # The dead process has been counted.
            amount -= self._share_of_sum(replaced_digest)
            further_amount -= self._further_bits(replaced_digest)
        if self._further_modulus:
            # Before the arrival: the last rank to arrive finds the bits of all.
            self.store.add(keys.FURTHER_BITS, further_amount)
        self._tally = self.store.add(keys.ARRIVED, amount)
        arrivals = self._tally & self._arrivals_mask
        _log.debug("%s: %d of %d ranks have arrived", self.call, arrivals, len(self.ranks))
        self._has_arrived = arrivals <= len(self.ranks)
        if not self._has_arrived:  # closed: nobody is to wait for this rank to read it
            self.store.add(keys.ARRIVED, -amount)
        return arrivals

    def _share_of_sum(self, digest: int) -> int:
        """A digest, cut to the bits above those that count arrivals."""
        return digest % self._modulus << self._shift

    def _further_bits(self, digest: int) -> int:
        """The bits of a digest that are not in the tally, where that holds too few."""
        if not self._further_modulus:
            return 0
        return (digest >> self._digest_bits) % self._further_modulus

    @property
    def _patience(self) -> timedelta:
        """The time in which all ranks look that are there: in a large world each looks rarely."""
        return max(_SILENCE, timedelta(seconds=4 * interval(len(self.ranks))))

    def all_equal(self, digest: int) -> bool:
        """Whether all ranks have arrived with this digest, as of this rank's arrival."""
        sum_of_digests = self._tally >> self._shift
        if sum_of_digests != digest % self._modulus * len(self.ranks):
            return False
        if not self._further_modulus:
            return True
        sum_of_further_bits = self.store.add(keys.FURTHER_BITS, 0)
        return sum_of_further_bits == self._further_bits(digest) * len(self.ranks)

    def publish(self, outcome: str, early: bool = False) -> None:
        """Close the phase with this outcome, unless a rank has closed it before.

        ``early``: ranks that come later find it closed.
        """
        if self.store.add(keys.CLOSED, 1) > 1:
            return
        if early:
            self.store.add(keys.ARRIVED, len(self.ranks))
        self.closing()
        first_value(self.store, keys.OUTCOME, outcome)
        _log.debug("%s: published the outcome %s", self.call, outcome)

    def published(self) -> str | None:
        """The outcome, None while there is none."""
        return peek(self.store, keys.OUTCOME)

    def outcome(self, timeout: timedelta, absent: str) -> str:
        """Wait for the outcome; after ``timeout`` this rank calls the roll.

        ``absent`` is the end of the error if ranks are missing: "did not arrive within 1 minute."
        """
        self.timeout = timeout
        try:
            outcome = look_until(self.look, timeout, len(self.ranks))
        except RuntimeError:
            self.publish(keys.ROLL_CALL, early=True)
            outcome = self.first(
                keys.OUTCOME,
                self._patience,
                lambda: f"a rank of {span_of(self.ranks)} ended before it could say what came out.",
            )
        if outcome != keys.ROLL_CALL:
            return outcome
        self._some_are_absent = True
        reports.answer(self.store, self.rank)
        patience = self._patience
        # Only those that have arrived are counted, each once: a rank that fails answers too, and
        # one that has refused has reported when it arrived.
        if self._has_arrived:
            answers = self.store.add(keys.REPORTED, 0 if self.has_reported else 1)
            if answers == self._arrivals_when_closed():
                patience = timedelta(0)  # no further rank will answer
        return self.first(
            keys.VERDICT,
            patience,
            lambda: f"{reports.missing(self.store, self.ranks)} {absent}",
        )

    def look(self) -> str | None:
        """The outcome, None while there is none. A rank that waits long says for whom.

        A rank that has ended makes the phase fail for all.
        """
        outcome = self.published()
        if outcome is None and time.monotonic() - self.begin >= LONG_WAIT:
            self._watch.timeout = self.timeout
            self._watch.look(self.label)
            if self._watch.ended:
                self.publish(self._watch.ended_in_words(), early=True)
        return outcome

    @functools.cached_property
    def _watch(self) -> Watch:
        return Watch(
            self.store,
            self.ranks,
            self.rank,
            self.call,
            arrived=self._count,
            done=self.done,
            all_connected=self.all_connected,
            begin=self.begin,
        )

    def first(self, key: str, patience: timedelta, otherwise: Callable[[], str]) -> str:
        """The first value of a key, which another rank is to set; else ``otherwise()`` is it."""
        look = functools.partial(peek, self.store, key)
        try:
            return look_until(look, patience, len(self.ranks))
        except RuntimeError:  # that rank has ended meanwhile
            return first_value(self.store, key, otherwise())

    def fail(self, reason: str, timeout: timedelta, absent: str) -> str:
        """Tell the others why this rank cannot go on; the error of the first rank that failed."""
        try:
            self.publish(reason, early=True)
            first = self.outcome(timeout, absent)
        except dist.DistNetworkError:  # another rank may have failed for that, and cannot say so
            return "The store through which ranks agree is lost: what serves it has ended."
        except Exception:  # the failure itself is what the caller must see
            return reason
        self.leave_after_a_failure()
        return first

    def _count(self) -> int:
        """How many ranks have arrived by now."""
        return self.store.add(keys.ARRIVED, 0) & self._arrivals_mask

    def _arrivals_when_closed(self) -> int:
        """How many had arrived when a rank called the roll, which has added as many as all are."""
        return self._count() - len(self.ranks)

    def leave_after_a_failure(self) -> None:
        """Wait, where this process serves the store, until the others have read it too."""

        def all_read() -> bool | None:
            expected = len(self.ranks)
            if self._some_are_absent:
                expected = self._arrivals_when_closed()
            return self.store.add(keys.READ, 0) >= expected or None

        # What has been read stands, also if the store is lost or the wait is aborted.
        with suppress(RuntimeError, AbortedError):
            self.store.add(keys.READ, 1)
            if serves(self.store):
                look_until(all_read, self._patience)
