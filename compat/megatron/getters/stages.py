"""Stages of the pipeline: virtual ones, and those with embeddings."""

# ruff: noqa: F821 - upstream's private globals are in the namespaces, see the package
# mypy: disable-error-code="name-defined,index"

from __future__ import annotations

import warnings

import torch.distributed as dist

from compat.megatron.getters.numbers import (
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_world_size,
)


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or its virtual stage, begins the pipeline."""
    if not ignore_virtual and _virtual_stages(vp_stage) is not None and vp_stage != 0:
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or its virtual stage, ends the pipeline."""
    if not ignore_virtual:
        stages = _virtual_stages(vp_stage)
        if stages is not None and vp_stage != stages - 1:
            return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or its virtual stage, holds word embeddings."""
    rank = dist.get_rank()
    if _EMBEDDING_GLOBAL_RANKS is None or rank not in _EMBEDDING_GLOBAL_RANKS:
        return False
    if not ignore_virtual and rank == _EMBEDDING_GLOBAL_RANKS[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    if not ignore_virtual and rank == _EMBEDDING_GLOBAL_RANKS[-1]:
        return is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return True


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds position embeddings."""
    rank = dist.get_rank()
    return _POSITION_EMBEDDING_GLOBAL_RANKS is not None and rank in _POSITION_EMBEDDING_GLOBAL_RANKS


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The virtual stage that was set, or None."""
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Virtual stages per rank, or None."""
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of virtual stages per rank."""
    global _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = world_size


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the virtual stage. Deprecated: pass ``vp_stage`` instead."""
    global _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK
    warnings.warn(
        "set_virtual_pipeline_model_parallel_rank is deprecated: pass vp_stage to "
        "is_pipeline_first_stage() and its like.",
        DeprecationWarning,
        stacklevel=2,
    )
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = rank


def _virtual_stages(vp_stage: int | None) -> int | None:
    """Virtual stages per rank, or None; refuses to be asked about none of them."""
    stages = get_virtual_pipeline_model_parallel_world_size()
    if stages is not None and vp_stage is None:
        raise AssertionError(
            f"virtual pipelines are on ({stages} stages per rank): pass vp_stage, or "
            f"ignore_virtual=True."
        )
    return stages
