"""A plan in numbers: for each name how many groups, how large, across how many hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hypergrid.layout import RankLayout
from hypergrid.plan import GroupPlan, GroupRow
from hypergrid.policy import CHOICES, Policy
from hypergrid.topology import Topology

_MOST_KINDS = 256  # a job's groups are laid out in fewer ways


@dataclass(frozen=True)
class Summary:
    """One name's groups over the whole job."""

    label: str
    layout: str
    dims: tuple[str, ...]  # larger than 1; empty for groups of one rank
    pick: str
    groups: int  # how many
    size: tuple[int, int]  # ranks of the smallest and of the largest
    hosts: tuple[int, int]  # that a group touches, at least and at most
    crossing: int  # groups on more than one host
    backend: str | None  # None: the default group's
    same_as: str | None  # the first name with the same groups that may share its communicator
    separate: bool  # whether it never shares
    traffic: str  # names share a communicator only where it is equal


def summaries(plan: GroupPlan, topology: Topology) -> Iterator[Summary]:
    """A line for each of the plan's rows, in the order of creation. Costs O(ranks) a row."""
    first: dict[object, str] = {}
    for row in plan.rows:
        arrays = plan.arrays(row)
        touched = np.concatenate([hosts_touched(part, topology) for part in arrays])
        sizes = [part.shape[1] for part in arrays]
        kind = row.kind and row.kind.among(max(sizes))
        owner = first.setdefault((_identity(arrays), kind), row.label) if kind else None
        yield Summary(
            row.label,
            row.layout,
            long_dims(plan, row),
            row.pick,
            len(touched),
            (min(sizes), max(sizes)),
            (int(touched.min()), int(touched.max())),
            int((touched > 1).sum()),
            row.backend,
            None if owner == row.label else owner,
            row.kind is None,
            row.traffic,
        )


def communicators(plan: GroupPlan) -> dict[str, tuple[int, int]]:
    """For each choice of ``share``: how many communicators a rank makes, at least and at most.

    With ``"none"`` these are all groups of the rank.
    """
    ranks = kinds_of_ranks(plan)
    counts = {}
    for share in CHOICES["share"]:
        policy = Policy(share=share)
        of_rank = [sum(owner is None for *_, owner in plan.sharing(r, policy)) for r in ranks]
        counts[share] = (min(of_rank), max(of_rank))
    return counts


def long_dims(plan: GroupPlan, row: GroupRow) -> tuple[str, ...]:
    """The dims of ``row`` that are larger than 1."""
    layout = plan.layouts[row.layout]
    return tuple(dim for dim in row.dims if layout.dim_size(dim) > 1)


def dims_in_words(dims: Sequence[str], pick: str = "all", size: int = 1) -> str:
    """Groups over ``dims`` in words: ``"tp-dp"``, ``"pp ends"``.

    Without dims ``"alone"``, or ``"listed"`` if the largest has a ``size`` above 1.
    """
    if not dims:
        return "listed" if size > 1 else "alone"
    return "-".join(dims) + (f" {pick}" if pick != "all" else "")


def sizes_in_words(layout: RankLayout) -> str:
    """The dims that are larger than 1: ``"tp=4 dp=2, order tp-dp"``."""
    long = layout.trimmed
    if not long.dims:
        return "one rank"
    sizes = " ".join(f"{dim}={size}" for dim, size in zip(long.dims, long.sizes, strict=True))
    return f"{sizes}, order {long.order}"


def hosts_touched(groups: np.ndarray, topology: Topology) -> np.ndarray:
    """How many hosts each of ``groups``, of shape (groups, size), touches."""
    hosts = np.sort(topology.numbers[groups], axis=1)
    touched: np.ndarray = (hosts[:, 1:] != hosts[:, :-1]).sum(axis=1) + 1
    return touched


def kinds_of_ranks(plan: GroupPlan) -> list[int]:
    """Ranks that together have every number and every size of groups that a rank can have."""
    window = plan.window
    kinds = np.zeros(window.stop, dtype=np.uint64)  # equal for ranks with groups of equal sizes
    for number, row in enumerate(plan.rows):
        for part in plan.arrays(row):
            kinds[part] += np.uint64(hash((number, part.shape[1])) % (1 << 64))
    first = np.unique(kinds[window.start :], return_index=True)[1]
    found: list[int] = (np.sort(first)[:_MOST_KINDS] + window.start).tolist()
    return found


def _identity(arrays: list[np.ndarray]) -> bytes:
    """Equal for rows with equal groups, in whatever order they are enumerated."""
    return b"".join(
        b"%d|" % part.shape[1] + part[np.argsort(part[:, 0], kind="stable")].tobytes()
        for part in arrays
    )
