"""Phase 2 of the two-phase commit: all ranks have their groups, or all of them roll back."""

from __future__ import annotations

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

NO_ADDRESS = "published no address to connect to"  # what a rank says that waited for another
_FAILED = 1  # what a rank that has failed arrives with, the others with 0


_phases: list[Phase] = []  # of the groups that this process creates, the outermost first


def another_rank_failed() -> bool:
    """Whether one of the ranks that create groups together with this process has failed."""
    return bool(_phases) and _phases[-1].is_decided()


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
            _phases.append(phase)
            try:
                yield
            finally:
                _phases.remove(phase)
        except BaseException as error:
            raise_if_waits_ended()  # nothing is to wait any more, also not for the store
            first = None
            with suppress(Exception):  # the failure itself is what the caller must see
                own = str(error) if isinstance(error, CreationError) else in_words(error)
                phase.arrive(_FAILED)
                phase.publish(own, early=True)
                first = phase.outcome(timeout, absent)
                phase.leave_after_a_failure(store, all_come=True)
            # A rank that only waited for this one is no cause of this one's failure.
            only_waited = first is not None and NO_ADDRESS in first and NO_ADDRESS not in own
            if isinstance(error, CreationError) and first not in (None, own) and not only_waited:
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
