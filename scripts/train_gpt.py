"""Train a small GPT on Python's own sources with megatron-core: any layout, GPUs or a CPU.

    torchrun --nproc-per-node 8 scripts/train_gpt.py --tp 2 --pp 2
    torchrun --nproc-per-node 8 scripts/train_gpt.py --tp 2 --sequence-parallel --ep 2 \
        --num-experts 4

`--results FILE` writes what was measured, with a digest over every rank's losses, gradient norms
and final parameters: equal digests are equal trainings, bit for bit.
"""

# ruff: noqa: E402 - torch is adapted before megatron is imported
import argparse
import hashlib
import json
import math
import os
import random
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from compat.verification import on_cpu
from compat.verification.on_cpu import taken

on_cpu.adapt()
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
# Megatron warns of every accelerated part that is not installed and of its own defaults.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

TEXT_BYTES = 1 << 20
MICRO_BATCH_SIZE = 2
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
Batches = Iterator[dict[str, torch.Tensor]]


class Parallel(NamedTuple):
    """Who answers for ranks and sizes, and what megatron-core is handed to communicate over."""

    state: Any  # megatron's module, or a ParallelState
    groups: Any = None  # a ProcessGroupCollection; without one megatron asks its module

    @property
    def handed(self) -> dict[str, Any]:
        return {} if self.groups is None else {"pg_collection": self.groups}

    @contextmanager
    def module_left_alone(self) -> Iterator[None]:
        """Let the module know, of an explicit state, only what megatron-core asks nobody else for.

        As of 0.16 that is the tensor parallel group, which vocab_parallel_cross_entropy takes no
        argument for, and the memory buffer, which holds no group.
        """
        if self.groups is None:
            yield
            return
        from compat.state import ParallelState

        left = ParallelState()
        left._TENSOR_MODEL_PARALLEL_GROUP = self.groups.tp
        left._set_global_memory_buffer()
        with left.activate():
            yield

    def destroy(self) -> None:
        if self.groups is None:
            self.state.destroy_model_parallel()
        else:
            self.state.destroy()


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--tensor-model-parallel-size", "--tp", type=int, default=1)
    add("--pipeline-model-parallel-size", "--pp", type=int, default=1)
    add("--virtual-pipeline-model-parallel-size", "--vp", type=int, help="stages per rank")
    add("--context-parallel-size", "--cp", type=int, default=1)
    add("--expert-model-parallel-size", "--ep", type=int, default=1)
    add("--expert-tensor-parallel-size", "--etp", type=int, help="default: that of the rest")
    add("--num-experts", type=int, default=0, help="0: a dense model")
    add("--sequence-parallel", action="store_true")
    add("--use-distributed-optimizer", action="store_true")
    add("--num-distributed-optimizer-instances", type=int, default=1)
    add("--order", default="tp-cp-ep-dp-pp", help="from the fastest rank dimension to the slowest")
    add("--explicit-groups", action="store_true", help="hand megatron a ProcessGroupCollection")
    add("--steps", type=int, default=20)
    add("--global-batch-size", type=int, default=16)
    add("--seq-length", type=int, default=128)
    add("--hidden-size", type=int, default=64)
    add("--layers", type=int, default=4)
    add("--results", type=Path, help="rank 0 writes what was measured to this file, as JSON")
    return parser.parse_args(argv)


def initialize(args: argparse.Namespace) -> tuple[Parallel, dict[str, Any]]:
    """Make the model-parallel groups, and what that took on this rank."""
    sizes = {name: getattr(args, name) for name in SIZES}
    sizes |= {"num_distributed_optimizer_instances": args.num_distributed_optimizer_instances}
    groups_before = len(dist.distributed_c10d._world.pg_map)
    # Ranks import at different speeds: no creation of a group waits for a rank that is still at it.
    dist.barrier()
    from compat import members_only  # on stock as well: it only marks what counts the calls

    calls = 0
    original = dist.new_group

    @members_only
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    with mock.patch.object(dist, "new_group", counted):
        if args.explicit_groups:
            from compat import collection

            # Megatron's optimizer takes no gloo groups with a collection.
            groups = collection.build(**sizes, order=args.order, create_gloo_process_groups=False)
            parallel = Parallel(groups.parallel_state, groups)
        else:
            parallel_state.initialize_model_parallel(**sizes, order=args.order)
            parallel = Parallel(parallel_state)
    live_groups = len(dist.distributed_c10d._world.pg_map) - groups_before
    return parallel, {"new_group_calls": calls, "live_groups": live_groups}


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    return TransformerConfig(
        **{name: getattr(args, name) for name in SIZES},
        num_layers=args.layers,
        hidden_size=args.hidden_size,
        num_attention_heads=8,
        sequence_parallel=args.sequence_parallel,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        pipeline_dtype=torch.float32,
        num_moe_experts=args.num_experts or None,
        moe_aux_loss_coeff=1e-2,
        # The one dispatcher that needs neither streams nor messages of unequal sizes.
        moe_token_dispatcher_type="allgather",
        add_bias_linear=not args.num_experts,
        # With two stages on each of two ranks, a batch holds two messages for one peer: gloo
        # takes one for the other, and the gradients are wrong without a word.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
    )


def build_stage(
    args: argparse.Namespace, parallel: Parallel, config: TransformerConfig, stage: int | None
) -> DistributedDataParallel:
    """One pipeline stage of the model, wrapped for data parallelism."""
    state = parallel.state
    pp_rank = state.get_pipeline_model_parallel_rank()
    # Megatron draws each weight whole on the CPU and keeps this rank's shard: ranks that hold parts
    # or copies of the same layers must draw the same.
    torch.manual_seed(100 * pp_rank + (stage or 0))
    layers = on_cpu.local_layers(config, stage, pp_rank)
    model = GPTModel(
        config,
        layers,
        vocab_size=256,
        max_sequence_length=args.seq_length,
        pre_process=state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=True,
        vp_stage=stage,
        **parallel.handed,
    )
    model.to(torch.cuda.current_device())
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=args.use_distributed_optimizer,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
    )
    return DistributedDataParallel(
        config, ddp_config, model, disable_bucketing=bool(stage), **parallel.handed
    )


def build(
    args: argparse.Namespace, parallel: Parallel
) -> tuple[list[DistributedDataParallel], MegatronOptimizer]:
    """This rank's stages and their optimizer."""
    # Without dropout nothing is drawn: the tracker for inference needs no CUDA generator.
    state = parallel.state
    model_parallel_cuda_manual_seed(
        1234,
        inference_rng_tracker=True,
        tp_rank=state.get_tensor_model_parallel_rank(),
        ep_rank=state.get_expert_model_parallel_rank(),
        etp_rank=state.get_expert_tensor_parallel_rank(),
    )
    config = transformer_config(args)
    stages = range(args.virtual_pipeline_model_parallel_size or 0) or [None]
    model = [build_stage(args, parallel, config, stage) for stage in stages]
    optimizer_config = OptimizerConfig(
        lr=2e-3, weight_decay=0.0, use_distributed_optimizer=args.use_distributed_optimizer
    )
    optimizer = get_megatron_optimizer(
        optimizer_config,
        model,
        use_gloo_process_groups=parallel.groups is None,
        **parallel.handed,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def read_text() -> torch.Tensor:
    """The first megabyte of the standard library, file by file in the order of names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:TEXT_BYTES]


def micro_batches(args: argparse.Namespace, state: Any, text: torch.Tensor, step: int) -> Batches:
    """This data-parallel rank's contiguous share of the step's global batch."""
    share = args.global_batch_size // state.get_data_parallel_world_size()
    first = step * args.global_batch_size + state.get_data_parallel_rank() * share
    size = MICRO_BATCH_SIZE
    length = args.seq_length
    device = torch.cuda.current_device()
    cp_size = state.get_context_parallel_world_size()
    chunks = torch.arange(length).view(2 * cp_size, -1)
    held = on_cpu.chunks_held(state.get_context_parallel_rank(), cp_size)
    columns = chunks[held].flatten()
    positions = torch.arange(length).repeat(size, 1)
    for start in range(first, first + share, size):
        samples = []
        for number in range(start, start + size):
            offset = random.Random(number).randrange(len(text) - length)
            samples.append(text[offset : offset + length + 1])
        rows = torch.stack(samples).long()
        # Each token's label is the next one.
        batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:], "position_ids": positions}
        yield {key: values[:, columns].to(device) for key, values in batch.items()}


def forward_step(batches: Batches, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """What megatron's schedules call for each micro batch: the output, and how to get its loss."""
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
        return losses.float().sum(), tokens, losses.detach().float().mean()

    return output, loss_of


def loss_everywhere(losses: list[torch.Tensor], group: dist.ProcessGroup) -> float:
    """The mean over micro batches and data-parallel ranks, told to every rank of the world."""
    loss = torch.full((1,), -math.inf, device=torch.cuda.current_device())
    if losses:
        loss = torch.stack(losses).mean().view(1)
        dist.all_reduce(loss, group=group)
        loss /= dist.get_world_size(group)
    dist.all_reduce(loss, op=dist.ReduceOp.MAX)
    return loss.item()


class Training(NamedTuple):
    """One rank's model and optimizer, and what takes a step: its losses, the loss, the norm."""

    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    step: Callable[[int], tuple[list[torch.Tensor], float, float]]


def training(args: argparse.Namespace, parallel: Parallel) -> Training:
    """*Collective.* Build model and optimizer."""
    state = parallel.state
    groups = parallel.groups
    dp_size = state.get_data_parallel_world_size()
    count, rest = divmod(args.global_batch_size, MICRO_BATCH_SIZE * dp_size)
    if rest:
        raise ValueError(
            f"global batch size {args.global_batch_size} is no multiple of micro batch size "
            f"{MICRO_BATCH_SIZE} x {dp_size} data-parallel ranks"
        )
    model, optimizer = build(args, parallel)
    handed = parallel.handed
    if groups is None:
        forward_backward = get_forward_backward_func()
        losses_group = state.get_data_parallel_group(with_context_parallel=True)
    else:
        stages = args.virtual_pipeline_model_parallel_size
        sizes = {"pp_size": groups.pp.size(), "vp_size": stages}
        forward_backward = get_forward_backward_func(**taken(get_forward_backward_func, sizes))
        losses_group = groups.dp_cp
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        handed["p2p_communicator"] = P2PCommunicator(groups.pp, model[0].config)
    text = read_text()

    def take(step: int) -> tuple[list[torch.Tensor], float, float]:
        for stage in model:
            stage.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=[micro_batches(args, state, text, step) for _ in model],
            model=model,
            num_microbatches=count,
            seq_length=args.seq_length,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
            **handed,
        )
        norm = float(optimizer.step()[1])
        return losses, loss_everywhere(losses, losses_group), norm

    return Training(model, optimizer, take)


def train(args: argparse.Namespace, parallel: Parallel) -> tuple[list[dict[str, Any]], str]:
    """Each step's measurements, and a digest of all that this rank computed."""
    model, _, take = training(args, parallel)
    digest = hashlib.sha256()
    steps = []
    for step in range(1, args.steps + 1):
        losses, loss, norm = take(step)
        for value in (*map(float, losses), norm):
            digest.update(value.hex().encode())
        steps.append({"loss": loss, "loss_hex": loss.hex()})
        if dist.get_rank() == 0:
            print(f"step {step:3}  loss {loss:.4f}  grad norm {norm:.4f}", flush=True)
    for stage in model:
        for name, parameter in stage.named_parameters():
            digest.update(name.encode())
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return steps, digest.hexdigest()


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """*Collective.* Initialise, train, and gather what every rank measured on rank 0."""
    parallel, measured = initialize(args)
    with parallel.module_left_alone():
        steps, measured["rank_digests"] = train(args, parallel)
    measured_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(measured_by_rank, measured)
    dist.barrier()
    parallel.destroy()
    if dist.get_rank():
        return None
    ranks = {}
    for key in measured:
        ranks[key] = [of_rank[key] for of_rank in measured_by_rank]
    results = {
        "arguments": {name: value for name, value in vars(args).items() if name != "results"},
        "world_size": len(measured_by_rank),
        **ranks,
        "digest": hashlib.sha256("".join(ranks["rank_digests"]).encode()).hexdigest(),
        "steps": steps,
    }
    print(f"digest {results['digest']}", flush=True)
    if args.results:
        args.results.write_text(json.dumps(results, indent=1) + "\n")
    return results


def main(argv: list[str] | None = None) -> dict[str, Any] | None:
    """Train, and give the results on rank 0; a default group that was there stays open."""
    args = parse_arguments(argv)
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    owns_world = not dist.is_initialized()
    if owns_world:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        return run(args)
    finally:
        if owns_world:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
