"""The groups for Transformer Engine, from a grid or from a state, by the same methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.hyper_comm_grid import AnyGrid, core_of
from compat.megatron.suspended import is_suspended
from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import shown
from hypergrid.views import BASE

if TYPE_CHECKING:
    from compat.state import ParallelState

# What Transformer Engine takes: over which roles, whether of expert layers, and a state's getter.
GROUPS: dict[tuple[str, bool], Callable[[ParallelState], ProcessGroup]] = {
    ("tp", False): lambda state: state.get_tensor_model_parallel_group(),
    ("cp", False): lambda state: state.get_context_parallel_group(),
    ("tp-cp", False): lambda state: state.get_amax_reduction_group(True, tp_only_amax_red=True),
    ("tp-dp-cp", False): lambda state: state.get_amax_reduction_group(True),
    ("tp", True): lambda state: state.get_expert_tensor_parallel_group(),
    ("tp-ep", True): lambda state: state.get_expert_tensor_and_model_parallel_group(),
}


class Named:
    """A grid whose dims have other names, for the functions of this module.

    Parameters
    ----------
    grid : HyperCommGrid
        A dim that it does not have counts as size 1.
    tp, cp, dp, ep : str, optional
        Their names in the grid; several dims joined by "-" count as one. Two dims for ``cp``
        are its hierarchy, the faster one for a2a.
    view : str
        The view of expert layers; the grid itself if it has no view of that name.

    Examples
    --------
    >>> where = Named(grid, tp="model", dp="replicate-shard")   # doctest: +SKIP
    """

    def __init__(
        self,
        grid: AnyGrid,
        *,
        tp: str | None = None,
        cp: str | None = None,
        dp: str | None = None,
        ep: str | None = None,
        view: str = "expert",
    ) -> None:
        self.grid = grid = core_of(grid)
        self.layout = grid.layout
        self.view = view if view in grid.views else BASE
        self._names = {}
        known = {*grid.layout.dims, *grid.views[self.view].dims}
        for role, given in {"tp": tp, "cp": cp, "dp": dp, "ep": ep}.items():
            self._names[role] = (given or role).split("-")
            for dim in self._names[role] if given else ():
                if dim not in known:
                    raise LayoutError(f"{role}={shown(given)}: there is no dim {dim!r} in {grid}.")
        self.cp_size = grid.layout.dim_size(self.dims("cp"))

    def dims(self, roles: str, view: str = BASE) -> list[str]:
        known = self.grid.views[view].dims
        return [dim for role in roles.split("-") for dim in self._names[role] if dim in known]

    def group(self, roles: str, expert: bool = False) -> ProcessGroup | None:
        view = self.view if expert else BASE
        dims = self.dims(roles, view)
        return self._over(dims, view) if dims else None

    def _over(self, dims: Sequence[str], view: str) -> ProcessGroup:
        group = self.grid.get_pg(dims, view=view)
        if group is None:
            raise RuntimeError(f"rank {dist.get_rank()} is outside {self.grid}: it has no groups.")
        return group

    @property
    def cp_ranks(self) -> list[int]:
        return self.layout.group(dist.get_rank(), self.dims("cp"))

    def hierarchy(self, a2a_size: int | None) -> list[ProcessGroup]:
        view, dims = self.split(a2a_size)
        if view not in self.grid.views:
            raise KeyError(
                f"the groups of cp={self.cp_size} in parts of {a2a_size} have not been created: "
                f"call create_groups(grid, a2a_size={a2a_size}) on every rank of the grid first."
            )
        return [self._over([dim], view) for dim in dims]

    def split(self, a2a_size: int | None) -> tuple[str, list[str]]:
        """The view with the two dims of cp, and these, a2a first."""
        dims, layout, size = self.dims("cp"), self.layout, self.cp_size
        if len(dims) == 2:
            dims.sort(key=layout.dims.index)
            _check_a2a(a2a_size, layout.dim_size(dims[0]), f"the dim {dims[0]!r}")
            return BASE, dims
        if a2a_size is None or a2a_size < 1 or size % a2a_size:
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            raise ValueError(
                f"a2a_size={shown(a2a_size)} does not divide cp={size}: a2a+p2p needs the number "
                f"of consecutive ranks that exchange heads. Allowed: {divisors}."
            )
        return f"a2a={a2a_size}", ["a2a", "p2p"]

    def create(self, a2a_size: int | None) -> None:
        views = [(roles, self.view if expert else BASE) for roles, expert in GROUPS]
        wanted = [(self.dims(roles, view), view) for roles, view in views]
        if a2a_size is not None:
            view, dims = self.split(a2a_size)
            if view not in self.grid.views:
                parts = {"a2a": a2a_size, "p2p": self.cp_size // a2a_size}
                split = self.layout.split(self.dims("cp")[0], parts)
                self.grid.register_view(view, split.sizes, split.dims)
            wanted += [([dim], view) for dim in dims]
        for dims, view in wanted:
            if dims and self.grid.name(dims, view=view) not in self.grid.groups:
                self.grid.create_pg(dims, view=view)


class OfState:
    """The groups of a state, by its getters."""

    def __init__(self, state: ParallelState) -> None:
        self._state = state

    @property
    def layout(self) -> RankLayout:
        if self._state.grid is None:
            raise RuntimeError(f"there is no layout to check: {self._state!r} has no groups.")
        return self._state.grid.layout

    def group(self, roles: str, expert: bool = False) -> ProcessGroup:
        return _usable(GROUPS[roles, expert](self._state))

    @property
    def cp_ranks(self) -> list[int]:
        return self._state.get_context_parallel_global_ranks()

    def hierarchy(self, a2a_size: int | None) -> list[ProcessGroup]:
        groups = _usable(self._state.get_hierarchical_context_parallel_groups())
        if len(groups) != 2:
            raise ValueError(
                f"Transformer Engine takes two levels of context parallelism, a2a and p2p, and "
                f"this state has {len(groups)}: initialise it with two "
                f"hierarchical_context_parallel_sizes."
            )
        _check_a2a(a2a_size, groups[0].size(), "hierarchical_context_parallel_sizes[0]")
        return groups


Where: TypeAlias = "AnyGrid | ParallelState | Named"


def source(where: Where) -> Named | OfState:
    if isinstance(where, Named):
        return where
    if isinstance(where, AnyGrid):
        return Named(where)
    if hasattr(where, "get_amax_reduction_group"):
        return OfState(where)
    raise TypeError(
        f"groups come from a HyperCommGrid, a ParallelState or a Named grid, not from a "
        f"{type(where).__name__}."
    )


def _usable(group: Any) -> Any:
    # Transformer Engine ignores a group of another type without an error.
    if is_suspended(group):
        raise RuntimeError(f"{group!r}.")
    return group


def _check_a2a(asked: int | None, size: int, what: str) -> None:
    if asked not in (None, size):
        raise ValueError(f"a2a_size={shown(asked)}, and {what} is {size}. Leave it out.")
