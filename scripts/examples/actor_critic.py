"""An actor and a critic in turn: whoever rests gives its communicators back.

    torchrun --nproc-per-node 8 scripts/examples/actor_critic.py

The actor is laid out as tp=2 x pp=2 x dp=2, the critic as tp=4 x dp=2, over the same eight ranks.
While the critic trains the actor is suspended: its ranks and sizes can be asked, its sockets are
closed. `resume()` makes its groups anew and says which new group stands for which old one. That is
`how="recreate"`; by default gloo's groups would stay open, and with NCCL be the same afterwards.
"""

import gc
import os
from typing import Any

import torch
import torch.distributed as dist

from compat import parallel_state
from compat.state import ParallelState


class Trainer:
    """What a framework keeps of a model: a weight, and the group that averages its gradient."""

    def __init__(self) -> None:
        self.group = parallel_state.get_data_parallel_group()
        self.weight = torch.ones(())

    def step(self) -> float:
        gradient = self.weight * dist.get_rank()
        dist.all_reduce(gradient, group=self.group)
        self.weight -= 0.1 * gradient / dist.get_world_size(self.group)
        return self.weight.item()


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def main() -> dict[str, Any]:
    """*Collective* over eight ranks: open file descriptors at each point, and the weights."""
    opened = {"at first": descriptors()}
    actor = ParallelState.create(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    critic = ParallelState.create(tensor_model_parallel_size=4)
    with actor.activate():
        player = Trainer()
    with critic.activate():
        judge = Trainer()
    weights = [player.step(), judge.step()]
    opened["with both"] = descriptors()

    old_name = player.group.group_name
    player.group = None  # a reference that stays keeps its sockets open
    actor.suspend(how="recreate")
    opened["actor suspended"] = descriptors()
    stage = actor.get_pipeline_model_parallel_rank()  # numbers still answer
    try:
        dist.all_reduce(torch.ones(()), group=actor.get_data_parallel_group())
    except Exception as error:
        refusal = str(error)
    weights.append(judge.step())

    renewed = actor.resume()
    player.group = renewed[old_name]
    weights.append(player.step())
    opened["actor resumed"] = descriptors()
    names = old_name, player.group.group_name

    if dist.get_rank() == 0:
        for when, count in opened.items():
            print(f"{count:4} file descriptors {when}")
        print(f"the suspended actor is stage {stage}; its group says: {refusal}")
        print(f"{len(renewed)} groups made anew; of the actor's data parallel ranks:")
        print("  old name {}\n  new name {}".format(*names))
    player.group = judge.group = None
    del renewed
    actor.destroy()
    critic.destroy()
    opened["at last"] = descriptors()
    return {"opened": opened, "weights": weights, "names": names, "refusal": refusal}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
