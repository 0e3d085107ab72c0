"""GroupPlan: which groups, in which order, with which options. Pure data, no communication."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, TypeAlias

import numpy as np

from hypergrid.files import decoded
from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import shown
from hypergrid.policy import Kind, Owners, Policy, owner_of

SCHEMA = 1

Ranks = tuple[int, ...]
Plain: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True)
class GroupRow:
    """All groups of one name, as a rule instead of a list.

    Parameters
    ----------
    label : str
        The name; it becomes the description of the communicator.
    layout : str
        Which of the plan's layouts ``dims`` refers to.
    dims : tuple of str
        A group holds the ranks that differ on these dims only.
    chunk : int, optional
        Cut each such group into runs of this many members, in order; the last may be shorter.
    pick : {"all", "ends", "first"}
        Keep all members, the first and the last, or the first alone.
    explicit : tuple of tuples of ranks, optional
        The groups themselves, where a caller's function chose them. They may overlap.
    backend : str, optional
        None means the backend of the default group.
    timeout : timedelta, optional
        None means torch's default for the backend.
    options : tuple of (key, value), optional
        Communicator options, as plain data; None leaves them to torch.
    traffic : str
        What the group carries, in the caller's words; only compared. A communicator runs one
        operation at a time, so names whose traffic runs at the same time must differ in it.
    separate : bool
        The group never shares a communicator with another label of the same ranks.
    """

    label: str
    layout: str
    dims: tuple[str, ...]
    chunk: int | None = None
    pick: Literal["all", "ends", "first"] = "all"
    explicit: tuple[Ranks, ...] | None = None
    backend: str | None = None
    timeout: timedelta | None = None
    options: tuple[tuple[str, Plain], ...] | None = None
    traffic: str = ""
    separate: bool = False

    @property
    def kind(self) -> Kind | None:
        """The key that is equal for labels that share a communicator; None if none may."""
        if self.explicit is not None:
            return None
        only = self.label if self.separate else ""
        return Kind(self.backend, self.timeout, self.options, self.traffic, only)

    @cached_property
    def places(self) -> Mapping[int, list[int]]:
        """By rank, which of the explicit groups it is in."""
        places_of_rank: dict[int, list[int]] = {}
        for place, ranks in enumerate(self.explicit or ()):
            for rank in ranks:
                places_of_rank.setdefault(rank, []).append(place)
        return places_of_rank

    def parts(self, size: int) -> list[list[int]]:
        """The groups made of one of ``size`` members, as the members' places in it."""
        # Of five members with chunk=2: [0, 1], [2, 3], [4].
        step = self.chunk or size
        places = list(range(size))
        parts = []
        for start in range(0, size, step):
            run = places[start : start + step]
            if self.pick == "first":
                run = run[:1]
            elif self.pick == "ends" and len(run) > 1:  # one member is both ends
                run = [run[0], run[-1]]
            parts.append(run)
        return parts

    def cuts(self, groups: Iterable[Sequence[int]]) -> list[Ranks]:
        """The groups made of each of ``groups``, in Megatron's order."""
        cut_groups = []
        for ranks in groups:
            for part in self.parts(len(ranks)):
                members = tuple(ranks[place] for place in part)
                cut_groups.append(members)
        return cut_groups


@dataclass(frozen=True)
class GroupPlan:
    """The groups of one initialisation, in the order of their creation.

    Symbolic: it holds layouts and rows, never the world's groups, so that it costs the same for a
    million ranks. Equal plans have equal fingerprints on every rank.

    The first layout is the grid that the plan is for; the others are views of it.
    """

    layouts: Mapping[str, RankLayout]
    rows: tuple[GroupRow, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.layouts:
            raise LayoutError("a plan needs a layout, and there is none.")
        for row in self.rows:
            if row.layout not in self.layouts:
                raise LayoutError(
                    f"{shown(row.label)} is over the layout {shown(row.layout)}, and the plan "
                    f"has {', '.join(self.layouts)}."
                )
            layout = self.layouts[row.layout]
            layout.axes(row.dims)  # refuses unknown dims
            if row.chunk is not None and row.chunk < 1:
                raise LayoutError(
                    f"a row cannot have chunk={row.chunk}: cut runs of at least 1 member."
                )
            if row.explicit == ():
                raise LayoutError(f"the row {shown(row.label)} lists its groups, and lists none.")

    @property
    def layout(self) -> RankLayout:
        """The first layout, which the plan is for."""
        return next(iter(self.layouts.values()))

    @property
    def window(self) -> range:
        """The span of ranks that the plan is for."""
        return self.layout.ranks

    def mine(self, row: GroupRow, rank: int) -> dict[str, Ranks]:
        """The groups of ``row`` that ``rank`` belongs to, by a name that is equal on all members.

        At most one, named by its label, unless the row is ``explicit``. Over tp of (tp=2, dp=2)
        rank 3 has ``{"TENSOR": (2, 3)}``.
        """
        if row.explicit is not None:
            # A rank may be in several of them: "LABEL#0", "LABEL#3".
            groups = {}
            for place in row.places.get(rank, ()):
                groups[f"{row.label}#{place}"] = row.explicit[place]
            return groups
        layout = self.layouts[row.layout]
        if rank not in layout:
            return {}
        group = layout.group(rank, row.dims)
        for ranks in row.cuts([group]):
            if rank in ranks:
                return {row.label: ranks}
        # The row does not pick this rank.
        return {}

    def all(self, row: GroupRow) -> list[Ranks]:
        """Every group of ``row``, in Megatron's order, as [(0, 1), (2, 3)]. Costs O(world)."""
        if row.explicit is not None:
            return list(row.explicit)
        layout = self.layouts[row.layout]
        groups = layout.groups(row.dims)
        return row.cuts(groups.tolist())

    def arrays(self, row: GroupRow) -> list[np.ndarray]:
        """Every group of ``row``, ascending: arrays of shape (groups, size)."""
        if row.explicit is not None:
            return [np.array([ranks], dtype=int) for ranks in row.explicit]
        layout = self.layouts[row.layout]
        groups = layout.groups(row.dims)
        # Parts of one size are one array: [0, 1] and [2, 3] of five members, then [4].
        arrays = []
        parts_of_group = row.parts(groups.shape[1])
        for size, parts in groupby(parts_of_group, len):
            # Of the shape (groups, parts of a group, size).
            cut_groups = groups[:, list(parts)]
            one_part_a_line = cut_groups.reshape(-1, size)
            arrays.append(one_part_a_line)
        return arrays

    def sharing(self, rank: int, policy: Policy) -> Iterator[tuple[GroupRow, Ranks, str | None]]:
        """Yield ``groups_of`` with the label whose communicator is used; None for its own."""
        owners: Owners = {}
        for row, ranks in self.groups_of(rank):
            owner = owner_of(owners, row.label, ranks, row.kind, policy)
            yield row, ranks, owner

    def groups_of(self, rank: int) -> Iterator[tuple[GroupRow, Ranks]]:
        """Each (row, ranks) that ``rank`` belongs to, in the order of creation."""
        for row in self.rows:
            for ranks in self.mine(row, rank).values():
                yield row, ranks

    def to_json(self) -> str:
        """The plan as JSON: ``{"schema": 1, "layouts": {...}, "rows": [...]}``."""
        layouts: dict[str, dict[str, Any]] = {}
        for name, layout in self.layouts.items():
            layouts[name] = {"dims": layout.dims, "sizes": layout.sizes, "offset": layout.offset}
        defaults = vars(GroupRow("", "", ()))
        rows = []
        for row in self.rows:
            values = {}
            for name, default in defaults.items():
                value = getattr(row, name)
                # A field with its default is left out, but for the dims of a group of one rank.
                if name == "dims" or value != default:
                    values[name] = value
            if row.timeout is not None:
                values["timeout"] = row.timeout.total_seconds()
            rows.append(values)
        plan = {"schema": SCHEMA, "layouts": layouts, "rows": rows}
        return json.dumps(plan)

    @classmethod
    def from_json(cls, text: str | bytes) -> GroupPlan:
        """Read what ``to_json`` wrote. ValueError on another schema or invalid rows or layouts.

        Needs msgspec, of the extra ``cli``.
        """
        saved = decoded(text, _Saved, "the plan")
        if saved.schema != SCHEMA:
            raise ValueError(
                f"a plan of schema {saved.schema} cannot be read: this release of hypergrid reads "
                f"schema {SCHEMA}."
            )
        return cls(saved.layouts, saved.group_rows)

    def fingerprint(self) -> str:
        """A digest that is equal on two ranks exactly when their plans are."""
        text = self.to_json()
        digest = hashlib.sha256(text.encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class _Row(GroupRow):
    """A row as ``to_json`` writes it."""

    timeout: float | None = None  # type: ignore[assignment]  # seconds


@dataclass
class _Saved:
    """The data that ``to_json`` writes."""

    schema: int | None = None
    layouts: dict[str, RankLayout] = field(default_factory=dict)
    rows: tuple[_Row, ...] = ()

    def __post_init__(self) -> None:
        rows = []
        for row in self.rows:
            values = dict(vars(row))
            if row.timeout is not None:
                values["timeout"] = timedelta(seconds=row.timeout)
            rows.append(GroupRow(**values))
        self.group_rows = tuple(rows)
