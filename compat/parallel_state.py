"""Replaces ``megatron.core.parallel_state``: the same functions over the same private globals.

Every function answers as megatron-core does; where releases disagree, as the installed one. All
are *local* unless they say otherwise. The getters are written in ``compat.megatron.getters``. The
private globals (``_TENSOR_MODEL_PARALLEL_GROUP`` ...) are this module's own and have the values of
the current state.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch as torch  # outside code reaches it, and `logger`, through upstream's module
import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.megatron.communicators import get_nccl_options as get_nccl_options
from compat.megatron.communicators import overwrite_nccl_comm_cfgs as overwrite_nccl_comm_cfgs
from compat.megatron.getters.groups import *  # noqa: F403
from compat.megatron.getters.numbers import *  # noqa: F403
from compat.megatron.getters.remat import *  # type: ignore[assignment] # noqa: F403
from compat.megatron.getters.setters import *  # noqa: F403
from compat.megatron.getters.stages import *  # noqa: F403
from compat.megatron.helpers import create_dynamic_dp_cp_groups as create_dynamic_dp_cp_groups
from compat.megatron.helpers import create_group as create_group
from compat.megatron.helpers import create_hierarchical_groups as create_hierarchical_groups
from compat.megatron.helpers import create_hybrid_dp_cp_groups as create_hybrid_dp_cp_groups
from compat.megatron.hosts import warn_of_tp_across_hosts
from compat.megatron.rank_generator import RankGenerator as RankGenerator
from compat.megatron.rank_generator import default_embedding_ranks as default_embedding_ranks
from compat.megatron.rank_generator import (
    default_position_embedding_ranks as default_position_embedding_ranks,
)
from compat.megatron.rank_generator import (
    generate_masked_orthogonal_rank_groups as generate_masked_orthogonal_rank_groups,
)
from compat.megatron.releases import as_released, drop_absent
from compat.megatron.request import Request, replaced_functions, watch
from compat.megatron.request import inject_gtp_remat_axis as _inject_gtp_remat_axis  # noqa: F401
from compat.megatron.rows import PlannedRows
from compat.state import ParallelState, current, init_counts, make_current, publish_into
from compat.swap import warn_of_a_second_state
from hypergrid.policy import outermost

logger = logging.getLogger(__name__)
HAVE_EINOPS = find_spec("einops") is not None


def current_state() -> ParallelState:
    """The state that this module's functions answer from; at first one without groups."""
    return current()


@as_released
def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    hybrid_context_parallel: bool = False,
    dynamic_context_parallel: bool = False,
    min_dynamic_context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = "tp-cp-ep-dp-pp",
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
    expert_model_parallel_size : int
        Size of the expert grid's ep.
    expert_tensor_parallel_size : int, optional
        Size of the expert grid's tp; the tensor-parallel size unless given.
    virtual_pipeline_model_parallel_size : int, optional
        Virtual stages per rank.
    pipeline_model_parallel_comm_backend : {"nccl", "ucc"}, optional
        Backend of the pipeline's group.
    hierarchical_context_parallel_sizes : list of int, optional
        Sizes of the levels, innermost first; their product is the context-parallel size.
    hybrid_context_parallel : bool
        Also make data x context parallel groups of every power of two.
    dynamic_context_parallel : bool
        As Megatron-LM's branch dev: the same groups, connected at once.
    min_dynamic_context_parallel_size : int
        The smallest size of these groups.
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
    get_embedding_ranks, get_position_embedding_ranks : function, optional
        From a pipeline's ranks to those that hold the embeddings.
    create_gloo_process_groups : bool
        Also create each data-parallel group with gloo.
    use_sharp : bool
        Create groups with SHARP.
    sharp_enabled_group : {"dp", "dp_replica"}, optional
        Which of them; the data-parallel groups unless given.
    create_all_gather_group : bool
        As megatron-core 0.16 and 0.17: a second data x context parallel group.
    rank_offset : int
        The window's first rank.
    local_world_size : int, optional
        How many ranks the window has; all of the world unless given.
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
    AgreementError, CreationError
        On every rank: ranks ask for different groups, or one of them is missing or refuses; a
        group could not be created, and none is left.
    AbortedError
        ``hypergrid.abort()`` was called meanwhile.
    """
    # A launcher's --order and HYPERGRID_ORDER come before the argument.
    order, order_source = outermost("order", order)
    helpers = replaced_functions()  # by outside code: they are called in place of ours
    request = Request(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
        pipeline_model_parallel_comm_backend=pipeline_model_parallel_comm_backend,
        use_sharp=use_sharp,
        context_parallel_size=context_parallel_size,
        hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
        hybrid_context_parallel=hybrid_context_parallel,
        dynamic_context_parallel=dynamic_context_parallel,
        min_dynamic_context_parallel_size=min_dynamic_context_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        gtp_remat_size=gtp_remat_size,
        expert_gtp_remat_size=expert_gtp_remat_size,
        num_distributed_optimizer_instances=num_distributed_optimizer_instances,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        nccl_communicator_config_path=nccl_communicator_config_path,
        distributed_timeout_minutes=distributed_timeout_minutes,
        order=order,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
        create_gloo_process_groups=create_gloo_process_groups,
        high_priority_stream_groups=high_priority_stream_groups,
        sharp_enabled_group=sharp_enabled_group,
        create_all_gather_group=create_all_gather_group,
        rank_offset=rank_offset,
        local_world_size=local_world_size,
        share=share,
        connect=connect,
        creation=creation,
        order_source=order_source,
        init_count=next(init_counts),
        helpers=helpers,
    )
    with request.telling_others():
        planned = PlannedRows(request)
        before = current()
        if before.is_in_use:
            raise AssertionError(
                f"model parallel groups are already initialized: {before!r}. Call "
                f"destroy_model_parallel() first."
            )
        if before._GLOBAL_MEMORY_BUFFER is not None and "_set_global_memory_buffer" not in helpers:
            raise AssertionError(
                "there is a global memory buffer already, which initialize_model_parallel() makes: "
                "call destroy_global_memory_buffer() first."
            )
    state = ParallelState()
    try:
        state.initialize(planned, becomes_current=True)
        warn_of_a_second_state()
        if dist.get_rank() == request.rank_offset:
            warn_of_tp_across_hosts(request)
            if os.environ.get("HYPERGRID_REPORT", "0") != "0":
                from compat.report import print_report  # here: few jobs ask for it

                print_report(state)
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
    current().destroy(abort)


def create_all_gather_groups(
    for_expert_parallelism: bool = False,
    timeout: timedelta | None = None,
    nccl_comm_cfgs: dict[str, dict[str, Any]] | None = None,
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Second groups, to overlap all-gather and reduce-scatter. *Collective* over the window."""
    return current().create_all_gather_groups(for_expert_parallelism, timeout, nccl_comm_cfgs)


def update_pg_timeout(timeout: timedelta, pg: ProcessGroup | None = None) -> None:
    """Set the timeout of ``pg``, or of all groups made here. *Collective* over ``pg``."""
    current().update_pg_timeout(timeout, pg)


drop_absent(globals())
publish_into(globals())  # the getters too: their globals are this module's
watch(globals())
if "compat.audit.watch" in sys.modules:
    sys.modules["compat.audit.watch"].renew()
if os.environ.get("HYPERGRID_AUDIT"):
    from compat.audit.watch import begin  # here: without an audit none of it is loaded

    begin(os.environ["HYPERGRID_AUDIT"])
    del begin
