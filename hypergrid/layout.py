"""Rank arithmetic: an immutable, named factorisation of a span of ranks. No torch, no globals."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from hypergrid.messages import shown

if TYPE_CHECKING:
    import numpy as np

Dims: TypeAlias = str | Iterable[str]


class LayoutError(ValueError):
    """An invalid layout, dim or rank; the message repeats the whole request."""


def dims_of(order: str, known_dims: Collection[str]) -> list[str]:
    """The dims that ``order`` names, from fastest to slowest, in small letters.

    LayoutError if it is not a text, or has a name that is not one of ``known_dims`` or is repeated.
    """
    if not isinstance(order, str):
        raise LayoutError(f"order must be a text such as 'tp-cp-dp', got {shown(order)}.")
    dims = order.lower().split("-")
    for token in dims:
        if token not in known_dims:
            raise LayoutError(
                f"order {shown(order)} names {shown(token)}, which has no size. Known: "
                f"{', '.join(known_dims)}."
            )
    if len(set(dims)) != len(dims):
        raise LayoutError(f"order {shown(order)} names a dim twice. Leave one of them out.")
    return dims


@dataclass(frozen=True)
class RankLayout:
    """A span of consecutive ranks, factorised into named dims.

    With sizes ``s_i`` (first dim fastest) and strides ``t_i = s_0 * ... * s_(i-1)``, the rank at
    coordinates ``c_i`` is ``offset + sum(c_i * t_i)``. A group over some dims is the set of ranks
    that share every other coordinate, so a rank finds its own group from its number alone.

    Parameters that are not as below raise LayoutError.

    Parameters
    ----------
    dims : sequence of str
        Names, from fastest to slowest. Unique, not empty.
    sizes : sequence of int
        The size of each dim, at least 1.
    offset : int
        The first rank of the span, not negative.

    Examples
    --------
    >>> layout = RankLayout(("tp", "pp", "dp"), (2, 2, 3))
    >>> layout
    RankLayout(tp=2-pp=2-dp=3, ranks 0..11)
    >>> layout.coordinate(7)
    {'tp': 1, 'pp': 1, 'dp': 1}
    >>> layout.group(7, "tp-dp")
    [2, 3, 6, 7, 10, 11]
    >>> layout.groups("dp").tolist()
    [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    >>> layout.orthogonal("tp")
    ('pp', 'dp')
    """

    dims: tuple[str, ...]
    sizes: tuple[int, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.dims, str):
            raise LayoutError(
                f"dims must be several names such as ('tp', 'dp'), got the text "
                f"{shown(self.dims)}. RankLayout.from_order() takes an order as text."
            )
        dims = tuple(listed(self.dims, "dims"))
        given_sizes = listed(self.sizes, "sizes")
        sizes = tuple([whole(size, "sizes") for size in given_sizes])
        offset = whole(self.offset, "offset")
        if len(dims) != len(sizes):
            raise LayoutError(
                f"{len(dims)} dim names {shown(list(dims))} were given {len(sizes)} sizes "
                f"{shown(list(sizes))}. Give one size per name."
            )
        for name, size in zip(dims, sizes, strict=True):
            if not isinstance(name, str) or not name:
                raise LayoutError(f"dim names must be non-empty strings, got {shown(list(dims))}.")
            if size < 1:
                raise LayoutError(f"every size must be at least 1, got {name}={shown(size)}.")
        if len(set(dims)) != len(dims):
            raise LayoutError(f"dim names must not repeat, got {shown(list(dims))}.")
        if offset < 0:
            raise LayoutError(f"the rank offset must not be negative, got {shown(offset)}.")
        # The dataclass is frozen.
        self.__dict__.update(dims=dims, sizes=sizes, offset=offset)

    @classmethod
    def from_order(cls, order: str, sizes: Mapping[str, int], offset: int = 0) -> RankLayout:
        """Lay out ``sizes`` in the order that ``order`` names, such as ``"tp-cp-ep-dp-pp"``.

        A dim of size 1 may be missing from ``order``; it is then the slowest. Upper and lower
        case are the same. LayoutError on a dim larger than 1 that ``order`` does not name, a token
        without a size, a repeat.
        """
        dims = dims_of(order, sizes)
        for name, size in sizes.items():
            if name in dims:
                continue
            if size != 1:
                raise LayoutError(
                    f"order {shown(order)} leaves out {name!r}, whose size is {shown(size)}. "
                    f"Add it to the order or make its size 1."
                )
            dims.append(name)
        sizes_in_order = tuple([sizes[name] for name in dims])
        return cls(tuple(dims), sizes_in_order, offset)

    @cached_property
    def size(self) -> int:
        """Number of ranks in the span."""
        return prod(self.sizes)

    @cached_property
    def ranks(self) -> range:
        """The span itself."""
        return range(self.offset, self.offset + self.size)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """For each dim the difference of the ranks of two neighbours on it."""
        # The sizes 2, 2, 3 have the strides 1, 2, 4: the product of all, 12, is none.
        *strides, _ = accumulate(self.sizes, operator.mul, initial=1)
        return tuple(strides)

    @property
    def stop(self) -> int:
        """One more than the largest rank: a world needs that many."""
        return self.ranks.stop

    @property
    def order(self) -> str:
        """The dims joined by ``"-"``, fastest first."""
        return "-".join(self.dims)

    @property
    def trimmed(self) -> RankLayout:
        """The same layout without the dims of size 1."""
        sizes = {}
        for dim, size in zip(self.dims, self.sizes, strict=True):
            if size > 1:
                sizes[dim] = size
        return replace(self, dims=tuple(sizes), sizes=tuple(sizes.values()))

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def __repr__(self) -> str:
        if self.size == 1:
            return f"RankLayout(rank {self.offset})"
        # Dims of size 1 part no ranks: Megatron's layouts have up to five of them.
        trimmed = self.trimmed
        named_sizes = map("{}={}".format, trimmed.dims, trimmed.sizes)
        sizes = "-".join(named_sizes)
        span = span_of(self.ranks)
        return f"RankLayout({sizes}, ranks {span})"

    def dim_size(self, dims: Dims) -> int:
        """Number of ranks in a group over ``dims``."""
        # Over tp=2 and dp=3: 6. Over no dim: 1.
        axes = self.axes(dims)
        return prod(self.sizes[axis] for axis in axes)

    def size_of(self, dim: str) -> int:
        """The size of one dim; 1 if the layout does not have it."""
        if dim not in self.dims:
            return 1
        axis = self.dims.index(dim)
        return self.sizes[axis]

    def stride(self, dim: str) -> int:
        """The difference of the ranks of two neighbours on ``dim``."""
        (axis,) = self.axes((dim,))
        return self.strides[axis]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Position of ``rank`` on each dim, in the order of the dims."""
        position = self._position(rank)
        coordinates = {}
        for dim, size, stride in zip(self.dims, self.sizes, self.strides, strict=True):
            # Position 5 is 2 steps of stride 2 on: in a dim of size 2 that is once around, to 0.
            steps = position // stride
            coordinates[dim] = steps % size
        return coordinates

    def rank(self, **coordinates: int) -> int:
        """The rank at ``coordinates``; a dim left out counts as 0."""
        rank = self.offset
        axes = self.axes(coordinates)  # refuses an unknown dim
        for axis, (dim, value) in zip(axes, coordinates.items(), strict=True):
            size = self.sizes[axis]
            coordinate = whole(value, f"coordinates such as {dim}")
            if not 0 <= coordinate < size:
                raise LayoutError(
                    f"{dim}={coordinate} is outside {self}: it goes from 0 to {size - 1}."
                )
            rank += coordinate * self.strides[axis]
        return rank

    def shift(self, rank: int, dim: str, by: int = 1) -> int:
        """The rank ``by`` steps further along ``dim``, around its end."""
        size = self.dim_size((dim,))  # refuses an unknown dim
        coordinates = self.coordinate(rank)
        # Of four, two steps from coordinate 3 lead to coordinate 1.
        steps = whole(by, "steps")
        coordinates[dim] = (coordinates[dim] + steps) % size
        return self.rank(**coordinates)

    def group(self, rank: int, dims: Dims) -> list[int]:
        """The group of ``rank`` over ``dims``, ascending. Costs O(size of the group)."""
        position = self._position(rank)
        # Widen the group dim by dim. Rank 3 of (tp=2, pp=2): [3], over tp [2, 3], over pp [0..3].
        members = [rank]
        for axis in sorted(self.axes(dims)):
            size = self.sizes[axis]
            stride = self.strides[axis]
            own_coordinate = position // stride % size
            widened: list[int] = []
            for steps in range(-own_coordinate, size - own_coordinate):
                distance = steps * stride
                widened.extend(member + distance for member in members)
            members = widened
        return members

    def groups(self, dims: Dims, *, as_given: bool = False) -> np.ndarray:
        """All groups over ``dims``: an int array of shape (number of groups, size of a group).

        Groups and members come in Megatron's order, by ascending coordinates, whichever way
        ``dims`` is written; with ``as_given`` the members of a group run through ``dims`` in the
        order given, the first one fastest.
        """
        import numpy as np  # here: start-up code of every Python process may import this file

        inner = self.axes(dims)
        if not as_given:
            inner.sort()
        axes = range(len(self.dims))
        outer = [axis for axis in axes if axis not in inner]
        # The ranks of (tp=2, dp=3) as an array of that shape: its element (1, 2) is rank 5.
        span = np.arange(self.offset, self.stop)
        ranks = span.reshape(self.sizes, order="F")
        # Numpy's last axis is the fastest: the members of a group come to stand side by side.
        fastest_last = (inner + outer)[::-1]
        group_size = prod(self.sizes[axis] for axis in inner)
        groups: np.ndarray = ranks.transpose(fastest_last).reshape(-1, group_size)
        return groups

    def orthogonal(self, dims: Dims) -> tuple[str, ...]:
        """All dims that are not in ``dims``: a group and its orthogonal group share one rank."""
        named = ordered(self, dims)
        others = [dim for dim in self.dims if dim not in named]
        return tuple(others)

    def split(self, dim: str, parts: Mapping[str, int]) -> RankLayout:
        """The same span with ``dim`` factorised into ``parts``, fastest first.

        >>> RankLayout(("cp", "dp"), (4, 2)).split("cp", {"near": 2, "far": 2})
        RankLayout(near=2-far=2-dp=2, ranks 0..7)
        """
        (axis,) = self.axes((dim,))
        size = self.sizes[axis]
        product = prod(parts.values())
        if product != size:
            raise LayoutError(
                f"{dim}={size} cannot be split into {dict(parts)}: their product is {product}."
            )
        # The parts take the place of the dim: (cp, dp) becomes (near, far, dp).
        dims = (*self.dims[:axis], *parts, *self.dims[axis + 1 :])
        sizes = (*self.sizes[:axis], *parts.values(), *self.sizes[axis + 1 :])
        return replace(self, dims=dims, sizes=sizes)

    def axes(self, dims: Dims) -> list[int]:
        """Positions of ``dims``: one name, names joined by ``"-"``, or an iterable of names."""
        if not isinstance(dims, str):
            names = listed(dims, "dims")
        elif dims in self.dims:
            names = [dims]  # the name of a dim may have a hyphen
        else:
            names = dims.split("-")
        for name in names:
            if name not in self.dims:
                raise LayoutError(f"invalid dim {shown(name)}. Valid dims are {list(self.dims)}.")
        if len(set(names)) != len(names):
            raise LayoutError(f"dims must not repeat, got {shown(names)}.")
        return list(map(self.dims.index, names))

    def _position(self, rank: int) -> int:
        if rank not in self:
            raise LayoutError(f"rank {rank} is outside {self}.")
        return rank - self.offset


def ordered(layout: RankLayout, dims: Dims) -> list[str]:
    """``dims``, the slowest first."""
    axes = sorted(layout.axes(dims), reverse=True)
    return [layout.dims[axis] for axis in axes]


def listed(values: Iterable[Any], title: str) -> list[Any]:
    """``values`` as a list. LayoutError if they are not several."""
    try:
        return list(values)
    except TypeError:
        raise LayoutError(f"{title} must be several values, got {shown(values)}.") from None


def whole(value: Any, title: str) -> int:
    """``value`` as an int, also numpy's. LayoutError if it is no whole number."""
    try:
        # True is an index, too.
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise LayoutError(f"{title} must be whole numbers, got {shown(value)}.")


def span_of(ranks: Sequence[int]) -> str:
    """Ascending ranks as runs: "0..3,8"."""
    if isinstance(ranks, range):
        return f"{ranks.start}..{ranks.stop - 1}"
    # The ranks 0, 1, 2, 3, 8 are the runs [0, 3] and [8].
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    texts = []
    for run in runs:
        text = "..".join(map(str, run))
        texts.append(text)
    return ",".join(texts)
