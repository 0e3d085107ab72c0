"""Faults put into megatron-core on each rank of a layout; one rank alone computes as ever."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from compat.verification import Layout
from compat.verification.gpt import small_gpt
from tests.verification.layouts import AUX, EXPERTS, SHARDED, TOKENS


class Mutant(NamedTuple):
    """What is changed before the model is built, or on the model; where it must be found."""

    layout: Layout
    found: str  # "what name" of one finding, a part of it
    before: Callable[[], Any] | None = None
    model: Callable[[Any], Any] | None = None


def _optimizer_modules() -> Any:
    from megatron.core.optimizer import clip_grads, optimizer

    return clip_grads, optimizer


def _finalize_module() -> Any:
    return import_module("megatron.core.distributed.finalize_model_grads")


def _skip(name: str) -> Callable[[], None]:
    def patch() -> None:
        setattr(_finalize_module(), name, lambda *_, **__: None)

    return patch


def _twice(name: str) -> Callable[[], None]:
    def patch() -> None:
        once = getattr(_finalize_module(), name)

        def again(*args: Any, **kwargs: Any) -> None:
            once(*args, **kwargs)
            once(*args, **kwargs)

        setattr(_finalize_module(), name, again)

    return patch


def _after_sync(change: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Change each gradient of the model after data parallelism has reduced it."""

    def patch() -> None:
        from megatron.core import parallel_state as state
        from megatron.core.distributed import DistributedDataParallel as DDP

        finish = DDP.finish_grad_sync

        def finished(self: Any, *args: Any, **kwargs: Any) -> None:
            finish(self, *args, **kwargs)
            for parameter in self.module.parameters():
                change(parameter.main_grad, state)

        DDP.finish_grad_sync = finished

    return patch


def _no_data_parallel_sum() -> None:
    from megatron.core.distributed import DistributedDataParallel as DDP

    DDP.finish_grad_sync = lambda self, *_, **__: None


def _over_dp_instead_of_tp() -> None:
    from megatron.core import parallel_state as state

    module = _finalize_module()
    for name in ("_allreduce_non_tensor_model_parallel_grads", "_allreduce_layernorm_grads"):
        original = getattr(module, name, None)
        if original is None:
            continue

        def wrong(model: Any, config: Any, *_: Any, original: Any = original) -> None:
            if _:
                original(model, config, state.get_data_parallel_group())
            else:
                original(model, config)

        setattr(module, name, wrong)


def _counts_duplicates() -> None:
    from megatron.core import tensor_parallel

    tensor_parallel.param_is_not_tensor_parallel_duplicate = lambda *_, **__: True


def _counts_shared() -> None:
    for module in _optimizer_modules():
        if hasattr(module, "param_is_not_shared"):
            module.param_is_not_shared = lambda *_: True


def _norm_of_this_rank() -> None:
    def local(grads: Any, norm_type: float = 2, **_: Any) -> float:
        return float(sum(float(each.norm()) ** 2 for each in grads) ** 0.5)

    for module in _optimizer_modules():
        module.get_grad_norm_fp32 = local


def _input_gradient_is_not_summed() -> None:
    from megatron.core.tensor_parallel import layers

    function = layers.LinearWithGradAccumulationAndAsyncCommunication
    forward = function.forward

    def without(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(ctx, *args, **kwargs)
        ctx.allreduce_dgrad = False
        return output

    function.forward = staticmethod(without)


def _predicted_logits_of_this_rank() -> None:
    module: Any = import_module("megatron.core.tensor_parallel.cross_entropy")
    module.torch = _Without(torch, all_reduce_calls=(1,))


class _Without:
    """``torch`` whose ``distributed.all_reduce`` leaves out the given calls of each three."""

    def __init__(self, real: Any, all_reduce_calls: tuple[int, ...]) -> None:
        self._real, self._left_out, self._count = real, all_reduce_calls, -1

    def __getattr__(self, name: str) -> Any:
        return (
            self
            if name == "distributed"
            else getattr(self._real, name, None) or getattr(self._real.distributed, name)
        )

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        self._count += 1
        if self._count % 3 not in self._left_out:
            return self._real.distributed.all_reduce(*args, **kwargs)
        return None


def _mask_is_ignored() -> None:
    """On tensor-parallel ranks but the first, attention sees the future."""
    from megatron.core import parallel_state as state
    from megatron.core.fusions import fused_softmax

    if state.get_tensor_model_parallel_rank():
        fused_softmax.FusedScaleMaskSoftmax.forward = lambda self, input, mask, *_: torch.softmax(
            input, dim=-1
        )


def _scaled_backward() -> None:
    from megatron.core.pipeline_parallel import p2p_communication as p2p

    receive = p2p.P2PCommunicator.recv_backward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = receive(self, *args, **kwargs)
        if isinstance(output, list):
            return [each * 1.001 for each in output]
        return None if output is None else output * 1.001

    p2p.P2PCommunicator.recv_backward = scaled


def _auxiliary_loss_is_scaled() -> None:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    original = MoEAuxLossAutoScaler.set_loss_scale
    MoEAuxLossAutoScaler.set_loss_scale = staticmethod(lambda scale: original(scale * 2))


def _parameters_are_not_gathered() -> None:
    from megatron.core.distributed import DistributedDataParallel as DDP

    DDP.start_param_sync = lambda self, *_, **__: None


def _tokens_of_this_rank() -> None:
    module, gather = _finalize_module(), dist.all_reduce

    class Distributed:
        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            return None if tensor.dtype == torch.int else gather(tensor, *args, **kwargs)

    class Torch:
        distributed = Distributed()

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    module.torch = Torch()


def _each(pattern: str, change: Callable[[Any], None]) -> Callable[[Any], None]:
    def patch(model: Any) -> None:
        hit = [p for name, p in model.named_parameters() if pattern in name]
        for parameter in hit:
            change(parameter)

    return patch


def _no_router_gradient(parameter: Any) -> None:
    from megatron.core import parallel_state as state

    if state.get_tensor_model_parallel_rank():
        parameter.register_hook(torch.zeros_like)


def _not_sequence_parallel(parameter: Any) -> None:
    parameter.sequence_parallel = False


def _as_if_dense(parameter: Any) -> None:
    parameter.allreduce = True


def _one_replica(gradient: Any, state: Any) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        gradient.mul_(1.01)


NORMS = "_allreduce_non_tensor_model_parallel_grads"
EMBEDDINGS = "_allreduce_word_embedding_grads"
_TP, _DP = {**TOKENS, **SHARDED}, {"use_distributed_optimizer": True}
_MOE = {**TOKENS, **SHARDED, **EXPERTS}

MUTANTS = {
    "norms under sequence parallelism are not summed over tp": Mutant(
        Layout(tp=2, options=_TP), "layer_norm_weight", _skip(NORMS)
    ),
    "norms are summed over tp twice": Mutant(
        Layout(tp=2, dp=2, options=_TP), "layer_norm_weight", _twice(NORMS)
    ),
    "norms are summed over dp instead of tp": Mutant(
        Layout(tp=2, dp=2, options=_TP), "layer_norm_weight", _over_dp_instead_of_tp
    ),
    "tied embeddings are not summed over the stages": Mutant(
        Layout(pp=2, options=TOKENS), "gradient embedding.word_embeddings", _skip(EMBEDDINGS)
    ),
    "tied embeddings are summed twice": Mutant(
        Layout(pp=2, dp=2, options=TOKENS), "gradient embedding.word_embed", _twice(EMBEDDINGS)
    ),
    "gradients are not summed over dp": Mutant(
        Layout(dp=2, options=TOKENS), "gradient ", _no_data_parallel_sum
    ),
    "gradients are scaled by cp": Mutant(
        Layout(cp=2, options=TOKENS),
        "gradient ",
        _after_sync(lambda grad, state: grad.mul_(state.get_context_parallel_world_size())),
    ),
    "gradients are scaled by the instances of the optimizer": Mutant(
        Layout(dp=4, options={**TOKENS, **_DP, "num_distributed_optimizer_instances": 2}),
        "gradient ",
        _after_sync(lambda grad, _: grad.mul_(2)),
    ),
    "gradients of one replica alone are off by a hundredth": Mutant(
        Layout(tp=2, dp=2, options=TOKENS), "gradient ", _after_sync(_one_replica)
    ),
    "tensor-parallel duplicates count in the norm": Mutant(
        Layout(tp=2, options=TOKENS), "gradient norm", _counts_duplicates
    ),
    "shared embeddings count twice in the norm": Mutant(
        Layout(pp=2, options=TOKENS), "gradient norm", _counts_shared
    ),
    "the norm is not summed over the model-parallel ranks": Mutant(
        Layout(tp=2, pp=2, options=TOKENS), "gradient norm", _norm_of_this_rank
    ),
    "a column-parallel layer does not sum its input's gradient": Mutant(
        Layout(tp=2, options=TOKENS), "gradient ", _input_gradient_is_not_summed
    ),
    "the loss leaves out logits of other shards of the vocabulary": Mutant(
        Layout(tp=2, options=TOKENS), "loss", _predicted_logits_of_this_rank
    ),
    "attention on one tensor-parallel rank ignores the mask": Mutant(
        Layout(tp=2, options=TOKENS), "loss", _mask_is_ignored
    ),
    "a stage scales the gradient that it receives": Mutant(
        Layout(pp=2, options=TOKENS), "gradient embedding.position_embeddings", _scaled_backward
    ),
    "the auxiliary loss of experts is scaled twice": Mutant(
        Layout(dp=2, options=AUX), "router.weight", _auxiliary_loss_is_scaled
    ),
    "parameters are not gathered after the distributed optimizer's step": Mutant(
        Layout(dp=2, options={**TOKENS, **_DP}), "update ", _parameters_are_not_gathered
    ),
    "tokens are not counted over dp": Mutant(
        Layout(dp=2, options=TOKENS), "gradient ", _tokens_of_this_rank
    ),
    "the router's gradient of one tensor-parallel rank is dropped": Mutant(
        Layout(tp=2, options=_MOE),
        "router.weight",
        None,
        _each("router.weight", _no_router_gradient),
    ),
    "one norm is not marked as sequence-parallel": Mutant(
        Layout(tp=2, options=_TP),
        "final_layernorm",
        None,
        _each("final_layernorm", _not_sequence_parallel),
    ),
    "experts are reduced as dense parameters are": Mutant(
        Layout(dp=2, ep=2, options=_MOE | {"sequence_parallel": False}),
        "experts",
        None,
        _each("experts", _as_if_dense),
    ),
}


def mutated(mutant: Mutant) -> Callable[..., Any]:
    """A build function whose ranks have the fault."""

    def build(layout: Layout, **where: Any) -> Any:
        several = layout.world_size > 1
        if several and mutant.before is not None:
            mutant.before()
        made = small_gpt(layout, **where)
        if several and mutant.model is not None:
            mutant.model(made)
        return made

    return build
