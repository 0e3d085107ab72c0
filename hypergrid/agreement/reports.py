"""What ranks report in full where one of them is missing, or where they differ.

A round in which all ranks are equal passes none of this. Every function takes the store of one
phase: its keys are there alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hypergrid.agreement import keys
from hypergrid.agreement.store import append, forget, lines
from hypergrid.messages import few, shown_apart


def answer(store: Store, rank: int) -> None:
    """Report that this rank is there."""
    append(store, keys.PRESENT, str(rank))


def missing(store: Store, ranks: Sequence[int]) -> str:
    """In words, which of ``ranks`` did not answer."""
    present = {int(rank) for rank in lines(store, keys.PRESENT)}
    absent = [rank for rank in ranks if rank not in present]
    world = len(ranks)
    if not absent:
        return f"one of {world} ranks, which has arrived since,"
    number = len(absent)
    names = few(absent)
    return f"{number} of {world} ranks ({names})"


class Entry(NamedTuple):
    """The report of a rank, and the number of ranks that are equal to it."""

    rank: int
    proposal: dict[str, Any]
    abilities: dict[str, Any]
    ranks: int


def report(store: Store, rank: int, digest: int, entry: str, is_first: bool) -> int:
    """Report ``entry``, what ``rank`` proposes and can do; gives how many ranks have reported.

    It is written if no equal one is there, or if ``is_first``.
    """
    equal_ranks = store.add(f"of/{digest}", 1)
    if equal_ranks == 1 or is_first:
        append(store, keys.ENTRIES, f"{digest} {rank} {entry}")
    answer(store, rank)
    return store.add(keys.REPORTED, 1)


def entries(store: Store) -> list[Entry]:
    """The entries: that of the window's first rank, and one of each kind."""
    reported = []
    for line in lines(store, keys.ENTRIES):
        digest, rank, entry = line.split(" ", maxsplit=2)
        proposal, abilities = json.loads(entry)
        equal_ranks = store.add(f"of/{digest}", 0)
        reported.append(Entry(int(rank), proposal, abilities, equal_ranks))
    return reported


def difference(reported: Sequence[Entry], span: str) -> str:
    """In words: a rank that refused, or how the rarest proposal differs from the first rank's.

    Empty if all proposals are equal.
    """
    # A refusal says why, where the other proposals only differ from it.
    for entry in reported:
        reason = entry.proposal.get("refused")
        if reason is not None:
            return (
                f"rank {entry.rank} refused its arguments, so no rank of {span} created a group: "
                f"{reason}"
            )
    # The only rank that was to write an entry may have ended before.
    if not reported:
        return ""
    first = min(reported, key=lambda entry: entry.rank)
    # The others may have equal proposals, and other abilities.
    differing = [entry for entry in reported if entry.proposal != first.proposal]
    if not differing:
        return ""
    # Where 7 ranks say tp=2 and rank 5 says tp=4, rank 5 is the one to look at.
    rarest = min(differing, key=lambda entry: (entry.ranks, entry.rank))
    where = f"rank {rarest.rank}"
    others = rarest.ranks - 1
    if others:
        where += f" (and {others} more)"
    fields = {}
    names = first.proposal.keys() | rarest.proposal.keys()
    for name in sorted(names):
        rare = rarest.proposal.get(name)
        usual = first.proposal.get(name)
        if rare == usual:
            continue
        rare, usual = shown_apart(rare, usual)
        on_rarest = f"{rare} on {where}"
        on_first = f"{usual} on rank {first.rank}"
        fields[name] = f"{name} is {on_rarest} and {on_first}"
    # The digest of the plan differs too, and says less than any other field.
    if len(fields) > 1:
        fields.pop("plan", None)
    differences = "; ".join(fields.values())
    return (
        f"ranks {span} were asked for different groups: {differences}. Start all of them with the "
        f"same arguments. No group was created."
    )


def clear_before(store: Store, epoch: str) -> None:
    """Delete the keys of a window's earlier rounds; all ranks are at the end of this one."""
    # After round 3 of "0..7": rounds 2, 1 and 0, until one whose keys are deleted already.
    span, _, number = epoch.rpartition("/")
    for earlier in range(int(number) - 1, -1, -1):
        prepare = PrefixStore(f"hypergrid/{span}/{earlier}/prepare", store)
        if not prepare.check([keys.OUTCOME]):
            break
        for line in lines(prepare, keys.ENTRIES):
            digest = line.partition(" ")[0]
            forget(prepare, f"of/{digest}")
        forget(prepare, *keys.OF_A_PHASE)
        commit = PrefixStore(f"hypergrid/{span}/{earlier}/commit", store)
        forget(commit, *keys.OF_A_PHASE)
