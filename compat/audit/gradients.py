"""Whether each parameter's gradient is summed over the right ranks, and counted once in the norm.

Gradients are filled with numbers that say which rank they come from; megatron-core's own functions
reduce and count them, and the results say which ranks took part.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from compat.state import ParallelState
from hypergrid.messages import few

# This rank's trained parameters, each with the number of its chunk and its name.
Parameters: TypeAlias = Sequence[tuple[int, str, Any]]
# Ranks that one reduction tells apart by powers of two: in bfloat16 too, and of four a multiple
# may be the sum of other ranks.
_BITS = 2
_EXACT = 200  # numbers that every dtype of gradients holds exactly


@dataclass(frozen=True)
class GradientFinding:
    """A parameter that is reduced over wrong ranks, or not counted once in the gradient norm."""

    parameter: str  # "" for the norm itself
    kind: str  # "tensor-parallel", "sequence-parallel", "expert", "shared embedding", "replicated"
    what: str
    ranks: tuple[int, ...]  # where it is so

    def __str__(self) -> str:
        subject = f"{self.parameter} ({self.kind})" if self.parameter else "the gradient norm"
        return f"{subject}: {self.what}; on ranks {few(self.ranks)}"


@dataclass(frozen=True)
class _Parameter:
    """One rank's part of one of the model's parameters."""

    name: str
    kind: str
    place: str  # the part of the whole model that has it
    key: tuple[Any, ...]  # equal on ranks that hold the same elements of the whole model
    numel: int
    wanted: frozenset[int]  # ranks whose gradients must be summed
    summed: frozenset[int]  # and those that were, as far as this rank can see


def check_gradients(
    model: torch.nn.Module | Sequence[torch.nn.Module], state: ParallelState, optimizer: Any = None
) -> list[GradientFinding]:
    """Find parameters whose gradients are reduced or counted wrongly; none is an empty list.

    *Collective* over the ranks of ``state``, between steps: gradients that are there are kept, the
    optimizer's own copies are dropped. Needs memory for a second copy of the gradients, and reduces
    them once for each two ranks.

    Parameters
    ----------
    model : DistributedDataParallel, or a list of them
        This rank's part of one model, as megatron-core's schedules take it.
    state : ParallelState
        The state that the model must communicate over.
    optimizer : MegatronOptimizer, optional
        As ``get_megatron_optimizer`` gave it. With it the gradient norm is checked too: it must
        count each element of the whole model once.

    Raises
    ------
    TypeError
        Something is given that is not a model, a state or an optimizer as above.
    ValueError
        The state has no groups or an encoder of its own; a parameter has no ``main_grad``.
    """
    chunks = list(model) if isinstance(model, Sequence) else [model]
    _check_arguments(chunks, state, optimizer)
    own = [
        (index, name, parameter)
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    ]
    bare = [name for _, name, each in own if getattr(each, "main_grad", None) is None]
    if bare:
        raise ValueError(
            f"{bare[0]} has no main_grad: megatron-core's DistributedDataParallel gives it to "
            f"parameters that require gradients when the model is wrapped."
        )
    with state.activate(), _restored(own, optimizer), torch.no_grad():
        here = _reduced(chunks, own, state)
        everyone = dict(_from_all((dist.get_rank(), here), state))
        found = list(_wrongly_reduced(everyone))
        if optimizer is not None:
            found += _wrongly_counted(own, here, optimizer, everyone, state)
    return found


def _check_arguments(chunks: list[Any], state: Any, optimizer: Any) -> None:
    if not isinstance(state, ParallelState):
        raise TypeError(
            f"check_gradients needs a ParallelState, not {state!r}: of the module's groups it is "
            f"parallel_state.current_state()."
        )
    if state.request is None or state.pool is None:
        raise ValueError(f"check_gradients needs a state with groups on this rank: {state!r}.")
    if state.request.encoder is not None:
        raise ValueError("check_gradients does not know a state with an encoder on its own ranks.")
    other = [type(each).__name__ for each in chunks if not hasattr(each, "finish_grad_sync")]
    if other or not chunks:
        raise TypeError(
            f"check_gradients needs the model as megatron-core's DistributedDataParallel wraps it, "
            f"or a list of such chunks, not {other[0] if other else 'an empty list'}."
        )
    if optimizer is not None and not hasattr(optimizer, "prepare_grads"):
        raise TypeError(
            f"check_gradients needs the optimizer that get_megatron_optimizer gave, not "
            f"{type(optimizer).__name__}."
        )


@contextmanager
def _restored(own: Parameters, optimizer: Any) -> Iterator[None]:
    # Where it stays True, the next backward does not add its gradients.
    kept = [(p.main_grad.clone(), getattr(p, "grad_added_to_main_grad", False)) for *_, p in own]
    try:
        yield
    finally:
        if optimizer is not None:
            optimizer.zero_grad()
        for (*_, parameter), (before, was_added) in zip(own, kept, strict=True):
            parameter.main_grad.copy_(before)
            parameter.grad_added_to_main_grad = was_added


def _from_all(value: Any, state: ParallelState) -> list[Any]:
    """Every rank's value: over the ranks of a stage, then over the stages."""
    stage: list[Any] = [value]
    for group in (
        state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        state.get_pipeline_model_parallel_group(),
    ):
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, stage, group=group)
        stage = [each for part in parts for each in part]
    return stage


def _reduced(chunks: list[Any], own: Parameters, state: ParallelState) -> list[_Parameter]:
    rank = dist.get_rank()
    ranks = sorted(_from_all(rank, state))
    rounds: list[list[float]] = []
    for start in range(0, len(ranks), _BITS):
        places = {each: place for place, each in enumerate(ranks[start : start + _BITS])}
        rounds.append(_reduce(chunks, own, 2.0 ** places[rank] if rank in places else 0.0))
    ones = _reduce(chunks, own, 1.0)
    where = dict(_from_all((rank, _neighbours(state)), state))
    # Most parameters are summed over the same few sets of ranks.
    summands = cache(lambda one, bits: _summands(one, bits, ranks))
    columns = zip(own, ones, zip(*rounds, strict=True), strict=True)
    return [
        _described(index, name, parameter, state, where, summands(one, bits))
        for (index, name, parameter), one, bits in columns
    ]


def _reduce(chunks: list[Any], own: Parameters, value: float) -> list[float]:
    """Each parameter's gradient after megatron-core's reductions, if it was ``value`` before."""
    from megatron.core.distributed import finalize_model_grads

    for *_, parameter in own:
        parameter.main_grad.fill_(value)
        # Where the gradient comes from autograd, main_grad has it already.
        parameter.grad_added_to_main_grad = True
    for chunk in chunks:
        config = getattr(chunk, "ddp_config", None)
        if getattr(config, "overlap_grad_reduce", False):
            chunk.start_grad_sync()
    finalize_model_grads(chunks)
    # Where a sum is spread over ranks, each rank has a part of it and smaller values elsewhere.
    return [float(parameter.main_grad.max()) for *_, parameter in own]


def _summands(ones: float, rounds: Sequence[float], ranks: list[int]) -> frozenset[int]:
    """The ranks whose powers of two are in ``rounds``, which are scaled as ``ones`` is."""
    nearest, found = 0.25, [0] * len(rounds)
    for many in range(1, len(ranks) + 1):
        bits = [value * many / ones if ones else 0.0 for value in rounds]
        whole = [round(each) for each in bits]
        off = max(abs(a - b) for a, b in zip(bits, whole, strict=True))
        if off < nearest and sum(each.bit_count() for each in whole) == many:
            nearest, found = off, whole
    return frozenset(rank for at, rank in enumerate(ranks) if found[at // _BITS] >> at % _BITS & 1)


def _neighbours(state: ParallelState) -> dict[str, list[int]]:
    ranks = dist.get_process_group_ranks
    embeddings = state._EMBEDDING_GROUP
    return {
        "dense": ranks(state.get_data_parallel_group(with_context_parallel=True)),
        "expert": ranks(state.get_expert_data_parallel_group()),
        "tp": ranks(state.get_tensor_model_parallel_group()),
        "embeddings": ranks(embeddings) if embeddings is not None else [dist.get_rank()],
    }


def _described(
    chunk: int,
    name: str,
    parameter: Any,
    state: ParallelState,
    where: dict[int, dict[str, list[int]]],
    summed: frozenset[int],
) -> _Parameter:
    rank, stage = dist.get_rank(), state.get_pipeline_model_parallel_rank()
    place, key = f"pp={stage}", tuple[Any, ...]((stage, chunk, name))
    is_split = bool(getattr(parameter, "tensor_model_parallel", False))
    in_experts = not {"experts", "local_experts"}.isdisjoint(name.split("."))
    if in_experts or not getattr(parameter, "allreduce", True):
        ep, tp = state.get_expert_model_parallel_rank(), state.get_expert_tensor_parallel_rank()
        kind, place, key, wanted = "expert", f"{place} ep={ep}", (*key, ep), where[rank]["expert"]
    else:
        tp, around = state.get_tensor_model_parallel_rank(), [rank]
        kind = "tensor-parallel" if is_split else "replicated"
        if getattr(parameter, "shared_embedding", False):
            kind, key, around = "shared embedding", ("shared",), where[rank]["embeddings"]
        elif getattr(parameter, "sequence_parallel", False):
            kind, around = "sequence-parallel", where[rank]["tp"]
        wanted = [each for one in around for each in where[one]["dense"]]
    key += (tp if is_split else -1,)
    return _Parameter(name, kind, place, key, parameter.numel(), frozenset(wanted), summed)


def _wrongly_reduced(everyone: dict[int, list[_Parameter]]) -> Iterator[GradientFinding]:
    found: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, parameters in sorted(everyone.items()):
        for at, parameter in enumerate(parameters):
            # The distributed optimizer's sums are spread: the rank that has a part knows it.
            others = [each for mate in parameter.wanted for each in everyone[mate][at : at + 1]]
            sums = [other.summed for other in others if other.key == parameter.key]
            summed = max([parameter.summed, *sums], key=len)
            if summed != parameter.wanted:
                got, wanted = few(sorted(summed)), few(sorted(parameter.wanted))
                what = f"summed over the ranks [{got}] instead of [{wanted}]"
                found[parameter.name, parameter.kind, what].append(rank)
    for (name, kind, what), ranks in found.items():
        yield GradientFinding(name, kind, what, tuple(ranks))


def _wrongly_counted(
    own: Parameters,
    here: list[_Parameter],
    optimizer: Any,
    everyone: dict[int, list[_Parameter]],
    state: ParallelState,
) -> Iterator[GradientFinding]:
    children = _children(optimizer)
    counted = [_counted(child, optimizer, own) for child in children]
    groups = [_norm_ranks(child, optimizer) for child in children]
    norms = _norm_of_ones(own, optimizer)
    told = dict(_from_all((dist.get_rank(), (counted, groups, norms)), state))
    wanted = {each.key: each for parameters in everyone.values() for each in parameters}
    wrong: dict[tuple[tuple[Any, ...], float], list[int]] = defaultdict(list)
    for rank, (_, over, _) in sorted(told.items()):
        total: Counter[tuple[Any, ...]] = Counter()
        for child, members in enumerate(over):
            for member in members if members is not None else told:
                for at, numel in told[member][0][child].items():
                    total[everyone[member][at].key] += numel
        for key, parameter in wanted.items():
            if total[key] != parameter.numel:
                wrong[key, total[key] / parameter.numel].append(rank)
    merged: dict[tuple[str, str, str, float], set[int]] = defaultdict(set)
    for (key, times), ranks in wrong.items():
        merged[wanted[key].name, wanted[key].kind, wanted[key].place, times].update(ranks)
    for (name, kind, place, times), where in merged.items():
        what = f"counted {times:g} times in the gradient norm instead of once, at {place}"
        yield GradientFinding(name, kind, what, tuple(sorted(where)))
    right = math.sqrt(sum(each.numel for each in wanted.values()))
    off = {r: norm for r, (*_, norm) in sorted(told.items()) if abs(norm - right) > 1e-4 * right}
    if off:
        got = " and ".join(sorted({f"{norm:.4f}" for norm in off.values()})[:4])
        what = f"{got} instead of {right:.4f} where every gradient is 1"
        yield GradientFinding("", "", what, tuple(off))


def _counted(child: Any, optimizer: Any, own: Parameters) -> dict[int, int]:
    """How many elements of each of this rank's parameters one optimizer counts."""
    found: Counter[int] = Counter()
    for start in range(0, len(own), _EXACT):
        for at, (*_, parameter) in enumerate(own):
            inside = start <= at < start + _EXACT
            parameter.main_grad.fill_(float(at - start + 1) if inside else 0.0)
        optimizer.prepare_grads()
        # Renamed in megatron-core 0.19.
        get = getattr(child, "get_grads_for_grad_norm", None) or child.get_main_grads_for_grad_norm
        for gradient in get():
            if gradient.numel() and (number := round(_scaled(gradient, child))):
                found[start + number - 1] += gradient.numel()
    return dict(found)


def _scaled(gradient: torch.Tensor, child: Any) -> float:
    # Loss scaling divides the optimizer's copies by the scale.
    scale = child.get_loss_scale() if getattr(child, "grad_scaler", None) is not None else 1.0
    return float(gradient.flatten()[0]) * float(scale)


def _norm_of_ones(own: Parameters, optimizer: Any) -> float:
    for *_, parameter in own:
        parameter.main_grad.fill_(1.0)
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm()) * _scaled(torch.ones(1), _children(optimizer)[0])


def _children(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", None) or [optimizer]


def _norm_ranks(child: Any, optimizer: Any) -> list[int] | None:
    """The ranks over which an optimizer's part of the norm is summed; None for all."""
    if type(optimizer).__name__ == "LayerWiseDistributedOptimizer":  # it sums over the world
        return None
    group = child.get_grad_stats_parallel_group()
    return None if group is None else dist.get_process_group_ranks(group)
