"""The ranks of a window at the store: arrivals are counted, and all ranks get one outcome.

On success a phase costs three round trips to the store: to arrive, to wait and to read. Arrivals
add to one number, which holds how many there were and the sum of their digests: the last rank
sees from it whether all were equal. Only where they differ, or where one is missing, do ranks
say more.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hypergrid.agreement.store import (
    append,
    first_value,
    forget,
    forget_lines,
    interval,
    lines,
    peek,
    stay_until,
    wait,
)
from hypergrid.messages import few, one_line

_COMPARE, _ROLL_CALL = "compare", "roll call"  # outcomes that ask each rank for more
_GRACE = timedelta(seconds=30)  # for ranks that are there already
_UNTIL_SET = timedelta(seconds=4)  # for the outcome of a rank that has decided
_SILENCE = 4.0  # seconds without an answer, after which a rank that arrived has ended
_KEYS = (
    "arrived",
    "closed",
    "closed/set",
    "outcome",
    "present",
    "entries",
    "told",
    "final",
    "read",
)


def _nothing() -> None: ...


def digest_of(text: str) -> int:
    """The entry with which a rank that reports ``text`` arrives."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _host_of(rank: int) -> int:
    """The first of the ranks that probably run on the host of ``rank``."""
    size = os.environ.get("LOCAL_WORLD_SIZE", "")  # launchers number hosts one by one
    many = max(1, int(size)) if size.isdecimal() and len(size) < 10 else 1
    return rank // many * many


class Phase:
    """One tally of a window: which ranks arrived, whether all said the same, what came of it.

    Parameters
    ----------
    store : Store
        Of this phase alone.
    ranks : sequence of int
        The window.
    rank : int
        This one.
    closing : function
        Called before the outcome can be read, by the rank that publishes it.
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        rank: int,
        closing: Callable[[], object] = _nothing,
    ) -> None:
        self.store, self.ranks, self.rank, self._closing = store, ranks, rank, closing
        members = len(ranks).bit_length()
        self._shift = members + 2  # arrivals, as many again to close the tally, and late ones
        self._modulus = 1 << (62 - self._shift - members)  # of digests: their sum fits
        self._sum = self._told = 0
        # Seconds for ranks that are there: in a large world each looks at the store less often.
        self._patience = max(_SILENCE, 2 * interval(len(ranks)))
        self._some_are_absent = False

    def arrive(self, digest: int = 0, instead_of: int | None = None) -> int:
        """Add this rank to the tally; gives how many have arrived, more than all if it is closed.

        ``instead_of`` is the digest of a process that arrived as this rank and is dead.
        """
        added = digest % self._modulus - (instead_of or 0) % self._modulus
        amount = (instead_of is None) + (added << self._shift)
        self._sum = self.store.add("arrived", amount)
        if self._count > len(self.ranks):  # closed: nobody is to wait for this rank to read it
            self.store.add("arrived", -amount)
        return self._count

    @property
    def _count(self) -> int:
        return self._sum & ((1 << self._shift) - 1)

    def all_equal(self, digest: int) -> bool:
        """Whether all ranks have arrived with this digest, as of this rank's arrival."""
        return self._sum >> self._shift == digest % self._modulus * len(self.ranks)

    def publish(self, outcome: str, early: bool = False) -> bool:
        """Set the outcome unless there is one. ``early``: ranks that come later find it closed."""
        # A rank may decide twice on the same: once for each window that overlaps with this one.
        decision = f"{secrets.token_hex(8)} {outcome}"
        if first_value(self.store, "closed", decision) != decision:
            return False
        if early:
            self._sum = self.store.add("arrived", len(self.ranks))
        self._closing()
        self.store.set("outcome", outcome)
        return True

    def is_decided(self) -> bool:
        """Whether there is an outcome: before all ranks have arrived, a failure."""
        return self.store.check(["outcome"])

    def ask(self) -> None:
        """Let all ranks say in full what they arrived with: their ``outcome`` is ``compared``."""
        self.publish(_COMPARE)

    def outcome(
        self,
        timeout: timedelta,
        absent: Callable[[str], str],
        compared: Callable[[], str] = str,
    ) -> str:
        """Wait for the outcome.

        Parameters
        ----------
        timeout : timedelta
            After which this rank calls the roll.
        absent : function
            Makes the outcome if ranks are missing; it is given these in words.
        compared : function
            Gives the outcome if ranks differ.
        """
        try:
            wait(self.store, ["outcome"], timeout, len(self.ranks))
        except RuntimeError:
            if self.publish(_ROLL_CALL, early=True):
                self._some_are_absent = True
                return self._call_roll(absent)
            self._adopt_decision()
        outcome = peek(self.store, "outcome")
        if outcome == _ROLL_CALL:
            self._some_are_absent = True
            self._answer()
            return self._final(lambda: absent(self._missing()))
        return compared() if outcome == _COMPARE else outcome

    def _adopt_decision(self) -> None:
        """Another rank has decided. It may have ended before it could set the outcome."""
        try:
            wait(self.store, ["outcome"], _UNTIL_SET, len(self.ranks))
        except RuntimeError:
            decision = peek(self.store, "closed")
            self.store.set("outcome", decision.partition(" ")[2])

    def _final(self, decide: Callable[[], str]) -> str:
        try:
            wait(self.store, ["final"], _GRACE, len(self.ranks))
        except RuntimeError:  # the rank that was to decide has ended meanwhile
            self.store.set("final", decide())
        return peek(self.store, "final")

    def _call_roll(self, absent: Callable[[str], str]) -> str:
        self._answer()
        end, said = time.monotonic() + self._patience, 1
        while said < self._count - len(self.ranks) and time.monotonic() < end:
            time.sleep(0.1)
            if said < (said := len(lines(self.store, "present"))):
                end = time.monotonic() + self._patience
        self.store.set("final", text := absent(self._missing()))
        return text

    def _answer(self) -> None:
        append(self.store, "present", f"{self.rank} {one_line(socket.gethostname())}")

    def _missing(self) -> str:
        """In words, which ranks did not answer, and where they are."""
        # A host's name may be empty, or have spaces.
        answers = (line.partition(" ") for line in lines(self.store, "present"))
        hosts = {int(rank): host for rank, _, host in answers}
        absent = [rank for rank in self.ranks if rank not in hosts]
        if not absent:
            return f"one of {len(self.ranks)} ranks, which has arrived since,"
        named = {_host_of(rank): host for rank, host in hosts.items()}
        places = dict.fromkeys(named.get(_host_of(rank), "") for rank in absent[:10])
        where = f" on {', '.join(filter(None, places))}" if any(places) else ""
        return f"{len(absent)} of {len(self.ranks)} ranks ({few(absent)}{where})"

    def tell(self, digest: int, entry: Any) -> bool:
        """Say in full what this rank arrived with: the window's first, and one of each digest.

        Returns whether this rank is the last, which decides by ``compare``.
        """
        if not self._told:
            if self.store.add(f"of/{digest}", 1) == 1 or self.rank == self.ranks[0]:
                append(self.store, "entries", json.dumps([digest, entry]))
            self._told = self.store.add("told", 1)
        return self._told == len(self.ranks)

    def compare(
        self, digest: int, entry: Any, decide: Callable[[list[tuple[int, Any]]], str]
    ) -> str:
        """The decision of one rank when all have reported: how many had an entry, and the entry."""
        is_last = self.tell(digest, entry)

        def told() -> str:
            entries = [json.loads(line) for line in lines(self.store, "entries")]
            return decide([(self.store.add(f"of/{digest}", 0), each) for digest, each in entries])

        if not is_last:
            return self._final(told)
        self.store.set("final", text := told())
        return text

    def leave_after_a_failure(self, default: Store, all_come: bool = False) -> None:
        """Wait, where this process serves the store, until the others have read it too.

        Those that have arrived; with ``all_come`` all ranks, which arrive when torch lets them.
        """
        self.store.add("read", 1)

        def all_read() -> bool:
            self._sum = self.store.add("arrived", 0)
            closed = self._count > len(self.ranks)
            arrived = self._count - closed * len(self.ranks)
            expected = len(self.ranks) if all_come and not self._some_are_absent else arrived
            return self.store.add("read", 0) >= expected

        stay_until(all_read, default, self._patience)


def clear_before(store: Store, epoch: str) -> None:
    """Delete the keys of a window's earlier rounds; all ranks are at the end of this one."""
    span, _, number = epoch.rpartition("/")
    for earlier in range(int(number) - 1, -1, -1):
        prepare, commit = (
            PrefixStore(f"hypergrid/{span}/{earlier}/{name}", store)
            for name in ("prepare", "commit")
        )
        if not prepare.check(["outcome"]):
            break
        told = [json.loads(line)[0] for line in lines(prepare, "entries")]
        forget(prepare, *_KEYS, *(f"of/{digest}" for digest in told))
        forget(commit, *_KEYS)
        forget_lines(prepare, "entries", "present")
        forget_lines(commit, "present")
