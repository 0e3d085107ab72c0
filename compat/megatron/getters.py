"""Every getter and setter of the module, each written out: a plain function over globals.

How it works. The same function runs over several namespaces, which are dicts with upstream's
private globals. ``bind_getters_to(names)`` makes functions of the same code whose globals are
``names``; they call each other by the names that are there:

    names = {"_TENSOR_MODEL_PARALLEL_GROUP": group, "_MPU_TENSOR_MODEL_PARALLEL_RANK": None}
    bind_getters_to(names)
    names["get_tensor_model_parallel_group"]()       # group
    names["_MPU_TENSOR_MODEL_PARALLEL_RANK"] = 3     # as outside code writes it
    names["get_tensor_model_parallel_rank"]()        # 3

The globals of ``compat.parallel_state`` are such a namespace: there are the values of the current
state, and outside code reads, writes and replaces there what it likes, as on stock. A state that is
not current has a namespace of its own, bound when it is first asked. A function that is called in
this module asks the current state. All are *local*: no communication.
"""

# ruff: noqa: F821 - upstream's private globals are in the namespaces, see ``bind_getters_to``
# mypy: disable-error-code="name-defined,index"

from __future__ import annotations

import functools
import warnings
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.megatron.buffers import memory_buffer, symmetric_memory_buffer
from compat.megatron.releases import RELEASE_HAS, as_released, drop_absent
from compat.megatron.request import warn_of_removal
from hypergrid.agreement.store import was_aborted
from hypergrid.errors import NoGroupsError


def get_global_memory_buffer() -> Any:
    """Megatron's buffer of reusable tensors."""
    if _GLOBAL_MEMORY_BUFFER is None:
        raise missing("_GLOBAL_MEMORY_BUFFER")
    return _GLOBAL_MEMORY_BUFFER


def _set_global_memory_buffer() -> None:
    """Make the memory buffer; AssertionError if there is one."""
    global _GLOBAL_MEMORY_BUFFER
    if _GLOBAL_MEMORY_BUFFER is not None:
        raise AssertionError("the global memory buffer is already initialized.")
    _GLOBAL_MEMORY_BUFFER = memory_buffer()


def destroy_global_memory_buffer() -> None:
    """Forget the memory buffer."""
    global _GLOBAL_MEMORY_BUFFER
    _GLOBAL_MEMORY_BUFFER = None


def get_global_symmetric_memory_buffer() -> Any:
    """Megatron 0.16's symmetric memory buffer for inference."""
    if _GLOBAL_SYMMETRIC_MEMORY_BUFFER is None:
        raise missing("_GLOBAL_SYMMETRIC_MEMORY_BUFFER")
    return _GLOBAL_SYMMETRIC_MEMORY_BUFFER


def _set_global_symmetric_memory_buffer() -> None:
    """Make the symmetric memory buffer; AssertionError if there is one."""
    global _GLOBAL_SYMMETRIC_MEMORY_BUFFER
    if _GLOBAL_SYMMETRIC_MEMORY_BUFFER is not None:
        raise AssertionError("the global symmetric memory buffer is already initialized.")
    _GLOBAL_SYMMETRIC_MEMORY_BUFFER = symmetric_memory_buffer(get_tensor_model_parallel_group())


def destroy_global_symmetric_memory_buffer() -> None:
    """Forget the symmetric memory buffer."""
    global _GLOBAL_SYMMETRIC_MEMORY_BUFFER
    _GLOBAL_SYMMETRIC_MEMORY_BUFFER = None


def get_moe_layer_wise_logging_tracker() -> dict[str, Any]:
    """Megatron 0.12's losses of experts by name, for logging."""
    return _MOE_LAYER_WISE_LOGGING_TRACKER


@as_released
def get_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group of this rank's model: tensor, GTP and pipeline parallel ranks."""
    if _MODEL_PARALLEL_GROUP is None and check_initialized:
        raise missing("_MODEL_PARALLEL_GROUP")
    return _MODEL_PARALLEL_GROUP


def get_tensor_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over tp: one layer's matrices are split over it."""
    if _TENSOR_MODEL_PARALLEL_GROUP is None and check_initialized:
        raise missing("_TENSOR_MODEL_PARALLEL_GROUP")
    return _TENSOR_MODEL_PARALLEL_GROUP


def get_gtp_weight_remat_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over gtp_remat: weights are sharded over it."""
    if _GTP_WEIGHT_REMAT_GROUP is None and check_initialized:
        raise missing("_GTP_WEIGHT_REMAT_GROUP")
    return _GTP_WEIGHT_REMAT_GROUP


@as_released
def get_pipeline_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over pp: the stages of one pipeline."""
    if _PIPELINE_MODEL_PARALLEL_GROUP is None and check_initialized:
        raise missing("_PIPELINE_MODEL_PARALLEL_GROUP")
    return _PIPELINE_MODEL_PARALLEL_GROUP


@as_released
def get_data_parallel_group(
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
    with_gtp_remat: bool = True,
) -> ProcessGroup:
    """Group over dp; optionally with cp, without gtp_remat, or of one optimizer instance."""
    if _gtp_remat and with_gtp_remat:
        return _data_parallel_with_remat(
            with_context_parallel, partial_data_parallel, independent_all_gather
        )
    if with_context_parallel:
        if partial_data_parallel:
            if _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP is None:
                raise missing("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP")
            return _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP
        if independent_all_gather:
            if _DATA_PARALLEL_GROUP_WITH_CP_AG is None:
                raise missing("_DATA_PARALLEL_GROUP_WITH_CP_AG")
            return _DATA_PARALLEL_GROUP_WITH_CP_AG
        if _DATA_PARALLEL_GROUP_WITH_CP is None:
            raise missing("_DATA_PARALLEL_GROUP_WITH_CP")
        return _DATA_PARALLEL_GROUP_WITH_CP
    if partial_data_parallel:
        raise _partial_without_cp()
    if _DATA_PARALLEL_GROUP is None:
        raise missing("_DATA_PARALLEL_GROUP")
    return _DATA_PARALLEL_GROUP


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Gloo twin of a data-parallel group."""
    if with_context_parallel:
        if partial_data_parallel:
            if _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO is None:
                raise missing("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO")
            return _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO
        if _DATA_PARALLEL_GROUP_WITH_CP_GLOO is None:
            raise missing("_DATA_PARALLEL_GROUP_WITH_CP_GLOO")
        return _DATA_PARALLEL_GROUP_WITH_CP_GLOO
    if partial_data_parallel:
        raise _partial_without_cp()
    if _DATA_PARALLEL_GROUP_GLOO is None:
        raise missing("_DATA_PARALLEL_GROUP_GLOO")
    return _DATA_PARALLEL_GROUP_GLOO


def has_separate_all_gather_group() -> bool:
    """Whether ``create_all_gather_group`` was asked for."""
    return _DATA_PARALLEL_GROUP_WITH_CP_AG is not None


def get_context_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over cp: one sequence is split over it."""
    if _CONTEXT_PARALLEL_GROUP is None and check_initialized:
        raise missing("_CONTEXT_PARALLEL_GROUP")
    return _CONTEXT_PARALLEL_GROUP


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[ProcessGroup]:
    """One group per level of hierarchical context parallelism, innermost first."""
    if _HIERARCHICAL_CONTEXT_PARALLEL_GROUPS is None and check_initialized:
        raise missing("_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS")
    return _HIERARCHICAL_CONTEXT_PARALLEL_GROUPS


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


@as_released
def get_embedding_group(check_initialized: bool = True) -> ProcessGroup:
    """Ranks of this pipeline that hold word embeddings."""
    if _EMBEDDING_GROUP is None and check_initialized:
        raise missing("_EMBEDDING_GROUP")
    return _EMBEDDING_GROUP


@as_released
def get_position_embedding_group(check_initialized: bool = True) -> ProcessGroup:
    """Ranks of this pipeline that hold position embeddings."""
    if _POSITION_EMBEDDING_GROUP is None and check_initialized:
        raise missing("_POSITION_EMBEDDING_GROUP")
    return _POSITION_EMBEDDING_GROUP


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup:
    """Group over which FP8 scaling factors are reduced."""
    if tp_only_amax_red and with_context_parallel:
        group = _TENSOR_AND_CONTEXT_PARALLEL_GROUP
    elif tp_only_amax_red:
        group = _TENSOR_MODEL_PARALLEL_GROUP
    elif with_context_parallel:
        group = _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP
    else:
        group = _TENSOR_AND_DATA_PARALLEL_GROUP
    if group is None:
        raise missing("_FP8_AMAX_REDUCTION_GROUP")
    return group


@as_released
def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup:
    """Group over tp and dp, optionally with cp."""
    if with_context_parallel:
        if _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP is None and check_initialized:
            raise missing("_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP")
        return _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP
    if _TENSOR_AND_DATA_PARALLEL_GROUP is None and check_initialized:
        raise missing("_TENSOR_AND_DATA_PARALLEL_GROUP")
    return _TENSOR_AND_DATA_PARALLEL_GROUP


@as_released
def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over tp and cp."""
    if _TENSOR_AND_CONTEXT_PARALLEL_GROUP is None and check_initialized:
        raise missing("_TENSOR_AND_CONTEXT_PARALLEL_GROUP")
    return _TENSOR_AND_CONTEXT_PARALLEL_GROUP


def get_expert_gtp_weight_remat_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over the expert grid's gtp_remat."""
    if _EXPERT_GTP_WEIGHT_REMAT_GROUP is None and check_initialized:
        raise missing("_EXPERT_GTP_WEIGHT_REMAT_GROUP")
    return _EXPERT_GTP_WEIGHT_REMAT_GROUP


def get_expert_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over ep: the experts are spread over it."""
    if _EXPERT_MODEL_PARALLEL_GROUP is None and check_initialized:
        raise missing("_EXPERT_MODEL_PARALLEL_GROUP")
    return _EXPERT_MODEL_PARALLEL_GROUP


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over the expert grid's tp."""
    if _EXPERT_TENSOR_PARALLEL_GROUP is None and check_initialized:
        raise missing("_EXPERT_TENSOR_PARALLEL_GROUP")
    return _EXPERT_TENSOR_PARALLEL_GROUP


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over the expert grid's tp and ep."""
    if _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP is None and check_initialized:
        raise missing("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
    return _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP


@as_released
def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup:
    """Group over the expert grid's tp, ep and pp, optionally with gtp_remat."""
    if with_egtp_remat:
        if _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP is None and check_initialized:
            raise missing("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP")
        return _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP
    if _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP is None and check_initialized:
        raise missing("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP")
    return _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP


@as_released
def get_expert_data_parallel_group(
    check_initialized: bool = True,
    partial_expert_data_parallel: bool = False,
    with_gtp_remat: bool = True,
) -> ProcessGroup:
    """Group over the expert grid's dp; optionally without gtp_remat, or of one instance."""
    if _expert_gtp_remat and with_gtp_remat:
        return _expert_data_parallel_with_remat(check_initialized, partial_expert_data_parallel)
    if partial_expert_data_parallel:
        if _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP is None and check_initialized:
            raise missing("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP")
        return _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP
    if _EXPERT_DATA_PARALLEL_GROUP is None and check_initialized:
        raise missing("_EXPERT_DATA_PARALLEL_GROUP")
    return _EXPERT_DATA_PARALLEL_GROUP


@as_released
def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Gloo twin of an expert-data-parallel group."""
    if partial_expert_data_parallel:
        if _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO is None:
            raise missing("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO")
        return _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO
    if _EXPERT_DATA_PARALLEL_GROUP_GLOO is None:
        raise missing("_EXPERT_DATA_PARALLEL_GROUP_GLOO")
    return _EXPERT_DATA_PARALLEL_GROUP_GLOO


@as_released
def get_data_modulo_expert_parallel_group(
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup:
    """Former name of the expert-data-parallel group."""
    warnings.warn(
        "get_data_modulo_expert_parallel_group is deprecated: use get_expert_data_parallel_group.",
        DeprecationWarning,
        stacklevel=2,
    )
    return _expert_data_parallel(partial_expert_data_parallel, True)


@as_released
def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup:
    """All ranks of this rank's distributed-optimizer instance."""
    if _INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP is None and check_initialized:
        raise missing("_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP")
    return _INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP


@as_released
def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup:
    """Ranks with this rank's place in each optimizer instance."""
    if _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP is None and check_initialized:
        raise missing("_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP")
    return _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP


def get_inter_partial_data_parallel_group() -> ProcessGroup:
    """Megatron 0.12's ranks with this rank's place in each optimizer instance, dense layers."""
    if _INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP is None:
        raise missing("_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP")
    return _INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP


def get_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int]:
    """Global ranks of the gtp_remat group."""
    if _GTP_WEIGHT_REMAT_GLOBAL_RANKS is None and check_initialized:
        raise missing("_GTP_WEIGHT_REMAT_GLOBAL_RANKS")
    return _GTP_WEIGHT_REMAT_GLOBAL_RANKS


def get_expert_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int]:
    """Global ranks of the expert gtp_remat group."""
    if _EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS is None and check_initialized:
        raise missing("_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS")
    return _EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS


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
    if _several:
        return _first_of_several()
    try:  # costs less than to ask first
        return _PIPELINE_GLOBAL_RANKS[0]
    except TypeError:
        if _PIPELINE_GLOBAL_RANKS is None:
            raise missing("_PIPELINE_GLOBAL_RANKS") from None
        raise


def get_pipeline_model_parallel_last_rank() -> int | list[int]:
    """Global rank of this pipeline's last stage; a list on an encoder's rank in several."""
    ranks = _pipeline()
    return _at(ranks, get_pipeline_model_parallel_world_size() - 1)


def get_pipeline_model_parallel_next_rank() -> int | list[int]:
    """Global rank of the next stage; the first follows the last."""
    ranks = _pipeline()
    stage = get_pipeline_model_parallel_rank()
    return _at(ranks, (stage + 1) % get_pipeline_model_parallel_world_size())


def get_pipeline_model_parallel_prev_rank() -> int | list[int]:
    """Global rank of the previous stage; the last precedes the first."""
    ranks = _pipeline()
    stage = get_pipeline_model_parallel_rank()
    return _at(ranks, (stage - 1) % get_pipeline_model_parallel_world_size())


def get_tensor_model_parallel_world_size() -> int:
    """Tensor-parallel size."""
    if _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    group = get_tensor_model_parallel_group()
    return _tp[2] if group is _tp[0] else _size_of(group)


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in the tensor-parallel group."""
    if _MPU_TENSOR_MODEL_PARALLEL_RANK is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_RANK
    group = get_tensor_model_parallel_group()
    return _tp[1] if group is _tp[0] else _rank_in(group)


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    if _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    group = get_pipeline_model_parallel_group()
    return _pp[2] if group is _pp[0] else _size_of(group)


def get_pipeline_model_parallel_rank() -> int:
    """This rank's pipeline stage."""
    if _MPU_PIPELINE_MODEL_PARALLEL_RANK is not None:
        return _MPU_PIPELINE_MODEL_PARALLEL_RANK
    if not _numbers and RELEASE_HAS["stage_asks_torch"]:
        dist.get_rank()
    group = get_pipeline_model_parallel_group()
    return _pp[1] if group is _pp[0] else _rank_in(group, RELEASE_HAS["stage_from_torch"])


@as_released
def get_data_parallel_world_size(
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
    with_gtp_remat: bool = True,
) -> int:
    """Data-parallel size; arguments as for the group."""
    if _MPU_DATA_PARALLEL_WORLD_SIZE is not None:
        return _MPU_DATA_PARALLEL_WORLD_SIZE
    if not _numbers and not _answers():
        return 0
    return _size_of(_data_parallel(with_context_parallel, partial_data_parallel, with_gtp_remat))


@as_released
def get_data_parallel_rank(
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
    with_gtp_remat: bool = True,
) -> int:
    """This rank's place in the data-parallel group; arguments as for the group."""
    if _MPU_DATA_PARALLEL_RANK is not None:
        return _MPU_DATA_PARALLEL_RANK
    if not _numbers and not _answers():
        return 0
    return _rank_in(_data_parallel(with_context_parallel, partial_data_parallel, with_gtp_remat))


def get_context_parallel_world_size() -> int:
    """Context-parallel size."""
    if not _numbers and not _answers():
        return 0
    return _size_of(get_context_parallel_group())


def get_context_parallel_rank() -> int:
    """This rank's place in the context-parallel group."""
    if not _numbers and not _answers():
        return 0
    return _rank_in(get_context_parallel_group())


def get_tensor_and_context_parallel_world_size() -> int:
    """Size of the tensor x context parallel group."""
    if not _numbers and not _answers():
        return 0
    return _size_of(get_tensor_and_context_parallel_group())


def get_tensor_and_context_parallel_rank() -> int:
    """This rank's place in the tensor x context parallel group."""
    if not _numbers and not _answers():
        return 0
    return _rank_in(get_tensor_and_context_parallel_group())


def get_gtp_weight_remat_world_size() -> int:
    """gtp_remat size; 0 where there is no such group."""
    if not _numbers and not _answers():
        return 0
    group = get_gtp_weight_remat_group(check_initialized=False)
    if group is None:
        return 0
    return _size_of(group)


def get_gtp_weight_remat_rank() -> int:
    """This rank's place in the gtp_remat group; 0 where there is none."""
    if not _numbers and not _answers():
        return 0
    group = get_gtp_weight_remat_group(check_initialized=False)
    if group is None:
        return 0
    return _rank_in(group)


def get_expert_gtp_weight_remat_world_size() -> int:
    """Expert gtp_remat size; 0 where there is no such group."""
    if not _numbers and not _answers():
        return 0
    group = get_expert_gtp_weight_remat_group(check_initialized=False)
    if group is None:
        return 0
    return _size_of(group)


def get_expert_gtp_weight_remat_rank() -> int:
    """This rank's place in the expert gtp_remat group; 0 where there is none."""
    if not _numbers and not _answers():
        return 0
    group = get_expert_gtp_weight_remat_group(check_initialized=False)
    if group is None:
        return 0
    return _rank_in(group)


def get_expert_model_parallel_world_size() -> int:
    """Expert-parallel size."""
    if _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE
    if not _numbers and not _answers():
        return 0
    return _size_of(get_expert_model_parallel_group())


def get_expert_model_parallel_rank() -> int:
    """This rank's place in the expert-parallel group."""
    if _MPU_EXPERT_MODEL_PARALLEL_RANK is not None:
        return _MPU_EXPERT_MODEL_PARALLEL_RANK
    if not _numbers and not _answers():
        return 0
    return _rank_in(get_expert_model_parallel_group())


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
    if not _numbers and not _answers():
        return 0
    return _size_of(get_expert_tensor_and_model_parallel_group())


def get_expert_tensor_and_model_parallel_rank() -> int:
    """This rank's place in the expert tensor x expert parallel group."""
    if not _numbers and not _answers():
        return 0
    return _rank_in(get_expert_tensor_and_model_parallel_group())


@as_released
def get_expert_data_parallel_world_size(
    partial_expert_data_parallel: bool = False, with_gtp_remat: bool = True
) -> int:
    """Expert-data-parallel size; arguments as for the group."""
    if not _numbers and not _answers():
        return 0
    return _size_of(_expert_data_parallel(partial_expert_data_parallel, with_gtp_remat))


@as_released
def get_expert_data_parallel_rank(
    partial_expert_data_parallel: bool = False, with_gtp_remat: bool = True
) -> int:
    """This rank's place in the expert-data-parallel group."""
    if not _numbers and not _answers():
        return 0
    return _rank_in(_expert_data_parallel(partial_expert_data_parallel, with_gtp_remat))


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


def is_initialized() -> bool:
    """Whether this rank has a data-parallel group."""
    return _DATA_PARALLEL_GROUP is not None


def model_parallel_is_initialized() -> bool:
    """Whether this rank has tensor-, pipeline- and data-parallel groups."""
    if (  # noqa: SIM103 - the condition's value would cost more
        _TENSOR_MODEL_PARALLEL_GROUP is not None
        and _PIPELINE_MODEL_PARALLEL_GROUP is not None
        and _DATA_PARALLEL_GROUP is not None
    ):
        return True
    return False


def is_unitialized() -> bool:
    """The opposite of ``is_initialized``; deprecated."""
    warnings.warn("is_unitialized is deprecated: use is_initialized.", DeprecationWarning, 2)
    return not is_initialized()


@as_released
def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or its virtual stage, begins the pipeline."""
    if not ignore_virtual:
        stages, virtual = _virtual_stage(vp_stage)
        if stages is not None and virtual != 0:
            return False
    return get_pipeline_model_parallel_rank() == 0


@as_released
def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or its virtual stage, ends the pipeline."""
    if not ignore_virtual:
        stages, virtual = _virtual_stage(vp_stage)
        if stages is not None and virtual != stages - 1:
            return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


@as_released
def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or its virtual stage, holds word embeddings."""
    rank = dist.get_rank()
    if _EMBEDDING_GLOBAL_RANKS is None or rank not in _EMBEDDING_GLOBAL_RANKS:
        return False
    staged = {"vp_stage": vp_stage} if RELEASE_HAS["vp_stage"] else {}
    if not ignore_virtual and rank == _EMBEDDING_GLOBAL_RANKS[0]:
        return is_pipeline_first_stage(ignore_virtual=False, **staged)
    if not ignore_virtual and rank == _EMBEDDING_GLOBAL_RANKS[-1]:
        return is_pipeline_last_stage(ignore_virtual=False, **staged)
    return True


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds position embeddings."""
    rank = dist.get_rank()
    return _POSITION_EMBEDDING_GLOBAL_RANKS is not None and rank in _POSITION_EMBEDDING_GLOBAL_RANKS


def get_pipeline_model_parallel_split_rank() -> int | None:
    """The stage at which the pipeline was split, or None."""
    return _PIPELINE_MODEL_PARALLEL_SPLIT_RANK


def get_pipeline_model_parallel_decoder_start() -> int | None:
    """The decoder's first stage after an encoder on ranks of its own; None without one."""
    _of_encoder("get_pipeline_model_parallel_decoder_start")
    return _PIPELINE_MODEL_PARALLEL_DECODER_START


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Whether a stage, this rank's unless given, comes before the split."""
    _of_encoder("is_pipeline_stage_before_split")
    stage = _stage(rank)
    split = _PIPELINE_MODEL_PARALLEL_SPLIT_RANK
    return stage is None or split is None or stage < split


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Whether a stage comes after the split."""
    _of_encoder("is_pipeline_stage_after_split")
    stage = _stage(rank)
    split = _PIPELINE_MODEL_PARALLEL_SPLIT_RANK
    return stage is None or split is None or stage >= split


def is_pipeline_stage_at_split() -> bool:
    """Whether this rank's stage is the last before the split."""
    _of_encoder("is_pipeline_stage_at_split")
    stage = get_pipeline_model_parallel_rank()
    return is_pipeline_stage_before_split(stage) and is_pipeline_stage_after_split(stage + 1)


def is_inside_encoder(rank: int | None = None) -> bool:
    """Whether a stage, this rank's unless given, belongs to the encoder."""
    _of_encoder("is_inside_encoder")
    stage = _stage(rank)
    start = _PIPELINE_MODEL_PARALLEL_DECODER_START
    if stage is None:
        return True
    if start is None:  # without an encoder on ranks of its own, it is in the first stage
        return stage == 0
    return stage < start


def is_inside_decoder(rank: int | None = None) -> bool:
    """Whether a stage belongs to the decoder."""
    _of_encoder("is_inside_decoder")
    stage = _stage(rank)
    start = _PIPELINE_MODEL_PARALLEL_DECODER_START
    return stage is None or start is None or stage >= start


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The virtual stage that was set, or None."""
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Virtual stages per rank, or None."""
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Make the tensor-parallel size return this; None removes that."""
    global _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = world_size


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Make the tensor-parallel rank return this; None removes that."""
    global _MPU_TENSOR_MODEL_PARALLEL_RANK
    _MPU_TENSOR_MODEL_PARALLEL_RANK = rank


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Make the pipeline size return this; None removes that."""
    global _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = world_size


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Make the pipeline rank return this; None removes that."""
    global _MPU_PIPELINE_MODEL_PARALLEL_RANK
    _MPU_PIPELINE_MODEL_PARALLEL_RANK = rank


def set_pipeline_model_parallel_split_rank(rank: int | None) -> None:
    """Set the stage at which the pipeline is split."""
    global _PIPELINE_MODEL_PARALLEL_SPLIT_RANK
    _PIPELINE_MODEL_PARALLEL_SPLIT_RANK = rank


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of virtual stages per rank."""
    global _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = world_size


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the virtual stage. Deprecated: pass ``vp_stage`` instead."""
    global _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK
    if RELEASE_HAS["vp_stage"]:
        warnings.warn(
            "set_virtual_pipeline_model_parallel_rank is deprecated: pass vp_stage to "
            "is_pipeline_first_stage() and its like.",
            DeprecationWarning,
            stacklevel=2,
        )
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = rank


def set_data_parallel_rank(rank: int | None) -> None:
    """Make every data-parallel rank return this; None removes that."""
    global _MPU_DATA_PARALLEL_RANK
    _MPU_DATA_PARALLEL_RANK = rank


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """Make the expert-parallel size return this; None removes that."""
    global _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE
    _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE = world_size


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """Make the expert-parallel rank return this; None removes that."""
    global _MPU_EXPERT_MODEL_PARALLEL_RANK
    _MPU_EXPERT_MODEL_PARALLEL_RANK = rank


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """Make the expert tensor-parallel size return this; None removes that."""
    global _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE
    _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE = world_size


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """Make the expert tensor-parallel rank return this; None removes that."""
    global _MPU_EXPERT_TENSOR_PARALLEL_RANK
    _MPU_EXPERT_TENSOR_PARALLEL_RANK = rank


def _answers() -> bool:
    """Whether torch has a default group, as stock asks, or had one until an abort."""
    return dist.is_initialized() or was_aborted()


def missing(slot: str) -> AssertionError:
    """The error for a group that does not exist."""
    name = slot.strip("_").replace("_", " ").lower()
    if was_aborted():
        return NoGroupsError(
            f"{name} does not exist any more: hypergrid.abort() has ended the groups of this "
            f"process. Create new ones, and load the last checkpoint."
        )
    return AssertionError(
        f"{name} is not initialized: no model parallel state with such a group is current. Call "
        f"initialize_model_parallel() first, with the sizes that make this group."
    )


def _partial_without_cp() -> AssertionError:
    return AssertionError(
        "a partial data-parallel group includes context parallelism: pass "
        "with_context_parallel=True with partial_data_parallel=True."
    )


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


def _data_parallel_with_remat(with_cp: bool, partial: bool, all_gather: bool) -> ProcessGroup:
    if partial and not with_cp:
        raise _partial_without_cp()
    if partial:
        group = _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT
    elif with_cp and all_gather:
        group = _DATA_PARALLEL_GROUP_WITH_CP_AG
    elif with_cp:
        group = _DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT
    else:
        group = _DATA_PARALLEL_GROUP_WITH_GTP_REMAT
    if group is None:
        raise missing("_DATA_PARALLEL_GROUP_WITH_GTP_REMAT")
    return group


def _expert_data_parallel_with_remat(check_initialized: bool, partial: bool) -> ProcessGroup:
    group = _EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT
    if partial:
        group = _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT
    if group is None and check_initialized:
        raise missing("_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT")
    return group


def _of_encoder(name: str) -> None:
    warn_of_removal(f"{name} is", stacklevel=3)


def _data_parallel(with_cp: bool, partial: bool, remat: bool) -> ProcessGroup:
    """The group by its getter, with the arguments that the release has."""
    if RELEASE_HAS["gtp_remat"] or not remat:
        return get_data_parallel_group(
            with_context_parallel=with_cp, partial_data_parallel=partial, with_gtp_remat=remat
        )
    return get_data_parallel_group(with_context_parallel=with_cp, partial_data_parallel=partial)


def _expert_data_parallel(partial: bool, remat: bool) -> ProcessGroup:
    if RELEASE_HAS["gtp_remat"] or not remat:
        return get_expert_data_parallel_group(
            partial_expert_data_parallel=partial, with_gtp_remat=remat
        )
    if RELEASE_HAS["instances_in_expert"]:
        return get_expert_data_parallel_group(partial_expert_data_parallel=partial)
    return get_expert_data_parallel_group()


def _rank_in(group: Any, from_torch: bool = False) -> int:
    """This rank's place in a group: known of those that the state made."""
    try:
        return _numbers[group][0]
    except (KeyError, TypeError):
        # Outside code's own group, or a list of pipelines: an encoder's rank is at the same stage
        # of each.
        if isinstance(group, list):
            group = group[0]
    if from_torch or RELEASE_HAS["numbers_from_torch"]:
        return dist.get_rank(group)
    return group.rank()


def _size_of(group: Any) -> int:
    try:
        return _numbers[group][1]
    except (KeyError, TypeError):
        if isinstance(group, list):
            group = group[0]
    if RELEASE_HAS["numbers_from_torch"]:
        return dist.get_world_size(group)
    return group.size()


def _pipeline() -> list[Any]:
    if _PIPELINE_GLOBAL_RANKS is None:
        raise missing("_PIPELINE_GLOBAL_RANKS")
    return _PIPELINE_GLOBAL_RANKS


def _first_of_several() -> int:
    pipeline = _pipeline()
    if isinstance(pipeline[0], list):
        pipeline = pipeline[0]
    return pipeline[0]


def _at(ranks: list[Any], stage: int) -> Any:
    """The rank at a stage; one for each pipeline where there are several."""
    if isinstance(ranks[0], list):
        return [pipeline[stage] for pipeline in ranks]
    return ranks[stage]


def _stage(rank: int | None) -> int | None:
    """``rank``, or else this rank's stage; None if the pipeline has one stage."""
    if get_pipeline_model_parallel_world_size() == 1:
        return None
    if rank is None:
        return get_pipeline_model_parallel_rank()
    return rank


def _virtual_stage(vp_stage: int | None) -> tuple[int | None, int | None]:
    """Virtual stages per rank, and the one that is asked about."""
    stages = get_virtual_pipeline_model_parallel_world_size()
    if stages is not None and vp_stage is None:
        # Before the argument, the stage that was set last counts.
        if not RELEASE_HAS["vp_stage"]:
            return stages, get_virtual_pipeline_model_parallel_rank()
        raise AssertionError(
            f"virtual pipelines are on ({stages} stages per rank): pass vp_stage, or "
            f"ignore_virtual=True."
        )
    return stages, vp_stage


drop_absent(globals())
_WRITTEN = {name: value for name, value in globals().items() if not name.startswith("__")}
FUNCTIONS = {
    name: value
    for name, value in _WRITTEN.items()
    if isinstance(value, FunctionType) and value.__module__ == __name__
}
SETTERS = ("set_", "_set_", "destroy_")  # so begin the names of functions that change something
answering: dict[str, FunctionType] = {}  # the functions over the values of the current state


def bind_getters_to(names: dict[str, Any]) -> dict[str, FunctionType]:
    """Put the functions into ``names``, which become their globals; and give them by name."""
    functions = {}
    for name, written in FUNCTIONS.items():
        function = FunctionType(written.__code__, names, name, written.__defaults__)
        function.__kwdefaults__ = written.__kwdefaults__
        functools.update_wrapper(function, written, ("__annotations__", "__doc__", "__qualname__"))
        del function.__wrapped__  # type: ignore[attr-defined]
        functions[name] = function
    # The modules that the functions use are among their globals too. What ``names`` has stays.
    names.update({**_WRITTEN, **names, **functions})
    return functions


def answer_from(names: dict[str, Any]) -> None:
    """Let the functions answer from ``names``, where the values of the current state are."""
    answering.update(bind_getters_to(names))


def _asking_the_current_state(written: FunctionType) -> Any:
    name = written.__name__

    @functools.wraps(written)
    def function(*args: Any, **kwargs: Any) -> Any:
        if name not in answering:
            raise AssertionError(
                f"{name}() has no state to answer from: import compat.parallel_state first."
            )
        return answering[name](*args, **kwargs)

    return function


for _name, _function in FUNCTIONS.items():
    globals()[_name] = _asking_the_current_state(_function)
