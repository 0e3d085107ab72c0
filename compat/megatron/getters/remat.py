"""Getters of releases whose grids have an axis gtp_remat, over which weights are sharded.

Those with the name of another file's getter are in its place.
"""

# ruff: noqa: F821 - upstream's private globals are in the namespaces, see the package
# mypy: disable-error-code="name-defined,index"

from __future__ import annotations

from torch.distributed import ProcessGroup

from compat.megatron.getters.groups import _partial_without_cp, missing
from compat.megatron.getters.numbers import _rank, _size
from compat.megatron.releases import as_released


def get_gtp_weight_remat_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over gtp_remat: weights are sharded over it."""
    if _GTP_WEIGHT_REMAT_GROUP is None and check_initialized:
        raise missing("_GTP_WEIGHT_REMAT_GROUP")
    return _GTP_WEIGHT_REMAT_GROUP


def get_expert_gtp_weight_remat_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over the expert grid's gtp_remat."""
    if _EXPERT_GTP_WEIGHT_REMAT_GROUP is None and check_initialized:
        raise missing("_EXPERT_GTP_WEIGHT_REMAT_GROUP")
    return _EXPERT_GTP_WEIGHT_REMAT_GROUP


@as_released
def get_data_parallel_group(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> ProcessGroup:
    """Group over dp; optionally with cp, without gtp_remat, or of one optimizer instance."""
    if partial_data_parallel and not with_context_parallel:
        raise _partial_without_cp()
    if with_gtp_remat:
        if partial_data_parallel:
            group = _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT
        elif with_context_parallel:
            group = _DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT
        else:
            group = _DATA_PARALLEL_GROUP_WITH_GTP_REMAT
    elif partial_data_parallel:
        group = _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP
    elif with_context_parallel:
        group = _DATA_PARALLEL_GROUP_WITH_CP
    else:
        group = _DATA_PARALLEL_GROUP
    if group is None:
        raise missing("_DATA_PARALLEL_GROUP")
    return group


@as_released
def get_expert_data_parallel_group(
    check_initialized: bool = True,
    with_gtp_remat: bool = True,
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup:
    """Group over the expert grid's dp; optionally without gtp_remat, or of one instance."""
    if with_gtp_remat:
        group = _EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT
        if partial_expert_data_parallel:
            group = _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT
    elif partial_expert_data_parallel:
        group = _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP
    else:
        group = _EXPERT_DATA_PARALLEL_GROUP
    if group is None and check_initialized:
        raise missing("_EXPERT_DATA_PARALLEL_GROUP")
    return group


@as_released
def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup:
    """Group over the expert grid's tp, ep and pp, optionally with gtp_remat."""
    group = _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP
    if with_egtp_remat:
        group = _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP
    if group is None and check_initialized:
        raise missing("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP")
    return group


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


def get_gtp_weight_remat_world_size() -> int:
    """gtp_remat size; 0 where there is no such group."""
    if get_gtp_weight_remat_group(False) is None:
        return 0
    return _size(get_gtp_weight_remat_group, False)


def get_gtp_weight_remat_rank() -> int:
    """This rank's place in the gtp_remat group; 0 where there is none."""
    if get_gtp_weight_remat_group(False) is None:
        return 0
    return _rank(get_gtp_weight_remat_group, False)


def get_expert_gtp_weight_remat_world_size() -> int:
    """Expert gtp_remat size; 0 where there is no such group."""
    if get_expert_gtp_weight_remat_group(False) is None:
        return 0
    return _size(get_expert_gtp_weight_remat_group, False)


def get_expert_gtp_weight_remat_rank() -> int:
    """This rank's place in the expert gtp_remat group; 0 where there is none."""
    if get_expert_gtp_weight_remat_group(False) is None:
        return 0
    return _rank(get_expert_gtp_weight_remat_group, False)


def _data_parallel(with_cp: bool, partial: bool, remat: bool) -> ProcessGroup:
    return get_data_parallel_group(
        with_context_parallel=with_cp, partial_data_parallel=partial, with_gtp_remat=remat
    )


def _expert_data_parallel(partial: bool, remat: bool) -> ProcessGroup:
    return get_expert_data_parallel_group(
        partial_expert_data_parallel=partial, with_gtp_remat=remat
    )
