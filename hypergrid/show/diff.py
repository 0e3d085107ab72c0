"""Two plans, or a plan and a job's live groups: which ranks move, which groups change members."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from hypergrid.hangs.reading import DEFAULT, Recording
from hypergrid.layout import RankLayout
from hypergrid.messages import few, one_line
from hypergrid.plan import GroupPlan, GroupRow

_COMPARED = 64  # groups of a recording with those of a plan


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
        shards = dict.fromkeys((name for name in before.layouts if name in after.layouts), ())
    common = range(
        max(before.window.start, after.window.start), min(before.window.stop, after.window.stop)
    )
    moved, resharded = [], []
    for name, dims in shards.items():
        one, other = before.layouts[name], after.layouts[name]
        cut, cut_anew = (tuple(each.size_of(dim) for dim in dims) for each in (one, other))
        changed = np.full(len(common), cut != cut_anew)
        for dim in dict.fromkeys((*one.dims, *other.dims)):
            differ = _coordinates(one, dim, common) != _coordinates(other, dim, common)
            sizes = (one.size_of(dim), other.size_of(dim))
            if differ.any() or sizes[0] != sizes[1]:
                moved.append(Moved(name, dim, sizes, int(differ.sum())))
            if dim in dims:
                changed |= differ
        if cut != cut_anew or changed.any():
            resharded.append(Resharded(name, dims, (cut, cut_anew), int(changed.sum())))
    regrouped = []
    by_label = [_rows(before), _rows(after)]
    for label in dict.fromkeys((*by_label[0], *by_label[1])):
        (many, one_of), (others, other_of) = (
            _groups(plan, rows.get(label, []), common)
            for plan, rows in zip((before, after), by_label, strict=True)
        )
        ranks = int((one_of != other_of).sum())
        if ranks or many != others:
            regrouped.append(Regrouped(label, (many, others), ranks))
    sizes = (len(before.window), len(after.window))
    return Difference(sizes, len(common), tuple(moved), tuple(regrouped), tuple(resharded))


def unfit(plan: GroupPlan, recording: Recording) -> str:
    """Why the plan cannot be that of a recorded job; "" if it can."""
    known = [group for group in recording.groups.values() if group.ranks]
    many, planned_for = recording.world_size, len(plan.window)
    whole = any(group.label == DEFAULT for group in known)  # else more ranks may exist
    if many > planned_for or (whole and many < planned_for):
        return f"it is for {planned_for} ranks, and the job has {many}"
    for group in known[:_COMPARED]:
        live = group.ranks or ()
        if live[0] not in plan.window:
            return f"rank {live[0]} is outside its ranks {plan.window[0]}..{plan.window[-1]}"
        planned = [of for row, of in plan.groups_of(live[0]) if row.label == group.label]
        if planned and live not in map(tuple, planned):
            return (
                f"{group.label} of rank {live[0]} has the ranks {_listed(planned)} there, and "
                f"{_listed([live])} in the job"
            )
    return ""


def against_dump(plan: GroupPlan, dump: Dump) -> list[str]:
    """Differences between the live groups of a rank and the plan, in sentences.

    ``dump`` is what ``hypergrid.dump`` wrote on one rank. Its default group and groups created by
    outside code have no label and are left out.
    """
    rank = dump["rank"]
    if rank is None:
        return ["the dump is of a process without process groups."]
    if rank not in plan.window:
        return [f"rank {rank} is outside the plan's ranks {plan.window[0]}..{plan.window[-1]}."]
    planned: dict[str, list[list[int]]] = {}
    for row, ranks in plan.groups_of(rank):
        planned.setdefault(one_line(row.label), []).append(list(ranks))
    live: dict[str, list[list[int]]] = {}
    for group in dump["groups"]:
        if group["label"] is not None:
            live.setdefault(one_line(group["label"]), []).append(list(group["ranks"]))
    said = []
    for label in dict.fromkeys((*planned, *live)):
        if label not in live:
            said.append(f"rank {rank}: {label} was planned but not created.")
        elif label not in planned:
            said.append(f"rank {rank}: {label} exists but was not planned.")
        elif sorted(planned[label]) != sorted(live[label]):
            said.append(
                f"rank {rank}: {label} has the ranks {_listed(live[label])}, planned were "
                f"{_listed(planned[label])}."
            )
    return said


def _listed(groups: Iterable[Sequence[int]]) -> str:
    return " and ".join(f"[{few(ranks)}]" for ranks in groups)


def _coordinates(layout: RankLayout, dim: str, ranks: range) -> np.ndarray:
    if dim not in layout.dims:
        return np.zeros(len(ranks), dtype=int)
    asked, members = np.array(ranks, dtype=int), layout.groups(layout.dims)[0]
    places = np.searchsorted(members, asked)
    known = np.isin(asked, members)
    return np.where(known, places // layout.stride(dim) % layout.dim_size(dim), -1)


def _rows(plan: GroupPlan) -> dict[str, list[GroupRow]]:
    found: dict[str, list[GroupRow]] = {}
    for row in plan.rows:
        found.setdefault(row.label, []).append(row)
    return found


def _groups(plan: GroupPlan, rows: list[GroupRow], ranks: range) -> tuple[int, np.ndarray]:
    """How many groups the rows have, and a digest of each rank's: equal for equal members."""
    count = 0
    parts = [part for row in rows for part in plan.arrays(row)]
    known = max([ranks.stop, *(int(part.max()) + 1 for part in parts)])
    mixed = np.random.default_rng(0).integers(1 << 63, size=known, dtype=np.uint64)
    digests = np.zeros(known, dtype=np.uint64)
    for part in parts:
        count += len(part)
        digests[part] += mixed[part].sum(axis=1, keepdims=True)
    return count, digests[ranks.start : ranks.stop]
