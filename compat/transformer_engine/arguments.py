"""Transformer Engine without Megatron: the groups that it takes, from a grid or a state.

``where`` is a ``HyperCommGrid`` with dims tp, cp, dp and ep (as many as there are), a
``ParallelState``, or a ``Named`` grid. All functions are *local* except ``create_groups``;
only ``probe`` imports Transformer Engine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.hyper_comm_grid import AnyGrid
from compat.transformer_engine.groups import Named as Named
from compat.transformer_engine.groups import Where, source
from compat.transformer_engine.process import Installation as Installation
from compat.transformer_engine.process import empty_meta_package as empty_meta_package
from compat.transformer_engine.process import forget_sizes, release
from compat.transformer_engine.process import probe as probe
from hypergrid.groups.pool import before_closing
from hypergrid.layout import RankLayout
from hypergrid.messages import shown

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
# The operations of te.ops that communicate, and the parameter that takes their group.
OPS = {
    **dict.fromkeys(("Linear", "BasicLinear", "Bias"), "tensor_parallel_group"),
    **dict.fromkeys(("AllGather", "ReduceScatter", "AllReduce"), "process_group"),
}

before_closing.add(release)
_stream_of = functools.cache(torch.cuda.Stream)


class ContextParallel(NamedTuple):
    """What ``set_context_parallel_group`` takes, in its order.

    ``cp_group`` is [a2a, p2p] for "a2a+p2p". ``cp_global_ranks`` are all ranks of cp in their
    order, a2a fastest: rank r of the ring sends to
    ``cp_global_ranks[(r + 1) % p2p * a2a + a2a_rank]``.
    """

    cp_group: ProcessGroup | list[ProcessGroup]
    cp_global_ranks: list[int]
    cp_stream: Any
    cp_comm_type: str


def create_groups(where: AnyGrid | Named, *, a2a_size: int | None = None) -> None:
    """Create the groups that Transformer Engine takes and that the grid does not have yet.

    *Collective* over the grid. Those over tp, cp, tp-cp, tp-dp-cp and, in the view of expert
    layers, tp and tp-ep; with ``a2a_size`` also the two of hierarchical context parallelism.
    A state has all of its groups already.
    """
    (where if isinstance(where, Named) else Named(where)).create(a2a_size)


def tp_kwargs(where: Where, *, expert: bool = False) -> dict[str, Any]:
    """``tp_group`` and ``tp_size``, for every module of ``te.pytorch`` that takes them.

    With ``expert`` those of expert layers, for ``GroupedLinear``. A grid without tp gives None and
    1, which means no tensor parallelism. This function and all below raise KeyError if the grid
    has not created the group; the message names the call that does.
    """
    group = source(where).group("tp", expert)
    return {"tp_group": group, "tp_size": 1 if group is None else group.size()}


def cp_args(
    where: Where, comm_type: str = "p2p", a2a_size: int | None = None, *, cp_stream: Any = None
) -> ContextParallel:
    """What ``set_context_parallel_group(*cp_args(grid))`` takes.

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
    groups = source(where)
    group = groups.hierarchy(a2a_size) if comm_type == "a2a+p2p" else groups.group("cp")
    if group is None:
        raise ValueError(f"there is no context parallelism: {groups.layout} has no dim cp.")
    if cp_stream is None and torch.cuda.is_available():
        cp_stream = _stream_of(torch.cuda.current_device())
    return ContextParallel(group, list(groups.cp_ranks), cp_stream, comm_type)


def amax_group(where: Where, tp_only: bool = False) -> ProcessGroup:
    """The group over which maxima of quantised tensors are reduced: tp x dp x cp, or tp x cp.

    Always the same object, since Transformer Engine keeps state for each object; and never None,
    which means the world to it.
    """
    return _never_the_world(where, "tp-cp" if tp_only else "tp-dp-cp")


def autocast_kwargs(where: Where, tp_only: bool = False) -> dict[str, ProcessGroup]:
    """``amax_reduction_group``, for ``autocast`` and ``make_graphed_callables``."""
    return {"amax_reduction_group": amax_group(where, tp_only)}


def checkpoint_kwargs(where: Where) -> dict[str, ProcessGroup]:
    """``tp_group``, for ``checkpoint``, to which None means the world."""
    return {"tp_group": _never_the_world(where, "tp")}


def ops_kwargs(where: Where, op: str | type = "Linear") -> dict[str, ProcessGroup]:
    """The tensor-parallel group under the name by which an operation of ``te.ops`` takes it.

    ``op`` is the operation or its name: "Linear", "BasicLinear", "Bias", "AllGather",
    "ReduceScatter" or "AllReduce". None means the world to them too.
    """
    name = op if isinstance(op, str) else op.__name__
    if name not in OPS:
        raise ValueError(f"invalid operation {shown(name)}: those that take a group are {[*OPS]}.")
    return {OPS[name]: _never_the_world(where, "tp")}


def cross_entropy_group(where: Where) -> ProcessGroup | None:
    """``dist_process_group`` of ``parallel_cross_entropy``; None without tensor parallelism."""
    return source(where).group("tp")


def ep_group(where: Where) -> ProcessGroup:
    """``ep_group`` of ``ep_bootstrap``: tp x ep of expert layers, two ranks or more."""
    group = _never_the_world(where, "tp-ep", expert=True)
    if group.size() < 2:
        raise ValueError(
            "tp x ep of expert layers is one rank, and ep_bootstrap needs at least two: do not "
            "call it without expert parallelism."
        )
    return group


def apply(
    module: torch.nn.Module,
    where: Where,
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
        tp = tp_kwargs(where, expert=expert)
        for name, m in named:
            if (m in of_experts) == expert and hasattr(m, "set_tensor_parallel_group"):
                _check_size(name, m, tp["tp_size"])
                given.append((m, tp["tp_group"]))
    if not given and not attention:
        raise ValueError(
            f"no module of {type(module).__name__} takes a group after it was built. Pass groups "
            f"to modules of te.ops when you build them: ops_kwargs()."
        )
    several = attention and len(source(where).cp_ranks) > 1
    context = cp_args(where, comm_type, a2a_size, cp_stream=cp_stream) if several else None
    for m, group in given:
        m.set_tensor_parallel_group(group)
    if context is not None:
        for m in attention:
            m.set_context_parallel_group(*context)


def check_userbuffers(where: Where | RankLayout, world_size: int | None = None) -> None:
    """Refuse a layout for which ``initialize_ub`` would choose other ranks than those of tp.

    It takes no group: it uses ranks ``i * tp ... i * tp + tp - 1`` of the world. So tp must be the
    fastest dim, and start at a multiple of its size. The ValueError names the ranks that it would
    choose, and those of tp.
    """
    groups = where if isinstance(where, RankLayout) else source(where)
    layout = groups if isinstance(groups, RankLayout) else groups.layout
    dims = groups.dims("tp") if isinstance(groups, Named) else {"tp"}.intersection(layout.dims)
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


def _never_the_world(where: Where, roles: str, expert: bool = False) -> ProcessGroup:
    group = source(where).group(roles, expert)
    if group is None:
        raise ValueError(
            f"the grid has no dim of {roles.split('-')}, and None means the world to Transformer "
            f"Engine: give the grid such a dim of size 1, and create_pg() over it."
        )
    return group


def _check_size(name: str, module: Any, size: int) -> None:
    built = getattr(module, "tp_size", size)
    if built != size and (built > 1 or getattr(module, "parallel_mode", None)):
        raise ValueError(
            f"{name or type(module).__name__} was built for tp_size={built}, and tp has {size} "
            f"ranks: its weights are of another size. Build it with tp_kwargs()."
        )
