"""Ranks agree, through the store, on what they are about to create, how, and under which epoch."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from hypergrid.creation import Abilities, abilities
from hypergrid.policy import Policy

DEFAULT_TIMEOUT = timedelta(minutes=30)
_alone = itertools.count()


class AgreementError(RuntimeError):
    """The ranks of a window were asked for different things, or one of them did not come."""


@dataclass(frozen=True)
class Agreement:
    """What the ranks of a window have agreed on.

    Parameters
    ----------
    epoch : str
        Part of every group's name; never used twice in the life of the store.
    way : {"members", "split", "everyone"}
        Who creates groups of the default group's backend.
    others : {"members", "everyone"}
        Who creates groups of another backend.
    why : str
        What stands in the way of "members"; empty where nothing does.
    lazy : bool
        Whether gloo connects on first use.
    """

    epoch: str
    way: str = "members"
    others: str = "members"
    why: str = ""
    lazy: bool = False


def agree(
    ranks: Sequence[int],
    proposal: Mapping[str, Any],
    policy: Policy,
    timeout: timedelta | None = None,
) -> Agreement:
    """Compare ``proposal`` and what each process can do over ``ranks``. *Collective* over them.

    Each rank writes one key and counts itself in; whoever comes last looks whether all were
    equal and tells the others. Costs a handful of store operations per rank, none of them with
    the proposals of others unless they differ.

    Parameters
    ----------
    ranks : sequence of int
        The ranks that create groups together, ascending; this rank is one of them.
    proposal : mapping
        What this rank is about to create, as values that JSON can hold.
    policy : Policy
        Compared too. "auto" takes the best way that all ranks can.
    timeout : timedelta, optional
        How long to wait for the last rank. Default 30 minutes.

    Raises
    ------
    AgreementError
        On every rank, with the same text, when proposals differ, or when the way of creation
        that the policy insists on is not open to all; on the ranks that wait when another one
        does not come within ``timeout``.
    """
    can, store = abilities(), _shared_store()
    if store is None:
        verdict = _choose(f"alone/{next(_alone)}", policy, [can])
        return _accept(verdict)
    rank, span = dist.get_rank(), _span(ranks)
    board = PrefixStore(f"hypergrid/{span}", store)
    round_number = board.add("round", 0)
    here = PrefixStore(str(round_number), board)
    text = json.dumps({**proposal, **asdict(policy)}, sort_keys=True, default=str)
    here.set(f"proposal/{rank}", text)
    alike = "alike/" + hashlib.sha256(text.encode()).hexdigest()
    here.add(alike, 1)
    if can != Abilities():  # the usual ones are not worth a key
        here.set(f"abilities/{here.add('abilities', 1)}", json.dumps(asdict(can)))
    if here.add("arrived", 1) == len(ranks):
        if here.add(alike, 0) == len(ranks):
            verdict = _choose(f"{span}/{round_number}", policy, _all_abilities(here, len(ranks)))
        else:
            verdict = {"error": _difference(here, ranks)}
        board.add("round", 1)  # before the verdict: whoever reads it may start the next round
        here.set("verdict", json.dumps(verdict))
    try:
        here.wait(["verdict"], timeout or DEFAULT_TIMEOUT)
    except RuntimeError as error:
        raise AgreementError(
            f"rank {rank} waited {timeout or DEFAULT_TIMEOUT} for all of ranks {span} to create "
            f"their groups together; only {here.add('arrived', 0)} of {len(ranks)} came."
        ) from error
    return _accept(json.loads(here.get("verdict")))


def _shared_store() -> Store | None:
    """The default group's store, where it is one that ranks really share; else None."""
    if not dist.is_initialized() or dist.get_backend() in ("fake", "mpi"):
        return None
    return c10d._get_default_store()


def _all_abilities(here: Store, count: int) -> list[Abilities]:
    """Those that were posted, and the usual ones once if any rank posted nothing."""
    posted = here.add("abilities", 0)
    told = [Abilities(**json.loads(here.get(f"abilities/{i + 1}"))) for i in range(posted)]
    return told if posted == count else [*told, Abilities()]


def _choose(epoch: str, policy: Policy, everybody: Sequence[Abilities]) -> dict[str, Any]:
    """The best way that all can take, or why the one that was insisted on is not open."""
    obstacle = next((can.obstacle for can in everybody if can.obstacle), None)
    bound = next((can.bound for can in everybody if can.bound), None)
    why = {
        "members": obstacle or bound,
        "split": obstacle
        or (None if all(can.can_split for can in everybody) else "not every rank can split"),
        "everyone": None,
    }
    way = policy.creation
    if way == "auto":
        way = next(each for each, reason in why.items() if reason is None)
    elif why[way] is not None:
        return {"error": f"creation={way!r} is not possible here: {why[way]}. Use 'auto'."}
    members_alone = obstacle is None and policy.creation != "everyone"
    return asdict(
        Agreement(
            epoch=epoch,
            way=way,
            others="members" if members_alone else "everyone",
            why=why["members"] or "",
            lazy=policy.connect == "lazy" and all(can.can_connect_lazily for can in everybody),
        )
    )


def _accept(verdict: dict[str, Any]) -> Agreement:
    if "error" in verdict:
        raise AgreementError(verdict["error"])
    return Agreement(**verdict)


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
