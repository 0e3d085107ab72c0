"""As Megatron-Bridge: private globals written without an initialisation; the signature asked."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.clients import Client, Step

# What is written where a component has such a group, and what stands in where it has none.
WRITTEN = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_MODEL_PARALLEL_GROUP": "mp",
}
# Ranks of a world of eight: two components of four ranks each, tp=2 and dp=2.
GROUPS = {
    "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "dp": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "mp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "tp_ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
    **{name: [[rank] for rank in range(8)] for name in ("pp", "cp", "expt_tp")},
}


def _own_groups() -> dict[str, Any]:
    """The groups that this rank is in, by their kind."""
    own_groups = {}
    for name, groups in GROUPS.items():
        for ranks in groups:
            group = dist.new_group(ranks=ranks, group_desc=name)
            if dist.get_rank() in ranks:
                own_groups[name] = group
    return own_groups


def components_with_groups_of_their_own(client: Client) -> Iterator[Step]:
    """Never initialise: write the component's groups, some of them missing, and read."""
    module = client.module
    own_groups = _own_groups()
    if getattr(module, "_GLOBAL_MEMORY_BUFFER", None) is None:
        module._set_global_memory_buffer()
    for name, kind in WRITTEN.items():
        fallback = own_groups["dp"] if "DATA" in name else own_groups["tp"]
        setattr(module, name, own_groups.get(kind, fallback))
    written = {name: _kinds_of(getattr(module, name), own_groups) for name in WRITTEN}
    yield "written", written
    yield "buffer", type(module.get_global_memory_buffer()).__name__


def groups_of_a_component_for_a_while(client: Client) -> Iterator[Step]:
    """After an initialisation: other groups inside a block, then those from before."""
    client.initialise()
    module = client.module
    own_groups = _own_groups()
    yield "before", None
    with _bridged(module, own_groups):
        yield "inside", None
    yield "after", None
    with mock.patch.object(module, "_DATA_PARALLEL_GROUP", None):
        yield "one patched away", None
    yield "unpatched", None


@contextlib.contextmanager
def _bridged(module: Any, own_groups: dict[str, Any]) -> Iterator[None]:
    saved = {name: getattr(module, name, None) for name in WRITTEN}
    try:
        for name, kind in WRITTEN.items():
            if kind in own_groups:
                setattr(module, name, own_groups[kind])
        if module._EXPERT_MODEL_PARALLEL_GROUP is saved["_EXPERT_MODEL_PARALLEL_GROUP"]:
            module._EXPERT_MODEL_PARALLEL_GROUP = own_groups["tp"]
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)


def _kinds_of(value: Any, own_groups: dict[str, Any]) -> list[str]:
    return [name for name, group in own_groups.items() if value is group]


def arguments_by_the_signature(client: Client) -> Iterator[Step]:
    """Look which arguments there are, and read a setting for each that only some releases have."""
    names = set(inspect.signature(client.module.initialize_model_parallel).parameters)
    settings = {"hybrid_context_parallel": False}
    if client.release == "dev":
        settings = {"dynamic_context_parallel": True, "min_dynamic_context_parallel_size": 2}
    client.initialise(
        virtual_pipeline_model_parallel_size=None,
        pipeline_model_parallel_comm_backend=None,
        hierarchical_context_parallel_sizes=None,
        num_distributed_optimizer_instances=1,
        expert_tensor_parallel_size=None,
        distributed_timeout_minutes=10,
        nccl_communicator_config_path=None,
        order="tp-cp-ep-pp-dp",
        get_embedding_ranks=None,
        get_position_embedding_ranks=None,
        create_gloo_process_groups=False,
        use_sharp=False,
        high_priority_stream_groups=None,
        sharp_enabled_group=None,
        **{name: value for name, value in settings.items() if name in names},
    )
    yield "arguments", sorted(names)
