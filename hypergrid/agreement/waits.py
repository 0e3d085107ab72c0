"""Ranks that wait for others: they say for whom, and find those whose process has ended.

A rank looks at the store until all have arrived in a phase. ``Watch`` is what it does beside that:
after some seconds it writes down where it is, and the lowest of those that wait speaks for all.
``beside`` goes on with that in a thread while torch blocks this rank: others may wait for it, or it
for them.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hypergrid import logs
from hypergrid.agreement.connections import at_the_store, to_the_store
from hypergrid.agreement.store import append, forget, forget_lines, lines, look_until, peek
from hypergrid.layout import span_of
from hypergrid.messages import one_line

WAITING = "waiting"  # the key under which ranks say that they wait for the addresses of others
PLACES = "places"  # the key under which ranks say where they are
_WORD = "outcome"  # the key that all look at: who speaks for them, and then the outcome
_DECIDED = "="  # before an outcome: a rank that speaks is a number
_WRITES_AFTER = 8.0  # seconds that a rank waits, or creates groups, until it writes its place
_CLAIMS_WITHIN = 1.5  # further seconds in which a rank claims to speak, the lowest first
_SEARCH_PERIOD = 3.0  # seconds from one search for ended processes to the next
_SEARCHES = 3  # in a row that must say the same: the kernel's list may lack a line
_SILENCE = 15.0  # seconds without a sign of the rank that speaks, until another one does
_SHOWN = 16  # ranks in a warning
_log = logging.getLogger(__name__)


def warning_times() -> Iterator[float]:
    """Seconds of waiting after which a rank warns: 10, 30, 60, and each five minutes."""
    return itertools.chain((10.0, 30.0, 60.0), itertools.count(300.0, 300.0))


def publish_outcome(store: Store, outcome: str) -> None:
    """Let all ranks see the outcome of a phase, to which ``store`` belongs alone."""
    store.set(_WORD, _DECIDED + outcome)


def outcome_in(store: Store) -> str | None:
    """The outcome of a phase; None while there is none."""
    return _outcome_of(peek(store, _WORD))


def _outcome_of(word: str) -> str | None:
    return word.removeprefix(_DECIDED) if word.startswith(_DECIDED) else None


class _Place(NamedTuple):
    """Where a rank is: its connections to the store, and the group it creates; "" if it waits."""

    connections: set[str]
    label: str


def _write_place(store: Store, rank: int, label: str = "") -> None:
    connections = ",".join(to_the_store(store))
    append(store, PLACES, f"{rank} {connections} {one_line(label)}")


def _places(store: Store) -> dict[int, _Place]:
    """By rank, what each has written last."""
    place_of = {}
    for line in lines(store, PLACES):
        rank, connections, label = line.split(" ", maxsplit=2)
        place_of[int(rank)] = _Place({*connections.split(",")} - {""}, label)
    return place_of


class Watch:
    """The wait of a rank for the others in one phase; ``look`` is called again and again.

    Parameters
    ----------
    store : Store
        That of the phase alone.
    call : str
        What the ranks do together, in words.
    arrived : function
        How many of ``ranks`` are there.
    done : str
        What ranks have done that have arrived.
    all_connected : bool
        Whether each rank was connected to the store before this wait: then the one whose
        connection is closed does not arrive any more.

    Attributes
    ----------
    timeout : timedelta, optional
        How long this rank will wait; None without a limit.
    label : str
        Of the groups that this rank creates at the moment; "" where it has arrived.
    is_known_to_wait : bool
        Whether this rank has told the others that it waits for addresses of theirs.
    ended : list of int
        Ranks that cannot arrive, as their connections to the store are closed.
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        rank: int,
        call: str,
        arrived: Callable[[], int],
        done: str = "are here",
        all_connected: bool = False,
    ) -> None:
        self.store = store
        self._ranks = ranks
        self.rank = rank
        self._call = call
        self._arrived = arrived
        self._done = done
        self._all_connected = all_connected
        self._begin = time.monotonic()
        self.timeout: timedelta | None = None
        self.label = ""
        self.is_known_to_wait = False
        self._written_label: str | None = None  # nothing yet
        # The lower a rank the earlier it claims to speak: the others see it then.
        position = ranks.index(rank) / len(ranks)
        self._claims_after = _WRITES_AFTER + position * _CLAIMS_WITHIN
        self._word = ""  # as last seen
        self._word_is_from = self._begin
        self._signs = 0
        self._warning_times = warning_times()
        self._next_warning = next(self._warning_times)
        self._next_search = self._claims_after
        self._searches_of_closed: dict[int, int] = {}  # in a row, by rank
        self.ended: list[int] = []

    @property
    def waited(self) -> float:
        """Seconds."""
        return time.monotonic() - self._begin

    def look(self) -> str | None:
        """The outcome, if there is one. In the first seconds that is a single call to the store."""
        word = peek(self.store, _WORD)
        outcome = _outcome_of(word)
        if outcome is not None:
            return outcome
        label = self.label
        if self.waited >= _WRITES_AFTER and label != self._written_label:
            self._written_label = label
            _write_place(self.store, self.rank, label)
        if self.waited >= self._claims_after and self._speaks(word):
            if self.waited >= self._next_search:
                self._next_search = self.waited + _SEARCH_PERIOD
                self._sign(word)
                self._search()
            if self.waited >= self._next_warning:
                while self._next_warning <= self.waited:
                    self._next_warning = next(self._warning_times)
                logs.warn(self._text(), _log)
        return None

    def _speaks(self, word: str) -> bool:
        """Whether this rank speaks for all; it begins to if no lower one does.

        ``word`` is "3.12" where rank 3 speaks and has signed twelve times: a rank that does not
        sign any more is stopped, or has ended.
        """
        if word != self._word:
            self._word = word
            self._word_is_from = time.monotonic()
        is_silent = time.monotonic() - self._word_is_from > _SILENCE
        if word and not is_silent:
            speaker = int(word.partition(".")[0])
            if speaker <= self.rank:
                return speaker == self.rank
        return self._sign(word)

    def _sign(self, word: str) -> bool:
        """Speak for all from now on, unless another rank has come before since ``word``."""
        self._signs += 1
        sign = f"{self.rank}.{self._signs}"
        try:
            current: bytes = self.store.compare_set(_WORD, word, sign)
        except (AttributeError, NotImplementedError, RuntimeError):
            return True  # a store in Python, where each rank speaks for itself
        return current.decode() == sign

    def _search(self) -> None:
        """Look for ranks whose connections to the store are closed."""
        connections = at_the_store(self.store) if self._all_connected else None
        if connections is None:
            return
        place_of = _places(self.store)
        written = set[str]()
        closed = set()
        for rank, place in place_of.items():
            written |= place.connections
            if place.connections and place.connections.isdisjoint(connections):
                closed.add(rank)
        # Each process has a connection. Those of ranks that have written nothing are not known by
        # name, and closed only where all that are open belong to ranks that have.
        if connections <= written:
            closed.update(rank for rank in self._ranks if rank not in place_of)
        searches = self._searches_of_closed
        self._searches_of_closed = {rank: searches.get(rank, 0) + 1 for rank in closed}
        self.ended = sorted(
            rank for rank, count in self._searches_of_closed.items() if count >= _SEARCHES
        )

    def ended_in_words(self) -> str:
        """The error of all ranks where some have ended."""
        return (
            f"{_named(self.ended)} of ranks {span_of(self._ranks)} cannot take part in "
            f"{self._call}: the connection to the store is closed. The process has ended, or has "
            f"destroyed its default group. Look at its log."
        )

    def _text(self) -> str:
        place_of = _places(self.store)
        arrived = self._arrived()
        waited = f"rank {self.rank} has waited {self.waited:.0f} s"
        if self.timeout is not None:
            waited += f" of {self.timeout.total_seconds():.0f} s"
        at_label: dict[str, list[int]] = {}
        silent = []
        for rank in self._ranks:
            if rank not in place_of:
                silent.append(rank)
            elif place_of[rank].label:
                at_label.setdefault(place_of[rank].label, []).append(rank)
        parts = []
        for label, ranks in at_label.items():
            parts.append(f"{_named(ranks)} still at {label}")
        missing = len(self._ranks) - arrived - sum(map(len, at_label.values()))
        if silent and missing == len(silent):
            parts.append(f"missing: {_spans(silent)}")
        elif silent and missing > 0:  # the others of these have arrived a moment ago
            parts.append(f"missing: {missing} of {_spans(silent)}")
        return (
            f"{waited} in {self._call}: {arrived} of {len(self._ranks)} ranks {self._done}, "
            f"{'; '.join(parts)}"
        )


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_spans(ranks)}"


def _spans(ranks: Sequence[int]) -> str:
    """Such as "1..3,7", and how many there are if these are too many to be shown."""
    text = span_of(ranks[:_SHOWN])
    if len(ranks) > _SHOWN:
        text += f",... ({len(ranks)} ranks)"
    return text


@contextmanager
def beside(look: Callable[[], object]) -> Iterator[None]:
    """Call ``look`` from time to time in a thread, while torch may block this one inside.

    The first call is after 8 s. An error in it ends the thread, and nothing else.
    """
    is_over = threading.Event()

    def run() -> None:
        pause = _WRITES_AFTER
        with suppress(Exception):  # the store is lost: who is inside will hear of it
            while not is_over.wait(pause):
                look()
                pause = 0.5

    thread = threading.Thread(target=run, name="hypergrid waits", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no memory for a thread
        yield
        return
    try:
        yield
    finally:
        is_over.set()
        thread.join(1.0)  # no longer than one call to the store


class ClosingWatch:
    """Says for whom this rank waits while torch closes groups, one after the other.

    ``store`` is the one that all ranks share. ``look`` is called in a thread.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._watch: Watch | None = None

    @contextmanager
    def closing(self, name: str, label: str, ranks: Sequence[int]) -> Iterator[None]:
        """Inside torch closes the group of ``ranks`` that it calls ``name``."""
        store = PrefixStore(f"hypergrid/closing/{name}", self._store)
        call = f"closing {label} of ranks {span_of(ranks)}"
        watch = Watch(store, ranks, self._rank, call, lambda: len(_places(store)))
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None
            if watch.waited >= _WRITES_AFTER:
                with suppress(RuntimeError):  # the store is lost
                    forget_lines(store, PLACES)
                    forget(store, PLACES, _WORD)

    def look(self) -> None:
        """Warn, if it is time for that."""
        watch = self._watch
        if watch is not None:
            watch.look()


creations: list[Watch] = []  # those of phase 2 of what this process creates, the outermost first


def at_label(label: str) -> None:
    """This process now creates the groups of ``label``."""
    if creations:
        creations[-1].label = label


def another_rank_failed() -> bool:
    """Whether a rank that creates groups with this one has failed.

    Called while this rank waits for others, which it tells them the first time.
    """
    if not creations:
        return False
    watch = creations[-1]
    if not watch.is_known_to_wait:
        watch.is_known_to_wait = True
        append(watch.store, WAITING, str(watch.rank))
    # Before this rank has arrived, there is an outcome only after a failure.
    return outcome_in(watch.store) is not None


def let_waiting_ranks_fail_first(ranks: Collection[int], timeout: timedelta) -> None:
    """Before this rank gives up on ``ranks``: those that wait themselves know better for whom.

    Rank 3 waits for rank 2, which waits for rank 0, which has ended: rank 2 is to name rank 0.
    """
    if not creations:
        return
    store = creations[-1].store
    waiting = {int(line) for line in lines(store, WAITING)}
    if not waiting.isdisjoint(ranks):
        with suppress(RuntimeError):  # they have ended meanwhile
            look_until(partial(outcome_in, store), timeout)
