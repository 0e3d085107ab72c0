"""megatron-core's calls of CUDA, answered on the CPU, so that its training runs over gloo.

`adapt()` goes before the first import of megatron; it does nothing where CUDA is available.
`local_layers()` comes after it and serves GPUs too: megatron-core's own layers refuse sequence and
context parallelism without Transformer Engine, these do not.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import torch

from hypergrid import of_torch


def adapt() -> None:
    """Make torch answer megatron-core's CUDA calls with the CPU."""
    if torch.cuda.is_available():
        return
    if "triton" not in sys.modules and find_spec("triton") is None:
        # 0.18 and later import it, to define kernels for GPUs.
        import_module("torch._inductor.compile_fx")  # torch knows that it has none
        stand_in = MagicMock(__version__="0")  # older than what megatron-core takes for kernels
        sys.modules.update({"triton": stand_in, "triton.language": stand_in})
    cuda: Any = torch.cuda
    # Nearly every buffer is made on the "current device".
    cuda.current_device = lambda: torch.device("cpu")
    # Batched sends between pipeline stages end with it.
    cuda.synchronize = lambda *_: None
    # Gradient reduction asks for streams, though it waits on them only where work overlaps.
    cuda.Stream = _NoStream
    cuda.current_stream = _NoStream
    # Schedules, optimizer and gradient clipping write device="cuda" out; rotary embeddings under
    # context parallelism ask for memory that is pinned for a GPU.
    for name in ("empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    # Tied embeddings move a weight before they reduce it between the pipeline's ends.
    tensor.cuda = lambda self, *_args, **_kwargs: self
    # Gradient clipping and the distributed optimizer take only tensors that say they are CUDA's.
    tensor.type = _saying_cuda(tensor.type)
    # Bridges between modules write backend="nccl" out for the groups that they broadcast in, which
    # torch's enumeration creates by this; the enumeration itself stays torch's own.
    c10d: Any = of_torch.c10d
    c10d.new_group = _not_nccl(c10d.new_group)


class _NoStream:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...


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
        return create(*args, backend=None if backend == "nccl" else backend, **kwargs)

    return make


def _saying_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_of)
    def answer(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return "torch.cuda." + type_of(self).rsplit(".", 1)[-1]
        return type_of(self, dtype, *args, **kwargs)

    return answer


def local_layers(config: Any, vp_stage: int | None, pp_rank: int) -> Any:
    """The specification of this stage's layers, for megatron-core without Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    # A name that the router reads, and that 0.16 gets from Transformer Engine alone.
    vars(moe_utils).setdefault("te_general_gemm", None)
    kinds = {"qk_layernorm": config.qk_layernorm}
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, **taken(get_gpt_layer_local_spec, kinds)
    )
    norm = _norm(config)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention.submodules
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    if config.context_parallel_size > 1:
        attention.core_attention = _context_parallel_attention()
    where = {"vp_stage": vp_stage, "pp_rank": pp_rank}
    count = get_num_layers_to_build(config, **taken(get_num_layers_to_build, where))
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def let_one_rank_sum() -> None:
    """Let experts with biases run on one rank.

    megatron-core's sum over one rank returns its input as it is, the experts' layer then adds the
    bias in place, and autograd refuses that.
    """
    layers: Any = import_module("megatron.core.tensor_parallel.layers")
    for name in (
        "reduce_from_tensor_model_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
    ):
        setattr(layers, name, _unless_alone(getattr(layers, name)))


def _unless_alone(reduce: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(reduce)
    def reduced(input_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = reduce(input_, *args, **kwargs)
        return input_ if output.data_ptr() == input_.data_ptr() else output

    return reduced


def taken(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The ``arguments`` that this release's ``function`` takes; older releases take fewer."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def chunks_held(rank: int, size: int) -> list[int]:
    """The chunks, of a sequence's 2 x size, that a cp rank holds: an early and a late one."""
    return [rank, 2 * size - 1 - rank]


def _norm(config: Any) -> type[torch.nn.Module]:
    """A norm for sequence parallelism, which megatron-core's own wrapper refuses."""
    kind: Any = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm

    class Norm(kind):  # type: ignore[misc]
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
            for parameter in self.parameters():
                # Marks gradients that cover a part of the sequence: megatron sums them over tp.
                parameter.sequence_parallel = config.sequence_parallel

    return Norm


def _context_parallel_attention() -> type[torch.nn.Module]:
    """Causal attention that gathers keys and values over cp, which the local one refuses."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class ContextParallelAttention(DotProductAttention):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            without_cp = copy.copy(config)
            without_cp.context_parallel_size = 1
            super().__init__(without_cp, *args, **kwargs)
            self.cp_group = kwargs["pg_collection"].cp

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            **kwargs: Any,
        ) -> torch.Tensor:
            key, value = (
                gather_from_sequence_parallel_region(part.contiguous(), group=self.cp_group)
                for part in (key, value)
            )
            size = self.cp_group.size()
            held = torch.tensor([chunks_held(rank, size) for rank in range(size)])
            positions = torch.arange(len(key)).view(2 * size, -1)[held].view(size, -1)
            queries, keys = positions[self.cp_group.rank()], positions.flatten()
            mask = (keys[None, :] > queries[:, None]).to(query.device)
            return super().forward(query, key, value, mask, **kwargs)

    return ContextParallelAttention
