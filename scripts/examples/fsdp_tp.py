"""FSDP2 x tensor parallelism over a grid's groups: the DeviceMesh wraps them and makes none.

    torchrun --nproc-per-node 8 scripts/examples/fsdp_tp.py

A grid of tp=2 x dp=4 creates its two groups per rank, torch shards an MLP over its mesh, and the
losses are those of the same MLP on one rank.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hypergrid import HyperCommGrid

STEPS = 4
BATCH = 16
WIDTH = 8


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def train(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss of each step, over the samples that this rank holds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        difference = model(batch) - batch.sin()
        loss = difference.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def live_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def main() -> dict[str, Any]:
    """*Collective* over eight ranks: both losses, and which groups served."""
    torch.manual_seed(0)
    model = Mlp()
    batch = torch.randn(BATCH, WIDTH)
    whole = train(copy.deepcopy(model), batch)

    grid = HyperCommGrid([2, 4], ["tp", "dp"])  # tp is the fastest: ranks 0 and 1 share a copy
    for dim in ("tp", "dp"):
        grid.create_pg(dim)
    groups_of_the_grid = live_groups()
    mesh = grid.device_mesh(["dp", "tp"])
    same = all(mesh.get_group(dim) is grid.get_pg(dim) for dim in ("tp", "dp"))

    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    dp_rank = mesh.get_local_rank("dp")
    sharded = train(model, batch.chunk(4)[dp_rank])
    # The mean over the batch is that of the four parts.
    dist.all_reduce(sharded, group=grid.get_pg("dp"))
    sharded /= 4
    new_groups = live_groups() - groups_of_the_grid

    if dist.get_rank() == 0:
        print(f"{mesh}: its groups are the grid's: {same}")
        print(f"groups that the mesh, FSDP2 and tensor parallelism made: {new_groups}")
        for step in range(STEPS):
            print(f"step {step}  one rank {whole[step]:.7f}  eight ranks {sharded[step]:.7f}")
    grid.destroy()
    return {"whole": whole.tolist(), "sharded": sharded.tolist(), "same": same, "made": new_groups}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
