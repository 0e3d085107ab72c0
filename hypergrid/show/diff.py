"""Two plans: which ranks move, which groups change members, which weights are cut anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hypergrid.layout import RankLayout
from hypergrid.plan import GroupPlan


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
        before, after = self.ranks
        if before != after:
            return False
        # A part of the weights changes where a coordinate does.
        return not (self.moved or self.regrouped)


def difference(
    before: GroupPlan,
    after: GroupPlan,
    shards: Mapping[str, tuple[str, ...]],
) -> Difference:
    """The changes from one plan to the other. Costs O(ranks) for each name.

    ``shards`` names the layouts to compare, each with the dims whose coordinates say which part
    of the weights a rank has.
    """
    start = max(before.window.start, after.window.start)
    stop = min(before.window.stop, after.window.stop)
    common = np.arange(start, stop)
    moved: list[Moved] = []
    resharded: list[Resharded] = []
    for name, weight_dims in shards.items():
        old = before.layouts[name]
        new = after.layouts[name]
        # Whether each rank holds another part of the weights: all do, if these are cut anew.
        old_cut = tuple(map(old.size_of, weight_dims))
        new_cut = tuple(map(new.size_of, weight_dims))
        part_differs = np.full(len(common), old_cut != new_cut)
        for dim in dict.fromkeys((*old.dims, *new.dims)):
            old_coordinates = _coordinates(old, dim, common)
            new_coordinates = _coordinates(new, dim, common)
            differs = old_coordinates != new_coordinates
            if dim in weight_dims:
                part_differs |= differs
            old_size = old.size_of(dim)
            new_size = new.size_of(dim)
            ranks = int(differs.sum())
            # A dim can grow by ranks that only one of the jobs has: then no common rank moves.
            if ranks or old_size != new_size:
                moved.append(Moved(name, dim, (old_size, new_size), ranks))
        ranks = int(part_differs.sum())
        if ranks or old_cut != new_cut:
            resharded.append(Resharded(name, weight_dims, (old_cut, new_cut), ranks))
    return Difference(
        ranks=(len(before.window), len(after.window)),
        common=len(common),
        moved=tuple(moved),
        regrouped=tuple(_regrouped(before, after, common)),
        resharded=tuple(resharded),
    )


def _coordinates(layout: RankLayout, dim: str, ranks: np.ndarray) -> np.ndarray:
    """The coordinate of each rank on ``dim``: -1 outside the layout, 0 without such a dim."""
    if dim not in layout.dims:
        return np.zeros(len(ranks), dtype=int)
    positions = ranks - layout.offset
    coordinates = positions // layout.stride(dim) % layout.size_of(dim)
    is_inside = (positions >= 0) & (positions < layout.size)
    return np.where(is_inside, coordinates, -1)


def _regrouped(before: GroupPlan, after: GroupPlan, common: np.ndarray) -> Iterator[Regrouped]:
    """The names whose groups change."""
    # A number for each rank: the sum over a group's members is its digest, in any order.
    rank_count = max(before.window.stop, after.window.stop)
    generator = np.random.default_rng(0)
    number_of_rank = generator.integers(1 << 63, size=rank_count, dtype=np.uint64)
    labels = [row.label for row in (*before.rows, *after.rows)]
    # Each once, in their order.
    for label in dict.fromkeys(labels):
        old_count, old_digests = _groups(before, label, number_of_rank)
        new_count, new_digests = _groups(after, label, number_of_rank)
        differs = old_digests != new_digests
        ranks = int(differs[common].sum())
        if ranks or old_count != new_count:
            yield Regrouped(label, (old_count, new_count), ranks)


def _groups(plan: GroupPlan, label: str, number_of_rank: np.ndarray) -> tuple[int, np.ndarray]:
    """How many groups the name has, and a digest of each rank's: equal for equal members."""
    count = 0
    digests = np.zeros_like(number_of_rank)
    for row in plan.rows:
        if row.label != label:
            continue
        # One array for each size of groups: each has a row for a group.
        for groups in plan.arrays(row):
            count += len(groups)
            sums = number_of_rank[groups].sum(axis=1, keepdims=True)
            # A rank may be in several groups of one name.
            digests[groups] += sums
    return count, digests
