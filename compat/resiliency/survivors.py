"""Processes that restart meet in a store, before any of them waits inside torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from hypergrid.agreement.commit import Phase
from hypergrid.agreement.store import abortable
from hypergrid.errors import AgreementError
from hypergrid.messages import in_words

_ALL_ARRIVED = "all arrived"


def meet_survivors(store: Store, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
    """Wait until all ``ranks`` are here, where no default group exists. *Collective* over them.

    Costs two round trips to the store per rank, and one for each look of a rank that waits.
    ``store`` is for this meeting alone.

    Raises
    ------
    AgreementError
        On every rank: one does not arrive within ``timeout``. Also on a lost store.
    AbortedError
        ``hypergrid.abort()`` was called meanwhile.
    """
    # A process that has not arrived may not have a connection yet.
    phase = Phase(store, ranks, rank, call="a meeting after a restart", all_connected=False)
    with abortable():
        try:
            if phase.arrive() == len(ranks):
                phase.publish(_ALL_ARRIVED)
            outcome = phase.outcome(timeout, f"did not begin this life within {timeout}.")
        except RuntimeError as error:
            raise AgreementError(f"rank {rank} lost the store: {in_words(error)}") from error
    if outcome != _ALL_ARRIVED:
        raise AgreementError(outcome)
