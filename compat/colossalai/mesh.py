"""ColossalAI's ``ProcessGroupMesh``, on a ``HyperCommGrid`` whose dims are the mesh's axes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.colossalai.groups import Lists, UniqueGroups
from hypergrid.agreement.commit import telling_others
from hypergrid.groups.creation import plain_backend
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.layout import RankLayout
from hypergrid.messages import shown

Axes: TypeAlias = int | Sequence[int]
Indices: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
Coordinate: TypeAlias = tuple[int, ...]
Mode: TypeAlias = Literal["raise", "wrap", "clip"]
IndicesOfAxis: TypeAlias = dict[int, list[int]]


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
        # ColossalAI's product of no sizes raises the same.
        if not size:
            raise TypeError("ProcessGroupMesh() needs the size of at least one axis.")
        self.rank = dist.get_rank()
        """The global rank of this process."""
        mesh_size = prod(size)
        world_size = dist.get_world_size()
        if mesh_size != world_size:
            raise AssertionError(
                f"ProcessGroupMesh{size} on rank {self.rank} has {mesh_size} ranks and the world "
                f"has {world_size}: the product of the sizes must be the world's size."
            )
        dims = [f"axis{axis}" for axis in range(len(size))]
        dims.reverse()
        # The layout's first dim is the fastest, and it is the mesh's last axis.
        layout = RankLayout(tuple(dims), size[::-1])
        self.grid = HyperCommGrid.over(layout)
        self.shape: Coordinate = layout.sizes[::-1]
        """The size of each axis."""
        self._coord = self.unravel(self.rank, self.shape)
        self._groups = UniqueGroups(self.grid, repr(self))

    def __repr__(self) -> str:
        return f"ProcessGroupMesh{self.shape} (rank {self.rank} at {self._coord})"

    def size(self, dim: int | None = None) -> int | Coordinate:
        """The size of one axis, or of each."""
        if dim is None:
            return self.shape
        return self.shape[dim]

    def coordinate(self, dim: int | None = None) -> int | Coordinate:
        """The coordinate of this rank on one axis, or on each."""
        if dim is None:
            return self._coord
        return self._coord[dim]

    @staticmethod
    def unravel(rank: int, shape: Sequence[int]) -> Coordinate:
        """The coordinate of ``rank``. ValueError if it is outside ``shape``."""
        # Python's integers, where numpy gives its own.
        indices = np.unravel_index(rank, shape)
        return tuple(map(int, indices))

    @staticmethod
    def ravel(
        coord: Sequence[int],
        shape: Sequence[int],
        mode: Mode = "raise",
    ) -> int:
        """The rank at ``coord``, as ``numpy.ravel_multi_index``.

        Outside its axis a coordinate raises ValueError, or ``mode`` takes the remainder ("wrap"),
        or the nearest one inside ("clip").
        """
        if mode not in ("raise", "wrap", "clip"):
            raise AssertionError(f"invalid mode {shown(mode)}; allowed: raise, wrap, clip.")
        rank = np.ravel_multi_index(coord, shape, mode)
        return int(rank)

    @staticmethod
    def get_coords_along_axis(
        base_coord: Sequence[int],
        axis: Axes,
        indices_at_axis: Indices,
    ) -> list[Coordinate]:
        """``base_coord`` with each of the indices at the axis, or at each of several axes."""
        coords = []
        # (7, 8, 9) at the axes 0 and 2, with the indices [1] and [2, 3]: (1, 8, 2), (1, 8, 3).
        axes, indices_of_axes = _listed(axis, indices_at_axis)
        for indices in itertools.product(*indices_of_axes):
            coord = list(base_coord)
            for axis_number, index in zip(axes, indices, strict=True):
                coord[axis_number] = index
            coords.append(tuple(coord))
        return coords

    def create_group_along_axis(
        self,
        axis: Axes,
        indices_at_axis: Indices | None = None,
        backend: str | None = None,
    ) -> ProcessGroup:
        """Create the groups along an axis, or over several; returns the group of this rank.

        *Collective* over the mesh, also if all groups exist. If every group that is asked for
        exists, also over other axes and indices, nothing is created, and ranks may give different
        arguments. Otherwise their arguments must be equal.

        Raises IndexError on an axis that does not exist, ValueError on no indices, on one that
        does not exist or on a repeat, both after the other ranks were told, or after ten seconds;
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
        self,
        axis: Axes,
        indices_at_axis: Indices | None = None,
        backend: str | None = None,
    ) -> ProcessGroup:
        """Return the groups along axes, as ``create_group_along_axis``; *local* if all exist.

        With equal arguments it is local on all ranks or on none.
        """
        return self._group(axis, indices_at_axis, backend, collective=False)

    def get_ranks_in_group(self, group: ProcessGroup) -> list[int]:
        """The global ranks of a group of this mesh. KeyError for another."""
        return self._groups.ranks_of(group)

    def destroy_mesh_process_groups(self) -> None:
        """Destroy every group of this mesh. *Local*; they can be created again."""
        self._groups.destroy()

    def _group(
        self,
        axis: Axes,
        indices_at_axis: Indices | None,
        backend: str | None,
        collective: bool,
    ) -> ProcessGroup:
        layout = self.grid.layout
        with telling_others(lambda: layout.ranks):
            indices_of_axis = self._indices(axis, indices_at_axis)
        backend = plain_backend(backend)
        lists = self._ranks(indices_of_axis)
        dims = [f"axis{axis}" for axis in indices_of_axis]
        is_whole = len(lists[0]) == layout.dim_size(dims)
        # Of other ranks' groups too: a rank that lacks none must wait for those that lack one.
        missing = self._groups.missing(lists, backend)
        if missing or collective:
            # In words which groups these are: "axis0-axis2 at [[0, 1], [3]]/gloo".
            label = "-".join(dims) or "alone"
            if not is_whole:
                indices = list(indices_of_axis.values())
                label += f" at {indices}"
            if backend:
                label += f"/{backend}"
            # Ranks whose groups all exist agree, whichever they ask for.
            proposed_group = label if missing else "one that exists"
            proposal = {"mesh": self.shape, "group": proposed_group}
            self._groups.create({label: lists}, backend, proposal)
        group = self._groups.own(lists, backend)
        # The grid has the groups over whole axes: for mesh.grid.get_pg() and device_mesh().
        if dims and backend is None and is_whole:
            self.grid.hold(dims, group)
        return group

    def _indices(self, axis: Axes, indices_at_axis: Indices | None) -> IndicesOfAxis:
        """The indices at each axis, both ascending."""
        if indices_at_axis is None:
            if isinstance(axis, int):
                axis = [axis]
            indices_at_axis = [range(self.shape[number]) for number in axis]
        axes, indices_of_axes = _listed(axis, indices_at_axis)
        indices_of_axis: IndicesOfAxis = {}
        for number, indices in zip(axes, indices_of_axes, strict=True):
            size = self.shape[number]  # IndexError if there is no such axis
            axis_number = number % len(self.shape)  # -1 is the last one
            chosen = sorted(set(indices))
            is_repeated = len(chosen) < len(indices)
            is_known_axis = axis_number in indices_of_axis
            places = set(range(size))
            is_outside = not places.issuperset(chosen)
            if not chosen or is_repeated or is_known_axis or is_outside:
                raise ValueError(
                    f"indices {shown(indices)} at axis {number} make no group in {self!r}: give "
                    f"each axis once, and of 0 to {size - 1} at least one, each once."
                )
            indices_of_axis[axis_number] = chosen
        # The order in which axes are named makes no other groups.
        axes_in_order = sorted(indices_of_axis.items())
        return dict(axes_in_order)

    def _ranks(self, indices_of_axis: IndicesOfAxis) -> Lists:
        """The members of every group."""
        world = np.arange(self.grid.size)
        # The ranks as they lie in the mesh, then those alone that are at the indices.
        ranks = world.reshape(self.shape)
        for axis, indices in indices_of_axis.items():
            ranks = ranks.take(indices, axis)
        # Members differ on these axes alone: as the last ones, each group's ranks are neighbours.
        axes = list(indices_of_axis)
        last_axes = range(-len(axes), 0)
        ranks = np.moveaxis(ranks, axes, last_axes)
        counts = [len(indices) for indices in indices_of_axis.values()]
        group_size = prod(counts)
        groups = ranks.reshape(-1, group_size)
        return [tuple(group) for group in groups.tolist()]


def _listed(
    axis: Axes,
    indices_at_axis: Any,
) -> tuple[list[int], list[list[int]]]:
    """The axes and the indices at each; a caller may pass one axis or several."""
    if not isinstance(axis, Iterable):
        axis = [axis]
        indices_at_axis = [indices_at_axis]
    axis_count = len(axis)
    if axis_count != len(indices_at_axis):
        raise ValueError(
            f"{axis_count} axes {shown(axis)} were given indices {shown(indices_at_axis)}: give "
            f"one list for each axis."
        )
    indices_of_axes = []
    for indices in indices_at_axis:
        whole_indices = [_whole(index) for index in indices]
        indices_of_axes.append(whole_indices)
    return list(axis), indices_of_axes


def _whole(index: Any) -> int:
    try:
        return operator.index(index)  # also numpy's whole numbers
    except TypeError:
        raise AssertionError(f"an index must be a whole number, got {shown(index)}.") from None
