"""Shared by the checks on GPUs: their rows, ranks on a device, groups that add up their members."""

from __future__ import annotations

import os
from collections.abc import Container
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from compat.state import ParallelState
from hypergrid import of_torch
from hypergrid.groups import creation as group_creation


class Row(NamedTuple):
    """What a rank saw of a check. A fault makes it FAILED, else a reason makes it skipped."""

    check: str
    observed: str
    faults: list[str] = []  # noqa: RUF012 - never changed
    skipped: str = ""


def sizes(world: int) -> dict[str, int]:
    """A layout with groups of two, as far as the world has them; of eight ranks the demo's."""
    tensor = 2 if world % 2 == 0 else 1
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": 2 if world % 8 == 0 else 1,
        "expert_model_parallel_size": tensor,
        "expert_tensor_parallel_size": 1,
    }


def join(device: torch.device, default: str = "unbound", life: int = 0) -> dict[str, int]:
    """Start the default group of all ranks, each ``life`` over a store of its own; their layout."""
    world = int(os.environ["WORLD_SIZE"])
    backend = "gloo"
    bound_device = None
    if device.type == "cuda":
        backend = "nccl"
        torch.cuda.set_device(device)
        if default.startswith("bound"):
            bound_device = device
    # A compound backend has one for each type of device; torch keeps its order.
    if "compound" in default:
        backend = f"cpu:gloo,cuda:{backend}"
    dist.init_process_group(
        backend,
        # Torch's TCP store is slow to look up its own host.
        store=dist.FileStore(f"{os.environ['STORE_FILE']}{life}", world),
        rank=int(os.environ["RANK"]),
        world_size=world,
        timeout=timedelta(seconds=90),
        device_id=bound_device,
    )
    return sizes(world)


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_nccl(group: dist.ProcessGroup) -> bool:
    devices = group_creation.devices_of(of_torch.backend_of(group))
    return devices.get("cuda") == "nccl"


def members_that_sum(
    state: ParallelState, device: torch.device, sizes: Container[int] = range(1, 63)
) -> list[str]:
    """Faults of one all_reduce on each group of these sizes; the sum says which ranks took part."""
    faults = []
    for pooled in state.pool.groups:
        if len(pooled.ranks) not in sizes:
            continue
        # Gloo twins and groups of a compound default group reduce on the CPU.
        place = device if on_nccl(pooled.group) else torch.device("cpu")
        # Rank 3 adds 8: the bits of the sum are the ranks.
        total = torch.tensor([1 << dist.get_rank()], device=place)
        dist.all_reduce(total, group=pooled.group)
        ranks = [rank for rank in range(62) if total.item() >> rank & 1]
        if ranks != sorted(pooled.ranks):
            faults.append(f"{pooled.label} of ranks {pooled.ranks} summed over {ranks}")
    return faults
