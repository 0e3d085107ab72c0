"""ColossalAI's ``ProcessGroupMesh``, on a ``HyperCommGrid`` whose dims are the mesh's axes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.colossalai.groups import UniqueGroups
from hypergrid.agreement.commit import telling_others
from hypergrid.groups.creation import plain_backend
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.layout import RankLayout
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
        ranks = prod(size)
        world_size = dist.get_world_size()
        if ranks != world_size:
            raise AssertionError(
                f"ProcessGroupMesh{size} on rank {dist.get_rank()} has {ranks} ranks and "
                f"the world has {world_size}: the product of the sizes must be the world's size."
            )
        self.grid = HyperCommGrid.over(_layout(size))
        self._shape: Coordinate = self.grid.layout.sizes[::-1]
        self._rank = dist.get_rank()
        self._coord = self.unravel(self._rank, self._shape)
        self._groups = UniqueGroups(self.grid, repr(self))

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
        if dim is None:
            return self._shape
        return self._shape[self._axis(dim)]

    def coordinate(self, dim: int | None = None) -> int | Coordinate:
        """The coordinate of this rank on one axis, or on each."""
        if dim is None:
            return self._coord
        return self._coord[self._axis(dim)]

    @staticmethod
    def unravel(rank: int, shape: Sequence[int]) -> Coordinate:
        """The coordinate of ``rank``. ValueError if it is outside ``shape``."""
        coordinate_of_dim = _layout(shape).coordinate(_whole(rank, "rank"))
        # The layout's first dim is the fastest, and it is the mesh's last axis.
        return tuple(coordinate_of_dim.values())[::-1]

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
        indices = [_whole(index, "coordinate") for index in coord]
        try:
            return int(np.ravel_multi_index(indices, tuple(shape), mode))
        except ValueError as error:
            raise ValueError(
                f"coordinate {shown(coord)} does not fit the shape {shown(shape)}: {error}. Give "
                f"one index for each axis, from 0 to its size less 1."
            ) from None

    @staticmethod
    def get_coords_along_axis(
        base_coord: Sequence[int], axis: Axes, indices_at_axis: Indices
    ) -> list[Coordinate]:
        """``base_coord`` with each of the indices at the axis, or at each of several axes."""
        axes, indices_of_axes = _listed(axis, indices_at_axis)
        coords = []
        # (7, 8, 9) at the axes 0 and 2, with the indices [1] and [2, 3]: (1, 8, 2), (1, 8, 3).
        for indices in itertools.product(*indices_of_axes):
            coord = list(base_coord)
            for axis_number, index in zip(axes, indices, strict=True):
                coord[axis_number] = index
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
        """Return the groups along axes, as ``create_group_along_axis``; *local* if all exist.

        With equal arguments it is local on all ranks or on none.
        """
        return self._group(axis, indices_at_axis, backend, collective=False)

    def get_ranks_in_group(self, group: ProcessGroup) -> list[int]:
        """The global ranks of a group of this mesh. KeyError for another."""
        ranks = self._groups.ranks_of(group)
        if ranks is None:
            raise KeyError(
                f"{shown(group)} is not a group of this rank in {self!r}. For groups created "
                f"elsewhere call torch.distributed.get_process_group_ranks()."
            )
        return ranks

    def destroy_mesh_process_groups(self) -> None:
        """Destroy every group of this mesh. *Local*; they can be created again."""
        self._groups.destroy()

    def _axis(self, axis: Any) -> int:
        """The number of an axis, which may count from the end."""
        count = len(self._shape)
        number = _whole(axis, "axis")
        if not -count <= number < count:
            raise IndexError(
                f"axis {number} does not exist in {self!r}: it has axes 0 to {count - 1}."
            )
        return number % count

    def _indices(self, axis: Axes, indices_at_axis: Indices | None) -> dict[int, list[int]]:
        """The indices at each axis, both ascending."""
        indices_of_axis = {}
        axes, indices_of_axes = _listed(axis, indices_at_axis)
        for number, indices in zip(map(self._axis, axes), indices_of_axes, strict=True):
            if number in indices_of_axis:
                raise ValueError(f"axes must not repeat, rank {self._rank} got {shown(axis)}.")
            size = self._shape[number]
            if indices is None:
                indices = range(size)
            is_repeating = len(set(indices)) < len(indices)
            if not indices or is_repeating or not set(indices) <= set(range(size)):
                error = ValueError if indices else IndexError
                raise error(
                    f"indices {shown(indices)} at axis {number} make no group in {self!r}: give "
                    f"at least one of 0 to {size - 1}, each once."
                )
            indices_of_axis[number] = sorted(indices)
        return dict(sorted(indices_of_axis.items()))

    def _label(self, indices_of_axis: dict[int, list[int]], backend: str | None) -> str:
        """In words which groups these are: ``axis0-axis2[0,1]/gloo``."""
        parts = []
        for axis, indices in indices_of_axis.items():
            part = f"axis{axis}"
            if len(indices) < self._shape[axis]:
                part += str(indices).replace(" ", "")
            parts.append(part)
        label = "-".join(parts) or "alone"
        if backend:
            return f"{label}/{backend}"
        return label

    def _ranks(self, dims: tuple[str, ...], indices_of_axis: dict[int, list[int]]) -> list[Ranks]:
        """The members of every group."""
        layout = self.grid.layout
        # Every group over whole axes has a rank in each cell of these axes. The indices pick the
        # same cells of all: of axes of the sizes 2 and 4, [1] and [0, 3] pick the cells 4 and 7.
        axis_sizes = [self._shape[axis] for axis in indices_of_axis]
        cells = np.arange(layout.dim_size(dims)).reshape(axis_sizes)
        picked_cells = cells[np.ix_(*indices_of_axis.values())].ravel()
        return [tuple(ranks) for ranks in layout.groups(dims)[:, picked_cells].tolist()]

    def _group(
        self, axis: Axes, indices_at_axis: Indices | None, backend: str | None, collective: bool
    ) -> ProcessGroup:
        with telling_others(lambda: self.grid.layout.ranks, patience=timedelta(minutes=1)):
            indices_of_axis = self._indices(axis, indices_at_axis)
        layout = self.grid.layout
        backend = plain_backend(backend)
        label = self._label(indices_of_axis, backend)
        dims = tuple(f"axis{axis}" for axis in indices_of_axis)
        lists = self._ranks(dims, indices_of_axis)
        # Of other ranks' groups too: a rank that lacks none must wait for those that lack one.
        missing = self._groups.missing(lists, backend)
        if missing or collective:
            proposal = {"mesh": self._shape, "group": label if missing else "one that exists"}
            self._groups.create({label: (dims, lists)}, backend, proposal)
        group = self._groups.own(lists, backend)
        # The grid has the groups over whole axes: for mesh.grid.get_pg() and device_mesh().
        if dims and backend is None and len(lists[0]) == layout.dim_size(dims):
            self.grid.hold(dims, group)
        return group


def _layout(shape: Sequence[int]) -> RankLayout:
    """The layout whose dims are the axes, the last and fastest one first."""
    dims = [f"axis{axis}" for axis in range(len(shape))]
    return RankLayout(tuple(dims[::-1]), tuple(shape)[::-1])


def _listed(axis: Axes, indices_at_axis: Indices | None) -> tuple[list[int], list[Any]]:
    """The axes and the indices at each, None for all; a caller may pass one axis or several."""
    axes: Any = axis
    indices_of_axes: Any = indices_at_axis
    if not isinstance(axis, Iterable):
        axes = [axis]
        indices_of_axes = [indices_at_axis]
    numbers = [_whole(number, "axis") for number in axes]
    if indices_at_axis is None:
        return numbers, [None] * len(numbers)
    if len(numbers) != len(indices_of_axes):
        raise ValueError(
            f"{len(numbers)} axes {shown(axis)} were given indices {shown(indices_at_axis)}: give "
            f"one list for each axis."
        )
    whole_indices = []
    for indices in indices_of_axes:
        whole_indices.append([_whole(index, "index") for index in indices])
    return numbers, whole_indices


def _whole(value: Any, role: str) -> int:
    # True and False are whole numbers to Python.
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    raise AssertionError(f"{role} must be a whole number, got {shown(value)}.")
