"""As NVRx: everything closed behind Megatron's back, and the job begun anew in the process."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.clients import Client, Step


def begun_anew_in_the_process(client: Client) -> Iterator[Step]:
    """Close torch's groups as they are found there, make a new world, initialise."""
    client.initialise()
    yield (
        "initialised",
        sorted(
            (group.group_desc, tuple(dist.get_process_group_ranks(group)))
            for group in c10d._world.pg_names
            if group is not dist.group.WORLD
        ),
    )
    for group in list(c10d._world.pg_names):
        assert isinstance(group, dist.ProcessGroup)
    client.restart()
    client.module.destroy_model_parallel()
    yield "destroyed", None
    client.initialise()
    yield "initialised anew", len(c10d._world.pg_names)
