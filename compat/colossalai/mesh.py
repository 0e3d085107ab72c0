"""ColossalAI's ``ProcessGroupMesh``, on a ``HyperCommGrid`` whose dims are the mesh's axes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from datetime import timedelta
from math import prod
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid.agreement.commit import telling_others
from hypergrid.groups.creation import NOT_A_MEMBER, plain_backend
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import shown
from hypergrid.plan import Ranks

Axes: TypeAlias = int | Sequence[int]
Indices: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
Coordinate: TypeAlias = tuple[int, ...]
Mode: TypeAlias = Literal["raise", "wrap", "clip"]


class ProcessGroupMesh:
    """The world as an N-dimensional mesh, as ColossalAI 0.5's class of this name.

    Row-major: the last axis is the fastest. ``grid`` is the same mesh as a
    ``~hypergrid.HyperCommGrid``, with dims ``"axis0"``, ``"axis1"`` ...

    Calls with the same members and backend return the same group, also over other axes. (ColossalAI
    ignores the backend: asking for gloo after NCCL returns the NCCL group.)

    Raises AssertionError if torch.distributed is not initialised or the sizes do not multiply to
    that of the world, ValueError if one is below 1.

    Parameters
    ----------
    *size : int
        The size of each axis. Their product is the size of the world.
    """

    def __init__(self, *size: int) -> None:
        if not dist.is_initialized():
            raise AssertionError(
                f"ProcessGroupMesh{size} needs torch.distributed: call "
                f"torch.distributed.init_process_group() first."
            )
        if not size:
            raise TypeError("ProcessGroupMesh() needs the size of at least one axis.")
        ranks, world = prod(size), dist.get_world_size()
        if ranks != world:
            raise AssertionError(
                f"ProcessGroupMesh{size} on rank {dist.get_rank()} has {ranks} ranks and "
                f"the world has {world}: the product of the sizes must be the world's size."
            )
        self.grid = HyperCommGrid.over(_layout(size))
        self._shape: Coordinate = self.grid.layout.sizes[::-1]
        self._rank = dist.get_rank()
        self._coord = self.unravel(self._rank, self._shape)
        # Groups of other ranks too: every rank knows all groups of the mesh.
        self._known: dict[tuple[str | None, Ranks], ProcessGroup] = {}

    def __repr__(self) -> str:
        return f"ProcessGroupMesh{self._shape} (rank {self._rank} at {self._coord})"

    @property
    def shape(self) -> Coordinate:
        """The size of each axis."""
        return self._shape

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._rank

    def size(self, dim: int | None = None) -> int | Coordinate:
        """The size of one axis, or of each."""
        return self._shape if dim is None else self._shape[self._axis(dim)]

    def coordinate(self, dim: int | None = None) -> int | Coordinate:
        """The coordinate of this rank on one axis, or on each."""
        return self._coord if dim is None else self._coord[self._axis(dim)]

    @staticmethod
    def unravel(rank: int, shape: Sequence[int]) -> Coordinate:
        """The coordinate of ``rank``. ValueError if it is outside ``shape``."""
        return tuple(_layout(shape).coordinate(_whole(rank, "rank")).values())[::-1]

    @staticmethod
    def ravel(coord: Sequence[int], shape: Sequence[int], mode: Mode = "raise") -> int:
        """The rank at ``coord``, as ``numpy.ravel_multi_index``.

        Outside its axis a coordinate raises ValueError, or ``mode`` takes the remainder ("wrap"),
        or the nearest one inside ("clip").
        """
        if mode not in get_args(Mode):
            raise AssertionError(
                f"invalid mode {shown(mode)} for coordinate {shown(coord)} of shape "
                f"{shown(shape)}; allowed: {', '.join(get_args(Mode))}."
            )
        layout = _layout(shape)
        at = [_whole(each, "coordinate") for each in coord]
        if len(at) != len(layout.sizes):
            raise LayoutError(
                f"coordinate {shown(coord)} has {len(at)} numbers and the shape {shown(shape)} "
                f"has {len(layout.sizes)}: give one for each axis."
            )
        if mode == "raise":
            return layout.rank(**dict(zip(layout.dims, at[::-1], strict=True)))
        return int(np.ravel_multi_index(at, shape, mode))

    @staticmethod
    def get_coords_along_axis(
        base_coord: Sequence[int], axis: Axes, indices_at_axis: Indices
    ) -> list[Coordinate]:
        """``base_coord`` with each of the indices at the axis, or at each of several axes."""
        axes, indices = _listed(axis, indices_at_axis)
        coords = []
        for chosen in itertools.product(*indices):
            coord = list(base_coord)
            for at, index in zip(axes, chosen, strict=True):
                coord[at] = index
            coords.append(tuple(coord))
        return coords

    def create_group_along_axis(
        self, axis: Axes, indices_at_axis: Indices | None = None, backend: str | None = None
    ) -> ProcessGroup:
        """Create the groups along an axis, or over several; returns the group of this rank.

        *Collective* over the mesh, also if all groups exist. If every group that is asked for
        exists, also over other axes and indices, nothing is created, and ranks may give different
        arguments. Otherwise their arguments must be equal.

        Raises IndexError on an axis that does not exist or on no indices, ValueError on an index
        that does not exist or on a repeat, both after the other ranks were told, or after a minute;
        AgreementError if ranks gave different arguments and not all of their groups exist;
        CreationError if a group could not be created, and then no rank keeps one.

        Parameters
        ----------
        axis : int or sequence of int
            Members differ on these, and are equal on all others.
        indices_at_axis : sequence of int, or one such sequence per axis, optional
            Only these positions; by default all.
        backend : str, optional
            By default that of the default group.

        Returns
        -------
        ProcessGroup
            ``torch.distributed.GroupMember.NON_GROUP_MEMBER`` if this rank is at none of the
            indices. (ColossalAI returns None the first time, which means the world to torch.)
        """
        return self._group(axis, indices_at_axis, backend, collective=True)

    def get_group_along_axis(
        self, axis: Axes, indices_at_axis: Indices | None = None, backend: str | None = None
    ) -> ProcessGroup:
        """As ``create_group_along_axis``; *local* if all of its groups exist, else collective.

        With equal arguments it is local on all ranks or on none.
        """
        return self._group(axis, indices_at_axis, backend, collective=False)

    def get_ranks_in_group(self, group: ProcessGroup) -> list[int]:
        """The global ranks of a group of this mesh. KeyError for another."""
        for (_, ranks), known in self._known.items():
            if known is group and group is not NOT_A_MEMBER:
                return list(ranks)
        raise KeyError(
            f"{shown(group)} is not a group of this rank in {self!r}. For groups created elsewhere "
            f"call torch.distributed.get_process_group_ranks()."
        )

    def destroy_mesh_process_groups(self) -> None:
        """Destroy every group of this mesh. *Local*; they can be created again."""
        self.grid.destroy()
        self._known.clear()

    def _axis(self, axis: Any) -> int:
        count = len(self._shape)
        at = _whole(axis, "axis")
        if not -count <= at < count:
            raise IndexError(f"axis {at} does not exist in {self!r}: it has axes 0 to {count - 1}.")
        return at % count

    def _chosen(self, axis: Axes, indices_at_axis: Indices | None) -> dict[int, list[int]]:
        """The axes and the positions chosen at each, ascending."""
        chosen: dict[int, list[int]] = {}
        axes, indices = _listed(axis, indices_at_axis)
        for at, some in zip(map(self._axis, axes), indices, strict=True):
            size = self._shape[at]
            given = list(range(size)) if some is None else some
            if at in chosen:
                raise ValueError(f"axes must not repeat, rank {self._rank} got {shown(axis)}.")
            if not given or len(set(given)) < len(given) or not {*given} <= {*range(size)}:
                raise (ValueError if given else IndexError)(
                    f"indices {shown(given)} at axis {at} make no group in {self!r}: give at "
                    f"least one of 0 to {size - 1}, each once."
                )
            chosen[at] = sorted(given)
        return dict(sorted(chosen.items()))

    def _group(
        self, axis: Axes, indices_at_axis: Indices | None, backend: str | None, collective: bool
    ) -> ProcessGroup:
        with telling_others(lambda: self.grid.layout.ranks, patience=timedelta(minutes=1)):
            chosen = self._chosen(axis, indices_at_axis)
        backend = plain_backend(backend)
        axes = [
            f"axis{at}" + ("" if len(given) == self._shape[at] else f"{given}".replace(" ", ""))
            for at, given in chosen.items()
        ]
        label = "-".join(axes or ["alone"]) + (f"/{backend}" if backend else "")
        layout, dims = self.grid.layout, tuple(f"axis{axis}" for axis in chosen)
        # The indices pick the same members of every whole line.
        whole = np.arange(layout.dim_size(dims)).reshape([self._shape[axis] for axis in chosen])
        places = whole[np.ix_(*chosen.values())].ravel()
        line = tuple(np.array(layout.group(self._rank, dims))[places].tolist())
        lines = [tuple(each) for each in layout.groups(dims)[:, places].tolist()]
        # Groups of other ranks too: a rank that lacks one would wait for the ranks that have it.
        missing = [each for each in lines if (backend, each) not in self._known]
        if missing or collective:
            proposal = {"mesh": self._shape, "group": label if missing else "one that exists"}
            mine = {label: line} if self._rank in line and line in missing else {}
            made = []
            with self.grid.agreed(proposal, repr(self)) as pool:
                if missing:
                    made = pool.make(label, mine, missing.copy, dims=dims, backend=backend)
            self._known |= {(backend, each): NOT_A_MEMBER for each in missing}
            if made:
                self._known[backend, line] = made[0]
        group = self._known[backend, line]
        if dims and backend is None and len(places) == whole.size:
            self.grid.hold(dims, group)
        return group


def _layout(shape: Sequence[int]) -> RankLayout:
    """The layout whose dims are the axes, the last and fastest one first."""
    names = [f"axis{axis}" for axis in range(len(shape))]
    return RankLayout(tuple(names[::-1]), tuple(shape)[::-1])


def _listed(axis: Axes, indices_at_axis: Indices | None) -> tuple[list[int], list[Any]]:
    """The axes and the indices at each, None for all; one axis or several may be given."""
    several = isinstance(axis, Iterable)
    axes = [_whole(each, "axis") for each in (axis if several else [axis])]  # type: ignore[union-attr]
    if indices_at_axis is None:
        return axes, [None] * len(axes)
    given: Any = indices_at_axis if several else [indices_at_axis]
    if len(axes) != len(given):
        raise ValueError(
            f"{len(axes)} axes {shown(axis)} were given indices {shown(indices_at_axis)}: give one "
            f"list for each axis."
        )
    return axes, [[_whole(each, "index") for each in some] for some in given]


def _whole(value: Any, what: str) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise AssertionError(f"{what} must be a whole number, got {shown(value)}.")
