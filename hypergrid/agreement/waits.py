"""Ranks that wait for others while they create groups: in vain, or for one that waits itself."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from hypergrid.agreement.store import append, lines, wait

WAITING = "waiting"  # the key under which ranks say that they wait for others


@dataclass
class Creation:
    """Phase 2 of what this process creates; ``store`` is for this phase alone."""

    store: Store
    rank: int
    is_known_to_wait: bool = False


creations: list[Creation] = []  # the outermost first


def another_rank_failed() -> bool:
    """Whether a rank that creates groups with this one has failed.

    Called while this rank waits for others, which it tells them the first time.
    """
    if not creations:
        return False
    creation = creations[-1]
    if not creation.is_known_to_wait:
        creation.is_known_to_wait = True
        append(creation.store, WAITING, str(creation.rank))
    # Before this rank has arrived, there is an outcome only after a failure.
    return creation.store.check(["outcome"])


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
            wait(store, ["outcome"], timeout)
