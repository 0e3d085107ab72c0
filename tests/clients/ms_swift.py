"""As ms-swift: a timeout for every group, and groups of its own from Megatron's RankGenerator."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.clients import Client, Step

MINUTES = 300_000  # its default: 208 days


def a_timeout_for_every_group(client: Client) -> Iterator[Step]:
    """Fill in the timeout that upstream leaves out, while it initialises."""
    module, original = client.module, client.module.create_group

    def create_group(
        ranks: Any = None, timeout: timedelta | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        given = timedelta(minutes=MINUTES) if timeout is None else timeout
        return original(ranks, given, *args, **kwargs)

    module.create_group = create_group
    sizes = dict(client.sizes)
    try:
        module.initialize_model_parallel(
            sizes.pop("tensor_model_parallel_size"),
            sizes.pop("pipeline_model_parallel_size"),
            None,
            **sizes,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=MINUTES,
        )
    finally:
        module.create_group = original
    yield "initialised", None
    yield "put back", module.create_group is original


def groups_of_its_own(client: Client) -> Iterator[Step]:
    """The ranks that see the same data, as groups: every rank makes every one."""
    client.initialise()
    module = client.module
    generator = module.RankGenerator(
        tp=module.get_tensor_model_parallel_world_size(),
        ep=1,
        dp=module.get_data_parallel_world_size(),
        pp=module.get_pipeline_model_parallel_world_size(),
        cp=module.get_context_parallel_world_size(),
        order="tp-cp-ep-dp-pp",
        rank_offset=0,
    )
    ranks_of_groups = []
    for ranks in generator.get_ranks("tp-cp-ep-pp"):
        group = dist.new_group(ranks=sorted(ranks), group_desc="ROLLOUT_GROUP")
        if dist.get_rank() in ranks:
            ranks_of_groups.append(dist.get_process_group_ranks(group))
    yield "its groups", ranks_of_groups
