"""The groups of this rank, each from the private global that holds it."""

# ruff: noqa: F821 - upstream's private globals are in the namespaces, see the package
# mypy: disable-error-code="name-defined,index"

from __future__ import annotations

import warnings

from torch.distributed import ProcessGroup

from compat.megatron.releases import as_released
from hypergrid.agreement.store import was_aborted
from hypergrid.errors import NoGroupsError


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
) -> ProcessGroup:
    """Group over dp; optionally with cp, or of one optimizer instance."""
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


def get_embedding_group(check_initialized: bool = True) -> ProcessGroup:
    """Ranks of this pipeline that hold word embeddings."""
    if _EMBEDDING_GROUP is None and check_initialized:
        raise missing("_EMBEDDING_GROUP")
    return _EMBEDDING_GROUP


def get_position_embedding_group(check_initialized: bool = True) -> ProcessGroup:
    """Ranks of this pipeline that hold position embeddings."""
    if _POSITION_EMBEDDING_GROUP is None and check_initialized:
        raise missing("_POSITION_EMBEDDING_GROUP")
    return _POSITION_EMBEDDING_GROUP


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup:
    """Group over which FP8 scaling factors are reduced."""
    if with_context_parallel:
        if not tp_only_amax_red:
            if _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP is None:
                raise missing("_FP8_AMAX_REDUCTION_GROUP")
            return _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP
        if _TENSOR_AND_CONTEXT_PARALLEL_GROUP is None:
            raise missing("_FP8_AMAX_REDUCTION_GROUP")
        return _TENSOR_AND_CONTEXT_PARALLEL_GROUP
    if not tp_only_amax_red:
        if _TENSOR_AND_DATA_PARALLEL_GROUP is None:
            raise missing("_FP8_AMAX_REDUCTION_GROUP")
        return _TENSOR_AND_DATA_PARALLEL_GROUP
    if _TENSOR_MODEL_PARALLEL_GROUP is None:
        raise missing("_FP8_AMAX_REDUCTION_GROUP")
    return _TENSOR_MODEL_PARALLEL_GROUP


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


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over tp and cp."""
    if _TENSOR_AND_CONTEXT_PARALLEL_GROUP is None and check_initialized:
        raise missing("_TENSOR_AND_CONTEXT_PARALLEL_GROUP")
    return _TENSOR_AND_CONTEXT_PARALLEL_GROUP


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


def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over the expert grid's tp, ep and pp."""
    if _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP is None and check_initialized:
        raise missing("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP")
    return _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup:
    """Group over the expert grid's dp; optionally of one optimizer instance."""
    if partial_expert_data_parallel:
        if _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP is None and check_initialized:
            raise missing("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP")
        return _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP
    if _EXPERT_DATA_PARALLEL_GROUP is None and check_initialized:
        raise missing("_EXPERT_DATA_PARALLEL_GROUP")
    return _EXPERT_DATA_PARALLEL_GROUP


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Gloo twin of an expert-data-parallel group."""
    if partial_expert_data_parallel:
        if _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO is None:
            raise missing("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO")
        return _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO
    if _EXPERT_DATA_PARALLEL_GROUP_GLOO is None:
        raise missing("_EXPERT_DATA_PARALLEL_GROUP_GLOO")
    return _EXPERT_DATA_PARALLEL_GROUP_GLOO


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


def missing(slot: str) -> AssertionError:
    """The error for a group that does not exist."""
    name = slot.strip("_").replace("_", " ").lower()
    if was_aborted():
        return NoGroupsError(
            f"{name} does not exist any more: hypergrid.abort() has ended the groups of this "
            f"process. Create new ones, and load the last checkpoint."
        )
    if _absence:
        return AssertionError(f"{name} is not initialized on this rank: {_absence}")
    return AssertionError(
        f"{name} is not initialized: no model parallel state with such a group is current. Call "
        f"initialize_model_parallel() first, with the sizes that make this group."
    )


def _partial_without_cp() -> AssertionError:
    return AssertionError(
        "a partial data-parallel group includes context parallelism: pass "
        "with_context_parallel=True with partial_data_parallel=True."
    )


def _data_parallel(with_cp: bool, partial: bool, remat: bool) -> ProcessGroup:
    """The group by its getter, with the arguments that the release has: none for gtp_remat."""
    return get_data_parallel_group(with_context_parallel=with_cp, partial_data_parallel=partial)


def _expert_data_parallel(partial: bool, remat: bool) -> ProcessGroup:
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial)
