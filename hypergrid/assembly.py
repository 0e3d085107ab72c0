"""AssemblyPlan: several grids, and links between them, as one plan. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, Protocol, TypeAlias

from hypergrid.layout import LayoutError, RankLayout, listed
from hypergrid.links import Ends, Link, check_backend
from hypergrid.messages import shown
from hypergrid.plan import GroupPlan, GroupRow
from hypergrid.views import ordered


class Declared(Protocol):
    """A grid of an assembly before it is created.

    ``GridPart``, or another class of the same kind, such as ``compat.assembly.MegatronPart``.
    """

    @property
    def layouts(self) -> Mapping[str, RankLayout]:
        """Its layouts; the first is the grid's own, the others are views of it."""

    @property
    def rows(self) -> Sequence[GroupRow]:
        """Its groups, in the order of creation."""


Parts: TypeAlias = Mapping[str, Declared | Sequence[Declared]]


@dataclass(frozen=True)
class GridPart:
    """One grid of an assembly: dims and sizes, on these ranks, with these groups.

    Parameters
    ----------
    sizes : mapping of dim to size
        The fastest first: ``{"tp": 2, "pp": 2}``.
    ranks : iterable of int
        As many as the sizes multiply to; ascending, not necessarily consecutive.
    groups : iterable of dims, optional
        Which groups are created: ``["tp", "dp", "dp-tp"]``. By default one over each dim.
    backend : str, optional
        By default that of the default group.
    timeout : float, optional
        Seconds; by default torch's.
    """

    sizes: Mapping[str, int]
    ranks: Iterable[int]
    groups: Iterable[str] | None = None
    backend: str | None = None
    timeout: float | None = None
    layout: RankLayout = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.sizes, Mapping):
            raise LayoutError(
                f"sizes must be such as {{'tp': 2, 'dp': 2}}, got {shown(self.sizes)}."
            )
        layout = RankLayout(tuple(self.sizes), tuple(self.sizes.values())).on(self.ranks)
        if isinstance(self.groups, str):
            raise LayoutError(
                f"groups must be several, such as ['tp', 'tp-dp'], got {shown(self.groups)}."
            )
        groups = tuple(layout.dims if self.groups is None else listed(self.groups, "groups"))
        self.__dict__.update(layout=layout, groups=groups, ranks=layout.ranks)
        labels = [row.label for row in self.rows]
        again = next((label for i, label in enumerate(labels) if label in labels[:i]), None)
        if again is not None:
            raise LayoutError(f"the groups over {again} are listed twice: list each once.")
        check_backend(self.backend)
        seconds: Any = 1.0 if self.timeout is None else self.timeout
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not 0 < seconds < inf:
            raise LayoutError(
                f"timeout must be a number of seconds above 0, got {shown(self.timeout)}."
            )

    @property
    def layouts(self) -> dict[str, RankLayout]:
        """The grid's own."""
        return {"": self.layout}

    @property
    def rows(self) -> list[GroupRow]:
        """One for each combination of dims."""
        chosen = [ordered(self.layout, dims) for dims in self.groups or ()]
        return [
            GroupRow("-".join(dims), "", tuple(dims), backend=self.backend, timeout=self.timeout)
            for dims in chosen
        ]


class AssemblyPlan:
    """Several grids as one plan: on disjoint ranks, on the same, or on some in common.

    Parameters
    ----------
    parts : mapping of name to grid, or to a list of grids
        A list is a pipeline whose stages differ in size: stage i of ``"lm"`` is the grid
        ``"lm.i"``, and a link goes from each stage to the next.
    links : iterable of Link
        Between grids; a pipeline is left from its last stage, and entered at its first.

    Raises
    ------
    LayoutError
        No grid, an invalid or repeated name, or a link that cannot be.

    Examples
    --------
    >>> vision = GridPart({"dp": 4}, range(4))
    >>> text = GridPart({"tp": 2, "pp": 2}, range(4, 8))
    >>> assembly = AssemblyPlan({"vision": vision, "text": text}, [Link("vision", "text")])
    >>> assembly.ends["vision->text"].pairs
    [(0, 4), (1, 4), (2, 4), (3, 4)]
    >>> [row.label for row in assembly.plan.rows][:3]
    ['vision/dp', 'text/tp', 'text/pp']
    """

    def __init__(self, parts: Parts, links: Iterable[Link] = ()) -> None:
        self.parts: dict[str, Declared] = {}
        self.pipelines: dict[str, tuple[str, ...]] = {}
        """The stages of each pipeline by its name."""
        chained = list[Link]()
        if not isinstance(parts, Mapping):
            raise LayoutError(
                f"parts must be such as {{'vision': GridPart(...)}}, got {shown(parts)}."
            )
        for name, part in parts.items():
            if not isinstance(name, str) or not name or "/" in name or "." in name:
                raise LayoutError(
                    f"a grid's name is a text without '/' and '.', got {shown(name)}."
                )
            if not isinstance(part, Sequence):
                self.parts[name] = part
                continue
            if not part:
                raise LayoutError(f"the pipeline {name} has no stage: list a grid for each.")
            stages = self.pipelines[name] = tuple(f"{name}.{i}" for i in range(len(part)))
            self.parts |= dict(zip(stages, part, strict=True))
            chained += [Link(*pair) for pair in pairwise(stages)]
        if not self.parts:
            raise LayoutError("an assembly needs a grid, and there is none.")
        for name, part in self.parts.items():
            if not hasattr(part, "layouts") or not hasattr(part, "rows"):
                raise LayoutError(f"{name} is no GridPart, and not of that kind: {shown(part)}.")
        self.links = tuple(chained + [self._resolved(link) for link in listed(links, "links")])
        names = [link.name for link in self.links]
        again = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if again is not None:
            raise LayoutError(f"two links are called {again}: give one of them another name=.")

    def _resolved(self, link: Link) -> Link:
        if not isinstance(link, Link):
            raise LayoutError(f"a link is a hypergrid.Link, got {shown(link)}.")
        ends = []
        for given, place in ((link.source, -1), (link.target, 0)):
            found = self.pipelines[given][place] if given in self.pipelines else given
            if found not in self.parts:
                raise LayoutError(
                    f"the link {link.name} names the grid {shown(given)}; there are "
                    f"{', '.join([*self.parts, *self.pipelines])}."
                )
            ends.append(found)
        return replace(link, source=ends[0], target=ends[1])

    @cached_property
    def layouts(self) -> dict[str, RankLayout]:
        """The layout of each grid."""
        return {name: next(iter(part.layouts.values())) for name, part in self.parts.items()}

    @cached_property
    def ends(self) -> dict[str, Ends]:
        """Each link by its name, between the grids' layouts."""
        return {link.name: link.ends(self.layouts) for link in self.links}

    @cached_property
    def plan(self) -> GroupPlan:
        """The groups of all grids in the order of creation, and then those of the links."""
        layouts, rows = dict[str, RankLayout](), list[GroupRow]()
        for name, part in self.parts.items():
            own = {key: name if i == 0 else f"{name}/{key}" for i, key in enumerate(part.layouts)}
            layouts |= {own[key]: layout for key, layout in part.layouts.items()}
            rows += [
                replace(row, label=f"{name}/{row.label}", layout=own[row.layout])
                for row in part.rows
            ]
        for link in self.links:
            rows += link_rows(self.ends[link.name])
        return GroupPlan(layouts, tuple(rows), tuple(self.parts), self.links)

    def with_rank(self, rank: int) -> list[str]:
        """The names of the grids that ``rank`` is in."""
        return [name for name, layout in self.layouts.items() if rank in layout]


def link_rows(ends: Ends) -> list[GroupRow]:
    """The groups of a link as rows of a plan."""
    link = ends.link
    return [
        GroupRow(label, link.source, (), explicit=groups, backend=link.backend)
        for label, groups in ends.groups().items()
    ]
