"""Programs over the groups of ``megatron.core.parallel_state``, which is stock's or the swap's.

    python tests/clients/over_groups.py megatron-fsdp-0.6.1
    python -m compat.launch tests/clients/over_groups.py mbridge-0.15.1

Four ranks run on gloo. Prints the file of parallel_state, and what each rank has computed.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

from compat.verification import on_cpu
from tests.support import ROOT
from tests.support.forked import run_ranks


def shard(rank: int) -> list[float]:
    """The losses of a model that megatron-fsdp shards over the data parallel group."""
    from megatron.core import parallel_state
    from megatron_fsdp import fully_shard

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    groups = [
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_tensor_model_parallel_group(),
    ]
    names = ("dp", "tp")
    mesh = DeviceMesh.from_group(groups, "cpu", torch.arange(4).view(2, 2), mesh_dim_names=names)
    # A number: the package compares its device with this one.
    cuda: Any = torch.cuda
    cuda.current_device = lambda: 0
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    model, optimizer = fully_shard(
        layers,
        torch.optim.SGD(layers.parameters(), lr=0.1),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[torch.nn.Linear],
        device=torch.device("cpu"),
        # Gradients are summed: NCCL alone has the operation that takes their mean.
        calculate_per_token_loss=True,
    )
    features = torch.randn(4, 8) + parallel_state.get_data_parallel_rank()
    losses = []
    for _ in range(2):
        loss = model(features).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def build(rank: int) -> dict[str, float]:
    """This rank's place, and a number of each weight that mbridge gathers from all of its model."""
    # The packages that read files and configurations of Hugging Face; nothing of them runs here.
    for name in ("transformers", "transformers.utils.hub", "safetensors", "safetensors.torch"):
        sys.modules[name] = mock.MagicMock()
    from mbridge.models.llama import LLaMABridge
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    class Bridge(LLaMABridge):
        """With layers that need no Transformer Engine: their norms have names of their own."""

        _OTHER_MAPPING: ClassVar = {"input_layernorm.weight": ["{layer_number}.input_layernorm"]}
        _MLP_MAPPING: ClassVar = {
            **LLaMABridge._MLP_MAPPING,
            "pre_mlp_layernorm.weight": ["{layer_number}.post_attention_layernorm"],
        }

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            return on_cpu.local_layers(self.config, vp_stage)

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2
    )
    model_parallel_cuda_manual_seed(1)
    config = Namespace(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=64,
        attention_dropout=0.0,
        rms_norm_eps=1e-5,
        vocab_size=64,
        max_position_embeddings=16,
        rope_theta=10000,
    )
    bridge = Bridge(config, torch.float32)
    model = bridge.get_model(bf16=False)
    numbers = {"tp": bridge.mpu.tp_rank, "pp": bridge.mpu.pp_rank}
    for name, weight in bridge.export_weights(model):
        # Shards that are gathered in another order give another number.
        places = torch.arange(weight.numel()).float()
        numbers[name] = (weight.flatten() @ places).item()
    return numbers


PROGRAMS = {"megatron-fsdp-0.6.1": shard, "mbridge-0.15.1": build}

if __name__ == "__main__":
    (program,) = sys.argv[1:]
    sys.path.append(str(ROOT / ".cache" / program))
    on_cpu.adapt()
    from megatron.core import parallel_state

    print(json.dumps([parallel_state.__file__, run_ranks(4, PROGRAMS[program])]))
