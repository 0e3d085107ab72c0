"""megatron-core's calls of CUDA, answered on the CPU, so that its training runs over gloo.

`adapt()` goes before the first import of megatron; it does nothing where CUDA is available.
`local_layers()` comes after it and serves GPUs too: megatron-core's own layers refuse sequence and
context parallelism without Transformer Engine, these do not.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import typing
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import typing_extensions

from compat.verification.collectives import expect_backward, watch_collectives
from hypergrid import of_torch


def adapt() -> None:
    """Make torch answer megatron-core's CUDA calls with the CPU."""
    if torch.cuda.is_available():
        return
    if not hasattr(typing, "override"):
        # Python before 3.12; megatron.training of 0.19 imports it, and is the same without.
        typing.override = typing_extensions.override
    if "triton" not in sys.modules and find_spec("triton") is None:
        # 0.18 and later import it, to define kernels for GPUs.
        import_module("torch._inductor.compile_fx")  # torch knows that it has none
        # A version that is older than what megatron-core takes for kernels.
        stand_in = mock.MagicMock(__version__="0")
        sys.modules.update({"triton": stand_in, "triton.language": stand_in})
    cuda: Any = torch.cuda
    # Nearly every buffer is made on the "current device".
    cuda.current_device = lambda: torch.device("cpu")
    # Batched sends between pipeline stages end with it.
    cuda.synchronize = lambda *_: None
    # Gradient reduction and token dispatch ask for streams; on the CPU, work runs in their order.
    cuda.Stream = _NoStream
    cuda.current_stream = _NoStream
    cuda.Event = _NoStream
    cuda.stream = lambda _stream: contextlib.nullcontext()
    # Each rank draws from the CPU's generator what it would draw from its GPU's.
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.random.get_rng_state = cuda.get_rng_state
    # Schedules, optimizer and gradient clipping write device="cuda" out; rotary embeddings under
    # context parallelism ask for memory that is pinned for a GPU.
    for name in ("empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    # Tied embeddings move a weight before they reduce it between the pipeline's ends.
    tensor.cuda = lambda self, *_args, **_kwargs: self
    tensor.record_stream = lambda self, _stream: None
    # Gradient clipping and the distributed optimizer take only tensors that say they are CUDA's.
    tensor.type = _saying_cuda(tensor.type)
    # Bridges between modules write backend="nccl" out for the groups that they broadcast in, which
    # torch's enumeration creates by this; the enumeration itself stays torch's own.
    c10d: Any = of_torch.c10d
    c10d.new_group = _not_nccl(c10d.new_group)
    # Token dispatch gives sizes as a tensor, which torch's NCCL alone reads.
    distributed: Any = torch.distributed
    distributed.all_to_all_single = _with_lists(distributed.all_to_all_single)
    distributed.all_gather = _of_any_sizes(distributed.all_gather)
    watch_collectives()


class _NoStream:
    """A stream, or an event in one, of a device that has one stream."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, *_args: Any) -> _NoStream:
        return self


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            device = "cpu"
        return factory(*args, device=device, **kwargs)

    return make


def _not_nccl(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def make(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        if backend == "nccl":
            backend = None
        return create(*args, backend=backend, **kwargs)

    return make


def _with_lists(exchange: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(exchange)

    @functools.wraps(exchange)
    def exchanged(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(arguments.get(name), torch.Tensor):
                arguments[name] = arguments[name].tolist()
        return exchange(**arguments)

    return exchanged


def _of_any_sizes(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Gather parts of unequal sizes, as NCCL does and gloo does not."""

    @functools.wraps(gather)
    def gathered(parts: Any, part: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({place.shape for place in parts}) == 1:
            return gather(parts, part, group=group, async_op=async_op)
        for rank, place in enumerate(parts):
            if rank == torch.distributed.get_rank(group):
                place.copy_(part)
            torch.distributed.broadcast(place, group=group, group_src=rank)
        return None

    return gathered


_said_types: list[str] = []  # the type that parameters say they have, and have float32 data


def parameters_say(types: list[str]) -> None:
    """Let the optimizer take parameters for float16: it then keeps copies of them in float32."""
    _said_types[:] = types


def _saying_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_of)
    def answer(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return type_of(self, dtype, *args, **kwargs)
        if _said_types and isinstance(self, torch.nn.Parameter):
            return _said_types[0]
        _, _, kind = type_of(self).rpartition(".")
        return f"torch.cuda.{kind}"

    return answer


def local_layers(config: Any, vp_stage: int | None, pp_rank: int | None = None) -> Any:
    """The specification of this stage's layers, for megatron-core without Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    replace_parts()
    options = {
        "normalization": config.normalization,
        "qk_l2_norm": getattr(config, "qk_l2_norm", False),  # from megatron-core 0.16 on
        "vp_stage": vp_stage,
        "pp_rank": pp_rank,
    }
    with _own_parts():
        block = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            **taken(get_gpt_decoder_block_spec, options),
        )
    block.layer_norm = Norm
    if getattr(config, "multi_latent_attention", False):
        for layer in block.layer_specs:
            attention = layer.submodules.self_attention.submodules
            attention.linear_q_down_proj = WholeLinear
            attention.linear_kv_down_proj = WholeLinear
    return block


def predicting_layers(config: Any, block: Any, vp_stage: int | None) -> Any:
    """The specification of this stage's layers that predict further tokens; None without any."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    with _own_parts():
        return get_gpt_mtp_block_spec(
            config, block, use_transformer_engine=False, vp_stage=vp_stage
        )


def _own_parts() -> Any:
    """Inside, specifications get our norm and our attention from what provides local layers."""
    from megatron.core.models.gpt import gpt_layer_specs

    class Provider(gpt_layer_specs.LocalSpecProvider):  # type: ignore[misc]
        def layer_norm(self, *_: Any, **__: Any) -> type:
            return Norm

        def core_attention(self) -> type:
            return _attention()

    return mock.patch.object(gpt_layer_specs, "LocalSpecProvider", Provider)


class Norm:
    """Makes a norm for sequence parallelism, which megatron-core's own wrapper refuses."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind: Any = torch.nn.LayerNorm
        if config.normalization == "RMSNorm":
            kind = torch.nn.RMSNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            # Marks gradients that cover a part of the sequence: megatron sums them over tp.
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class WholeLinear(torch.nn.Module):
    """A linear layer that each tensor-parallel rank has whole, as Transformer Engine's can be.

    megatron-core's local layers are split, and give other gradients than those that users run.
    """

    def __init__(self, inputs: int, outputs: int, *, config: Any, init_method: Any, **_: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        init_method(self.weight)
        # Marks a gradient that covers a part of the sequence: megatron sums it over tp.
        mark: Any = self.weight
        mark.sequence_parallel = config.sequence_parallel

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(features, self.weight), None


class Replaced(NamedTuple):
    """A name in a module of megatron-core that has another value here."""

    module: str  # below megatron.core
    name: str
    by: Callable[[Any], Any]  # gives the new value, and takes the old one; None if there is none
    does: str  # instead, and why


def _set_cpu_state(set_gpu_state: Callable[..., None]) -> Callable[..., None]:
    if torch.cuda.is_available():
        return set_gpu_state
    return lambda state, *_, **__: torch.set_rng_state(state)


def _torch_without_bfloat16() -> ModuleType:
    """torch, but for the name bfloat16, which is float32."""
    module = ModuleType("torch")
    vars(module).update(vars(torch), bfloat16=torch.float32)
    return module


def _unless_alone(reduce: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``reduce``, and the identity in a group of one rank: there its gradient is the same."""

    # megatron-core's layers, which alone have it by this name, always give their group.
    @functools.wraps(reduce)
    def reduced(features: torch.Tensor, group: Any) -> torch.Tensor:
        if group.size() == 1:
            return features
        output = reduce(features, group)
        expect_backward(reduce.__name__, output)
        return output

    return reduced


# Experts' layers, and losses of gathered logits, change in place what this function returns. In a
# group of one rank it returns its input, of which autograd then refuses the change.
_GIVES_ITS_INPUT = "gives its input in a group of one rank"
# All that is replaced in megatron-core itself, and why the results of several ranks are still its
# own. The layers of a specification are not in this list: a specification exists to be given other
# layers.
REPLACED = (
    # A group of two or more runs megatron-core's own, forward and backward.
    *(
        Replaced("tensor_parallel.layers", name, _unless_alone, _GIVES_ITS_INPUT)
        for name in (
            "reduce_from_tensor_model_parallel_region",
            "reduce_scatter_to_sequence_parallel_region",
            "gather_from_tensor_model_parallel_region",
        )
    ),
    # A state belongs to one rank.
    Replaced(
        "tensor_parallel.random",
        "_set_cuda_rng_state",
        _set_cpu_state,
        "sets the state of the CPU's generator where CUDA is absent",
    ),
    # Each rank rounds its own part.
    Replaced(
        "fusions.fused_cross_entropy",
        "torch",
        lambda _: _torch_without_bfloat16(),
        "rounds gradients to float32, and not to bfloat16",
    ),
    # Each rank holds the layer whole; its gradient is summed by megatron-core.
    Replaced(
        "transformer.multi_latent_attention",
        "TELinear",
        lambda _: WholeLinear,
        "is the class by which the module knows a layer that is not split",
    ),
    # The router then multiplies with torch.
    Replaced(
        "transformer.moe.moe_utils",
        "te_general_gemm",
        lambda function: function,
        "is None, where 0.16 has no such name",
    ),
    # A training job has no such layer.
    Replaced(
        "transformer.multi_token_prediction",
        "is_inference_column_parallel_linear",
        lambda _: lambda _: False,
        "knows no layer for inference",
    ),
)


@functools.cache
def replace_parts() -> None:
    """Put in place what ``REPLACED`` lists, in the modules that this release has; once."""
    for replaced in REPLACED:
        with contextlib.suppress(ModuleNotFoundError):
            module = import_module(f"megatron.core.{replaced.module}")
            original = getattr(module, replaced.name, None)
            setattr(module, replaced.name, replaced.by(original))


def taken(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The ``arguments`` that this release's ``function`` takes; older releases take fewer."""
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def chunks_held(rank: int, size: int) -> list[int]:
    """The chunks, of a sequence's 2 x size, that a cp rank holds: an early and a late one."""
    return [rank, 2 * size - 1 - rank]


def _attention() -> Any:
    """megatron-core's local attention, and what it refuses.

    Under cp it gathers keys and values, and is causal. Values may have another size than keys, as
    in multi-latent attention.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region as gather
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        def __init__(
            self,
            config: Any,
            *,
            k_channels: int | None = None,
            v_channels: int | None = None,
            **kwargs: Any,
        ) -> None:
            without_cp = copy.copy(config)
            without_cp.context_parallel_size = 1
            super().__init__(without_cp, **kwargs)
            if v_channels is not None:
                heads = self.num_attention_heads_per_partition
                self.hidden_size_per_partition = v_channels * heads
            self.cp_group: Any = None
            if config.context_parallel_size > 1:
                self.cp_group = kwargs["pg_collection"].cp
                # megatron-core's own mask of a window is for a whole sequence.
                self.window = self.scale_mask_softmax.window_size
                self.scale_mask_softmax.window_size = None

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            **kwargs: Any,
        ) -> torch.Tensor:
            if self.cp_group is not None:
                key = gather(key.contiguous(), group=self.cp_group)
                value = gather(value.contiguous(), group=self.cp_group)
                attention_mask = self.causal_mask(len(key))
            return super().forward(query, key, value, attention_mask, **kwargs)

        def causal_mask(self, length: int) -> torch.Tensor:
            size = self.cp_group.size()
            held = torch.tensor([chunks_held(rank, size) for rank in range(size)])
            # The positions that each cp rank holds: of 8 tokens on 2 ranks 0 1 6 7 and 2 3 4 5.
            positions = torch.arange(length).view(2 * size, -1)[held].view(size, -1)
            keys = positions.flatten()[None, :]
            queries = positions[self.cp_group.rank()][:, None]
            mask = keys > queries
            if self.window is not None:
                mask |= keys < queries - self.window[0]
            return mask

    return Attention
