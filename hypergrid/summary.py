"""A plan in numbers: for each name how many groups, how large, across how many hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hypergrid.layout import RankLayout
from hypergrid.plan import GroupPlan, GroupRow
from hypergrid.policy import Policy
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
    owner_of_groups: dict[object, str] = {}
    for row in plan.rows:
        arrays = plan.arrays(row)
        # For each group of the row the number of its hosts.
        touched = np.concatenate([topology.touched(groups) for groups in arrays])
        sizes = [groups.shape[1] for groups in arrays]
        owner = None
        if row.kind is not None:
            # The first name with the same groups of the same kind owns the communicators.
            largest = max(sizes)
            communicators_of_row = (_identity(arrays), row.kind.among(largest))
            owner = owner_of_groups.setdefault(communicators_of_row, row.label)
        if owner == row.label:
            owner = None
        yield Summary(
            label=row.label,
            layout=row.layout,
            dims=long_dims(plan, row),
            pick=row.pick,
            groups=len(touched),
            size=(min(sizes), max(sizes)),
            hosts=(int(touched.min()), int(touched.max())),
            crossing=int((touched > 1).sum()),
            backend=row.backend,
            same_as=owner,
            separate=row.separate or row.explicit is not None,
            traffic=row.traffic,
        )


def communicators(plan: GroupPlan, of_one_rank: bool = False) -> dict[str, tuple[int, int]]:
    """For each choice of ``share``: how many communicators a rank makes, at least and at most.

    With ``"none"`` these are all groups of the rank. ``of_one_rank`` counts only those that the
    rank has alone.
    """
    ranks_of_job = kinds_of_ranks(plan)
    counts = {}
    for share in ("none", "all"):  # "states" is "all" for a plan, which is of one state
        policy = Policy(share=share)
        created = []  # by rank how many communicators it creates
        for rank in ranks_of_job:
            count = 0
            for _, ranks, owner in plan.sharing(rank, policy):
                # A group that another label owns has no communicator of its own.
                if owner is None and (len(ranks) == 1 or not of_one_rank):
                    count += 1
            created.append(count)
        counts[share] = (min(created), max(created))
    return counts


def long_dims(plan: GroupPlan, row: GroupRow) -> tuple[str, ...]:
    """The dims of ``row`` that are larger than 1."""
    layout = plan.layouts[row.layout]
    return tuple(dim for dim in row.dims if layout.dim_size(dim) > 1)


def dims_in_words(dims: Sequence[str], pick: str = "all", size: int = 1) -> str:
    """Groups over ``dims`` in words: ``"tp-dp"``, ``"pp ends"``.

    Without dims ``"alone"``, or ``"listed"`` if the largest has a ``size`` above 1.
    """
    if not dims and size > 1:
        return "listed"
    if not dims:
        return "alone"
    words = "-".join(dims)
    if pick != "all":
        words += f" {pick}"
    return words


def sizes_in_words(layout: RankLayout) -> str:
    """The dims that are larger than 1: ``"tp=4 dp=2, order tp-dp"``."""
    trimmed = layout.trimmed
    if not trimmed.dims:
        return "one rank"
    named_sizes = map("{}={}".format, trimmed.dims, trimmed.sizes)
    sizes = " ".join(named_sizes)
    return f"{sizes}, order {trimmed.order}"


def kinds_of_ranks(plan: GroupPlan) -> list[int]:
    """Ranks that together have every number and every size of groups that a rank can have."""
    window = plan.window
    # The sum of a hash for each group of a rank: equal for ranks with groups of equal sizes.
    digests = np.zeros(window.stop, dtype=np.uint64)
    for number, row in enumerate(plan.rows):
        for groups in plan.arrays(row):
            size = groups.shape[1]
            digest = hash((number, size)) % (1 << 64)
            digests[groups] += np.uint64(digest)
    # The first rank of each kind, from the start of the window.
    _, first_ranks = np.unique(digests[window.start :], return_index=True)
    first_ranks.sort()
    ranks: list[int] = first_ranks[:_MOST_KINDS].tolist()
    return [window.start + rank for rank in ranks]


def _identity(arrays: list[np.ndarray]) -> bytes:
    """Equal for rows with equal groups, in whatever order they are enumerated."""
    parts = []
    for groups in arrays:
        order = np.argsort(groups[:, 0], kind="stable")
        size = b"%d|" % groups.shape[1]
        parts += [size, groups[order].tobytes()]
    return b"".join(parts)
