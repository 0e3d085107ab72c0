"""As ms-swift: a timeout for every group, and groups of its own from Megatron's RankGenerator."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.clients import Client, Step, generated_groups

MINUTES = 300_000  # its default: 208 days


def a_timeout_for_every_group(client: Client) -> Iterator[Step]:
    """Fill in the timeout that upstream leaves out, while it initialises."""
    module, original = client.module, client.module.create_group

    def create_group(
        ranks: Any = None, timeout: timedelta | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        timeout = timeout or timedelta(minutes=MINUTES)
        return original(ranks, timeout, *args, **kwargs)

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
    """The ranks that see the same data, as groups."""

    def create(ranks: list[int]) -> Any:
        return dist.new_group(ranks=sorted(ranks), group_desc="ROLLOUT_GROUP")

    return generated_groups(client, "tp-cp-ep-pp", create)
