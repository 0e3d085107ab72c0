"""Stages of the pipeline: virtual ones, those with embeddings, an encoder's before a decoder's."""

# ruff: noqa: F821 - upstream's private globals are in the namespaces, see the package
# mypy: disable-error-code="name-defined,index"

from __future__ import annotations

import warnings

import torch.distributed as dist

from compat.megatron.getters.numbers import (
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_world_size,
)
from compat.megatron.releases import RELEASE_HAS, as_released
from compat.megatron.request import warn_of_removal


@as_released
def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or its virtual stage, begins the pipeline."""
    if not ignore_virtual:
        stages, virtual = _virtual_stage(vp_stage)
        if stages is not None and virtual != 0:
            return False
    return get_pipeline_model_parallel_rank() == 0


@as_released
def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or its virtual stage, ends the pipeline."""
    if not ignore_virtual:
        stages, virtual = _virtual_stage(vp_stage)
        if stages is not None and virtual != stages - 1:
            return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


@as_released
def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or its virtual stage, holds word embeddings."""
    rank = dist.get_rank()
    if _EMBEDDING_GLOBAL_RANKS is None or rank not in _EMBEDDING_GLOBAL_RANKS:
        return False
    staged = {"vp_stage": vp_stage} if RELEASE_HAS["vp_stage"] else {}
    if not ignore_virtual and rank == _EMBEDDING_GLOBAL_RANKS[0]:
        return is_pipeline_first_stage(ignore_virtual=False, **staged)
    if not ignore_virtual and rank == _EMBEDDING_GLOBAL_RANKS[-1]:
        return is_pipeline_last_stage(ignore_virtual=False, **staged)
    return True


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds position embeddings."""
    rank = dist.get_rank()
    return _POSITION_EMBEDDING_GLOBAL_RANKS is not None and rank in _POSITION_EMBEDDING_GLOBAL_RANKS


def get_pipeline_model_parallel_split_rank() -> int | None:
    """The stage at which the pipeline was split, or None."""
    return _PIPELINE_MODEL_PARALLEL_SPLIT_RANK


def get_pipeline_model_parallel_decoder_start() -> int | None:
    """The decoder's first stage after an encoder on ranks of its own; None without one."""
    _of_encoder("get_pipeline_model_parallel_decoder_start")
    return _PIPELINE_MODEL_PARALLEL_DECODER_START


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Whether a stage, this rank's unless given, comes before the split."""
    _of_encoder("is_pipeline_stage_before_split")
    stage = _stage(rank)
    split = _PIPELINE_MODEL_PARALLEL_SPLIT_RANK
    return stage is None or split is None or stage < split


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Whether a stage comes after the split."""
    _of_encoder("is_pipeline_stage_after_split")
    stage = _stage(rank)
    split = _PIPELINE_MODEL_PARALLEL_SPLIT_RANK
    return stage is None or split is None or stage >= split


def is_pipeline_stage_at_split() -> bool:
    """Whether this rank's stage is the last before the split."""
    _of_encoder("is_pipeline_stage_at_split")
    stage = get_pipeline_model_parallel_rank()
    return is_pipeline_stage_before_split(stage) and is_pipeline_stage_after_split(stage + 1)


def is_inside_encoder(rank: int | None = None) -> bool:
    """Whether a stage, this rank's unless given, belongs to the encoder."""
    _of_encoder("is_inside_encoder")
    stage = _stage(rank)
    start = _PIPELINE_MODEL_PARALLEL_DECODER_START
    if stage is None:
        return True
    if start is None:  # without an encoder on ranks of its own, it is in the first stage
        return stage == 0
    return stage < start


def is_inside_decoder(rank: int | None = None) -> bool:
    """Whether a stage belongs to the decoder."""
    _of_encoder("is_inside_decoder")
    stage = _stage(rank)
    start = _PIPELINE_MODEL_PARALLEL_DECODER_START
    return stage is None or start is None or stage >= start


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The virtual stage that was set, or None."""
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Virtual stages per rank, or None."""
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE


def set_pipeline_model_parallel_split_rank(rank: int | None) -> None:
    """Set the stage at which the pipeline is split."""
    global _PIPELINE_MODEL_PARALLEL_SPLIT_RANK
    _PIPELINE_MODEL_PARALLEL_SPLIT_RANK = rank


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of virtual stages per rank."""
    global _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = world_size


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the virtual stage. Deprecated: pass ``vp_stage`` instead."""
    global _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK
    if RELEASE_HAS["vp_stage"]:
        warnings.warn(
            "set_virtual_pipeline_model_parallel_rank is deprecated: pass vp_stage to "
            "is_pipeline_first_stage() and its like.",
            DeprecationWarning,
            stacklevel=2,
        )
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = rank


def _of_encoder(name: str) -> None:
    warn_of_removal(f"{name} is", stacklevel=3)


def _stage(rank: int | None) -> int | None:
    """``rank``, or else this rank's stage; None if the pipeline has one stage."""
    if get_pipeline_model_parallel_world_size() == 1:
        return None
    if rank is None:
        return get_pipeline_model_parallel_rank()
    return rank


def _virtual_stage(vp_stage: int | None) -> tuple[int | None, int | None]:
    """Virtual stages per rank, and the one that is asked about."""
    stages = get_virtual_pipeline_model_parallel_world_size()
    if stages is not None and vp_stage is None:
        # Before the argument, the stage that was set last counts.
        if not RELEASE_HAS["vp_stage"]:
            return stages, get_virtual_pipeline_model_parallel_rank()
        raise AssertionError(
            f"virtual pipelines are on ({stages} stages per rank): pass vp_stage, or "
            f"ignore_virtual=True."
        )
    return stages, vp_stage
