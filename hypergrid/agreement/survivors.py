"""Processes that restart meet in a store, before any of them waits inside torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from hypergrid.agreement.rendezvous import Phase, digest_of
from hypergrid.agreement.store import abortable, forget
from hypergrid.errors import AgreementError
from hypergrid.messages import in_words, shown


class DifferentError(AgreementError):
    """The ranks were started with different choices."""


def meet_survivors(
    store: Store, ranks: Sequence[int], rank: int, said: Mapping[str, Any], timeout: timedelta
) -> None:
    """Compare ``said`` over ``ranks``, where no default group exists. *Collective* over them.

    Costs three round trips to the store per rank. ``store`` is for this meeting alone.

    Raises
    ------
    AgreementError
        On every rank: one does not arrive within ``timeout``. Also on a lost store.
    DifferentError
        On every rank: what they say differs.
    AbortedError
        ``hypergrid.abort()`` was called meanwhile.
    """
    digest = digest_of(json.dumps(said, sort_keys=True))
    phase = Phase(store, ranks, rank)

    def compared() -> str:
        return phase.compare(digest, [rank, said], _difference)

    def absent(missing: str) -> str:
        return f"missing: {missing} did not begin this life within {timeout}."

    with abortable():
        try:
            if phase.arrive(digest) == len(ranks):
                if phase.all_equal(digest):
                    phase.publish("equal")
                else:
                    phase.ask()
            outcome = phase.outcome(timeout, absent, compared)
        except RuntimeError as error:
            raise AgreementError(f"rank {rank} lost the store: {in_words(error)}") from error
    if outcome.startswith("missing: "):
        raise AgreementError(outcome.removeprefix("missing: "))
    if outcome != "equal":
        raise DifferentError(outcome)


def _difference(entries: list[tuple[int, Any]]) -> str:
    (_, (first, base)), (_, (rank, other)) = sorted(entries, key=lambda each: each[1][0])[:2]
    fields = "; ".join(
        f"{key} is {shown(other.get(key))} on rank {rank} and {shown(base.get(key))} on rank "
        f"{first}"
        for key in sorted(base.keys() | other.keys())
        if base.get(key) != other.get(key)
    )
    return f"the ranks begin this life differently: {fields}. Start all with the same environment."


def forget_life(store: Store, prefix: str) -> None:
    """Delete the keys that begin with ``prefix``, if the store can list its keys."""
    own: Any = store
    try:
        keys = own.list_keys()
    except (AttributeError, NotImplementedError, RuntimeError):
        return
    forget(store, *(key for key in keys if key.startswith(prefix)))
