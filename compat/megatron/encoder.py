"""The encoder of megatron-core 0.12 and 0.13, on ranks of its own before the decoder's.

Its sizes and its pipelines.
"""

from __future__ import annotations

import warnings

from compat.megatron.releases import RELEASE_HAS
from compat.megatron.table import Row
from hypergrid.messages import shown

TENSOR = "encoder_tensor_model_parallel_size"
STAGES = "encoder_pipeline_model_parallel_size"


def warn_of_its_end(what: str, stacklevel: int = 2) -> None:
    """Warn, as upstream does, that this will be removed: a DeprecationWarning."""
    if RELEASE_HAS["encoder_deprecated"]:
        warnings.warn(
            f"{what} deprecated, as encoders with sizes of their own: lay out encoder and decoder "
            f"as two grids.",
            DeprecationWarning,
            stacklevel=stacklevel + 1,
        )


def sizes(tensor: int, stages: int, decoder_tensor: int) -> tuple[int, int]:
    """The encoder's tensor-parallel size and its stages; without stages there is no encoder."""
    for name, size in ((TENSOR, tensor), (STAGES, stages)):
        if size < 0:
            raise ValueError(f"{name} must be at least 0 (no encoder), got {shown(size)}.")
    return decoder_tensor if tensor == 0 and stages > 0 else tensor, stages


def check(asked: tuple[int, int], decoder_tensor: int) -> None:
    """Refuse more tensor parallelism than the decoder has: AssertionError, as upstream."""
    if any(asked):
        warn_of_its_end(f"{TENSOR} and {STAGES} are")
    if asked[0] > max(decoder_tensor, 0):
        raise AssertionError(
            f"{TENSOR}={shown(asked[0])} is more than tensor_model_parallel_size="
            f"{shown(decoder_tensor)}: each rank of the encoder feeds one or more of the decoder. "
            f"Make it smaller."
        )


def beside(
    row: Row, encoder: list[list[int]], decoder: list[list[int]], instances: int
) -> list[list[int]]:
    """The lists of both, as ``row.encoder`` says."""
    if row.loop == "dp":
        sizes = [len(lists[0]) for lists in (encoder, decoder)]
        if sizes[0] != sizes[1]:
            raise RuntimeError(
                f"num_distributed_optimizer_instances={instances} with an encoder needs "
                f"equal data parallel sizes of encoder and experts, they are {sizes[0]} and "
                f"{sizes[1]}. Change the expert sizes, or have one instance."
            )
    if row.encoder == "apart":
        return encoder + decoder
    if row.encoder == "shared":
        # By consecutive pipelines of the decoder; of a remainder the first ones get one more each.
        share, more = divmod(len(decoder), len(encoder))
        encoder = [pipe for i, pipe in enumerate(encoder) for _ in range(share + (i < more))]
    return [first + second for first, second in zip(encoder, decoder, strict=True)]
