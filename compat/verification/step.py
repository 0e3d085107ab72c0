"""One optimizer step of one rank, and what it computed, by names of the whole model.

megatron-core's own sharded state dicts say which part of which whole tensor a rank holds. They are
taken while parameters hold gradients, so that gradients get the same names and places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from compat.verification.layout import INSTANCES, Layout
from compat.verification.on_cpu import chunks_held, taken

MicroBatch: TypeAlias = Mapping[str, Any]
Slices: TypeAlias = tuple[tuple[int, int], ...]
Build: TypeAlias = Callable[..., Any]
Loss: TypeAlias = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, torch.Tensor]]
SEED = 1234
_FAULT = 1.01  # times a gradient: the fault that is planted in ranks


class Piece(NamedTuple):
    """The part of one whole tensor that one rank holds."""

    name: str
    where: Slices
    value: torch.Tensor

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(*each) for each in self.where)


class MicroBatchLoss(NamedTuple):
    """The loss that one rank of the last stage summed over its tokens of one micro batch."""

    micro_batch: int
    cp_rank: int
    total: float
    tokens: float


@dataclass
class Computed:
    """The results of one rank's step."""

    initial: list[Piece] = field(default_factory=list)
    gradients: list[Piece] = field(default_factory=list)
    updates: list[Piece] = field(default_factory=list)
    losses: list[MicroBatchLoss] = field(default_factory=list)
    norm: float = 0.0
    planted: set[str] = field(default_factory=set)  # tensors whose gradient this rank made wrong


@dataclass(frozen=True)
class Task:
    """The task: model, batch and loss, the same for all layouts."""

    build: Build
    batch: Sequence[MicroBatch]
    loss: Loss | None = None
    seq_length: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Samples of a micro batch and their length, of its first tensor with two dims."""
        first = next(v for v in self.batch[0].values() if torch.is_tensor(v) and v.dim() > 1)
        return first.shape[0], self.seq_length or first.shape[1]


def take_step(
    task: Task,
    layout: Layout,
    initial: Mapping[str, torch.Tensor] | None,
    backwards: bool = False,
    jitter: float = 0.0,
    planted: bool = False,
) -> Computed:
    """*Collective.* Build the model, load ``initial`` weights, take one step and tell what it did.

    Without ``initial`` the model's own weights, made uneven, are taken. ``backwards`` takes micro
    batches in the reverse order and ``jitter`` changes weights by so much, relative to each: what
    differs then is what rounding does. ``planted`` makes each gradient wrong on one rank.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    torch.manual_seed(SEED)
    _initialize(parallel_state, layout)
    chunks = _build(task, layout, parallel_state)
    config = chunks[0].config
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for chunk in chunks:
            if initial is None:
                for parameter in chunk.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
            else:
                _load(chunk, initial)
            for parameter in chunk.parameters() if jitter else ():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.mul_(1 + jitter * noise)
    computed = Computed()
    if planted:
        _plant_faults(chunks, computed, parallel_state)
    ddp = DistributedDataParallelConfig(
        **{"grad_reduce_in_fp32": True, **layout.fields_of(DistributedDataParallelConfig)}
    )
    model = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=bool(at))
        for at, chunk in enumerate(chunks)
    ]
    # With so large an eps Adam's step is linear in the gradient: rounding flips no sign of it.
    settings = {"lr": 1.0, "adam_eps": 1.0, "clip_grad": 1e9, "weight_decay": 0.1}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**{**settings, **layout.fields_of(OptimizerConfig)}), model
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if ddp.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in model]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    computed.initial = _pieces(chunks)
    numbers = _own_micro_batches(task, layout, parallel_state, backwards)
    size, length = task.shape
    step = _forward_step(task, computed, parallel_state)
    forward_backward = get_forward_backward_func()
    forward_backward(
        forward_step_func=step,
        data_iterator=[iter(numbers) for _ in model] if len(model) > 1 else iter(numbers),
        model=model,
        num_microbatches=len(numbers),
        seq_length=length,
        micro_batch_size=size,
        forward_only=False,
    )
    _gather_sharded(model)
    gradients = {p: getattr(p, "main_grad", None) for c in model for p in c.module.parameters()}
    with _holding(gradients):
        computed.gradients = _pieces(chunks)
    computed.norm = float(optimizer.step()[1])
    before = {(piece.name, piece.where): piece.value for piece in computed.initial}
    computed.updates = [
        piece._replace(value=piece.value - before[piece.name, piece.where])
        for piece in _pieces(chunks)
    ]
    return computed


def _initialize(state: Any, layout: Layout) -> None:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed as seed

    instances = layout.options.get(INSTANCES, 1)
    state.initialize_model_parallel(
        **layout.sizes, order=layout.order, num_distributed_optimizer_instances=instances
    )
    ranks = {
        "tp_rank": state.get_tensor_model_parallel_rank(),
        "ep_rank": state.get_expert_model_parallel_rank(),
        "etp_rank": state.get_expert_tensor_parallel_rank(),
    }
    # Without dropout nothing is drawn: the tracker for inference needs no CUDA generator.
    seed(SEED, inference_rng_tracker=True, **taken(seed, ranks))


def _build(task: Task, layout: Layout, state: Any) -> list[Any]:
    begins, ends = state.is_pipeline_first_stage, state.is_pipeline_last_stage
    chunks = []
    for stage in range(layout.vp) if layout.vp else [None]:
        if stage is not None:  # older models ask parallel_state which of them is built
            state.set_virtual_pipeline_model_parallel_rank(stage)
        where = {"ignore_virtual": False, "vp_stage": stage}
        made = task.build(
            layout,
            pre_process=begins(**taken(begins, where)),
            post_process=ends(**taken(ends, where)),
            vp_stage=stage,
        )
        if not hasattr(made, "config"):
            raise TypeError(f"build() must give a model of megatron-core, got {made!r:.80}")
        made.model_type = getattr(made, "model_type", None) or _encoder_or_decoder()
        chunks.append(made)
    if layout.vp:
        state.set_virtual_pipeline_model_parallel_rank(0)
    return chunks


def _encoder_or_decoder() -> Any:
    from megatron.core.enums import ModelType

    return ModelType.encoder_or_decoder


def _plant_faults(chunks: Iterable[Any], computed: Computed, state: Any) -> None:
    """Scale by 1 % what one rank alone adds to each gradient, before anything is reduced."""
    tensor_rank = state.get_tensor_model_parallel_rank()
    data_rank = state.get_data_parallel_rank(with_context_parallel=True)
    expert_tensor_rank = state.get_expert_tensor_parallel_rank()
    expert_data_rank = state.get_expert_data_parallel_rank()
    for chunk in chunks:
        names_in: dict[int, set[str]] = {}
        for piece in _shards(chunk):
            names_in.setdefault(_storage(piece.value), set()).add(piece.name)
        for parameter in chunk.parameters():
            ranks = (tensor_rank, data_rank)
            # megatron-core's mark of a parameter that the expert-parallel layout reduces.
            if not getattr(parameter, "allreduce", True):
                ranks = (expert_tensor_rank, expert_data_rank)
            names = names_in.get(_storage(parameter), set())
            if ranks == (0, 0):
                parameter.register_hook(partial(_scaled, names, computed.planted))


def _scaled(names: set[str], planted: set[str], gradient: torch.Tensor) -> torch.Tensor:
    # Without a token for it, an expert's gradient is 0, and so is the fault.
    if gradient.any():
        planted.update(names)
    return gradient * _FAULT


def _own_micro_batches(task: Task, layout: Layout, state: Any, backwards: bool) -> list[int]:
    """Numbers of the micro batches of this data-parallel rank: whole ones, in turn."""
    numbers = list(range(state.get_data_parallel_rank(), len(task.batch), layout.dp))
    return numbers[::-1] if backwards else numbers


def _forward_step(task: Task, computed: Computed, state: Any) -> Callable[..., Any]:
    cp_rank, cp_size = state.get_context_parallel_rank(), state.get_context_parallel_world_size()

    def step(numbers: Iterator[int], model: Any) -> tuple[Any, Any]:
        number = next(numbers)
        own = {
            name: _of_cp_rank(value, cp_rank, cp_size) for name, value in task.batch[number].items()
        }
        inputs = {name: value for name, value in own.items() if name != "loss_mask"}
        output = model(**taken(model.module.forward, inputs))

        def loss_of(output: torch.Tensor) -> tuple[Any, ...]:
            total, tokens = (task.loss or masked_sum)(output, own)
            told = MicroBatchLoss(number, cp_rank, total.item(), tokens.item())
            computed.losses.append(told)
            return total, tokens.to(torch.int), {}

        return output, loss_of

    return step


def masked_sum(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of losses of shape (samples, length) where ``loss_mask`` is 1, and how many."""
    mask = batch.get("loss_mask")
    mask = torch.ones_like(output) if mask is None else mask.to(output.dtype)
    return (output.float() * mask).sum(), mask.sum()


def _of_cp_rank(value: Any, rank: int, size: int) -> Any:
    """This rank's two chunks of the sequence, which is the second dim of each tensor."""
    if size == 1 or not torch.is_tensor(value) or value.dim() < 2:
        return value
    chunks = value.chunk(2 * size, dim=1)
    return torch.cat([chunks[each] for each in chunks_held(rank, size)], dim=1)


def _gather_sharded(model: Iterable[Any]) -> None:
    """Complete gradients of which the distributed optimizer leaves each rank its part only."""
    for chunk in model:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group = buckets.intra_distributed_optimizer_instance_group
            for bucket in buckets.buckets:
                parts = bucket.grad_data.chunk(group.size())
                dist.all_gather(list(parts), parts[group.rank()].clone(), group=group)


@contextmanager
def _holding(values: Mapping[Any, torch.Tensor | None]) -> Iterator[None]:
    """Parameters hold other values of their shape meanwhile."""
    kept = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            empty = torch.full_like(parameter.data, float("nan"))
            parameter.data = empty if value is None else value.to(parameter.dtype)
        yield
    finally:
        for parameter, data in kept.items():
            parameter.data = data


def _pieces(chunks: Iterable[Any]) -> list[Piece]:
    """Copies of all that the chunks hold."""
    return [
        piece._replace(value=piece.value.detach().clone())
        for chunk in chunks
        for piece in _shards(chunk)
    ]


def _load(chunk: Any, whole: Mapping[str, torch.Tensor]) -> None:
    for piece in _shards(chunk):
        if piece.name not in whole:
            raise ValueError(f"{piece.name} of this layout's model is not in that of one rank")
        piece.value.copy_(whole[piece.name][piece.slices])


def _shards(chunk: Any) -> Iterator[Piece]:
    """Views of the chunk's parameters, with their places in whole tensors."""
    parameters = {_storage(each) for each in chunk.parameters()}
    yield from _walk(
        chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True}), parameters
    )


def _walk(node: Any, parameters: set[int]) -> Iterator[Piece]:
    if hasattr(node, "build_fn"):  # one parameter that is stored as several tensors
        node = node.build()
    if isinstance(node, Mapping):
        node = list(node.values())
    if isinstance(node, list | tuple):
        for each in node:
            yield from _walk(each, parameters)
    elif hasattr(node, "global_offset") and _storage(node.data) in parameters:
        ahead = node.prepend_axis_num
        number = "".join(f"[{at}]" for at in node.global_offset[:ahead])
        starts = node.global_offset[ahead:]
        where = tuple((at, at + n) for at, n in zip(starts, node.local_shape, strict=True))
        yield Piece(node.key + number, where, node.data)


def _storage(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().data_ptr()
