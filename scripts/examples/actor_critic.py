"""An actor and a critic in turn: the communicators of the one that rests give their memory back.

    torchrun --nproc-per-node 8 scripts/examples/actor_critic.py

The actor is laid out as tp=2 x pp=2 x dp=2, the critic as tp=4 x dp=2, over the same eight ranks.
While the critic trains the actor is suspended. With NCCL that frees the device memory of its
communicators; gloo has none, and its groups are kept. After `resume()` every group is the same
object, so the actor's model and optimizer go on as they are.
"""

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


def main() -> dict[str, Any]:
    """*Collective* over eight ranks: what was suspended, and the weights."""
    actor = ParallelState.create(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    critic = ParallelState.create(tensor_model_parallel_size=4)
    with actor.activate():
        actor_trainer = Trainer()
    with critic.activate():
        critic_trainer = Trainer()
    weights = [actor_trainer.step(), critic_trainer.step()]

    report = actor.suspend()
    stage = actor.get_pipeline_model_parallel_rank()  # numbers still answer
    weights.append(critic_trainer.step())

    actor.resume()
    weights.append(actor_trainer.step())
    is_same_group = actor_trainer.group is actor.get_data_parallel_group()

    if dist.get_rank() == 0:
        print(f"the actor is stage {stage}; suspended: {report}")
        print(f"the actor's group is the same object after resume(): {is_same_group}")
    how = {backend: suspended.how for backend, suspended in report.items()}
    actor.destroy()
    critic.destroy()
    return {"how": how, "weights": weights, "is_same_group": is_same_group}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
