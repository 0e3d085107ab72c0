"""Replaces ``megatron.core.hyper_comm_grid``."""

from __future__ import annotations

import logging as _logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Integral
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np  # noqa: F401 (a name of stock's module)
import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.megatron.releases import RELEASE_HAS
from hypergrid.groups import creation
from hypergrid.groups.grid import BASE, Key
from hypergrid.groups.grid import HyperCommGrid as Core
from hypergrid.layout import Dims, RankLayout
from hypergrid.messages import Sentence

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
    """megatron-core's ``HyperCommGrid``: its interface and its error messages.

    Of its private names there are ``_pgs``, a dict that may be written, ``_views``,
    ``_gen_rank_enum``, ``_order_dims`` and ``_order_dims_for``; where one of these methods is
    replaced, the grid refuses to answer. Its attributes but ``backend`` are only read.

    ``core`` is the ``hypergrid.HyperCommGrid`` that creates the groups; it has more methods, such
    as ``grid.core.device_mesh()``. Both return the same groups.

    Parameters and errors are as for ``hypergrid.HyperCommGrid``. The size of the world is the
    variable ``WORLD_SIZE``, if that is set.
    """

    _shape: Sequence[int]
    _dim_names: Sequence[str]

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
        self._shape = shape[:]
        self._dim_names = dim_names[:]

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
        self._shape = core.shape
        self._dim_names = core.dim_names
        self.backend = core.backend
        # Groups of others stay open when this grid is destroyed.
        self._borrowed = self._foreign()

    # Only read: another size or dim is another grid.
    shape: Sequence[int] = property(attrgetter("_shape"))  # type: ignore[assignment]
    dim_names: Sequence[str] = property(attrgetter("_dim_names"))  # type: ignore[assignment]
    rank_offset: int = property(attrgetter("core.rank_offset"))  # type: ignore[assignment]
    size: int = property(attrgetter("core.size"))  # type: ignore[assignment]

    @property
    def _views(self) -> Mapping[str, _RankViewSpec]:
        views = {}
        for name, layout in self.core.views.items():
            shared_dims = list(self.core._shared[name])
            sizes = list(layout.sizes)
            views[name] = _RankViewSpec(name, sizes, list(layout.dims), shared_dims)
        return MappingProxyType(views)

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

    def create_pg(
        self, dims: Dims, *, view: str | None = None, **kwargs: Any
    ) -> ProcessGroup | None:
        """Create the groups over ``dims``, once; returns the group of this rank. *Collective*.

        The core grid creates them, by their members alone if possible.
        ``torch.distributed.new_subgroups_by_enumeration`` creates them if that function has been
        replaced. Errors are as for ``hypergrid.HyperCommGrid``.
        """
        if "backend" in kwargs:
            raise TypeError("create_pg() takes no backend: it is that of its grid, set there.")
        names = self._known_dims(dims, view)
        if not creation.is_replaced(dist.new_subgroups_by_enumeration) and self._has_all_ranks():
            self.core.backend = self.backend
            return self.core.create_pg(names, view=view, **kwargs)
        key, layout, ordered_dims = self.core._find(names, view)
        self.core._check_is_new(key)
        ranks = layout.groups(ordered_dims).tolist()
        group, _ = dist.new_subgroups_by_enumeration(ranks, backend=self.backend, **kwargs)
        self._pgs[key] = group
        return group  # type: ignore[no-any-return]

    def get_pg(self, dims: Dims, *, view: str | None = None) -> ProcessGroup | None:
        """The group of this rank over ``dims``. *Local*."""
        return self.core.get_pg(self._known_dims(dims, view), view=view)

    def get_rank_enum(self, dims: Dims, *, view: str | None = None) -> list[list[int]]:
        """All groups over ``dims`` as lists of ranks, in the order of creation. *Local*."""
        return self.core.get_rank_enum(self._known_dims(dims, view), view=view)

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

    def _has_all_ranks(self) -> bool:
        """Whether there are as many ranks as WORLD_SIZE may promise; torch's function refuses."""
        return dist.is_initialized() and self.core.layout.stop <= dist.get_world_size()

    def _known_dims(self, dims: Dims, view: str | None) -> list[str]:
        """The names in ``dims``; of an unknown one stock's error, in stock's words."""
        for written in _ENUMERATING:
            method = getattr(self, written.__name__)
            if getattr(method, "__func__", None) is not written:
                raise TypeError(
                    f"{written.__name__} of this grid has been replaced, which would have no "
                    f"effect. Replace torch.distributed.new_subgroups_by_enumeration instead."
                )
        known_dims = self.core._layout(view).dims
        names = _listed(dims, known_dims)
        for name in names:
            if name not in known_dims:
                # Stock without views finds no group of a single dim that it does not have.
                is_not_found = isinstance(dims, str) and not RELEASE_HAS["grid_views"]
                kind = KeyError if is_not_found else ValueError
                raise kind(
                    Sentence(
                        f"{name!r} is not in view {view or BASE!r}, whose dims are "
                        f"{list(known_dims)}. Use one of them, or pass the view that has it as "
                        f"view=."
                    )
                )
        return names

    def _gen_rank_enum(self, dims: Sequence[str]) -> list[list[int]]:
        # The last of the dims given is the fastest.
        groups: list[list[int]] = self.core.layout.groups(list(dims)[::-1], as_given=True).tolist()
        return groups

    def _order_dims(self, dims: Dims) -> tuple[list[str], str]:
        return self._order_dims_for(self.dim_names, dims)

    def _order_dims_for(self, dim_names: Sequence[str], dims: Dims) -> tuple[list[str], str]:
        slowest_first = list(dim_names)[::-1]
        names = sorted(_listed(dims, dim_names), key=slowest_first.index)
        return names, "-".join(names)


# Stock creates groups by these methods; here they only answer those who ask.
_ENUMERATING = (
    HyperCommGrid._gen_rank_enum,
    HyperCommGrid._order_dims,
    HyperCommGrid._order_dims_for,
)
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
