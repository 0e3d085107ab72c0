"""The end of creation: all ranks have their groups, or all of them say which one had not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hypergrid.errors import CreationError
from hypergrid.groups.store import (
    bounded,
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
    """What is created inside is created on all ``ranks`` or reported by all as not created.

    *Collective* over ``ranks``, once for each ``epoch`` that they have agreed on. A rank leaves it
    without an error only when all have come to its end; whoever fails tells those that are there.
    To give back what was made is the caller's.

    Raises
    ------
    CreationError
        Another rank failed, or did not come to the end within ``timeout`` and a little.
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
                first = _settle(here, {"error": own})["error"]
                _leave(here, ranks, failed=True)
            if isinstance(error, CreationError) and first not in (None, own):
                raise CreationError(f"{error} The first to fail: {first}") from error.__cause__
            raise
        with telling_of_a_lost_store():
            outcome = _meet_at_the_end(here, ranks, timeout)
        with suppress(RuntimeError):  # what has been read stands, also when the store is lost now
            _leave(here, ranks, "error" in outcome)
        if "error" in outcome:
            raise CreationError(
                f"rank {dist.get_rank()} gave its groups back, another rank could not make its "
                f"own: {outcome['error']}"
            )


def _meet_at_the_end(here: Store, ranks: Sequence[int], timeout: timedelta) -> dict[str, Any]:
    here.set(f"done/{dist.get_rank()}", "")
    if here.add("done", 1) == len(ranks):
        return _settle(here, {})
    try:
        # Whoever is stuck in torch finds out after the timeout, and knows better what at.
        here.wait(["outcome"], timeout + timedelta(seconds=5))
    except RuntimeError:
        if here.add("reporting", 1) == 1:
            text = f"{missing(here, 'done', 'done', ranks)} did not finish creating groups within"
            return _settle(here, {"error": f"{text} {timeout}. Look at their logs."})
        here.wait(["outcome"], timedelta(seconds=30))
    outcome: dict[str, Any] = json.loads(here.get("outcome"))
    return outcome


def _settle(here: Store, outcome: dict[str, Any]) -> dict[str, Any]:
    """Write how it ended, unless somebody has; gives what stands."""
    if here.add("settled", 1) == 1:
        here.set("outcome", json.dumps(outcome))
        return outcome
    here.wait(["outcome"], timedelta(seconds=30))
    standing: dict[str, Any] = json.loads(here.get("outcome"))
    return standing


def _leave(here: Store, ranks: Sequence[int], failed: bool) -> None:
    forget(here, f"done/{dist.get_rank()}")
    if here.add("left", 1) == len(ranks):
        clear_ending(here)
    elif failed:
        stay_until(lambda: not here.check(["outcome"]), here)


def clear_ending(here: Store) -> None:
    forget(here, "done", "settled", "reporting", "left", "outcome")  # the last of all leave last
