"""Two plans: which ranks move, which groups change members, which weights are cut anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        changed = (*self.moved, *self.regrouped, *self.resharded)
        return self.ranks[0] == self.ranks[1] and not changed


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
    common = range(start, stop)
    moved: list[Moved] = []
    resharded: list[Resharded] = []
    for name, weight_dims in shards.items():
        old = before.layouts[name]
        new = after.layouts[name]
        # Whether each rank holds another part of the weights: all do, if these are cut anew.
        old_cut = _sizes(old, weight_dims)
        new_cut = _sizes(new, weight_dims)
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


def _regrouped(
    before: GroupPlan,
    after: GroupPlan,
    common: range,
) -> Iterator[Regrouped]:
    """The names whose groups change."""
    # Each once, in their order.
    for label in dict.fromkeys(row.label for row in (*before.rows, *after.rows)):
        old_count, old_digests = _groups(before, label, common)
        new_count, new_digests = _groups(after, label, common)
        differs = old_digests != new_digests
        ranks = int(differs.sum())
        if ranks or old_count != new_count:
            yield Regrouped(label, (old_count, new_count), ranks)


def _sizes(layout: RankLayout, dims: Sequence[str]) -> tuple[int, ...]:
    return tuple(map(layout.size_of, dims))


def _coordinates(
    layout: RankLayout,
    dim: str,
    ranks: range,
) -> np.ndarray:
    """The coordinate of each rank on ``dim``: -1 outside the layout, 0 without such a dim."""
    if dim not in layout.dims:
        return np.zeros(len(ranks), dtype=int)
    positions = np.array(ranks) - layout.offset
    stride = layout.stride(dim)
    coordinates = positions // stride % layout.size_of(dim)
    is_outside = (positions < 0) | (positions >= layout.size)
    coordinates[is_outside] = -1
    return coordinates


def _groups(
    plan: GroupPlan,
    label: str,
    ranks: range,
) -> tuple[int, np.ndarray]:
    """How many groups the name has, and a digest of each rank's: equal for equal members."""
    arrays: list[np.ndarray] = []
    for row in plan.rows:
        if row.label == label:
            arrays.extend(plan.arrays(row))
    stop = ranks.stop
    for groups in arrays:
        # A row may list ranks that are not in the plan's layout.
        stop = max(stop, int(groups.max()) + 1)
    # A number for each rank: the sum over a group's members is its digest, in any order.
    generator = np.random.default_rng(0)
    number_of_rank = generator.integers(1 << 63, size=stop, dtype=np.uint64)
    digests = np.zeros(stop, dtype=np.uint64)
    for groups in arrays:
        # A rank may be in several groups of one name.
        digests[groups] += number_of_rank[groups].sum(axis=1, keepdims=True)
    count = sum(map(len, arrays))
    return count, digests[ranks.start : ranks.stop]
