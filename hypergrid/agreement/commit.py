"""Phase 2 of the two-phase commit: all ranks have their groups, or all of them roll back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hypergrid.agreement.rendezvous import Phase, clear_before
from hypergrid.agreement.store import (
    bounded,
    noticing_a_dead_link,
    raise_if_waits_ended,
    shared_store,
    telling_of_a_lost_store,
)
from hypergrid.errors import CreationError
from hypergrid.messages import in_words, shortened

_FAILED = 1  # what a rank that has failed arrives with, the others with 0


class _Thread(threading.local):
    phase: Phase | None = None  # of the groups that this thread creates


_thread = _Thread()


def another_rank_failed() -> bool:
    """Whether one of the ranks that create groups together with this thread has failed."""
    return _thread.phase is not None and _thread.phase.is_decided()


@contextmanager
def _creating(phase: Phase) -> Iterator[None]:
    outer = _thread.phase
    _thread.phase = phase
    try:
        yield
    finally:
        _thread.phase = outer


@contextmanager
def all_or_none(epoch: str, ranks: Sequence[int], timeout: timedelta) -> Iterator[None]:
    """All ``ranks`` create the groups that are created inside, or every rank raises.

    *Collective* over ``ranks``, once for each ``epoch`` that they have agreed on. A rank that fails
    tells those that are there. The caller destroys its groups.

    Raises
    ------
    CreationError
        Another rank failed, or did not finish within ``timeout`` and a little.
    """
    store = shared_store()
    if store is None:
        yield
        return
    timeout, rank = bounded(timeout), dist.get_rank()
    phase = Phase(PrefixStore(f"hypergrid/{epoch}/commit", store), ranks, rank)

    def absent(missing: str) -> str:
        return f"{missing} did not finish creating groups within {timeout}. Look at their logs."

    with noticing_a_dead_link(store, timeout):
        try:
            with _creating(phase):
                yield
        except BaseException as error:
            raise_if_waits_ended()  # nothing is to wait any more, also not for the store
            first = None
            with suppress(Exception):  # the failure itself is what the caller must see
                own = str(error) if isinstance(error, CreationError) else in_words(error)
                phase.arrive(_FAILED)
                phase.publish(own, early=True)
                first = phase.outcome(timeout, absent)
                phase.leave_after_a_failure(store, all_come=True)
            if isinstance(error, CreationError) and first not in (None, own):
                text = f"{shortened(str(error), 200)} The first to fail: {first}"
                raise CreationError(text) from error.__cause__
            raise
        with telling_of_a_lost_store():
            # A rank that is stuck in torch finds out after the timeout, and knows better why.
            failure = _outcome(phase, store, epoch, timeout + timedelta(seconds=5), absent)
        if failure:
            with suppress(RuntimeError):  # what has been read stands, also if the store is lost
                phase.leave_after_a_failure(store, all_come=True)
            raise CreationError(
                f"rank {rank} rolled back its groups, as another rank could not create its own: "
                f"{failure}"
            )


def _outcome(
    phase: Phase, store: Store, epoch: str, timeout: timedelta, absent: Callable[[str], str]
) -> str:
    """Say that this rank has its groups, and wait for all: empty, or the first failure."""
    if phase.arrive() == len(phase.ranks) and phase.all_equal(0):
        phase.publish("")
        with suppress(RuntimeError):  # what is published stands
            clear_before(store, epoch)
    return phase.outcome(timeout, absent)
