"""The world cut into equal groups and turned around, as physicsnemo's manager does it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypergrid.layout import RankLayout
from hypergrid.tree import Placement


@dataclass(frozen=True)
class Division:
    """A partition of the world: groups over the dims ``inner``, one for each place on ``outer``.

    The order of both is that of physicsnemo's lists of ranks, which decides what a cut cuts.

    >>> world = Division.of_world(8)
    >>> pairs = world.cut(2)
    >>> pairs.ranks()
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    >>> pairs.orthogonal().cut(2).ranks()
    [[0, 2], [4, 6], [1, 3], [5, 7]]
    """

    layout: RankLayout
    inner: tuple[str, ...]
    outer: tuple[str, ...] = ()

    @classmethod
    def of_world(cls, size: int) -> Division:
        """The world as one group."""
        return cls(RankLayout(("world",), (size,)), ("world",))

    @classmethod
    def of_dims(cls, placement: Placement, dims: tuple[str, ...]) -> Division:
        """The groups over ``dims``, listed from their first dim on around the layout's end."""
        every = placement.layout.dims
        first = every.index(dims[0]) if dims else 0
        around = every[first:] + every[:first]
        inner = tuple(dim for dim in around if dim in dims)
        return cls(placement.layout, inner, tuple(dim for dim in around if dim not in dims))

    def __str__(self) -> str:
        steps = [(self.layout.dim_size((dim,)), self.layout.stride(dim)) for dim in self.inner]
        return " x ".join(f"{size} ranks {stride} apart" for size, stride in steps) or "1 rank"

    @property
    def size(self) -> int:
        """Number of ranks in each group."""
        return self.layout.dim_size(self.inner)

    def group(self, rank: int) -> list[int]:
        """The group of ``rank``, ascending. Costs O(size of the group)."""
        return self.layout.group(rank, self.inner)

    def ranks(self) -> list[list[int]]:
        """Every group, groups and members in physicsnemo's order. Costs O(world)."""
        whole = self.layout.groups((*self.inner, *self.outer), as_given=True)
        groups: list[list[int]] = whole.reshape(-1, self.size).tolist()
        return groups

    def orthogonal(self) -> Division:
        """The first members of all groups, the second members, and so on."""
        return Division(self.layout, self.outer, self.inner)

    def cut(self, size: int) -> Division:
        """Runs of ``size`` members of each group.

        Raises
        ------
        AssertionError
            The runs would be uneven, or would not be the product of anything.
        """
        if size < 1 or self.size % size:
            raise AssertionError(
                f"groups of {self.size} ranks cannot be cut into groups of {size}: "
                f"{self.size} / {size} leaves a remainder. Take a size that divides it."
            )
        fused = self._fused()
        layout, taken, rest, left = fused.layout, [], list(fused.inner), size
        while left > 1:
            dim = rest.pop(0)
            whole = layout.dim_size((dim,))
            if left % whole and whole % left:
                strides = " x ".join(str(layout.dim_size((each,))) for each in fused.inner)
                raise AssertionError(
                    f"groups of {strides} ranks cannot be cut into groups of {size}: their "
                    f"neighbours are not evenly apart. Take a multiple or a divisor of "
                    f"{layout.dim_size((fused.inner[0],))}, or cut before turning around."
                )
            if left % whole:  # only a part of the dim
                layout = layout.split(dim, {f"{dim}a": left, f"{dim}b": whole // left})
                dim, left = f"{dim}a", whole
                rest.insert(0, f"{dim[:-1]}b")
            taken.append(dim)
            left //= whole
        return Division(layout, tuple(taken), (*rest, *fused.outer))

    def _fused(self) -> Division:
        """The same with the fewest dims: neighbours that are nowhere apart become one."""
        runs: list[list[str]] = []
        for dim in self.layout.dims:
            if runs and any(_follows(part, runs[-1][-1], dim) for part in (self.inner, self.outer)):
                runs[-1].append(dim)
            else:
                runs.append([dim])
        sizes = tuple(map(self.layout.dim_size, runs))
        name = {run[0]: str(i) for i, run in enumerate(runs)}
        return Division(
            RankLayout(tuple(name.values()), sizes, self.layout.offset),
            tuple(name[dim] for dim in self.inner if dim in name),
            tuple(name[dim] for dim in self.outer if dim in name),
        )


def _follows(dims: tuple[str, ...], one: str, other: str) -> bool:
    return (one, other) in pairwise(dims)
