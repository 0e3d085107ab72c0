"""Replaces ``megatron.core.hyper_comm_grid``."""

from __future__ import annotations

import logging as _logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np  # noqa: F401 (a name of stock's module)
import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.megatron.releases import RELEASE_HAS
from hypergrid.groups import creation
from hypergrid.groups.grid import BASE, Key
from hypergrid.groups.grid import HyperCommGrid as Core
from hypergrid.layout import Dims, RankLayout

# Names of stock's module that outside code reads and replaces.
HAVE_ABSL = find_spec("absl") is not None
HAVE_EINOPS = find_spec("einops") is not None
logging = _logging.getLogger(__name__)
_BASE_VIEW_NAME = BASE


def _is_process_group_member(pg: object) -> bool:
    return pg is not None and pg is not dist.GroupMember.NON_GROUP_MEMBER


@dataclass
class _RankViewSpec:
    name: str
    shape: list[int]
    dim_names: list[str]
    shared_dims: list[str]


class HyperCommGrid:
    """megatron-core's ``HyperCommGrid``: its interface, its error messages, its private names.

    ``core`` is the ``hypergrid.HyperCommGrid`` that creates the groups; it has more methods, such
    as ``grid.core.device_mesh()``. Both return the same groups.

    Parameters and errors are as for ``hypergrid.HyperCommGrid``. The size of the world is the
    variable ``WORLD_SIZE``, if that is set.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
    ) -> None:
        _check_lengths(shape, dim_names)
        layout = RankLayout(tuple(dim_names), tuple(shape), rank_offset)
        world_size = None
        if "WORLD_SIZE" in os.environ:
            world_size = int(os.environ["WORLD_SIZE"])
        self._hold(Core.over(layout, backend=backend, world_size=world_size))
        # As the caller gave them: lists stay lists.
        self.shape = shape[:]
        self.dim_names = dim_names[:]

    @classmethod
    def from_core(cls, core: Core) -> HyperCommGrid:
        """``core``, such as ``state.grid``, for megatron's code: its views and its groups.

        Creates no group. Groups that ``core`` did not create, such as those of a ``DeviceMesh``,
        stay open when this grid is destroyed.
        """
        grid = cls.__new__(cls)
        grid._hold(core)
        return grid

    def _hold(self, core: Core) -> None:
        self.core = core
        self.rank_offset = core.rank_offset
        self.size = core.size
        self.shape = core.shape
        self.dim_names = core.dim_names
        self.backend = core.backend
        self._views: dict[str, _RankViewSpec] = {}
        for name, layout in core.views.items():
            self._add_view(name, layout.sizes, layout.dims, core._shared[name])
        # Groups of others stay open when this grid is destroyed.
        self._borrowed = self._foreign()

    @property
    def _pgs(self) -> dict[Key, ProcessGroup | None]:
        return self.core._pgs

    @_pgs.setter
    def _pgs(self, groups: dict[Key, ProcessGroup | None]) -> None:
        self.core._pgs = groups

    def __repr__(self) -> str:
        return repr(self.core)

    def register_view(
        self,
        name: str,
        shape: Sequence[int],
        dim_names: Sequence[str],
        shared_dims: Sequence[str] | None = None,
    ) -> None:
        """Add another factorisation of the same ranks, as in ``hypergrid.HyperCommGrid``."""
        _check_lengths(shape, dim_names)
        if len(set(dim_names)) != len(dim_names):
            raise ValueError(
                f"View {name!r} has duplicate dim_names: {dim_names}. Name each dim once."
            )
        if not all(isinstance(size, Integral) and int(size) > 0 for size in shape):
            raise ValueError(f"View {name!r}: shape must be positive ints, and it is {shape}.")
        self.core.register_view(name, shape, dim_names, shared_dims)
        self._add_view(name, shape, dim_names, shared_dims or ())

    def _add_view(
        self, name: str, shape: Sequence[int], dim_names: Sequence[str], shared_dims: Sequence[str]
    ) -> None:
        # Copies, since the caller may change its lists.
        view = _RankViewSpec(name, list(shape), list(dim_names), list(shared_dims))
        self._views[name] = view

    def create_pg(
        self, dims: Dims, *, view: str | None = None, **kwargs: Any
    ) -> ProcessGroup | None:
        """Create the groups over ``dims``, once; returns the group of this rank. *Collective*.

        The core grid creates them, by their members alone if possible.
        ``torch.distributed.new_subgroups_by_enumeration`` creates them if that function has been
        replaced, or if the ranks differ from the core grid's because an attribute or a method
        that enumerates ranks has been replaced. Errors are as for ``hypergrid.HyperCommGrid``.
        """
        if "backend" in kwargs:
            raise TypeError("create_pg() takes no backend: it is that of its grid, set there.")
        key, spec, ordered_dims = self._find(dims, view)
        self.core._check_is_new(key)
        ranks = self._enumerate(spec, ordered_dims)
        # Shared dims of a view are those of the grid itself.
        view_of_key = None if isinstance(key, str) else key[0]
        if self._core_creates(key, ordered_dims, view_of_key, ranks):
            self.core.backend = self.backend
            self.core.create_pg(ordered_dims, view=view_of_key, **kwargs)
        else:
            group, _ = dist.new_subgroups_by_enumeration(ranks, backend=self.backend, **kwargs)
            self._pgs[key] = group
        return self._pgs[key]

    def get_pg(self, dims: Dims, *, view: str | None = None) -> ProcessGroup | None:
        """The group of this rank over ``dims``. *Local*."""
        key, _, _ = self._find(dims, view)
        return self.core._created(key)

    def get_rank_enum(self, dims: Dims, *, view: str | None = None) -> list[list[int]]:
        """All groups over ``dims`` as lists of ranks, in the order of creation. *Local*."""
        _, spec, ordered_dims = self._find(dims, view)
        return self._enumerate(spec, ordered_dims)

    def is_current_rank_in_grid(self) -> bool:
        """Whether this rank is one of the grid's."""
        return bool(self.rank_offset <= dist.get_rank() < self.rank_offset + self.size)

    def destroy(self, *, abort: bool = False) -> None:
        """Destroy every group of the grid; they can then be created again.

        *Local* with ``abort``; else NCCL waits until the other members destroy theirs.
        """
        for group in dict.fromkeys(self._foreign()):
            if group not in self._borrowed:
                dist.destroy_process_group(group)
        if self.core.pool is not None:
            self.core.pool.close(self._pgs.values(), abort=abort)
        self._pgs.clear()

    def _foreign(self) -> list[Any]:
        """The groups that the core grid did not create."""
        created = set()
        if self.core.pool is not None:
            created = {pooled.group for pooled in self.core.pool.groups}
        groups = filter(_is_process_group_member, self._pgs.values())
        return [group for group in groups if group not in created]

    def _core_creates(
        self, key: Key, dims: list[str], view: str | None, ranks: list[list[int]]
    ) -> bool:
        """Whether the core grid has the same groups, in a world that has their ranks."""
        if creation.is_replaced(dist.new_subgroups_by_enumeration) or not dist.is_initialized():
            return False
        # WORLD_SIZE may promise more ranks than there are: torch's function refuses them.
        if self.core.layout.stop > dist.get_world_size():
            return False
        try:
            core_key, _, _ = self.core._find(dims, view)
            return core_key == key and self.core.get_rank_enum(dims, view=view) == ranks
        except (KeyError, ValueError):  # outside code has written other dims
            return False

    def _find(self, dims: Dims, view: str | None) -> tuple[Key, _RankViewSpec, list[str]]:
        # Through the methods that the release has, since outside code may replace one.
        if view is None and not RELEASE_HAS["grid_views"]:
            ordered_dims, key = self._order_dims(dims)
            return key, self._views[BASE], ordered_dims
        spec = self._resolve_view(view)
        ordered_dims, _ = self._order_dims_for_view(spec, dims)
        return self._canonical_pg_key_and_enum_view(spec, ordered_dims)

    def _enumerate(self, spec: _RankViewSpec, ordered_dims: list[str]) -> list[list[int]]:
        if spec.name == BASE and not RELEASE_HAS["grid_views"]:
            return self._gen_rank_enum(ordered_dims)
        return self._gen_rank_enum_for(spec.shape, spec.dim_names, ordered_dims)

    def _gen_rank_enum(self, dims: Sequence[str]) -> list[list[int]]:
        return self._gen_rank_enum_for(self.shape, self.dim_names, dims)

    def _gen_rank_enum_for(
        self, shape: Sequence[int], dim_names: Sequence[str], dims: Sequence[str]
    ) -> list[list[int]]:
        layout = RankLayout(tuple(dim_names), tuple(shape), self.rank_offset)
        # The last of the dims given is the fastest.
        groups: list[list[int]] = layout.groups(list(dims)[::-1], as_given=True).tolist()
        return groups

    def _order_dims(self, dims: Dims) -> tuple[list[str], str]:
        return self._order_dims_for(self.dim_names, dims)

    def _order_dims_for(self, dim_names: Sequence[str], dims: Dims) -> tuple[list[str], str]:
        names = _listed(dims, dim_names)
        # A single name is not looked up: an unknown one is refused later, as by stock.
        if not isinstance(dims, str) or len(names) > 1:
            slowest_first = list(dim_names)[::-1]
            names.sort(key=slowest_first.index)
        return names, "-".join(names)

    def _resolve_view(self, view: str | None) -> _RankViewSpec:
        self.core._layout(view)  # refuses one that is not registered
        return self._views[view or BASE]

    def _order_dims_for_view(self, view: _RankViewSpec, dims: Dims) -> tuple[list[str], str]:
        for dim in _listed(dims, view.dim_names):
            if dim not in view.dim_names:
                raise ValueError(
                    f"{dim!r} is not in view {view.name!r}, whose dims are {view.dim_names}. Use "
                    f"one of them, or pass the view that has it as view=."
                )
        return self._order_dims_for(view.dim_names, dims)

    def _canonical_pg_key_and_enum_view(
        self, view: _RankViewSpec, ordered_dims: list[str]
    ) -> tuple[Key, _RankViewSpec, list[str]]:
        if view.name == BASE:
            return "-".join(ordered_dims), view, ordered_dims
        if set(ordered_dims) <= set(view.shared_dims):
            base = self._views[BASE]
            base_dims, key = self._order_dims_for_view(base, ordered_dims)
            return key, base, base_dims
        return (view.name, tuple(ordered_dims)), view, ordered_dims

    def _is_base_pg_key(self, key: Key) -> bool:
        return isinstance(key, str)


AnyGrid: TypeAlias = HyperCommGrid | Core


def core_of(grid: AnyGrid) -> Core:
    """The core grid of either class."""
    if isinstance(grid, HyperCommGrid):
        return grid.core
    return grid


def _check_lengths(shape: Sequence[int], dim_names: Sequence[str]) -> None:
    if len(shape) != len(dim_names):
        raise ValueError(
            f"len(shape) {len(shape)} != len(dim_names) {len(dim_names)}: shape={shape} and "
            f"dim_names={dim_names}. Give one size per name."
        )


def _listed(dims: Dims, dim_names: Sequence[str]) -> list[str]:
    if not isinstance(dims, str):
        return list(dims)
    # A dim's own name may have a dash: "expt-tp".
    if dims in dim_names:
        return [dims]
    return dims.split("-")
