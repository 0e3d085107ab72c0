"""Transformer Engine without Megatron: the groups that it takes, from a grid or a state.

``source`` is a ``HyperCommGrid`` with dims tp, cp and dp (as many as there are), or a
``ParallelState``. All functions are *local* except ``create_groups``; only ``probe`` imports
Transformer Engine. A function that needs a group that the grid has not created raises KeyError,
which names the call that creates it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.hyper_comm_grid import AnyGrid, core_of
from compat.transformer_engine.process import Installation as Installation
from compat.transformer_engine.process import empty_meta_package as empty_meta_package
from compat.transformer_engine.process import forget_sizes, release
from compat.transformer_engine.process import probe as probe
from hypergrid.groups.pool import before_closing
from hypergrid.layout import RankLayout
from hypergrid.messages import shown
from hypergrid.views import BASE

if TYPE_CHECKING:
    from compat.state import ParallelState

GroupSource: TypeAlias = "AnyGrid | ParallelState"
COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")

# The groups that Transformer Engine takes: dims, whether of expert layers, and a state's getter.
_GROUPS: dict[tuple[str, bool], Callable[[ParallelState], ProcessGroup]] = {
    ("tp", False): lambda state: state.get_tensor_model_parallel_group(),
    ("cp", False): lambda state: state.get_context_parallel_group(),
    ("tp-cp", False): lambda state: state.get_amax_reduction_group(True, tp_only_amax_red=True),
    ("tp-dp-cp", False): lambda state: state.get_amax_reduction_group(True),
    ("tp", True): lambda state: state.get_expert_tensor_parallel_group(),
}

before_closing.add(release)
_stream_of = functools.cache(torch.cuda.Stream)


class ContextParallel(NamedTuple):
    """The arguments of ``set_context_parallel_group``, in its order.

    ``cp_group`` is [a2a, p2p] for "a2a+p2p". ``cp_global_ranks`` are all ranks of cp in their
    order, a2a fastest: rank r of the ring sends to
    ``cp_global_ranks[(r + 1) % p2p * a2a + a2a_rank]``.
    """

    cp_group: ProcessGroup | list[ProcessGroup]
    cp_global_ranks: list[int]
    cp_stream: Any
    cp_comm_type: str


def create_groups(grid: AnyGrid, *, a2a_size: int | None = None) -> None:
    """Create the groups of this module that the grid does not have yet.

    *Collective* over the grid. They are over tp, cp, tp-cp, tp-dp-cp and, in its view "expert", tp;
    with ``a2a_size`` also the two of hierarchical context parallelism. A state has all already.
    """
    core, wanted = core_of(grid), [_dims(grid, *each) for each in _GROUPS]
    if a2a_size is not None:
        view, rings = f"a2a={a2a_size}", _rings(core.layout, a2a_size)
        if view not in core.views:
            split = core.layout.split("cp", {"a2a": a2a_size, "p2p": rings})
            core.register_view(view, split.sizes, split.dims)
        wanted += [(["a2a"], view), (["p2p"], view)]
    for dims, view in wanted:
        if dims and core.name(dims, view=view) not in core.groups:
            core.create_pg(dims, view=view)


def cp_args(
    source: GroupSource,
    comm_type: str = "p2p",
    a2a_size: int | None = None,
    *,
    cp_stream: Any = None,
) -> ContextParallel:
    """The arguments for ``set_context_parallel_group(*cp_args(grid))``.

    Parameters
    ----------
    comm_type : str
        "p2p", "all_gather", "a2a" or "a2a+p2p".
    a2a_size : int, optional
        For "a2a+p2p": how many consecutive ranks of cp exchange heads; the others form rings.
    cp_stream : torch.cuda.Stream, optional
        By default one that this process uses for all calls on the device.
    """
    if comm_type not in COMM_TYPES:
        raise ValueError(
            f"invalid value for comm_type: {shown(comm_type)}; allowed: {', '.join(COMM_TYPES)}."
        )
    if a2a_size is not None and comm_type != "a2a+p2p":
        raise ValueError(f"a2a_size={shown(a2a_size)} is for 'a2a+p2p' only, not {comm_type!r}.")
    group = _hierarchy(source, a2a_size) if comm_type == "a2a+p2p" else _group(source, "cp")
    if group is None:
        raise ValueError(f"there is no context parallelism: {_layout(source)} has no dim cp.")
    if cp_stream is None and torch.cuda.is_available():
        cp_stream = _stream_of(torch.cuda.current_device())
    return ContextParallel(group, _cp_ranks(source), cp_stream, comm_type)


def amax_group(source: GroupSource, tp_only: bool = False) -> ProcessGroup:
    """The group over which maxima of quantised tensors are reduced: tp x dp x cp, or tp x cp.

    Always the same object, since Transformer Engine keeps state for each object; and never None,
    which means the world to it: ValueError if the grid has none of these dims.
    """
    dims = "tp-cp" if tp_only else "tp-dp-cp"
    group = _group(source, dims)
    if group is None:
        raise ValueError(
            f"the grid has no dim of {dims.split('-')}, and None means the world to Transformer "
            f"Engine: give the grid such a dim of size 1, and create_pg() over it."
        )
    return group


def apply(
    module: torch.nn.Module,
    source: GroupSource,
    *,
    experts: Iterable[torch.nn.Module] = (),
    comm_type: str = "p2p",
    a2a_size: int | None = None,
    cp_stream: Any = None,
) -> None:
    """Give a model its groups: both setters, on each of its modules that has them.

    Raises ValueError if no module has a setter (those of ``te.ops`` have none), or if one was
    built for another ``tp_size``.

    Parameters
    ----------
    experts : iterable of Module
        Modules of the model that are expert layers, with all they contain: their tensor
        parallelism is that of the experts.
    comm_type, a2a_size, cp_stream
        As for ``cp_args``; ``set_context_parallel_group`` is not called if cp is one rank.
    """
    forget_sizes()  # those cached before torch.distributed was initialised are wrong
    named = list(module.named_modules())
    of_experts = {part for expert in experts for part in expert.modules()}
    attention = [m for _, m in named if hasattr(m, "set_context_parallel_group")]
    given = []
    # Experts last: a layer's own setter also sets the experts that it contains.
    for expert in (False, True) if of_experts else (False,):
        group = _group(source, "tp", expert)
        size = 1 if group is None else group.size()
        for name, m in named:
            if (m in of_experts) == expert and hasattr(m, "set_tensor_parallel_group"):
                _check_size(name, m, size)
                given.append((m, group))
    if not given and not attention:
        raise ValueError(
            f"no module of {type(module).__name__} takes a group after it was built. Pass groups "
            f"to modules of te.ops when you build them."
        )
    several = attention and len(_cp_ranks(source)) > 1
    context = cp_args(source, comm_type, a2a_size, cp_stream=cp_stream) if several else None
    for m, group in given:
        m.set_tensor_parallel_group(group)
    if context is not None:
        for m in attention:
            m.set_context_parallel_group(*context)


def check_userbuffers(source: GroupSource | RankLayout, world_size: int | None = None) -> None:
    """Refuse a layout for which ``initialize_ub`` would choose other ranks than those of tp.

    It takes no group: it uses ranks ``i * tp ... i * tp + tp - 1`` of the world. So tp must be the
    fastest dim, and start at a multiple of its size. The ValueError names the ranks that it would
    choose, and those of tp.
    """
    layout = source if isinstance(source, RankLayout) else _layout(source)
    dims = {"tp"}.intersection(layout.dims)
    size = layout.dim_size(dims)
    ours = layout.group(layout.offset, dims)
    theirs = [layout.offset // size * size + place for place in range(size)]
    if ours != theirs:
        raise ValueError(
            f"Userbuffers would use ranks {theirs} for tensor parallelism, and {layout} has "
            f"{ours}: initialize_ub counts {size} consecutive ranks from rank 0 on. Make tp the "
            f"fastest dim, first in the order, and the offset a multiple of its size; or do not "
            f"use ub_overlap_*."
        )
    world = world_size or (dist.get_world_size() if dist.is_initialized() else layout.size)
    if world % size:
        raise ValueError(
            f"Userbuffers divide the world of {world} ranks into parts of tp={size}, which leaves "
            f"a remainder of {world % size}."
        )


def _group(source: GroupSource, dims: str, expert: bool = False) -> ProcessGroup | None:
    """The group over ``dims``; of a grid without any of them None."""
    if not isinstance(source, AnyGrid):
        return _GROUPS[dims, expert](_state(source))
    known, view = _dims(source, dims, expert)
    return _of_grid(source, known, view) if known else None


def _hierarchy(source: GroupSource, a2a_size: int | None) -> list[ProcessGroup]:
    """The groups of the two levels of context parallelism, a2a and p2p."""
    if isinstance(source, AnyGrid):
        _rings(_layout(source), a2a_size)
        view = f"a2a={a2a_size}"
        if view not in core_of(source).views:
            raise KeyError(
                f"the groups of cp in parts of {a2a_size} have not been created: call "
                f"create_groups(grid, a2a_size={a2a_size}) on every rank of the grid first."
            )
        return [_of_grid(source, [dim], view) for dim in ("a2a", "p2p")]
    groups: list[ProcessGroup] = _state(source).get_hierarchical_context_parallel_groups()
    if len(groups) != 2:
        raise ValueError(
            f"Transformer Engine takes two levels of context parallelism, a2a and p2p, and this "
            f"state has {len(groups)}: initialise it with two hierarchical_context_parallel_sizes."
        )
    if a2a_size not in (None, groups[0].size()):
        raise ValueError(
            f"a2a_size={shown(a2a_size)}, and hierarchical_context_parallel_sizes[0] is "
            f"{groups[0].size()}. Leave it out."
        )
    return groups


def _dims(grid: AnyGrid, dims: str, expert: bool = False) -> tuple[list[str], str]:
    """The dims among ``dims`` that the grid has, and their view."""
    views = core_of(grid).views
    view = "expert" if expert and "expert" in views else BASE
    return [dim for dim in dims.split("-") if dim in views[view].dims], view


def _of_grid(grid: AnyGrid, dims: list[str], view: str) -> ProcessGroup:
    group = core_of(grid).get_pg(dims, view=view)
    if group is None:
        raise RuntimeError(f"rank {dist.get_rank()} is outside {grid}: it has no groups.")
    return group


def _rings(layout: RankLayout, a2a_size: int | None) -> int:
    """How many ranks a ring has. ValueError if ``a2a_size`` does not divide cp."""
    size = layout.dim_size({"cp"}.intersection(layout.dims))
    if a2a_size is None or a2a_size < 1 or size % a2a_size:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"a2a_size={shown(a2a_size)} does not divide cp={size}: a2a+p2p needs the number of "
            f"consecutive ranks that exchange heads. Allowed: {divisors}."
        )
    return size // a2a_size


def _cp_ranks(source: GroupSource) -> list[int]:
    if not isinstance(source, AnyGrid):
        return list(_state(source).get_context_parallel_global_ranks())
    layout = _layout(source)
    return layout.group(dist.get_rank(), {"cp"}.intersection(layout.dims))


def _layout(source: GroupSource) -> RankLayout:
    grid = source if isinstance(source, AnyGrid) else _state(source).grid
    if grid is None:
        raise RuntimeError(f"there is no layout to check: {source!r} has no groups.")
    return core_of(grid).layout


def _state(source: Any) -> ParallelState:
    if not hasattr(source, "get_amax_reduction_group"):
        raise TypeError(
            f"groups come from a HyperCommGrid or a ParallelState, not from a "
            f"{type(source).__name__}."
        )
    return source  # type: ignore[no-any-return]


def _check_size(name: str, module: Any, size: int) -> None:
    built = getattr(module, "tp_size", size)
    if built != size and (built > 1 or getattr(module, "parallel_mode", None)):
        raise ValueError(
            f"{name or type(module).__name__} was built for tp_size={built}, and tp has {size} "
            f"ranks: its weights are of another size. Build it with that group."
        )
