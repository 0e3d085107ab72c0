"""A vision tower on its own ranks trains with a language tower on others, over a bridge.

    torchrun --nproc-per-node 8 scripts/examples/two_towers.py

Transformer blocks of megatron-core: vision on ranks 0-3 as dp=4, text on ranks 4-7 as tp=2 x pp=2.
Both are states of one assembly; its link has the groups of megatron-core's BridgeCommunicator. The
third state, over all ranks, holds the same model unsplit on each of them: its losses are equal.
"""

# ruff: noqa: E402 - the swap comes before megatron
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import compat

compat.install()
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import megatron_on_cpu

megatron_on_cpu.adapt()
warnings.filterwarnings("ignore", module=r"megatron\.")

from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlock

from compat.assembly import MegatronPart, bridges, grids_of
from hypergrid import Assembly, Link

LENGTH, BATCH, WIDTH, STEPS, RATE = 4, 4, 16, 4, 0.05


def tower(name: str, state: Any, layers: int) -> TransformerBlock:
    """This rank's stage and shard of a tower; each weight is drawn whole from its name."""
    tp, pp = state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank()
    sizes = {
        "tensor_model_parallel_size": state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": state.get_pipeline_model_parallel_world_size(),
    }
    model_parallel_cuda_manual_seed(
        1, inference_rng_tracker=True, tp_rank=tp, ep_rank=0, etp_rank=0
    )
    config = TransformerConfig(
        **sizes,
        num_layers=layers,
        hidden_size=WIDTH,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        pipeline_dtype=torch.float32,
    )
    last = state.is_pipeline_last_stage()
    layers_here = megatron_on_cpu.local_layers(config, None, pp)
    block = TransformerBlock(config, layers_here, pre_process=True, post_process=last)
    for key, weight in block.named_parameters():
        if weight.dim() == 1:
            continue
        number = lambda found: str(block.layers[int(found[0])].layer_number)  # noqa: E731
        key = f"{name}.{re.sub(r'(?<=layers[.])[0-9]+', number, key)}"
        shape, dim = list(weight.shape), getattr(weight, "partition_dim", -1)
        split = sizes["tensor_model_parallel_size"] if dim >= 0 else 1
        shape[dim] *= split
        random = torch.Generator().manual_seed(sum(key.encode()) * 7919)
        whole = torch.randn(shape, generator=random) * 0.2
        weight.data.copy_(whole.chunk(split, dim)[tp if split > 1 else 0])
    return block


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches of all pictures, and what the text tower shall make of them."""
    random = torch.Generator().manual_seed(step % 2)
    return tuple(torch.randn(LENGTH, BATCH, WIDTH, generator=random) for _ in range(2))


def update(block: TransformerBlock, group: dist.ProcessGroup | None = None) -> None:
    for weight in block.parameters():
        if group is not None:
            dist.all_reduce(weight.grad, group=group)
        weight.data -= RATE * weight.grad
        weight.grad = None


def split_losses(assembly: Assembly) -> list[float]:
    """The losses of the two towers, on every rank."""
    rank, grids = dist.get_rank(), grids_of(assembly)
    with bridges(assembly):
        bridge = BridgeCommunicator(
            grids["vision"],
            grids["text"],
            dim_mapping={"s": 0, "b": 1, "h": 2},
            comm_dtype=torch.float32,
        )
    name = "vision" if rank < 4 else "text"
    state, losses = assembly[name], []
    with state.activate():
        block = tower(name, state, 1 if name == "vision" else 2)
        pipeline = state.get_pipeline_model_parallel_group()
        for step in range(STEPS):
            patches, wanted = data(step)
            loss = torch.zeros(())
            if name == "vision":
                mine = patches[:, rank : rank + 1].contiguous()
                encoded = block(hidden_states=mine, attention_mask=None)
                bridge.send_forward(encoded.detach())
                encoded.backward(bridge.recv_backward())
                update(block, state.get_data_parallel_group())
            elif not state.is_pipeline_last_stage():
                inputs = bridge.recv_forward().detach().requires_grad_()
                outputs, following = block(hidden_states=inputs, attention_mask=None), rank + 2
                dist.send(outputs.detach().contiguous(), following, group=pipeline)
                gradient = torch.empty_like(outputs)
                dist.recv(gradient, following, group=pipeline)
                outputs.backward(gradient)
                bridge.send_backward(inputs.grad)
                update(block)
            else:
                inputs = torch.empty(LENGTH, BATCH, WIDTH)
                dist.recv(inputs, rank - 2, group=pipeline)
                outputs = block(hidden_states=inputs.requires_grad_(), attention_mask=None)
                loss = (outputs - wanted).square().mean()
                loss.backward()
                dist.send(inputs.grad, rank - 2, group=pipeline)
                update(block)
            shown = loss.detach().clone()
            dist.broadcast(shown, 7)
            losses.append(shown.item())
    return losses


def whole_losses(state: Any) -> list[float]:
    """The losses of the same model, unsplit on this rank."""
    with state.activate():
        vision, text, losses = tower("vision", state, 1), tower("text", state, 2), []
        for step in range(STEPS):
            patches, wanted = data(step)
            encoded = vision(hidden_states=patches, attention_mask=None)
            loss = (text(hidden_states=encoded, attention_mask=None) - wanted).square().mean()
            loss.backward()
            for block in (vision, text):
                update(block)
            losses.append(loss.item())
    return losses


def main() -> dict[str, list[float]]:
    """*Collective* over eight ranks: the losses of both, on every rank."""
    text = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assembly = Assembly(
        {
            "vision": MegatronPart(range(4)),
            "text": MegatronPart(range(4, 8), **text),
            "whole": MegatronPart(range(8)),
        },
        [Link("vision", "text")],
    ).create()
    losses = {"split": split_losses(assembly), "whole": whole_losses(assembly["whole"])}
    if dist.get_rank() == 0:
        for name, each in losses.items():
            print(f"{name}: {', '.join(f'{loss:.6f}' for loss in each)}")
    assembly.destroy()
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
