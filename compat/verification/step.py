"""Two optimizer steps of one rank, and what they computed, by names of the whole model.

megatron-core's own sharded state dicts say which part of which whole tensor a rank holds. They are
taken while parameters hold gradients, so that gradients get the same names and places.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from operator import add
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist

from compat.verification.collectives import Call, call_site, watch
from compat.verification.layout import INSTANCES, MIXED_PRECISION, RECOMPUTATION, Layout
from compat.verification.on_cpu import chunks_held, parameters_say, taken

MicroBatch: TypeAlias = Mapping[str, Any]
Slices: TypeAlias = tuple[tuple[int, int], ...]
Place: TypeAlias = tuple[str, Slices]  # a whole tensor, and the part of it
Kind: TypeAlias = tuple[int, str]  # the step, and the quantity: (1, "gradient")
GRADIENT: Kind = (1, "gradient")
NORM = "gradient norm"
EVEN_NORM = "gradient norm of equal gradients"  # which each parameter has
Build: TypeAlias = Callable[..., Any]
Loss: TypeAlias = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, torch.Tensor]]
SEED = 1234
RANDOM_INIT = "data_parallel_random_init"
_DROPOUT = 0.1


class Piece(NamedTuple):
    """The part of one whole tensor that one rank holds."""

    name: str
    where: Slices
    value: torch.Tensor

    @property
    def place(self) -> Place:
        return self.name, self.where

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, end) for start, end in self.where)


class Weight(NamedTuple):
    """A part of a weight that the job's own initialisation made, without its numbers."""

    place: Place
    digest: str
    norm: float
    is_constant: bool


class Draw(NamedTuple):
    """A dropout of one rank: its place, and digests of its input and of the generator's state."""

    place: str
    input: str
    state: str


@dataclass
class Computed:
    """The results of one rank's two steps."""

    # Of the run from which others get their weights.
    initial: list[Piece] = field(default_factory=list)
    own_initial: list[Weight] = field(default_factory=list)
    tensors: dict[Kind, list[Piece]] = field(default_factory=dict)
    # A norm that the optimizer took, and the norms of the gradients of which it is.
    norms: dict[Kind, tuple[float, dict[Place, float]]] = field(default_factory=dict)
    # Collectives of several ranks, in the first step.
    calls: Counter[Call] = field(default_factory=Counter)
    one_way: set[str] = field(default_factory=set)  # functions whose backward pass did not run
    tensor_parallel_ranks: tuple[int, ...] = ()
    draws: list[Draw] = field(default_factory=list)

    def digests(self) -> dict[tuple[Kind, Place], str]:
        """All tensors, to the last bit; 0 is -0."""
        digests = {}
        for kind, pieces in self.tensors.items():
            for piece in pieces:
                digests[kind, piece.place] = digest(piece.value + 0)
        return digests


@dataclass(frozen=True)
class Task:
    """The task: model, batch and loss, the same for all layouts."""

    build: Build
    batch: Sequence[MicroBatch]
    loss: Loss | None = None
    seq_length: int | None = None
    # Gives a script's ``forward_step`` for a configuration, a layout and the batch, of which it
    # takes its own part: instead of our own cut and our own loss.
    script: Callable[..., Any] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Samples of a micro batch and their length, of its first tensor with two dims."""
        for value in self.batch[0].values():
            if _has_length(value):
                samples, length = value.shape[:2]
                return samples, self.seq_length or length
        raise ValueError("a micro batch has no tensor of shape (samples, length, ...)")


def _has_length(value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() > 1


@dataclass(frozen=True)
class Variant:
    """How a run differs from the plain one.

    ``backwards`` takes micro batches in the reverse order and ``jitter`` changes weights by so
    much, relative to each: what differs then is what rounding does. ``left_out`` is a call site:
    on rank ``leaving_out``, the results of its collectives are then the rank's own input.
    """

    backwards: bool = False
    jitter: float = 0.0
    left_out: str = ""
    leaving_out: int = 0
    dropout: bool = False
    recomputes: bool = True  # if the layout does
    steps: int = 2


PLAIN = Variant()


def run_variants(
    task: Task,
    layout: Layout,
    initial: Mapping[str, torch.Tensor] | None,
    variants: Sequence[Variant] = (PLAIN,),
) -> list[Computed]:
    """*Collective.* Take two optimizer steps for each variant, each from ``initial`` weights.

    Without ``initial``, the first variant takes the model's own weights, made uneven, and the
    others take the same.
    """
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        **layout.sizes,
        order=layout.order,
        num_distributed_optimizer_instances=layout.options.get(INSTANCES, 1),
    )
    results: list[Computed] = []
    for variant in variants:
        computed = _take_steps(task, _varied(layout, variant), initial, variant, parallel_state)
        if initial is None:
            initial = whole_tensors(computed.initial)
        if variant.dropout:
            # What else a step with dropout computes is not compared, and would fill the memory.
            computed.tensors = {GRADIENT: computed.tensors[GRADIENT]}
        results.append(computed)
    dist.barrier()  # a rank that leaves takes its connections along
    return results


def _varied(layout: Layout, variant: Variant) -> Layout:
    if not variant.recomputes:
        layout = layout.without(*RECOMPUTATION)
    if variant.dropout:
        dropout = {"hidden_dropout": _DROPOUT, "attention_dropout": _DROPOUT}
        layout = replace(layout, options={**layout.options, **dropout})
    return layout


def _take_steps(
    task: Task,
    layout: Layout,
    initial: Mapping[str, torch.Tensor] | None,
    variant: Variant,
    state: Any,
) -> Computed:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    left_out = ""
    if variant.leaving_out == dist.get_rank():
        left_out = variant.left_out
    watched = watch(left_out)
    _seed(layout, state)
    chunks = _build(task, layout, state)
    config = chunks[0].config
    tensor_parallel_group = state.get_tensor_model_parallel_group()
    tensor_parallel_ranks = dist.get_process_group_ranks(tensor_parallel_group)
    computed = Computed(tensor_parallel_ranks=tuple(tensor_parallel_ranks))
    ddp_fields = layout.fields_of(DistributedDataParallelConfig)
    ddp = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **ddp_fields})
    model = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    if layout.options.get(RANDOM_INIT):
        for wrapped in model:
            wrapped.broadcast_params()
    computed.own_initial = list(map(_weight, _pieces(chunks)))
    _set_weights(chunks, initial, variant.jitter)
    if initial is None:
        computed.initial = _pieces(chunks)

    # With so large an eps Adam's step is linear in the gradient: rounding flips no sign of it.
    settings = {"lr": 1.0, "adam_eps": 1.0, "clip_grad": 1e9, "weight_decay": 0.1}
    optimizer_config = OptimizerConfig(**{**settings, **layout.fields_of(OptimizerConfig)})
    # The data stays float32: the copies that the optimizer makes are what is verified.
    parameters_say([said for name, said in MIXED_PRECISION.items() if name in layout.options])
    optimizer = get_megatron_optimizer(optimizer_config, model)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if ddp.overlap_grad_reduce:
        config.no_sync_func = _of_chunks([chunk.no_sync for chunk in model])
        if layout.vp:
            config.grad_sync_func = _of_chunks([chunk.start_grad_sync for chunk in model])
    if ddp.overlap_param_gather and layout.vp:
        config.param_sync_func = _of_chunks([chunk.start_param_sync for chunk in model])

    # Each data-parallel rank takes whole micro batches, in turn: of 8 on 2 ranks 0 2 4 6, 1 3 5 7.
    first = state.get_data_parallel_rank()
    numbers = list(range(first, len(task.batch), layout.dp))
    if variant.backwards:
        numbers.reverse()
    for step in range(1, variant.steps + 1):
        if step > 1:
            # The first step leaves gradients as they are, to compare the norm; this one clips them.
            norm, _ = computed.norms[1, NORM]
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                part.config.clip_grad = norm / 2
        with _recorded_draws(computed.draws):
            _step(step, task, layout, computed, chunks, model, optimizer, numbers, state)
        # Of one step: where an option is left out to compare them, no more are run.
        if step == 1:
            computed.calls = watched.calls.copy()
    if variant.steps > 1:
        computed.norms[variant.steps, EVEN_NORM] = _even_norm(chunks, optimizer)
    computed.one_way = watched.forward - watched.backward
    return computed


@contextmanager
def _recorded_draws(draws: list[Draw]) -> Iterator[None]:
    """Record each dropout meanwhile: ranks with one input must draw alike, others must not."""
    functions: Any = torch.nn.functional
    dropout = functions.dropout

    @wraps(dropout)
    def recorded(features: torch.Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
        if p:
            place = call_site(sys._getframe(1))
            draws.append(Draw(place, digest(features), digest(torch.get_rng_state())))
        return dropout(features, p, *args, **kwargs)

    with mock.patch.object(functions, "dropout", recorded):
        yield


def digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().contiguous().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


def _of_chunks(functions: Sequence[Any]) -> Any:
    """The chunks as megatron-core takes them: a list, or the function of a single chunk."""
    if len(functions) == 1:
        return functions[0]
    return functions


def _step(
    step: int,
    task: Task,
    layout: Layout,
    computed: Computed,
    chunks: Sequence[Any],
    model: Sequence[Any],
    optimizer: Any,
    numbers: Sequence[int],
    state: Any,
) -> None:
    """Take one optimizer step, and write what it did to ``computed``."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for wrapped in model:
        wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    samples, length = task.shape
    weights_before = {piece.place: piece.value for piece in _pieces(chunks)}
    # Of the last stage: parts of one tensor that has a number for each micro batch.
    sums: dict[str, list[Piece]] = {"loss": [], "tokens": []}

    def run(sums: dict[str, list[Piece]], forward_only: bool) -> None:
        get_forward_backward_func()(
            forward_step_func=_forward_step(task, layout, chunks[0].config, sums, state),
            # Each chunk of an interleaved pipeline takes the micro batches by itself.
            data_iterator=[iter(numbers) for _ in model],
            model=list(model),
            num_microbatches=len(numbers),
            seq_length=length,
            micro_batch_size=samples,
            forward_only=forward_only,
        )

    run(sums, forward_only=False)
    for quantity, parts in sums.items():
        computed.tensors[step, quantity] = parts
        for part in parts:
            # Each cp rank has summed over its own part of a sample.
            dist.all_reduce(part.value, group=state.get_context_parallel_group())
    with _whole_gradients(model):
        gradients = _gradients(chunks, optimizer)
    _, norm, _ = optimizer.step()
    computed.norms[step, NORM] = float(norm), _norms(gradients)
    if model[0].ddp_config.overlap_param_gather:
        # megatron-core gathers parameters in the hooks of the next forward pass. Gathered here
        # instead, a hook that gathers nothing would not be seen.
        with torch.no_grad():
            run({"loss": [], "tokens": []}, forward_only=True)
    updates = [
        piece._replace(value=piece.value - weights_before[piece.place]) for piece in _pieces(chunks)
    ]
    computed.tensors[step, "gradient"] = gradients
    computed.tensors[step, "update"] = updates
    computed.tensors[step, "buffer"] = _pieces(chunks, of_buffers=True)


def _even_norm(chunks: Sequence[Any], optimizer: Any) -> tuple[float, dict[Place, float]]:
    """The norm of gradients of equal size, and the norms of these.

    In the norm of a step, a small parameter that is left out or counted twice would not be seen.
    """
    for parameter in _parameters(chunks):
        gradient = getattr(parameter, "main_grad", None)
        if gradient is not None:
            # Of equal numbers, a sum in float32 is wrong by more than rounding is allowed to be.
            noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(SEED))
            gradient.copy_(noise * (optimizer.get_loss_scale() / noise.norm()))
    norms = _norms(_gradients(chunks, optimizer))
    _, norm, _ = optimizer.step()
    return float(norm), norms


def _norms(pieces: Iterable[Piece]) -> dict[Place, float]:
    return {piece.place: float(piece.value.double().norm()) for piece in pieces}


def _weight(piece: Piece) -> Weight:
    value = piece.value
    return Weight(
        piece.place,
        digest(value),
        norm=float(value.norm()),
        # The weight of a norm is the same number everywhere.
        is_constant=bool(value.min() == value.max()),
    )


def _gradients(chunks: Sequence[Any], optimizer: Any) -> list[Piece]:
    """Copies of all gradients, as the optimizer takes them: without the scale of the loss."""
    weights: dict[Any, torch.Tensor] = {}
    # In the place of the weight, a gradient gets its name and its part of the whole tensor.
    for parameter in _parameters(chunks):
        weights.setdefault(parameter, parameter.data)  # chunks may share it
        # Where megatron-core's data parallelism keeps it; NaN without any.
        gradient = getattr(parameter, "main_grad", None)
        if gradient is None:
            gradient = torch.full_like(parameter.data, float("nan"))
        parameter.data = gradient.to(parameter.dtype)
    pieces = _pieces(chunks)
    for parameter, weight in weights.items():
        parameter.data = weight
    for piece in pieces:
        piece.value.div_(optimizer.get_loss_scale())
    return pieces


def _parameters(chunks: Iterable[Any]) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.parameters()


def _seed(layout: Layout, state: Any) -> None:
    """Seed as Megatron's training does: stages differ, data-parallel ranks only if asked for."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    seed = SEED + 100 * state.get_pipeline_model_parallel_rank()
    if layout.options.get(RANDOM_INIT):
        seed += 10 * state.get_data_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def _set_weights(
    chunks: Sequence[Any], initial: Mapping[str, torch.Tensor] | None, jitter: float
) -> None:
    """Give the model the ``initial`` weights, or make its own uneven: norms begin with ones."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for chunk in chunks:
            if initial is not None:
                _load(chunk, initial)
            for parameter in chunk.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if initial is None:
                    parameter.add_(noise * 0.02)
                elif jitter:
                    parameter.mul_(1 + jitter * noise)


def whole_tensors(pieces: Sequence[Piece]) -> dict[str, torch.Tensor]:
    """One rank's tensors; the two halves of a gated layer's first weight are pieces of one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        ends = tuple(end for _, end in piece.where)
        shape = shapes.get(piece.name, ends)
        shapes[piece.name] = tuple(map(max, ends, shape))
    whole = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for piece in pieces:
        whole[piece.name][piece.slices] = piece.value
    return whole


def _build(task: Task, layout: Layout, state: Any) -> list[Any]:
    """The chunks of this rank's stage."""
    from megatron.core.enums import ModelType

    stages: Sequence[int | None] = [None]  # the one stage of a rank has no number
    if layout.vp:
        stages = range(layout.vp)
    chunks = []
    for stage in stages:
        chunk = task.build(
            layout,
            pre_process=state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
        )
        if not hasattr(chunk, "config"):
            raise TypeError(f"build() must give a model of megatron-core, got {chunk!r:.80}")
        # Schedules ask for it; Megatron's training sets it, and a model of the user's may lack it.
        if getattr(chunk, "model_type", None) is None:
            chunk.model_type = ModelType.encoder_or_decoder
        chunks.append(chunk)
    return chunks


def _forward_step(
    task: Task,
    layout: Layout,
    config: Any,
    sums: Mapping[str, list[Piece]],
    state: Any,
) -> Callable[..., Any]:
    if task.script is not None:
        forward = task.script(config, layout, task.batch)
    else:
        forward = partial(_forward, task, state.get_context_parallel_rank(), layout.cp)

    def step(numbers: Iterator[int], model: Any) -> tuple[Any, Any]:
        number = next(numbers)
        output, loss = forward(number, model)

        def recorded(output: torch.Tensor) -> tuple[Any, ...]:
            # Megatron's own gives what is logged, too.
            total, count, *_ = loss(output)
            where = ((number, number + 1),)
            for quantity, value in (("loss", total), ("tokens", count)):
                sums[quantity].append(Piece("", where, value.detach().clone().view(1)))
            return total, count.to(torch.int), {}

        return output, recorded

    return step


def _forward(task: Task, cp_rank: int, cp_size: int, number: int, model: Any) -> tuple[Any, Any]:
    """The output for this rank's part of a micro batch, and the function of its loss."""
    batch = task.batch[number]
    part = {name: _of_cp_rank(value, cp_rank, cp_size) for name, value in batch.items()}
    output = model(**taken(model.module.forward, part))
    loss = task.loss or masked_sum
    return output, lambda output: loss(output, part)


def masked_sum(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of losses of shape (samples, length) where ``loss_mask`` is 1, and how many."""
    mask = batch.get("loss_mask")
    if mask is None:
        mask = torch.ones_like(output)
    losses = output.float() * mask
    return losses.sum(), mask.sum()


def _of_cp_rank(value: Any, rank: int, size: int) -> Any:
    """This rank's two chunks of the sequence, which is the second dim of each tensor."""
    if size == 1 or not _has_length(value):
        return value
    chunks = value.chunk(2 * size, dim=1)
    early, late = chunks_held(rank, size)
    return torch.cat([chunks[early], chunks[late]], dim=1)


@contextmanager
def _whole_gradients(model: Iterable[Any]) -> Iterator[None]:
    """Gradient buffers are complete meanwhile; the distributed optimizer leaves each rank its part.

    Afterwards they are as they were: an optimizer that reads another part than its own must not
    find it complete.
    """
    partial_gradients = []
    for chunk in model:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group = buckets.intra_distributed_optimizer_instance_group
            for bucket in buckets.buckets:
                gradients = bucket.grad_data.clone()
                partial_gradients.append((bucket.grad_data, gradients))
                # Each rank has reduced the part that its place in the group says.
                parts = list(bucket.grad_data.chunk(group.size()))
                own_part = gradients.chunk(group.size())[group.rank()]
                dist.all_gather(parts, own_part, group=group)
    try:
        yield
    finally:
        for buffer, gradients in partial_gradients:
            buffer.copy_(gradients)


def _pieces(chunks: Iterable[Any], of_buffers: bool = False) -> list[Piece]:
    """Copies of all parameters, or all buffers, that the chunks hold."""
    pieces: list[Piece] = []
    for chunk in chunks:
        pieces.extend(_shards(chunk, of_buffers))
    return [piece._replace(value=piece.value.detach().clone()) for piece in pieces]


def _load(chunk: Any, whole: Mapping[str, torch.Tensor]) -> None:
    for piece in _shards(chunk):
        if piece.name not in whole:
            raise ValueError(f"{piece.name} of this layout's model is not in that of one rank")
        piece.value.copy_(whole[piece.name][piece.slices])


def _shards(chunk: Any, of_buffers: bool = False) -> Iterator[Piece]:
    """Views of the chunk's parameters, or buffers, with their places in whole tensors."""
    tensors = chunk.buffers() if of_buffers else chunk.parameters()
    # A state dict has other entries too, such as what layers save beside their weights.
    storages = set(map(_storage, tensors))
    # Each layer under its own number: layers need not be alike.
    state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    yield from _walk(state, storages)


def _walk(node: Any, storages: set[int]) -> Iterator[Piece]:
    if hasattr(node, "build_fn"):  # one parameter that is stored as several tensors
        node = node.build()
    if isinstance(node, Mapping):
        node = list(node.values())
    if isinstance(node, list | tuple):
        for child in node:
            yield from _walk(child, storages)
    elif hasattr(node, "global_offset") and _storage(node.data) in storages:
        yield _piece(node)


def _piece(shard: Any) -> Piece:
    """The piece of a ShardedTensor. Axes before the tensor's own number layers or experts.

    Example: an offset of (3, 16, 0) with one such axis is the part from 16 on of ``name[3]``.
    """
    name = shard.key
    for offset in shard.global_offset[: shard.prepend_axis_num]:
        name += f"[{offset}]"
    starts = shard.global_offset[shard.prepend_axis_num :]
    ends = map(add, starts, shard.local_shape)
    return Piece(name, tuple(zip(starts, ends, strict=True)), shard.data)


def _storage(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    return tensor.untyped_storage().data_ptr()
