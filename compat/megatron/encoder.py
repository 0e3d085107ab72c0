"""The encoder of megatron-core 0.12 and 0.13: ranks of its own, in front of the decoder's."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from compat.megatron.refusals import SizeError
from compat.megatron.releases import HAS
from hypergrid.messages import shown

if TYPE_CHECKING:
    from compat.megatron.arguments import Request
    from compat.megatron.table import Row

TENSOR = "encoder_tensor_model_parallel_size"
STAGES = "encoder_pipeline_model_parallel_size"


def warn_of_its_end(what: str, stacklevel: int = 2) -> None:
    """Say, where upstream does, that this goes away: a DeprecationWarning."""
    if HAS["encoder_deprecated"]:
        warnings.warn(
            f"{what} deprecated, as encoders with sizes of their own: lay out encoder and decoder "
            f"as two grids.",
            DeprecationWarning,
            stacklevel=stacklevel + 1,
        )


def sizes(request: Request) -> tuple[int, int]:
    """The encoder's tensor-parallel size and its stages; without stages there is no encoder."""
    stages = 0 if getattr(request, STAGES) is None else request.whole(STAGES)
    tensor = request.whole(TENSOR)
    for name, size in ((TENSOR, tensor), (STAGES, stages)):
        if size < 0:
            raise SizeError(
                f"{name} must be at least 0, which means no encoder, got {shown(size)}."
            )
    if tensor == 0 and stages > 0:
        tensor = request.whole("tensor_model_parallel_size")
    return tensor, stages


def check(request: Request) -> None:
    """Refuse more tensor parallelism than the decoder has: AssertionError, as upstream."""
    asked, most = sizes(request), request.whole("tensor_model_parallel_size")
    tensor = asked[0]
    if any(asked):
        warn_of_its_end(f"{TENSOR} and {STAGES} are")
    if tensor > max(most, 0):
        raise AssertionError(
            f"{TENSOR}={shown(tensor)} is more than tensor_model_parallel_size={shown(most)}: each "
            f"rank of the encoder feeds one or more of the decoder. Make it smaller."
        )


def beside(
    request: Request, row: Row, encoder: list[list[int]], decoder: list[list[int]]
) -> list[list[int]]:
    """The lists of both: joined where a group goes through the encoder, else one after another."""
    if row.loop == "dp":
        sizes = [len(lists[0]) for lists in (encoder, decoder)]
        if sizes[0] != sizes[1]:
            raise RuntimeError(
                f"num_distributed_optimizer_instances={request.instances} with an encoder needs "
                f"equal data parallel sizes of encoder and experts, they are {sizes[0]} and "
                f"{sizes[1]}. Change the expert sizes, or have one instance."
            )
    if row.slot == "_MODEL_PARALLEL_GROUP":
        return [first + second for first, second in zip(encoder, decoder, strict=True)]
    if row.dims != "pp":
        return encoder + decoder
    # Neighbours share an encoder's pipeline; where they do not come out even, the first ones
    # have one more.
    share, more = divmod(len(decoder), len(encoder))
    feeds = [pipe for i, pipe in enumerate(encoder) for _ in range(share + (i < more))]
    return [first + second for first, second in zip(feeds, decoder, strict=True)]
