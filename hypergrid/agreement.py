"""Ranks agree, through the store, on what they are about to create and under which epoch."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from hypergrid import creation

DEFAULT_TIMEOUT = timedelta(minutes=30)
_alone = itertools.count()


class AgreementError(RuntimeError):
    """The ranks of a window were asked for different things, or one of them did not come."""


@dataclass(frozen=True)
class Agreement:
    """What the ranks of a window have agreed on.

    ``epoch`` is part of every group's name and is never used twice in the life of the store;
    ``obstacle`` says why members alone cannot create their groups, or is None where they can.
    """

    epoch: str
    obstacle: str | None


def agree(
    ranks: Sequence[int], proposal: Mapping[str, Any], timeout: timedelta | None = None
) -> Agreement:
    """Compare ``proposal`` over ``ranks``. *Collective* over them.

    Each rank writes one key and counts itself in; whoever comes last looks whether all were
    equal and tells the others. Costs a handful of store operations per rank, none of them with
    the proposals of others unless they differ.

    Parameters
    ----------
    ranks : sequence of int
        The ranks that create groups together, ascending; this rank is one of them.
    proposal : mapping
        What this rank is about to create, as values that JSON can hold.
    timeout : timedelta, optional
        How long to wait for the last rank. Default 30 minutes.

    Raises
    ------
    AgreementError
        On every rank, with the same text, when proposals differ; on the ranks that wait when
        another one does not come within ``timeout``.
    """
    obstacle = creation.obstacle()
    store = shared_store()
    if store is None:
        return Agreement(f"alone/{next(_alone)}", obstacle)
    rank = dist.get_rank()
    span = _span(ranks)
    board = PrefixStore(f"hypergrid/{span}", store)
    epoch = board.add("round", 0)
    here = PrefixStore(str(epoch), board)
    text = json.dumps(proposal, sort_keys=True, default=str)
    here.set(f"proposal/{rank}", text)
    if obstacle is not None:
        here.set("obstacle", obstacle)
        here.add("obstacles", 1)
    alike = "alike/" + hashlib.sha256(text.encode()).hexdigest()
    here.add(alike, 1)
    if here.add("arrived", 1) == len(ranks):
        board.add("round", 1)  # before the verdict: whoever reads it may start the next round
        here.set("verdict", json.dumps(_verdict(here, ranks, alike)))
    try:
        here.wait(["verdict"], timeout or DEFAULT_TIMEOUT)
    except RuntimeError as error:
        raise AgreementError(
            f"rank {rank} waited {timeout or DEFAULT_TIMEOUT} for all of ranks {span} to create "
            f"their groups together; only {here.add('arrived', 0)} of {len(ranks)} came."
        ) from error
    verdict = json.loads(here.get("verdict"))
    if "error" in verdict:
        raise AgreementError(verdict["error"])
    return Agreement(f"{span}/{epoch}", verdict["obstacle"])


def shared_store() -> Store | None:
    """The default group's store, where it is one that ranks really share; else None."""
    if not dist.is_initialized() or dist.get_backend() in ("fake", "mpi"):
        return None
    return c10d._get_default_store()


def _verdict(here: Store, ranks: Sequence[int], alike: str) -> dict[str, str | None]:
    if here.add(alike, 0) != len(ranks):
        return {"error": _difference(here, ranks)}
    blocked = here.add("obstacles", 0) > 0
    return {"obstacle": here.get("obstacle").decode() if blocked else None}


def _difference(here: Store, ranks: Sequence[int]) -> str:
    first = json.loads(here.get(f"proposal/{ranks[0]}"))
    for rank in ranks[1:]:
        other = json.loads(here.get(f"proposal/{rank}"))
        if other != first:
            break
    fields = "; ".join(
        f"{key} is {other.get(key)!r} on rank {rank} and {first.get(key)!r} on rank {ranks[0]}"
        for key in sorted(first.keys() | other.keys())
        if first.get(key) != other.get(key)
    )
    return (
        f"ranks {_span(ranks)} were asked for different groups: {fields}. "
        f"Start all of them with the same arguments. No group was made."
    )


def _span(ranks: Sequence[int]) -> str:
    if isinstance(ranks, range):
        return f"{ranks.start}..{ranks.stop - 1}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ",".join("..".join(map(str, run)) for run in runs)
