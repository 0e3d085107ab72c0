"""Phase 2 of the two-phase commit: all ranks have their groups, or all of them roll back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hypergrid.errors import CreationError
from hypergrid.groups.store import (
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
from hypergrid.messages import in_words


@contextmanager
def all_or_none(epoch: str, ranks: Sequence[int], timeout: timedelta) -> Iterator[None]:
    """What is created inside is created on all ``ranks``, or every rank raises.

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
    here, timeout = PrefixStore(f"hypergrid/{epoch}", store), bounded(timeout)
    with noticing_a_dead_link(store, timeout):
        try:
            yield
        except BaseException as error:
            first = None
            with suppress(Exception):  # the failure itself is what the caller must see
                own = str(error) if isinstance(error, CreationError) else in_words(error)
                decide(here, "commit", {"error": own})
                first = decided(here, "commit", timedelta(seconds=30))["error"]
                _finish(here, ranks, failed=True)
            if isinstance(error, CreationError) and first not in (None, own):
                raise CreationError(f"{error} The first to fail: {first}") from error.__cause__
            raise
        with telling_of_a_lost_store():
            here.set(f"done/{dist.get_rank()}", "")
            if here.add("done", 1) == len(ranks):
                decide(here, "commit", {})

            def late() -> None:
                absent = missing(here, "done", "done", ranks)
                error = f"{absent} did not finish creating groups within {timeout}."
                decide(here, "commit", {"error": f"{error} Look at their logs."})

            # A rank that waits in torch gives up after the timeout, and can say more.
            outcome = decided(here, "commit", timeout + timedelta(seconds=5), late)
        with suppress(RuntimeError):  # the outcome holds also when the store is lost now
            _finish(here, ranks, "error" in outcome)
        if "error" in outcome:
            raise CreationError(
                f"rank {dist.get_rank()} rolled back its groups, as another rank could not create "
                f"its own: {outcome['error']}"
            )


def _finish(here: Store, ranks: Sequence[int], failed: bool) -> None:
    forget(here, f"done/{dist.get_rank()}")
    if here.add("finished", 1) == len(ranks):
        clear_commit(here)
    elif failed:
        stay_until(lambda: not here.check(["commit"]), here)


def clear_commit(here: Store) -> None:
    """Remove the keys of this phase. The outcome last: the others wait until it is gone."""
    forget(here, "done", "commit/decided", "commit/late", "finished", "commit")
