"""The groups for Transformer Engine, from a grid or from a state, by the same methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.hyper_comm_grid import AnyGrid, core_of
from compat.megatron.suspended import is_suspended
from hypergrid.layout import RankLayout
from hypergrid.messages import shown
from hypergrid.views import BASE

if TYPE_CHECKING:
    from compat.state import ParallelState

# What Transformer Engine takes: over which dims, whether of expert layers, and a state's getter.
GROUPS: dict[tuple[str, bool], Callable[[ParallelState], ProcessGroup]] = {
    ("tp", False): lambda state: state.get_tensor_model_parallel_group(),
    ("cp", False): lambda state: state.get_context_parallel_group(),
    ("tp-cp", False): lambda state: state.get_amax_reduction_group(True, tp_only_amax_red=True),
    ("tp-dp-cp", False): lambda state: state.get_amax_reduction_group(True),
    ("tp", True): lambda state: state.get_expert_tensor_parallel_group(),
}


class OfGrid:
    """The groups of a grid; a dim that it does not have counts as size 1."""

    def __init__(self, grid: AnyGrid) -> None:
        self.grid = core_of(grid)
        self.layout = self.grid.layout
        self._expert = "expert" if "expert" in self.grid.views else BASE

    def _dims(self, dims: str, expert: bool = False) -> tuple[list[str], str]:
        """Those that there are, and their view."""
        view = self._expert if expert else BASE
        return [dim for dim in dims.split("-") if dim in self.grid.views[view].dims], view

    def group(self, dims: str, expert: bool = False) -> ProcessGroup | None:
        known, view = self._dims(dims, expert)
        return self._over(known, view) if known else None

    def _over(self, dims: list[str], view: str) -> ProcessGroup:
        group = self.grid.get_pg(dims, view=view)
        if group is None:
            raise RuntimeError(f"rank {dist.get_rank()} is outside {self.grid}: it has no groups.")
        return group

    @property
    def cp_ranks(self) -> list[int]:
        return self.layout.group(dist.get_rank(), self._dims("cp")[0])

    def hierarchy(self, a2a_size: int | None) -> list[ProcessGroup]:
        self._check(a2a_size)
        view = f"a2a={a2a_size}"
        if view not in self.grid.views:
            raise KeyError(
                f"the groups of cp in parts of {a2a_size} have not been created: call "
                f"create_groups(grid, a2a_size={a2a_size}) on every rank of the grid first."
            )
        return [self._over([dim], view) for dim in ("a2a", "p2p")]

    def _check(self, a2a_size: int | None) -> int:
        size = self.layout.dim_size(self._dims("cp")[0])
        if a2a_size is None or a2a_size < 1 or size % a2a_size:
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            raise ValueError(
                f"a2a_size={shown(a2a_size)} does not divide cp={size}: a2a+p2p needs the number "
                f"of consecutive ranks that exchange heads. Allowed: {divisors}."
            )
        return size // a2a_size

    def create(self, a2a_size: int | None) -> None:
        wanted = [self._dims(*each) for each in GROUPS]
        if a2a_size is not None:
            view, rings = f"a2a={a2a_size}", self._check(a2a_size)
            if view not in self.grid.views:
                split = self.layout.split("cp", {"a2a": a2a_size, "p2p": rings})
                self.grid.register_view(view, split.sizes, split.dims)
            wanted += [(["a2a"], view), (["p2p"], view)]
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

    def group(self, dims: str, expert: bool = False) -> ProcessGroup:
        return _usable(GROUPS[dims, expert](self._state))

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
        if a2a_size not in (None, groups[0].size()):
            raise ValueError(
                f"a2a_size={shown(a2a_size)}, and hierarchical_context_parallel_sizes[0] is "
                f"{groups[0].size()}. Leave it out."
            )
        return groups


Where: TypeAlias = "AnyGrid | ParallelState"


def source(where: Where) -> OfGrid | OfState:
    if isinstance(where, AnyGrid):
        return OfGrid(where)
    if hasattr(where, "get_amax_reduction_group"):
        return OfState(where)
    raise TypeError(
        f"groups come from a HyperCommGrid or a ParallelState, not from a {type(where).__name__}."
    )


def _usable(group: Any) -> Any:
    # Transformer Engine ignores a group of another type without an error.
    if is_suspended(group):
        raise RuntimeError(f"{group!r}.")
    return group
