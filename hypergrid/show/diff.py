"""Two plans, or a plan and a job's live groups: which ranks move, which groups change members."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from hypergrid.layout import RankLayout, span_of
from hypergrid.messages import few, one_line
from hypergrid.plan import GroupPlan


class LiveGroup(TypedDict):
    """A group of a dump: without a label it is outside code's, or the default one."""

    label: str | None
    ranks: list[int]


class Dump(TypedDict):
    """The compared fields of ``hypergrid.dump``; without process groups there is no rank."""

    pid: int
    rank: int | None
    groups: list[LiveGroup]


@dataclass(frozen=True)
class Moved:
    """The change of one dim of one layout."""

    layout: str
    dim: str
    sizes: tuple[int, int]  # before, after; 1 if the layout does not have the dim
    ranks: int  # in both jobs, whose coordinate on it changes


@dataclass(frozen=True)
class Regrouped:
    """The change of one name's groups."""

    label: str
    groups: tuple[int, int]  # before, after
    ranks: int  # in both jobs, whose group has other members


@dataclass(frozen=True)
class Resharded:
    """How the weights of one layout in a checkpoint must be resharded."""

    layout: str
    dims: tuple[str, ...]
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    ranks: int  # in both jobs, that hold another part

    @property
    def is_cut_anew(self) -> bool:
        """Whether the weights are divided into other parts."""
        return self.sizes[0] != self.sizes[1]


@dataclass(frozen=True)
class Difference:
    """The differences between two plans; ranks are compared where both plans have them."""

    ranks: tuple[int, int]
    common: int
    moved: tuple[Moved, ...] = ()
    regrouped: tuple[Regrouped, ...] = ()
    resharded: tuple[Resharded, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no rank sees a difference."""
        changed = (*self.moved, *self.regrouped, *self.resharded)
        return self.ranks[0] == self.ranks[1] and not changed


def difference(
    before: GroupPlan,
    after: GroupPlan,
    shards: Mapping[str, tuple[str, ...]] | None = None,
) -> Difference:
    """The changes from one plan to the other. Costs O(ranks) for each name.

    ``shards`` names the layouts to compare, each with the dims whose coordinates say which part
    of the weights a rank has. By default all layouts that both have, and no weights.
    """
    if shards is None:
        shards = {}
        for name in before.layouts:
            if name in after.layouts:
                shards[name] = ()
    start = max(before.window.start, after.window.start)
    stop = min(before.window.stop, after.window.stop)
    common = range(start, stop)
    moved: list[Moved] = []
    resharded: list[Resharded] = []
    for name, dims in shards.items():
        old = before.layouts[name]
        new = after.layouts[name]
        old_cut = tuple(old.size_of(dim) for dim in dims)
        new_cut = tuple(new.size_of(dim) for dim in dims)
        # Whether each rank holds another part of the weights: all do, if these are cut anew.
        part_differs = np.full(len(common), old_cut != new_cut)
        for dim in dict.fromkeys((*old.dims, *new.dims)):
            differs = _coordinates(old, dim, common) != _coordinates(new, dim, common)
            old_size = old.size_of(dim)
            new_size = new.size_of(dim)
            if differs.any() or old_size != new_size:
                moved.append(Moved(name, dim, (old_size, new_size), int(differs.sum())))
            if dim in dims:
                part_differs |= differs
        if part_differs.any() or old_cut != new_cut:
            ranks = int(part_differs.sum())
            resharded.append(Resharded(name, dims, (old_cut, new_cut), ranks))
    return Difference(
        (len(before.window), len(after.window)),
        len(common),
        tuple(moved),
        tuple(_regrouped(before, after, common)),
        tuple(resharded),
    )


def _regrouped(before: GroupPlan, after: GroupPlan, common: range) -> Iterator[Regrouped]:
    """The names whose groups change."""
    labels = [row.label for row in (*before.rows, *after.rows)]
    for label in dict.fromkeys(labels):  # each once, in their order
        old_count, old_digests = _groups(before, label, common)
        new_count, new_digests = _groups(after, label, common)
        ranks = int((old_digests != new_digests).sum())
        if ranks or old_count != new_count:
            yield Regrouped(label, (old_count, new_count), ranks)


def against_dump(plan: GroupPlan, dump: Dump) -> list[str]:
    """Differences between the live groups of a rank and the plan, in sentences.

    ``dump`` is what ``hypergrid.dump`` wrote on one rank. Its default group and groups created by
    outside code have no label and are left out.
    """
    rank = dump["rank"]
    if rank is None:
        return ["the dump is of a process without process groups."]
    if rank not in plan.window:
        return [f"rank {rank} is outside the plan's ranks {span_of(plan.window)}."]
    planned: dict[str, list[list[int]]] = {}
    for row, ranks in plan.groups_of(rank):
        label = one_line(row.label)  # as the dump has it
        planned.setdefault(label, []).append(list(ranks))
    live: dict[str, list[list[int]]] = {}
    for group in dump["groups"]:
        if group["label"] is not None:
            label = one_line(group["label"])
            live.setdefault(label, []).append(group["ranks"])
    sentences = []
    for label in dict.fromkeys((*planned, *live)):
        if label not in live:
            sentences.append(f"rank {rank}: {label} was planned but not created.")
        elif label not in planned:
            sentences.append(f"rank {rank}: {label} exists but was not planned.")
        elif sorted(planned[label]) != sorted(live[label]):
            sentences.append(
                f"rank {rank}: {label} has the ranks {_listed(live[label])}, planned were "
                f"{_listed(planned[label])}."
            )
    return sentences


def _listed(groups: Iterable[Sequence[int]]) -> str:
    return " and ".join(f"[{few(ranks)}]" for ranks in groups)


def _coordinates(layout: RankLayout, dim: str, ranks: range) -> np.ndarray:
    """The coordinate of each rank on ``dim``: -1 outside the layout, 0 without such a dim."""
    if dim not in layout.dims:
        return np.zeros(len(ranks), dtype=int)
    positions = np.arange(ranks.start, ranks.stop) - layout.offset
    coordinates = positions // layout.stride(dim) % layout.size_of(dim)
    is_outside = (positions < 0) | (positions >= layout.size)
    coordinates[is_outside] = -1
    return coordinates


def _groups(plan: GroupPlan, label: str, ranks: range) -> tuple[int, np.ndarray]:
    """How many groups the name has, and a digest of each rank's: equal for equal members."""
    arrays: list[np.ndarray] = []
    for row in plan.rows:
        if row.label == label:
            arrays.extend(plan.arrays(row))
    count = 0
    stop = ranks.stop
    for array in arrays:
        count += len(array)
        stop = max(stop, int(array.max()) + 1)
    # A number for each rank: the sum over a group's members is its digest, in any order.
    generator = np.random.default_rng(0)
    number_of_rank = generator.integers(1 << 63, size=stop, dtype=np.uint64)
    digests = np.zeros(stop, dtype=np.uint64)
    for array in arrays:
        # A rank may be in several groups of one name.
        digests[array] += number_of_rank[array].sum(axis=1, keepdims=True)
    return count, digests[ranks.start : ranks.stop]
