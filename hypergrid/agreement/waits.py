"""Ranks that wait long for others: they say for whom, and find those whose process has ended.

A rank looks at the store until all have arrived. From its eighth second on a ``Watch`` looks too:
the rank writes down where it is, and after ten seconds the lowest of those that wait warns.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hypergrid import logs
from hypergrid.agreement import keys
from hypergrid.agreement.connections import at_the_store, to_the_store
from hypergrid.agreement.store import (
    LONG_WAIT,
    append,
    lines,
    look_beside,
)
from hypergrid.layout import span_of
from hypergrid.messages import one_line

_WARNS_AFTER = (10.0, 30.0, 60.0)  # seconds of waiting
_WARNS_EACH = 300.0  # further seconds
_CLAIMS_BEFORE = 2.0  # seconds before a warning
_CLAIMS_WITHIN = 1.5  # seconds in which ranks claim it, the lowest first: the others see it then
_SEARCH_PERIOD = 3.0  # seconds from one search for ended processes to the next
_SEARCHES = 3  # in a row that must say the same: the kernel's list may lack a line
_SHOWN = 16  # ranks in a warning
_log = logging.getLogger(__name__)


class _Place(NamedTuple):
    """Where a rank is: its connections to the store, and the group it creates; "" if it waits."""

    connections: set[str]
    label: str


def _places(store: Store) -> dict[int, _Place]:
    """By rank, what each has written last."""
    place_of = {}
    for line in lines(store, keys.PLACES):
        rank, connections, label = json.loads(line)
        place_of[rank] = _Place({*connections}, label)
    return place_of


@dataclass(eq=False)
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
    begin : float
        When the wait began, as ``time.monotonic()`` has it.
    timeout : timedelta, optional
        How long this rank will wait; None without a limit.

    Attributes
    ----------
    ended : list of int
        Ranks that cannot arrive, as their connections to the store are closed.
    """

    store: Store
    ranks: Sequence[int]
    rank: int
    call: str
    arrived: Callable[[], int]
    done: str = "are here"
    all_connected: bool = False
    begin: float = field(default_factory=time.monotonic)
    timeout: timedelta | None = None
    ended: list[int] = field(default_factory=list)
    _written_label: str | None = None  # nothing yet
    _warnings: int = 0  # how many were due until now
    _claims: int = 0  # how many of them and of the next were to be claimed
    _has_claimed: bool = False  # the last of these
    _seen_claims: int = 0  # of all ranks
    _next_search: float = 0.0
    _searches_of_closed: Counter[int] = field(default_factory=Counter)  # in a row, by rank

    @property
    def waited(self) -> float:
        """Seconds."""
        return time.monotonic() - self.begin

    def look(self, label: str = "") -> None:
        """Write down where this rank is, look for ended processes and warn, if it is time for that.

        ``label`` is of the groups that this rank creates at the moment; "" where it has arrived.
        """
        waited = self.waited
        if waited < LONG_WAIT:
            return
        if label != self._written_label:
            self._written_label = label
            place = [self.rank, to_the_store(self.store), one_line(label)]
            append(self.store, keys.PLACES, json.dumps(place))
        if waited >= self._next_search:
            self._next_search = waited + _SEARCH_PERIOD
            self._search()
        # Shortly before a warning is due ranks claim it, one after the other: a rank that sees the
        # claim of a lower one leaves it to that.
        position = self.ranks.index(self.rank) / len(self.ranks)
        until_claim = _CLAIMS_BEFORE - position * _CLAIMS_WITHIN
        claims = _due(waited + until_claim)
        if claims > self._claims:
            self._claims = claims
            self._has_claimed = not self._a_lower_rank_claims()
            if self._has_claimed:
                append(self.store, keys.CLAIMS, str(self.rank))
        # Lower ranks may have claimed it since.
        warnings = _due(waited)
        if warnings > self._warnings:
            self._warnings = warnings
            if self._has_claimed and not self._a_lower_rank_claims():
                logs.warn(self._text(), _log)

    def _a_lower_rank_claims(self) -> bool:
        """Whether a lower rank has claimed a warning since this one asked before."""
        claims = lines(self.store, keys.CLAIMS)
        new_claims = claims[self._seen_claims :]
        self._seen_claims = len(claims)
        return any(int(rank) < self.rank for rank in new_claims)

    def _search(self) -> None:
        """Look for ranks whose connections to the store are closed, on the host that serves it."""
        connections = at_the_store(self.store) if self.all_connected else None
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
            closed.update(rank for rank in self.ranks if rank not in place_of)
        searches = {rank: self._searches_of_closed[rank] + 1 for rank in closed}
        self._searches_of_closed = Counter(searches)
        self.ended = sorted(rank for rank in closed if searches[rank] >= _SEARCHES)

    def ended_in_words(self) -> str:
        """The error of all ranks where some have ended."""
        return (
            f"{_named(self.ended)} of ranks {span_of(self.ranks)} cannot take part in "
            f"{self.call}: the connection to the store is closed. The process has ended, or has "
            f"destroyed its default group. Look at its log."
        )

    def _text(self) -> str:
        place_of = _places(self.store)
        arrived = self.arrived()
        waited = f"rank {self.rank} has waited {self.waited:.0f} s"
        if self.timeout is not None:
            limit = self.timeout.total_seconds()
            waited += f" of {limit:.0f} s"
        ranks_at = defaultdict[str | None, list[int]](list)
        for rank in self.ranks:
            label = place_of[rank].label if rank in place_of else None
            ranks_at[label].append(rank)
        silent = ranks_at.pop(None, [])
        ranks_at.pop("", None)  # these wait too
        parts = [f"{_named(ranks)} still at {label}" for label, ranks in ranks_at.items()]
        missing = len(self.ranks) - arrived - sum(map(len, ranks_at.values()))
        if silent and missing > 0:
            # Else the others of the silent ones have arrived a moment ago.
            number = "" if missing == len(silent) else f"{missing} of "
            parts.append(f"missing: {number}{_spans(silent)}")
        others = "; ".join(parts) or "the last a moment ago"
        done = f"{arrived} of {len(self.ranks)} ranks {self.done}"
        return f"{waited} in {self.call}: {done}, {others}"


def _due(waited: float) -> int:
    """How many warnings a rank gives in so many seconds of waiting."""
    later_warnings = int(waited // _WARNS_EACH)
    return sum(waited >= seconds for seconds in _WARNS_AFTER) + later_warnings


def _named(ranks: Sequence[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {_spans(ranks)}"


def _spans(ranks: Sequence[int]) -> str:
    """Such as "1..3,7", and how many there are if these are too many to be shown."""
    text = span_of(ranks[:_SHOWN])
    if len(ranks) > _SHOWN:
        text += f",... ({len(ranks)} ranks)"
    return text


def watched_closing(
    store: Store, rank: int, name: str, label: str, ranks: Sequence[int]
) -> AbstractContextManager[None]:
    """Inside torch closes the group of ``ranks`` that it calls ``name``, and may wait for others.

    ``store`` is the one that all ranks share.
    """
    group_store = PrefixStore(f"hypergrid/closing/{name}", store)
    call = f"closing {label} of ranks {span_of(ranks)}"
    watch = Watch(group_store, ranks, rank, call, arrived=lambda: len(_places(group_store)))
    return look_beside(watch.look)
