"""What ranks report in full where one of them is missing, or where they differ.

A round in which all ranks are equal passes none of this. Every function takes the store of one
phase: its keys are there alone.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hypergrid.agreement.store import append, forget, forget_lines, lines
from hypergrid.messages import few, one_line, shown_apart

_KEYS = (
    "arrived",
    "closed",
    "closed/set",
    "outcome",
    "present",
    "entries",
    "told",
    "final",
    "read",
)


def answer(store: Store, rank: int) -> None:
    """Report that this rank is there, and on which host."""
    append(store, "present", f"{rank} {one_line(socket.gethostname())}")


def wait_for_answers(store: Store, expected: int, patience: float) -> None:
    """Wait until ``expected`` ranks have answered, or none has for ``patience`` seconds."""
    end = time.monotonic() + patience
    answers = 1
    while answers < expected and time.monotonic() < end:
        time.sleep(0.1)
        now_answered = len(lines(store, "present"))
        if now_answered > answers:
            answers = now_answered
            end = time.monotonic() + patience


def missing(store: Store, ranks: Sequence[int]) -> str:
    """In words, which of ``ranks`` did not answer, and where they are."""
    present = set()
    host_of = {}  # by the first rank of each host
    for line in lines(store, "present"):
        rank, _, host = line.partition(" ")  # a host's name may be empty, or have spaces
        present.add(int(rank))
        host_of[_first_on_host(int(rank))] = host
    absent = [rank for rank in ranks if rank not in present]
    if not absent:
        return f"one of {len(ranks)} ranks, which has arrived since,"
    text = f"{len(absent)} of {len(ranks)} ranks ({few(absent)}"
    hosts = dict.fromkeys(host_of.get(_first_on_host(rank), "") for rank in absent[:10])
    hosts.pop("", None)  # ranks of which none has answered on their host
    if hosts:
        text += f" on {', '.join(hosts)}"
    return f"{text})"


def _first_on_host(rank: int) -> int:
    """The first of the ranks that probably run on the host of ``rank``."""
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")  # launchers number hosts one by one
    if not local_size.isdecimal() or len(local_size) > 9 or int(local_size) == 0:
        return rank
    return rank - rank % int(local_size)


class Entry(NamedTuple):
    """What a rank reported, and the number of ranks that are equal to it."""

    rank: int
    proposal: dict[str, Any]
    abilities: dict[str, Any]
    ranks: int


def report(store: Store, entry: Sequence[Any], digest: int, is_first: bool) -> int:
    """Report ``entry`` if no equal one is there, or if ``is_first``; how many have reported."""
    if store.add(f"of/{digest}", 1) == 1 or is_first:
        append(store, "entries", json.dumps([digest, entry]))
    return store.add("told", 1)


def entries(store: Store) -> list[Entry]:
    """The entries: that of the window's first rank, and one of each kind."""
    reported = []
    for line in lines(store, "entries"):
        digest, (rank, proposal, abilities) = json.loads(line)
        equal_ranks = store.add(f"of/{digest}", 0)
        reported.append(Entry(rank, proposal, abilities, equal_ranks))
    return reported


def difference(reported: Sequence[Entry], span: str) -> str:
    """In words: a rank that refused, or how the rarest proposal differs from the first rank's.

    Empty if all proposals are equal.
    """
    for entry in reported:
        if "refused" in entry.proposal:
            return (
                f"rank {entry.rank} refused its arguments, so no rank of {span} created a group: "
                f"{entry.proposal['refused']}"
            )
    first = min(reported, key=lambda entry: entry.rank)
    others = [entry for entry in reported if entry.proposal != first.proposal]
    if not others:
        return ""
    rarest = min(others, key=lambda entry: (entry.ranks, entry.rank))
    where = f"rank {rarest.rank}"
    if rarest.ranks > 1:
        where += f" (and {rarest.ranks - 1} more)"
    fields = {}
    for name in sorted(first.proposal.keys() | rarest.proposal.keys()):
        rare = rarest.proposal.get(name)
        usual = first.proposal.get(name)
        if rare != usual:
            rare, usual = shown_apart(rare, usual)
            fields[name] = f"{name} is {rare} on {where} and {usual} on rank {first.rank}"
    if len(fields) > 1:  # the plan's digest says less than other fields
        fields.pop("plan", None)
    return (
        f"ranks {span} were asked for different groups: {'; '.join(fields.values())}. "
        f"Start all of them with the same arguments. No group was created."
    )


def clear_before(store: Store, epoch: str) -> None:
    """Delete the keys of a window's earlier rounds; all ranks are at the end of this one."""
    span, _, number = epoch.rpartition("/")
    for earlier in range(int(number) - 1, -1, -1):
        prepare = PrefixStore(f"hypergrid/{span}/{earlier}/prepare", store)
        commit = PrefixStore(f"hypergrid/{span}/{earlier}/commit", store)
        if not prepare.check(["outcome"]):  # deleted already, with all before it
            break
        digests = [json.loads(line)[0] for line in lines(prepare, "entries")]
        forget(prepare, *_KEYS, *(f"of/{digest}" for digest in digests))
        forget(commit, *_KEYS)
        forget_lines(prepare, "entries", "present")
        forget_lines(commit, "present")
