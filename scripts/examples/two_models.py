"""Two models with different layouts in one process: distillation with megatron-core's layers.

    torchrun --nproc-per-node 8 scripts/examples/two_models.py

The teacher is split over tp=4, the student over tp=2, on the same eight ranks. Each is built and
run while its own `ParallelState` is active; what comes out are the gradients of one rank.
"""

# ruff: noqa: E402 - the swap comes before megatron
import warnings
from typing import Any

import torch
import torch.distributed as dist

import compat

compat.install()
from compat.verification import on_cpu

on_cpu.adapt()
warnings.filterwarnings("ignore", module=r"megatron\.")

from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from compat.state import ParallelState

WIDTH = 16
HIDDEN = 64


class Mlp(torch.nn.Module):
    """Split over the tensor parallel group of the state that is active when it is made."""

    def __init__(self) -> None:
        super().__init__()
        config = ModelParallelConfig(use_cpu_initialization=True)
        options = {
            "config": config,
            "init_method": torch.nn.init.xavier_normal_,
            "bias": False,
            "skip_bias_add": False,
            "keep_master_weight_for_test": True,  # the whole weight, beside this rank's shard
        }
        self.up = ColumnParallelLinear(WIDTH, HIDDEN, gather_output=False, **options)
        self.down = RowParallelLinear(HIDDEN, WIDTH, input_is_parallel=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Each layer gives its output, and a bias that it did not add.
        hidden, _ = self.up(x)
        output, _ = self.down(hidden.tanh())
        return output


def on_one_rank(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (x @ up.t()).tanh() @ down.t()


def main() -> dict[str, Any]:
    """*Collective* over eight ranks: what this one holds, and how far it is from one rank."""
    torch.manual_seed(0)
    x = torch.randn(8, WIDTH)
    states = {
        "teacher": ParallelState.create(tensor_model_parallel_size=4),
        "student": ParallelState.create(tensor_model_parallel_size=2),
    }
    models = {}
    outputs = {}
    shards = {}
    for name, state in states.items():
        with state.activate():
            model = Mlp()
            outputs[name] = model(x)
            tp_size = parallel_state.get_tensor_model_parallel_world_size()
        models[name] = model
        shards[name] = f"tp={tp_size}, {tuple(model.up.weight.shape)} of {(HIDDEN, WIDTH)}"
    with states["student"].activate():
        difference = outputs["student"] - outputs["teacher"].detach()
        difference.square().mean().backward()

    # The same on this rank alone, with the whole weights.
    teacher = models["teacher"]
    student = models["student"]
    taught = on_one_rank(x, teacher.up.master_weight, teacher.down.master_weight)
    up = student.up.master_weight.requires_grad_()
    down = student.down.master_weight.requires_grad_()
    difference = on_one_rank(x, up, down) - taught
    difference.square().mean().backward()
    tp = states["student"].get_tensor_model_parallel_rank()
    up_shard = up.grad.chunk(2)[tp]
    down_shard = down.grad.chunk(2, dim=1)[tp]
    differences = {
        "the teacher's output": outputs["teacher"] - taught,
        "the student's first gradient": student.up.weight.grad - up_shard,
        "the student's second gradient": student.down.weight.grad - down_shard,
    }
    errors = {}
    for name, difference in differences.items():
        errors[name] = difference.abs().max().item()
    if dist.get_rank() == 0:
        for name, shard in shards.items():
            print(f"{name}: {shard}")
        for name, error in errors.items():
            print(f"{name} differs from that of one rank by {error:.1e}")
    for state in states.values():
        state.destroy()
    return {"held": shards, "errors": errors, "gradient": up.grad.abs().max().item()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
