"""Transformer Engine without Megatron: the groups that it takes, from a grid or a state.

``source`` is a ``HyperCommGrid`` with dims tp, cp and dp (as many as there are), or a
``ParallelState``. All functions are *local*; only ``probe`` imports Transformer Engine. A function
that needs a group that the grid has not created raises KeyError, which names the call that creates
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.hyper_comm_grid import AnyGrid, core_of
from compat.transformer_engine.process import forget_sizes, release
from compat.transformer_engine.process import probe as probe
from hypergrid.groups.pool import before_closing

if TYPE_CHECKING:
    from compat.state import ParallelState

GroupSource: TypeAlias = "AnyGrid | ParallelState"

before_closing.add(release)


def tp_args(source: GroupSource, *, expert: bool = False) -> dict[str, Any]:
    """The keywords ``tp_group`` and ``tp_size`` of a module: ``te.Linear(..., **tp_args(grid))``.

    With ``expert`` those of an expert layer: of a grid, from its view "expert".
    """
    # Sizes that were cached before torch.distributed was initialised are wrong.
    forget_sizes()
    if isinstance(source, AnyGrid):
        view = "expert" if expert else None
        group = _group_of_grid(source, "tp", view)
    elif expert:
        group = source.get_expert_tensor_parallel_group()
    else:
        group = source.get_tensor_model_parallel_group()
    return {"tp_group": group, "tp_size": group.size()}


def cp_args(source: GroupSource, comm_type: str = "p2p") -> dict[str, Any]:
    """The keywords of ``set_context_parallel_group`` but ``cp_stream``, which the caller has.

    ``cp_group`` is [a2a, p2p] for "a2a+p2p". ``cp_global_ranks`` are all ranks of cp in their
    order, a2a fastest: rank r of the ring sends to
    ``cp_global_ranks[(r + 1) % p2p * a2a + a2a_rank]``.

    Parameters
    ----------
    comm_type : str
        "p2p", "all_gather", "a2a" or "a2a+p2p". For the last a grid has the dims a2a and p2p in
        place of cp, a2a in front; a state has two ``hierarchical_context_parallel_sizes``.
        Transformer Engine itself refuses other values, and other numbers of levels.
    """
    forget_sizes()
    is_hierarchical = comm_type == "a2a+p2p"
    if isinstance(source, AnyGrid):
        dims = _present_dims(source, "cp-a2a-p2p")
        # With p2p in front of a2a, Transformer Engine would send to other ranks than p2p has.
        if not dims or (is_hierarchical and dims != ["a2a", "p2p"]):
            raise ValueError(
                f"comm_type {comm_type!r} needs a grid with a dim cp, or with a2a and p2p in this "
                f"order in its place ('a2a+p2p' needs both), and this is {source}."
            )
        if is_hierarchical:
            group: Any = [_group_of_grid(source, dim) for dim in dims]
        else:
            group = _group_of_grid(source, "-".join(dims))
        ranks = core_of(source).layout.group(dist.get_rank(), dims)
    else:
        group = source.get_context_parallel_group()
        if is_hierarchical:
            group = source.get_hierarchical_context_parallel_groups()
        ranks = list(source.get_context_parallel_global_ranks())
    return {"cp_group": group, "cp_global_ranks": ranks, "cp_comm_type": comm_type}


def amax_group(source: GroupSource, tp_only: bool = False) -> ProcessGroup:
    """The group over which maxima of quantised tensors are reduced: tp x dp x cp, or tp x cp.

    Always the same object, since Transformer Engine keeps state for each object; and never None,
    which means the world to it: ValueError if the grid has none of these dims.
    """
    if not isinstance(source, AnyGrid):
        return source.get_amax_reduction_group(True, tp_only_amax_red=tp_only)
    names = "tp-cp-a2a-p2p"
    if not tp_only:
        names += "-dp"
    dims = _present_dims(source, names)
    if not dims:
        raise ValueError(
            f"{source} has no dim for this group, and None means the world to Transformer Engine: "
            f"give the grid a dim tp, cp or dp of size 1, and create_pg() over it."
        )
    return _group_of_grid(source, "-".join(dims))


def _present_dims(grid: AnyGrid, names: str) -> list[str]:
    """The dims among ``names`` that the grid has, in the grid's order."""
    return [dim for dim in core_of(grid).layout.dims if dim in names.split("-")]


def _group_of_grid(grid: AnyGrid, dims: str, view: str | None = None) -> ProcessGroup:
    group = core_of(grid).get_pg(dims, view=view)
    if group is None:
        raise RuntimeError(f"rank {dist.get_rank()} is outside {grid}: it has no groups.")
    return group
