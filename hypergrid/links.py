"""Links: which ranks of one grid send to which of another, and who leads. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hypergrid.layout import LayoutError, RankLayout, listed, whole
from hypergrid.messages import shown

Ranks = tuple[int, ...]
Place = Literal["first", "last"]
At = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Link:
    """A link: activations from one grid of an assembly to another, and their gradients back.

    Each side is cut into parts, one for each coordinate on the dims ``over``. A part holds the
    ranks at the link's end of that grid; one of them leads: it sends or receives for its part,
    whose others it tells by a broadcast. Equally many parts on both sides are linked one to one;
    else as many neighbours as divide evenly fan in to one part, or out from one.

    Parameters
    ----------
    source, target : str
        Names of grids of the assembly; they may be the same, or have ranks in common.
    over : str or sequence of str
        The dims that number the parts, such as "dp" or "dp-cp"; a grid without such a dim has one
        part. By default "dp".
    leave, enter : mapping of dim to coordinate, optional
        Which ranks of source and target are its ends; -1 is the last. By default the last
        coordinate on "pp" of the source, and the first of the target, if they have that dim.
    lead : ("first" or "last", "first" or "last")
        Which rank of a part leads: of those that leave, of those that enter. By default the last
        and the first, as megatron-core's bridges have it.
    backend : str, optional
        Of the link's groups; by default that of the default group.
    name : str, optional
        By default "source->target"; two links of the same grids need names.
    """

    source: str
    target: str
    over: tuple[str, ...] = ("dp",)
    leave: At | None = None
    enter: At | None = None
    lead: tuple[Place, Place] = ("last", "first")
    backend: str | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for what, value in (("source", self.source), ("target", self.target)):
            if not isinstance(value, str) or not value:
                raise LayoutError(
                    f"the {what} of a link must be the name of a grid, got {value!r}."
                )
        if not isinstance(self.name, str):
            raise LayoutError(f"the name of a link must be a text, got {shown(self.name)}.")
        check_backend(self.backend)
        name = self.name or f"{self.source}->{self.target}"
        given = self.over.split("-") if isinstance(self.over, str) else self.over
        over = tuple(listed(given, "over"))
        if not all(isinstance(dim, str) for dim in over):
            raise LayoutError(
                f"over of the link {name} must be dims such as ('dp',), got {shown(self.over)}."
            )
        lead = tuple(self.lead) if isinstance(self.lead, Sequence) else ()
        allowed = get_args(Place)
        if len(lead) != 2 or not all(each in allowed for each in lead):
            raise LayoutError(
                f"invalid lead={shown(self.lead)} of the link {name}; allowed: two of "
                f"{', '.join(map(repr, allowed))}, who leads on either side."
            )
        leave, enter = _pinned(self.leave), _pinned(self.enter)
        self.__dict__.update(name=name, over=over, lead=lead, leave=leave, enter=enter)

    def ends(self, layouts: Mapping[str, RankLayout]) -> Ends:
        """The link between these grids. LayoutError if they have no such dims or do not divide."""
        sides = []
        for name, at, default in ((self.source, self.leave, -1), (self.target, self.enter, 0)):
            layout = layouts[name]
            if at is None:
                at = (("pp", default),) if "pp" in layout.dims and "pp" not in self.over else ()
            sides.append(self._parts(name, layout, dict(at)))
        leaving, entering = sides
        few, many = sorted((len(leaving), len(entering)))
        if many % few:
            raise LayoutError(
                f"the link {self.name} has {len(leaving)} parts that leave {self.source} and "
                f"{len(entering)} that enter {self.target}, over {'-'.join(self.over)}: one must "
                f"be a multiple of the other. Change a size, or link over other dims."
            )
        return Ends(self, tuple(leaving), tuple(entering))

    def _parts(self, name: str, layout: RankLayout, at: Mapping[str, int]) -> list[Ranks]:
        pins = {}
        for dim, given in at.items():
            size, why = layout.size_of(dim), ""
            if dim in self.over:
                why = f"it is over {dim}"
            elif dim not in layout.dims:
                why = f"invalid dim {shown(dim)}. Valid dims are {list(layout.dims)}"
            elif not -size <= given < size:
                why = f"{dim}={given} is outside {layout!r}"
            if why:
                raise LayoutError(
                    f"the link {self.name} cannot end at {dim}={given} of {name}: {why}."
                )
            pins[dim] = given % size
        over = [dim for dim in layout.dims if dim in self.over]
        inner = [dim for dim in layout.dims if dim not in self.over and dim not in pins]
        several = RankLayout(tuple(over), tuple(layout.size_of(dim) for dim in over))
        firsts = (layout.rank(**pins, **several.coordinate(i)) for i in range(several.size))
        return [tuple(layout.group(first, inner)) for first in firsts]


@dataclass(frozen=True)
class Ends:
    """A link between two layouts: its parts, and which leader sends to which.

    ``leaving`` and ``entering`` are the parts of either side, ascending.
    """

    link: Link
    leaving: tuple[Ranks, ...]
    entering: tuple[Ranks, ...]

    @property
    def leaders(self) -> tuple[Ranks, Ranks]:
        """The leader of each part that leaves, and of each that enters."""
        places = [0 if each == "first" else -1 for each in self.link.lead]
        sides = zip((self.leaving, self.entering), places, strict=True)
        leaving, entering = (tuple(part[place] for part in parts) for parts, place in sides)
        return leaving, entering

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Each (leader that sends, leader that receives)."""
        leaving, entering = self.leaders
        n, m = len(leaving), len(entering)
        return [
            (leaving[i * n // max(n, m)], entering[i * m // max(n, m)]) for i in range(max(n, m))
        ]

    @property
    def kind(self) -> str:
        """``"one to one"``, ``"fan-in 2 to 1"`` or ``"fan-out 1 to 4"``."""
        n, m = len(self.leaving), len(self.entering)
        if n == m:
            return "one to one"
        return f"fan-in {n // m} to 1" if n > m else f"fan-out 1 to {m // n}"

    def sends_to(self, rank: int) -> list[int]:
        """The leaders that ``rank`` sends to; none unless it leads a part that leaves."""
        return [target for source, target in self.pairs if source == rank]

    def receives_from(self, rank: int) -> list[int]:
        """The leaders that ``rank`` receives from; none unless it leads a part that enters."""
        return [source for source, target in self.pairs if target == rank]

    def groups(self) -> dict[str, tuple[Ranks, ...]]:
        """The groups by label: each part of either side, and all leaders."""
        leaders = tuple(sorted({rank for side in self.leaders for rank in side}))
        name = self.link.name
        return {
            f"{name} leaving": self.leaving,
            f"{name} entering": self.entering,
            f"{name} leaders": (leaders,),
        }


def _pinned(given: Any) -> At | None:
    if given is None:
        return None
    try:
        items = dict(given).items()
        return tuple((str(dim), whole(at, "coordinates")) for dim, at in items)
    except (TypeError, ValueError):
        raise LayoutError(
            f"the end of a link is such as {{'pp': -1}}, got {shown(given)}."
        ) from None


def check_backend(backend: Any) -> None:
    """LayoutError if it is no name of a backend, nor None."""
    if not isinstance(backend, str | None):
        raise LayoutError(f"backend must be a name such as 'gloo', got {shown(backend)}.")
