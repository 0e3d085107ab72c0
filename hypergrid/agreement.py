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
        On every rank, with the same text, when proposals differ, when a rank has refused its own
        (:func:`refuse`), when the way of creation that the policy insists on is not open to all,
        or when a rank does not come within ``timeout``.
    """
    can, store = abilities(), _shared_store()
    if store is None:
        return _accept(_choose(f"alone/{next(_alone)}", policy, [can]))
    here, everything = _Round(store, ranks), {**proposal, **asdict(policy)}
    if not here.arrive(everything, can, policy):
        here.wait(timeout or DEFAULT_TIMEOUT)
        here = _Round(store, ranks)
        here.arrive(everything, can, policy)
    return _accept(here.wait(timeout or DEFAULT_TIMEOUT))


def refuse(ranks: Sequence[int], error: BaseException) -> None:
    """Tell the other ranks that this one has refused its arguments, so that none waits for it.

    *Local*: it does not wait. The others raise with this error's text once all have come.
    """
    store = _shared_store()
    if store is not None and dist.get_rank() in ranks:
        text = f"{type(error).__name__}: {error}"
        _Round(store, ranks).arrive({"refused": text}, Abilities(), Policy())


class _Round:
    """One meeting of ``ranks`` at the store. The next one begins when its verdict is out.

    A rank that comes again before that, as a fresh process in a dead one's place, replaces what
    it said and is counted once. A refusal stands: whoever refused meets the others in the next
    round, when they too have heard of it.
    """

    def __init__(self, store: Store, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = dist.get_rank(), ranks
        self.board = PrefixStore(f"hypergrid/{_span(ranks)}", store)
        self.number = self.board.add("round", 0)
        self.here = PrefixStore(str(self.number), self.board)
        self.alike = ""  # counts the ranks that said what this one did

    def arrive(self, proposal: dict[str, Any], can: Abilities, policy: Policy) -> bool:
        """Say what this rank proposes; who comes last of all also writes the verdict.

        False, and nothing is said, if this rank has refused in this round.
        """
        own, text = f"proposal/{self.rank}", json.dumps(proposal, sort_keys=True, default=str)
        again = self.here.add(f"came/{self.rank}", 1) > 1
        if again:
            before = self.here.get(own).decode()
            if "refused" in json.loads(before):
                return False
            self.here.add(_alike(before), -1)
        self.here.set(own, text)
        self.alike = _alike(text)
        self.here.add(self.alike, 1)
        if can != Abilities():  # the usual ones are not worth a key
            self.here.set(f"abilities/{self.here.add('abilities', 1)}", json.dumps(asdict(can)))
        if not again and self.here.add("arrived", 1) == len(self.ranks):
            if self.here.add(self.alike, 0) == len(self.ranks) and "refused" not in proposal:
                everybody = _all_abilities(self.here, len(self.ranks))
                verdict = _choose(f"{_span(self.ranks)}/{self.number}", policy, everybody)
            else:
                verdict = {"error": _difference(self.here, self.ranks)}
            self.close(verdict)
        return True

    def close(self, verdict: dict[str, Any]) -> None:
        """Write the verdict, unless somebody has; the next round begins before it can be read."""
        if self.here.add("closed", 1) == 1:
            self.board.add("round", 1)
            self.here.set("verdict", json.dumps(verdict))

    def wait(self, timeout: timedelta) -> dict[str, Any]:
        """The verdict; if time runs out, one that names who did not come."""
        try:
            self.here.wait(["verdict"], timeout)
        except RuntimeError:
            missing = [r for r in self.ranks if not self.here.check([f"came/{r}"])]
            shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
            self.close(
                {
                    "error": f"{len(missing)} of {len(self.ranks)} ranks did not come to create "
                    f"groups together within {timeout}: {shown}. Look at their logs, or give "
                    f"them more time by distributed_timeout_minutes."
                }
            )
            self.here.wait(["verdict"], timedelta(seconds=30))
        verdict: dict[str, Any] = json.loads(self.here.get("verdict"))
        self.tidy("error" in verdict)
        return verdict

    def tidy(self, failed: bool) -> None:
        """Take this rank's keys away, and the shared ones once all have read them."""
        if failed:
            return  # a rank that comes late must still find the verdict
        for key in (f"proposal/{self.rank}", f"came/{self.rank}"):
            self.here.delete_key(key)
        if self.here.add("read", 1) == len(self.ranks):
            posted = self.here.add("abilities", 0)
            shared = ["arrived", "closed", "verdict", self.alike, "read", "abilities"]
            for key in (*shared, *(f"abilities/{i + 1}" for i in range(posted))):
                self.here.delete_key(key)


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
    """In words: the lowest rank that refused, or that differs from the first one, and how."""
    first = json.loads(here.get(f"proposal/{ranks[0]}"))
    for rank in ranks:
        other = json.loads(here.get(f"proposal/{rank}"))
        if "refused" in other:
            return (
                f"rank {rank} refused its arguments, so no rank of {_span(ranks)} made a group: "
                f"{other['refused']}"
            )
        if other != first:
            break
    fields = "; ".join(
        f"{key} is {other.get(key)!r} on rank {rank} and {first.get(key)!r} on rank {ranks[0]}"
        for key in sorted(first.keys() | other.keys())
        if first.get(key) != other.get(key)
    )
    return (
        f"ranks {_span(ranks)} were asked for different groups: "
        f"{fields or 'one of them changed its mind meanwhile'}. "
        f"Start all of them with the same arguments. No group was made."
    )


def _alike(text: str) -> str:
    return "alike/" + hashlib.sha256(text.encode()).hexdigest()


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
