"""A vision tower on its own ranks trains with a language model on others, over a bridge.

    torchrun --nproc-per-node 8 scripts/examples/two_towers.py

Models of megatron-core: a ViT on ranks 0-3 as dp=4; a GPTModel on ranks 4-7 as tp=2 x pp=2, which
reads a picture's patches before its words. Both are states of one assembly, whose link has the
groups of megatron-core's BridgeCommunicator. A third state, over all ranks, holds both models
unsplit on each of them: losses and the trained ViT are equal, to 1e-5 and 1e-6.
"""

# ruff: noqa: E402 - the swap comes before megatron
import re
import warnings
from typing import Any

import torch
import torch.distributed as dist

import compat

compat.install()
from compat.verification import on_cpu

on_cpu.adapt()
warnings.filterwarnings("ignore", module=r"megatron\.")

from megatron.core.models.gpt import GPTModel
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from compat.assembly import MegatronPart, bridges, grids_of
from compat.collection import from_state
from hypergrid import Assembly, Link

BATCH, WIDTH, SIDE, PATCH, WORDS, VOCABULARY, STEPS, RATE = 4, 16, 8, 4, 6, 32, 6, 0.1
PATCHES, POSITIONS = (SIDE // PATCH) ** 2, torch.arange(WORDS).repeat(BATCH, 1)


def tower(name: str, state: Any) -> Any:
    """This rank's stage and shard of a tower; each weight is drawn whole from its name."""
    tp, pp = state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank()
    size, groups = state.get_tensor_model_parallel_world_size(), from_state(state)
    model_parallel_cuda_manual_seed(
        1, inference_rng_tracker=True, tp_rank=tp, ep_rank=0, etp_rank=0
    )
    config = TransformerConfig(
        tensor_model_parallel_size=size,
        pipeline_model_parallel_size=state.get_pipeline_model_parallel_world_size(),
        num_layers=1 if name == "vision" else 2,
        hidden_size=WIDTH,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        pipeline_dtype=torch.float32,
    )
    layers = on_cpu.local_layers(config, None, pp)
    if name == "vision":
        picture = {"img_h": SIDE, "img_w": SIDE, "patch_dim": PATCH, "model_subtype": "internvit"}
        model = CLIPViTModel(config, layers, add_class_token=False, **picture, pg_collection=groups)
    else:
        model = GPTModel(
            config,
            layers,
            VOCABULARY,
            WORDS,
            pre_process=state.is_pipeline_first_stage(),
            post_process=state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            pg_collection=groups,
        )
    for key, weight in model.named_parameters():
        if "norm" in key:
            continue
        number = lambda found: str(model.decoder.layers[int(found[0])].layer_number)  # noqa: E731
        key = f"{name}.{re.sub(r'(?<=layers[.])[0-9]+', number, key)}"
        shape, dim = list(weight.shape), getattr(weight, "partition_dim", -1)
        split = size if dim >= 0 else 1
        shape[dim] *= split
        random = torch.Generator().manual_seed(sum(key.encode()) * 7919)
        whole = torch.randn(shape, generator=random) * 0.2
        weight.data.copy_(whole.chunk(split, dim)[tp if split > 1 else 0])
    return model


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All pictures, and what is written under them: one word more than the model reads."""
    random = torch.Generator().manual_seed(step % 2)
    pictures = torch.randn(BATCH, 3, SIDE, SIDE, generator=random)
    return pictures, torch.randint(VOCABULARY, (BATCH, WORDS + 1), generator=random)


def read(gpt: GPTModel, words: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
    """The output of a stage; the first takes encoded pictures, the last gives the loss of words."""
    seen, inputs = words[:, :-1], None
    if encoded is not None:
        inputs = torch.cat([encoded.transpose(0, 1), gpt.embedding(seen, POSITIONS)])
    labels = torch.nn.functional.pad(words[:, 1:], (PATCHES, 0))
    outputs = gpt(seen, POSITIONS, None, decoder_input=inputs, labels=labels)
    return outputs[:, PATCHES:].mean() if gpt.post_process else outputs


def update(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    for weight in model.parameters():
        if group is not None:
            dist.all_reduce(weight.grad, group=group)
        weight.data -= RATE * weight.grad
        weight.grad = None


def train_split(assembly: Assembly) -> tuple[list[float], Any]:
    """The losses of the two towers, on every rank, and this rank's part of its tower."""
    rank, grids = dist.get_rank(), grids_of(assembly)
    with bridges(assembly):
        bridge = BridgeCommunicator(
            grids["vision"],
            grids["text"],
            dim_mapping={"b": 0, "s": 1, "h": 2},
            comm_dtype=torch.float32,
        )
    name = "vision" if rank < 4 else "text"
    state, losses = assembly[name], []
    with state.activate():
        model = tower(name, state)
        pipeline = state.get_pipeline_model_parallel_group()
        for step in range(STEPS):
            pictures, words = data(step)
            loss = torch.zeros(())
            if name == "vision":
                encoded = model(pictures[rank : rank + 1])
                bridge.send_forward(encoded.detach())
                encoded.backward(bridge.recv_backward())
                update(model, state.get_data_parallel_group())
            elif not state.is_pipeline_last_stage():
                encoded = bridge.recv_forward().detach().requires_grad_()
                outputs, following = read(model, words, encoded), rank + 2
                dist.send(outputs.detach().contiguous(), following, group=pipeline)
                gradient = torch.empty_like(outputs)
                dist.recv(gradient, following, group=pipeline)
                outputs.backward(gradient)
                bridge.send_backward(encoded.grad)
                update(model)
            else:
                inputs = torch.empty(PATCHES + WORDS, BATCH, WIDTH)
                dist.recv(inputs, rank - 2, group=pipeline)
                model.set_input_tensor(inputs.requires_grad_())
                loss = read(model, words)
                loss.backward()
                dist.send(inputs.grad, rank - 2, group=pipeline)
                update(model)
            shown = loss.detach().clone()
            dist.broadcast(shown, 7)
            losses.append(shown.item())
    return losses, model


def train_whole(state: Any) -> tuple[list[float], Any]:
    """The losses of the same models, unsplit on this rank, and the vision tower."""
    with state.activate():
        vision, text, losses = tower("vision", state), tower("text", state), []
        for step in range(STEPS):
            pictures, words = data(step)
            loss = read(text, words, vision(pictures))
            loss.backward()
            for model in (vision, text):
                update(model)
            losses.append(loss.item())
    return losses, vision


def main() -> dict[str, Any]:
    """*Collective* over eight ranks: the losses of both, and how far the ViT is from the whole."""
    text = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assembly = Assembly(
        {
            "vision": MegatronPart(range(4)),
            "text": MegatronPart(range(4, 8), **text),
            "whole": MegatronPart(range(8)),
        },
        [Link("vision", "text")],
    ).create()
    (split, model), (whole, vision) = train_split(assembly), train_whole(assembly["whole"])
    results: dict[str, Any] = {"split": split, "whole": whole}
    if dist.get_rank() < 4:
        with assembly["vision"].activate():
            untrained = tower("vision", assembly["vision"])
        for name, other in {"error": vision, "moved": untrained}.items():
            pairs = zip(model.parameters(), other.parameters(), strict=True)
            results[name] = max((mine - its).abs().max().item() for mine, its in pairs)
    if dist.get_rank() == 0:
        for name in ("split", "whole"):
            print(f"{name}: {', '.join(f'{loss:.6f}' for loss in results[name])}")
        print(f"ViT: moved by {results['moved']:.3f}, from the whole by {results['error']:.1e}")
    assembly.destroy()
    return results


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
