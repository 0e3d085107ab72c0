"""Sizes of groups, this rank's place in them, their global ranks; the groups asked for by size.

What outside code has set (``_MPU_TENSOR_MODEL_PARALLEL_RANK`` ...) comes before the group's number.
"""

# ruff: noqa: F821 - upstream's private globals are in the namespaces, see the package
# mypy: disable-error-code="name-defined,index"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.megatron.getters.groups import (
    _data_parallel,
    _expert_data_parallel,
    get_context_parallel_group,
    get_expert_model_parallel_group,
    get_expert_tensor_and_model_parallel_group,
    get_expert_tensor_parallel_group,
    get_pipeline_model_parallel_group,
    get_tensor_and_context_parallel_group,
    get_tensor_model_parallel_group,
    missing,
)
from compat.megatron.releases import RELEASE_HAS, as_released
from hypergrid.agreement.store import was_aborted


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int]:
    """Global ranks of the context-parallel group."""
    if _CONTEXT_PARALLEL_GLOBAL_RANKS is None and check_initialized:
        raise missing("_CONTEXT_PARALLEL_GLOBAL_RANKS")
    return _CONTEXT_PARALLEL_GLOBAL_RANKS


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank that comes first in the tensor-parallel group."""
    if _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS is None:
        raise missing("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS")
    return _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS[0]


def get_model_parallel_src_rank() -> int:
    """Global rank that comes first in the model-parallel group."""
    if _MODEL_PARALLEL_GLOBAL_RANKS is None:
        raise missing("_MODEL_PARALLEL_GLOBAL_RANKS")
    return _MODEL_PARALLEL_GLOBAL_RANKS[0]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank that comes first in the data-parallel group."""
    if with_context_parallel:
        if _DATA_PARALLEL_GLOBAL_RANKS_WITH_CP is None:
            raise missing("_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP")
        return _DATA_PARALLEL_GLOBAL_RANKS_WITH_CP[0]
    if _DATA_PARALLEL_GLOBAL_RANKS is None:
        raise missing("_DATA_PARALLEL_GLOBAL_RANKS")
    return _DATA_PARALLEL_GLOBAL_RANKS[0]


def get_expert_model_parallel_src_rank() -> int:
    """Global rank that comes first in the expert-parallel group."""
    if _EXPERT_MODEL_PARALLEL_RANKS is None:
        raise missing("_EXPERT_MODEL_PARALLEL_RANKS")
    return _EXPERT_MODEL_PARALLEL_RANKS[0]


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of this pipeline's first stage."""
    if _PIPELINE_GLOBAL_RANKS is None:
        raise missing("_PIPELINE_GLOBAL_RANKS")
    return _PIPELINE_GLOBAL_RANKS[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of this pipeline's last stage."""
    ranks = _pipeline()
    return ranks[get_pipeline_model_parallel_world_size() - 1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage; the first follows the last."""
    return _neighbour(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage; the last precedes the first."""
    return _neighbour(-1)


def get_tensor_model_parallel_world_size() -> int:
    """Tensor-parallel size."""
    if _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    return _size_of(get_tensor_model_parallel_group())


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in the tensor-parallel group."""
    if _MPU_TENSOR_MODEL_PARALLEL_RANK is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_RANK
    return _rank_in(get_tensor_model_parallel_group())


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    if _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    return _size_of(get_pipeline_model_parallel_group())


def get_pipeline_model_parallel_rank() -> int:
    """This rank's pipeline stage."""
    if _MPU_PIPELINE_MODEL_PARALLEL_RANK is not None:
        return _MPU_PIPELINE_MODEL_PARALLEL_RANK
    group = get_pipeline_model_parallel_group()
    try:
        return _numbers[group][0]
    except (KeyError, TypeError):  # of outside code's own group torch tells it, as on stock
        return dist.get_rank(group)


@as_released
def get_data_parallel_world_size(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """Data-parallel size; arguments as for the group."""
    if _MPU_DATA_PARALLEL_WORLD_SIZE is not None:
        return _MPU_DATA_PARALLEL_WORLD_SIZE
    return _size(_data_parallel, with_context_parallel, partial_data_parallel, with_gtp_remat)


@as_released
def get_data_parallel_rank(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """This rank's place in the data-parallel group; arguments as for the group."""
    if _MPU_DATA_PARALLEL_RANK is not None:
        return _MPU_DATA_PARALLEL_RANK
    return _rank(_data_parallel, with_context_parallel, partial_data_parallel, with_gtp_remat)


def get_context_parallel_world_size() -> int:
    """Context-parallel size."""
    return _size(get_context_parallel_group)


def get_context_parallel_rank() -> int:
    """This rank's place in the context-parallel group."""
    return _rank(get_context_parallel_group)


def get_tensor_and_context_parallel_world_size() -> int:
    """Size of the tensor x context parallel group."""
    return _size(get_tensor_and_context_parallel_group)


def get_tensor_and_context_parallel_rank() -> int:
    """This rank's place in the tensor x context parallel group."""
    return _rank(get_tensor_and_context_parallel_group)


def get_expert_model_parallel_world_size() -> int:
    """Expert-parallel size."""
    if _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE
    return _size(get_expert_model_parallel_group)


def get_expert_model_parallel_rank() -> int:
    """This rank's place in the expert-parallel group."""
    if _MPU_EXPERT_MODEL_PARALLEL_RANK is not None:
        return _MPU_EXPERT_MODEL_PARALLEL_RANK
    return _rank(get_expert_model_parallel_group)


def get_expert_tensor_parallel_world_size() -> int | None:
    """Expert tensor-parallel size."""
    if _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE is not None:
        return _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE
    if _EXPERT_TENSOR_PARALLEL_GROUP is None:
        return _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    return _size_of(get_expert_tensor_parallel_group())


def get_expert_tensor_parallel_rank() -> int | None:
    """This rank's place in the expert tensor-parallel group."""
    if _MPU_EXPERT_TENSOR_PARALLEL_RANK is not None:
        return _MPU_EXPERT_TENSOR_PARALLEL_RANK
    if _EXPERT_TENSOR_PARALLEL_GROUP is None:
        return _MPU_TENSOR_MODEL_PARALLEL_RANK
    return _rank_in(get_expert_tensor_parallel_group())


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Size of the expert tensor x expert parallel group."""
    return _size(get_expert_tensor_and_model_parallel_group)


def get_expert_tensor_and_model_parallel_rank() -> int:
    """This rank's place in the expert tensor x expert parallel group."""
    return _rank(get_expert_tensor_and_model_parallel_group)


@as_released
def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Expert-data-parallel size; arguments as for the group."""
    return _size(_expert_data_parallel, partial_expert_data_parallel, with_gtp_remat)


@as_released
def get_expert_data_parallel_rank(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """This rank's place in the expert-data-parallel group."""
    return _rank(_expert_data_parallel, partial_expert_data_parallel, with_gtp_remat)


def get_all_ranks() -> str:
    """This rank's places on the dims, joined by underscores; for names of files."""
    ranks = [get_tensor_model_parallel_rank()]
    if RELEASE_HAS["gtp_remat"]:
        ranks.append(get_gtp_weight_remat_rank())
    ranks += [
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    ]
    return "_".join(str(rank or 0) for rank in ranks)


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup:
    """Group of ``group_size`` consecutive data x context parallel ranks."""
    return _of_size("hybrid", _HYBRID_DP_CP_GROUPS, check_initialized, group_size)


def get_dynamic_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup:
    """Group of ``group_size`` consecutive data x context parallel ranks, of the branch dev."""
    return _of_size("dynamic", _DYNAMIC_DP_CP_GROUPS, check_initialized, group_size)


def _answers() -> bool:
    """Whether torch has a default group, as stock asks, or had one until an abort."""
    return dist.is_initialized() or was_aborted()


def _of_size(kind: str, groups: Any, check_initialized: bool, size: int | None) -> ProcessGroup:
    if get_data_parallel_world_size(with_context_parallel=True) == size:
        if _DATA_PARALLEL_GROUP_WITH_CP is None and check_initialized:
            raise missing("_DATA_PARALLEL_GROUP_WITH_CP")
        return _DATA_PARALLEL_GROUP_WITH_CP
    if groups is None and check_initialized:
        raise missing(f"_{kind}_DP_CP_GROUPS")
    if size not in groups:
        raise KeyError(
            f"there is no data x context parallel group of size {size!r}; sizes that exist: "
            f"{sorted(groups) or 'none'}. Initialise with {kind}_context_parallel=True."
        )
    return groups[size]


def _rank(getter: Callable[..., Any], *arguments: Any) -> int:
    """This rank's place in the group that a getter returns; as upstream, 0 without torch's."""
    if not _numbers and not _answers():
        return 0
    return _rank_in(getter(*arguments))


def _size(getter: Callable[..., Any], *arguments: Any) -> int:
    """The size of the group that a getter returns; as upstream, 0 without torch's."""
    if not _numbers and not _answers():
        return 0
    return _size_of(getter(*arguments))


def _rank_in(group: Any) -> int:
    """This rank's place in a group: known of those that the state made.

    Known, and not asked of the group: compiled code would keep the first answer for the groups of
    other states.
    """
    try:
        return _numbers[group][0]
    except (KeyError, TypeError):  # outside code's own group
        return group.rank()


def _size_of(group: Any) -> int:
    try:
        return _numbers[group][1]
    except (KeyError, TypeError):
        return group.size()


def _pipeline() -> list[Any]:
    if _PIPELINE_GLOBAL_RANKS is None:
        raise missing("_PIPELINE_GLOBAL_RANKS")
    return _PIPELINE_GLOBAL_RANKS


def _neighbour(step: int) -> int:
    """Global rank of the stage so many stages behind this one; the first follows the last."""
    ranks = _pipeline()
    stage = get_pipeline_model_parallel_rank() + step
    return ranks[stage % get_pipeline_model_parallel_world_size()]
