"""Replaces ``megatron.core.parallel_state``: short functions over the current ParallelState.

Every function answers as megatron-core does; where releases disagree, as the installed one. All
are *local* unless they say otherwise. The private globals that outside code reads and writes
(``_TENSOR_MODEL_PARALLEL_GROUP`` ...) read and write through to the current state.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.megatron import replaced
from compat.megatron.build import environment_restored_on_failure
from compat.megatron.communicators import get_nccl_options as get_nccl_options
from compat.megatron.communicators import overwrite_nccl_comm_cfgs as overwrite_nccl_comm_cfgs
from compat.megatron.getters import Getters
from compat.megatron.helpers import create_group as create_group
from compat.megatron.helpers import create_hierarchical_groups as create_hierarchical_groups
from compat.megatron.helpers import (
    create_hierarchical_parallel_groups as create_hierarchical_parallel_groups,
)
from compat.megatron.helpers import create_hybrid_dp_cp_groups as create_hybrid_dp_cp_groups
from compat.megatron.order import asked
from compat.megatron.planning import Request
from compat.megatron.rank_generator import RankGenerator as RankGenerator
from compat.megatron.rank_generator import default_embedding_ranks as default_embedding_ranks
from compat.megatron.rank_generator import (
    default_position_embedding_ranks as default_position_embedding_ranks,
)
from compat.megatron.rank_generator import (
    generate_masked_orthogonal_rank_groups as generate_masked_orthogonal_rank_groups,
)
from compat.megatron.rank_generator import inject_gtp_remat_axis as _inject_gtp_remat_axis  # noqa: F401
from compat.megatron.releases import as_released
from compat.report import report
from compat.state import SLOTS, ParallelState, current, make_current, speak_through
from compat.swap import warn_of_a_second_state

_current = current()  # what every function here asks; kept up to date by compat.state
_lives = itertools.count(1)


def current_state() -> ParallelState:
    """The state that this module's functions answer from; at first one without groups."""
    return _current


@as_released
def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_split_rank: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = "tp-cp-ep-dp-pp",
    encoder_tensor_model_parallel_size: int = 0,
    encoder_pipeline_model_parallel_size: int | None = 0,
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    get_position_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: list[str] | None = None,
    sharp_enabled_group: str | None = None,
    create_all_gather_group: bool | None = False,
    rank_offset: int = 0,
    local_world_size: int | None = None,
    *,
    share: str | None = None,
    connect: str | None = None,
    creation: str | None = None,
) -> None:
    """Build the groups of one model and make them what every getter answers from.

    *Collective* over the window of ranks, which is the world unless ``rank_offset`` and
    ``local_world_size`` say otherwise. After an error there are no groups and the environment is
    as before.

    Parameters
    ----------
    tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size : int
        Sizes of the decoder grid's dims; dp is the world size divided by their product.
    expert_model_parallel_size, expert_tensor_parallel_size : int
        Sizes of the expert grid's dims. The expert tp is the tensor-parallel size unless given.
    virtual_pipeline_model_parallel_size : int, optional
        Virtual stages per rank.
    pipeline_model_parallel_split_rank : int, optional
        As megatron-core 0.12 and 0.13: the stage where an encoder ends, which has embeddings too.
    pipeline_model_parallel_comm_backend : {"nccl", "ucc"}, optional
        Backend of the pipeline's group.
    hierarchical_context_parallel_sizes : list of int, optional
        Sizes of the levels, innermost first; their product is the context-parallel size.
    hybrid_context_parallel : bool
        Also make data x context parallel groups of every power of two.
    gtp_remat_size, expert_gtp_remat_size : int
        Ranks over which weights are sharded; a dim of its own in each grid.
    num_distributed_optimizer_instances : int
        Cut the data-parallel ranks into so many instances of the distributed optimizer.
    nccl_communicator_config_path : str, optional
        YAML file: group name to ``max_ctas``, ``min_ctas``, ``cga_cluster_size``, ``net_name``.
    high_priority_stream_groups : list of str, optional
        Names, as in that file, whose communication runs on high-priority streams.
    distributed_timeout_minutes : float
        Timeout of the groups, and of waiting for the other ranks to reach initialisation.
    order : str
        Dims from fastest to slowest. ``HYPERGRID_ORDER`` in the environment takes precedence.
    encoder_tensor_model_parallel_size, encoder_pipeline_model_parallel_size : int
        As megatron-core 0.12 and 0.13: an encoder of so many stages on ranks of its own, before
        the decoder's. On its ranks in several pipelines, getters of the pipeline return lists.
    get_embedding_ranks, get_position_embedding_ranks : function, optional
        From a pipeline's ranks to those that hold the embeddings.
    create_gloo_process_groups : bool
        Also create each data-parallel group with gloo.
    use_sharp, sharp_enabled_group : bool, {"dp", "dp_replica"}
        Which groups are created with SHARP.
    create_all_gather_group : bool
        As megatron-core 0.16 and 0.17: a second data x context parallel group.
    rank_offset, local_world_size : int
        The window: its first rank, and how many ranks it has.
    share, connect, creation : str, optional
        How groups are created, see ``hypergrid.policy.Policy``. Not in upstream.
        ``HYPERGRID_SHARE``, ``HYPERGRID_CONNECT`` and ``HYPERGRID_CREATION`` in the environment
        take precedence.

    Raises
    ------
    RuntimeError
        The sizes do not divide the world; the order leaves out a dim that is larger than 1.
    AssertionError
        Already initialised; torch.distributed is not; sizes that contradict each other.
    TypeError, ValueError
        A wrong type; a size below 1; a window outside the world; an unknown dim in the order.
    """
    arguments = dict(locals())
    arguments["order"], source = asked(order)
    helpers = replaced.found()
    request = Request(**arguments, life=next(_lives), helpers=helpers, order_source=source)
    before = _current
    with request.telling_others():
        request.check()
        if before.is_in_use:
            raise AssertionError(
                f"model parallel groups are already initialized: {before!r}. Call "
                f"destroy_model_parallel() first."
            )
    state = ParallelState()
    state.take_overrides(before)
    with environment_restored_on_failure():
        try:
            make_current(state)  # functions that outside code has replaced may ask for it
            state.initialize(request)
            warn_of_a_second_state()
            wanted = os.environ.get("HYPERGRID_REPORT", "0") != "0"
            if wanted and dist.get_rank() == request.rank_offset:
                print(report(state), flush=True)
            if before.grid is not None:  # outside code has emptied its globals
                before.grid.destroy()
        except BaseException:
            make_current(before)
            state.destroy(abort=True)
            raise


@as_released
def destroy_model_parallel(*, abort: bool = False) -> None:
    """Close every group that ``initialize_model_parallel`` made and forget all state; idempotent.

    Without ``abort`` NCCL waits until the other members close theirs. With ``abort``, which is not
    in upstream, this is *local*: it waits for no other rank, in any thread, and threads that wait
    in a collective of these groups raise an error. ``hypergrid.abort()`` does so with all groups.
    """
    _current.destroy(abort)


def create_all_gather_groups(
    for_expert_parallelism: bool = False,
    timeout: timedelta | None = None,
    nccl_comm_cfgs: dict[str, dict[str, Any]] | None = None,
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Second groups, to overlap all-gather and reduce-scatter. *Collective* over the window."""
    return _current.create_all_gather_groups(for_expert_parallelism, timeout, nccl_comm_cfgs)


def update_pg_timeout(timeout: timedelta, pg: ProcessGroup | None = None) -> None:
    """Set the timeout of ``pg``, or of all groups made here. *Collective* over ``pg``."""
    _current.update_pg_timeout(timeout, pg)


def get_global_memory_buffer() -> Any:
    """Megatron's buffer of reusable tensors."""
    return _current.get_global_memory_buffer()


def _set_global_memory_buffer() -> None:
    """Make the memory buffer; AssertionError if there is one."""
    _current._set_global_memory_buffer()


def destroy_global_memory_buffer() -> None:
    """Forget the memory buffer."""
    _current.destroy_global_memory_buffer()


def get_global_symmetric_memory_buffer() -> Any:
    """Megatron 0.16's symmetric memory buffer for inference."""
    return _current.get_global_symmetric_memory_buffer()


def _set_global_symmetric_memory_buffer() -> None:
    """Make the symmetric memory buffer; AssertionError if there is one."""
    _current._set_global_symmetric_memory_buffer()


def destroy_global_symmetric_memory_buffer() -> None:
    """Forget the symmetric memory buffer."""
    _current.destroy_global_symmetric_memory_buffer()


def get_moe_layer_wise_logging_tracker() -> dict[str, Any]:
    """Megatron 0.12's losses of experts by name, for logging."""
    return _current.get_moe_layer_wise_logging_tracker()


@as_released
def get_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group of this rank's model: tensor, GTP and pipeline parallel ranks."""
    return _current.get_model_parallel_group(check_initialized)


def get_tensor_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over tp: one layer's matrices are split over it."""
    return _current.get_tensor_model_parallel_group(check_initialized)


def get_gtp_weight_remat_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over gtp_remat: weights are sharded over it."""
    return _current.get_gtp_weight_remat_group(check_initialized)


@as_released
def get_pipeline_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over pp: the stages of one pipeline."""
    return _current.get_pipeline_model_parallel_group(check_initialized)


@as_released
def get_data_parallel_group(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
) -> ProcessGroup:
    """Group over dp; optionally with cp, without gtp_remat, or of one optimizer instance."""
    return _current.get_data_parallel_group(
        with_context_parallel, with_gtp_remat, partial_data_parallel, independent_all_gather
    )


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Gloo twin of a data-parallel group."""
    return _current.get_data_parallel_group_gloo(with_context_parallel, partial_data_parallel)


def has_separate_all_gather_group() -> bool:
    """Whether ``create_all_gather_group`` was asked for."""
    return _current.has_separate_all_gather_group()


def get_context_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over cp: one sequence is split over it."""
    return _current.get_context_parallel_group(check_initialized)


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[ProcessGroup]:
    """One group per level of hierarchical context parallelism, innermost first."""
    return _current.get_hierarchical_context_parallel_groups(check_initialized)


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup:
    """Group of ``group_size`` consecutive data x context parallel ranks."""
    return _current.get_hybrid_data_context_parallel_groups(check_initialized, group_size)


@as_released
def get_embedding_group(check_initialized: bool = True) -> ProcessGroup:
    """Ranks of this pipeline that hold word embeddings."""
    return _current.get_embedding_group(check_initialized)


@as_released
def get_position_embedding_group(check_initialized: bool = True) -> ProcessGroup:
    """Ranks of this pipeline that hold position embeddings."""
    return _current.get_position_embedding_group(check_initialized)


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup:
    """Group over which FP8 scaling factors are reduced."""
    return _current.get_amax_reduction_group(with_context_parallel, tp_only_amax_red)


@as_released
def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup:
    """Group over tp and dp, optionally with cp."""
    return _current.get_tensor_and_data_parallel_group(check_initialized, with_context_parallel)


@as_released
def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over tp and cp."""
    return _current.get_tensor_and_context_parallel_group(check_initialized)


def get_expert_gtp_weight_remat_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over the expert grid's gtp_remat."""
    return _current.get_expert_gtp_weight_remat_group(check_initialized)


def get_expert_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over ep: the experts are spread over it."""
    return _current.get_expert_model_parallel_group(check_initialized)


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over the expert grid's tp."""
    return _current.get_expert_tensor_parallel_group(check_initialized)


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Group over the expert grid's tp and ep."""
    return _current.get_expert_tensor_and_model_parallel_group(check_initialized)


@as_released
def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup:
    """Group over the expert grid's tp, ep and pp, optionally with gtp_remat."""
    return _current.get_expert_tensor_model_pipeline_parallel_group(
        check_initialized, with_egtp_remat
    )


@as_released
def get_expert_data_parallel_group(
    check_initialized: bool = True,
    with_gtp_remat: bool = True,
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup:
    """Group over the expert grid's dp; optionally without gtp_remat, or of one instance."""
    return _current.get_expert_data_parallel_group(
        check_initialized, with_gtp_remat, partial_expert_data_parallel
    )


@as_released
def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Gloo twin of an expert-data-parallel group."""
    return _current.get_expert_data_parallel_group_gloo(partial_expert_data_parallel)


@as_released
def get_data_modulo_expert_parallel_group(
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup:
    """Former name of the expert-data-parallel group."""
    return _current.get_data_modulo_expert_parallel_group(partial_expert_data_parallel)


@as_released
def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup:
    """All ranks of this rank's distributed-optimizer instance."""
    return _current.get_intra_distributed_optimizer_instance_group(check_initialized)


@as_released
def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup:
    """Ranks with this rank's place in each optimizer instance."""
    return _current.get_inter_distributed_optimizer_instance_group(check_initialized)


def get_inter_partial_data_parallel_group() -> ProcessGroup:
    """Megatron 0.12's ranks with this rank's place in each optimizer instance, dense layers."""
    return _current.get_inter_partial_data_parallel_group()


def get_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int]:
    """Global ranks of the gtp_remat group."""
    return _current.get_gtp_weight_remat_global_ranks(check_initialized)


def get_expert_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int]:
    """Global ranks of the expert gtp_remat group."""
    return _current.get_expert_gtp_weight_remat_global_ranks(check_initialized)


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int]:
    """Global ranks of the context-parallel group."""
    return _current.get_context_parallel_global_ranks(check_initialized)


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank that comes first in the tensor-parallel group."""
    return _current.get_tensor_model_parallel_src_rank()


def get_model_parallel_src_rank() -> int:
    """Global rank that comes first in the model-parallel group."""
    return _current.get_model_parallel_src_rank()


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank that comes first in the data-parallel group."""
    return _current.get_data_parallel_src_rank(with_context_parallel)


def get_expert_model_parallel_src_rank() -> int:
    """Global rank that comes first in the expert-parallel group."""
    return _current.get_expert_model_parallel_src_rank()


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of this pipeline's first stage."""
    return _current.get_pipeline_model_parallel_first_rank()


def get_pipeline_model_parallel_last_rank() -> int | list[int]:
    """Global rank of this pipeline's last stage; a list on an encoder's rank in several."""
    return _current.get_pipeline_model_parallel_last_rank()


def get_pipeline_model_parallel_next_rank() -> int | list[int]:
    """Global rank of the next stage; the first follows the last."""
    return _current.get_pipeline_model_parallel_next_rank()


def get_pipeline_model_parallel_prev_rank() -> int | list[int]:
    """Global rank of the previous stage; the last precedes the first."""
    return _current.get_pipeline_model_parallel_prev_rank()


def get_tensor_model_parallel_world_size() -> int:
    """Tensor-parallel size."""
    return _current.get_tensor_model_parallel_world_size()


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in the tensor-parallel group."""
    return _current.get_tensor_model_parallel_rank()


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return _current.get_pipeline_model_parallel_world_size()


def get_pipeline_model_parallel_rank() -> int:
    """This rank's pipeline stage."""
    return _current.get_pipeline_model_parallel_rank()


@as_released
def get_data_parallel_world_size(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """Data-parallel size; arguments as for the group."""
    return _current.get_data_parallel_world_size(
        with_context_parallel, with_gtp_remat, partial_data_parallel
    )


@as_released
def get_data_parallel_rank(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """This rank's place in the data-parallel group; arguments as for the group."""
    return _current.get_data_parallel_rank(
        with_context_parallel, with_gtp_remat, partial_data_parallel
    )


def get_context_parallel_world_size() -> int:
    """Context-parallel size."""
    return _current.get_context_parallel_world_size()


def get_context_parallel_rank() -> int:
    """This rank's place in the context-parallel group."""
    return _current.get_context_parallel_rank()


def get_tensor_and_context_parallel_world_size() -> int:
    """Size of the tensor x context parallel group."""
    return _current.get_tensor_and_context_parallel_world_size()


def get_tensor_and_context_parallel_rank() -> int:
    """This rank's place in the tensor x context parallel group."""
    return _current.get_tensor_and_context_parallel_rank()


def get_gtp_weight_remat_world_size() -> int:
    """gtp_remat size; 0 where there is no such group."""
    return _current.get_gtp_weight_remat_world_size()


def get_gtp_weight_remat_rank() -> int:
    """This rank's place in the gtp_remat group; 0 where there is none."""
    return _current.get_gtp_weight_remat_rank()


def get_expert_gtp_weight_remat_world_size() -> int:
    """Expert gtp_remat size; 0 where there is no such group."""
    return _current.get_expert_gtp_weight_remat_world_size()


def get_expert_gtp_weight_remat_rank() -> int:
    """This rank's place in the expert gtp_remat group; 0 where there is none."""
    return _current.get_expert_gtp_weight_remat_rank()


def get_expert_model_parallel_world_size() -> int:
    """Expert-parallel size."""
    return _current.get_expert_model_parallel_world_size()


def get_expert_model_parallel_rank() -> int:
    """This rank's place in the expert-parallel group."""
    return _current.get_expert_model_parallel_rank()


def get_expert_tensor_parallel_world_size() -> int | None:
    """Expert tensor-parallel size."""
    return _current.get_expert_tensor_parallel_world_size()


def get_expert_tensor_parallel_rank() -> int | None:
    """This rank's place in the expert tensor-parallel group."""
    return _current.get_expert_tensor_parallel_rank()


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Size of the expert tensor x expert parallel group."""
    return _current.get_expert_tensor_and_model_parallel_world_size()


def get_expert_tensor_and_model_parallel_rank() -> int:
    """This rank's place in the expert tensor x expert parallel group."""
    return _current.get_expert_tensor_and_model_parallel_rank()


@as_released
def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Expert-data-parallel size; arguments as for the group."""
    return _current.get_expert_data_parallel_world_size(
        with_gtp_remat, partial_expert_data_parallel
    )


@as_released
def get_expert_data_parallel_rank(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """This rank's place in the expert-data-parallel group."""
    return _current.get_expert_data_parallel_rank(with_gtp_remat, partial_expert_data_parallel)


def get_all_ranks() -> str:
    """This rank's places on the dims, joined by underscores; for names of files."""
    return _current.get_all_ranks()


def is_initialized() -> bool:
    """Whether this rank has a data-parallel group."""
    return _current.is_initialized()


def model_parallel_is_initialized() -> bool:
    """Whether this rank has tensor-, pipeline- and data-parallel groups."""
    return _current.model_parallel_is_initialized()


def is_unitialized() -> bool:
    """The opposite of ``is_initialized``; deprecated."""
    return _current.is_unitialized()


@as_released
def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or its virtual stage, begins the pipeline."""
    return _current.is_pipeline_first_stage(ignore_virtual, vp_stage)


@as_released
def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or its virtual stage, ends the pipeline."""
    return _current.is_pipeline_last_stage(ignore_virtual, vp_stage)


@as_released
def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or its virtual stage, holds word embeddings."""
    return _current.is_rank_in_embedding_group(ignore_virtual, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds position embeddings."""
    return _current.is_rank_in_position_embedding_group()


def get_pipeline_model_parallel_split_rank() -> int | None:
    """The stage at which the pipeline was split, or None."""
    return _current.get_pipeline_model_parallel_split_rank()


def get_pipeline_model_parallel_decoder_start() -> int | None:
    """The decoder's first stage after an encoder on ranks of its own; None without one."""
    return _current.get_pipeline_model_parallel_decoder_start()


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Whether a stage, this rank's unless given, comes before the split."""
    return _current.is_pipeline_stage_before_split(rank)


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Whether a stage comes after the split."""
    return _current.is_pipeline_stage_after_split(rank)


def is_pipeline_stage_at_split() -> bool:
    """Whether this rank's stage is the last before the split."""
    return _current.is_pipeline_stage_at_split()


def is_inside_encoder(rank: int | None = None) -> bool:
    """Whether a stage, this rank's unless given, belongs to the encoder."""
    return _current.is_inside_encoder(rank)


def is_inside_decoder(rank: int | None = None) -> bool:
    """Whether a stage belongs to the decoder."""
    return _current.is_inside_decoder(rank)


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The virtual stage that was set, or None."""
    return _current.get_virtual_pipeline_model_parallel_rank()


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Virtual stages per rank, or None."""
    return _current.get_virtual_pipeline_model_parallel_world_size()


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Make the tensor-parallel size return this; None removes that."""
    _current.set_tensor_model_parallel_world_size(world_size)


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Make the tensor-parallel rank return this; None removes that."""
    _current.set_tensor_model_parallel_rank(rank)


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Make the pipeline size return this; None removes that."""
    _current.set_pipeline_model_parallel_world_size(world_size)


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Make the pipeline rank return this; None removes that."""
    _current.set_pipeline_model_parallel_rank(rank)


def set_pipeline_model_parallel_split_rank(rank: int | None) -> None:
    """Set the stage at which the pipeline is split."""
    _current.set_pipeline_model_parallel_split_rank(rank)


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of virtual stages per rank."""
    _current.set_virtual_pipeline_model_parallel_world_size(world_size)


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the virtual stage. Deprecated: pass ``vp_stage`` instead."""
    _current.set_virtual_pipeline_model_parallel_rank(rank)


def set_data_parallel_rank(rank: int | None) -> None:
    """Make every data-parallel rank return this; None removes that."""
    _current.set_data_parallel_rank(rank)


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """Make the expert-parallel size return this; None removes that."""
    _current.set_expert_model_parallel_world_size(world_size)


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """Make the expert-parallel rank return this; None removes that."""
    _current.set_expert_model_parallel_rank(rank)


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """Make the expert tensor-parallel size return this; None removes that."""
    _current.set_expert_tensor_parallel_world_size(world_size)


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """Make the expert tensor-parallel rank return this; None removes that."""
    _current.set_expert_tensor_parallel_rank(rank)


def __getattr__(name: str) -> Any:
    # Not on the class below: there it would slow down every read of the module.
    if name in SLOTS:
        try:
            return getattr(_current, name)
        except AttributeError:  # deleted
            pass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Module(ModuleType):
    """This module, with upstream's private globals written through to the current state."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SLOTS:
            setattr(_current, name, value)
            return
        super().__setattr__(name, value)
        if name in _GETTERS:  # patched, or put back: getters built on it must see that
            patched = any(vars(self)[getter] is not own for getter, own in _GETTERS.items())
            _current.ask_via(self if patched else _current)

    def __delattr__(self, name: str) -> None:
        if name in SLOTS:  # mock.patch deletes, then sets the former value
            delattr(_current, name)
        else:
            super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *SLOTS})

    def __repr__(self) -> str:
        return f"<module {self.__name__!r} from {self.__file__!r}: {_current!r}>"


_GETTERS = {name: globals()[name] for name in dir(Getters) if not name.startswith("_")}
replaced.watch(globals())
speak_through(globals())
sys.modules[__name__].__class__ = _Module
