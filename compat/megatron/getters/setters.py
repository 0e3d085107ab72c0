"""Numbers that answer instead of a group's, and Megatron's buffers."""


# mypy: disable-error-code="name-defined,index"

from __future__ import annotations

from typing import Any

from compat.megatron.buffers import memory_buffer, symmetric_memory_buffer
from compat.megatron.getters.groups import get_tensor_model_parallel_group, missing


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Make the tensor-parallel size return this; None removes that."""
    global _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = world_size


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Make the tensor-parallel rank return this; None removes that."""
    global _MPU_TENSOR_MODEL_PARALLEL_RANK
    _MPU_TENSOR_MODEL_PARALLEL_RANK = rank


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Make the pipeline size return this; None removes that."""
    global _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = world_size


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Make the pipeline rank return this; None removes that."""
    global _MPU_PIPELINE_MODEL_PARALLEL_RANK
    _MPU_PIPELINE_MODEL_PARALLEL_RANK = rank


def set_data_parallel_rank(rank: int | None) -> None:
    """Make every data-parallel rank return this; None removes that."""
    global _MPU_DATA_PARALLEL_RANK
    _MPU_DATA_PARALLEL_RANK = rank


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """Make the expert-parallel size return this; None removes that."""
    global _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE
    _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE = world_size


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """Make the expert-parallel rank return this; None removes that."""
    global _MPU_EXPERT_MODEL_PARALLEL_RANK
    _MPU_EXPERT_MODEL_PARALLEL_RANK = rank


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """Make the expert tensor-parallel size return this; None removes that."""
    global _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE
    _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE = world_size


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """Make the expert tensor-parallel rank return this; None removes that."""
    global _MPU_EXPERT_TENSOR_PARALLEL_RANK
    _MPU_EXPERT_TENSOR_PARALLEL_RANK = rank


def get_global_memory_buffer() -> Any:
    """Megatron's buffer of reusable tensors."""
    if _GLOBAL_MEMORY_BUFFER is None:
        raise missing("_GLOBAL_MEMORY_BUFFER")
    return _GLOBAL_MEMORY_BUFFER


def _set_global_memory_buffer() -> None:
    """Make the memory buffer; AssertionError if there is one."""
    global _GLOBAL_MEMORY_BUFFER
    if _GLOBAL_MEMORY_BUFFER is not None:
        raise AssertionError("the global memory buffer is already initialized.")
    _GLOBAL_MEMORY_BUFFER = memory_buffer()


def destroy_global_memory_buffer() -> None:
    """Forget the memory buffer."""
    global _GLOBAL_MEMORY_BUFFER
    _GLOBAL_MEMORY_BUFFER = None


def get_global_symmetric_memory_buffer() -> Any:
    """Megatron 0.16's symmetric memory buffer for inference."""
    if _GLOBAL_SYMMETRIC_MEMORY_BUFFER is None:
        raise missing("_GLOBAL_SYMMETRIC_MEMORY_BUFFER")
    return _GLOBAL_SYMMETRIC_MEMORY_BUFFER


def _set_global_symmetric_memory_buffer() -> None:
    """Make the symmetric memory buffer; AssertionError if there is one."""
    global _GLOBAL_SYMMETRIC_MEMORY_BUFFER
    if _GLOBAL_SYMMETRIC_MEMORY_BUFFER is not None:
        raise AssertionError("the global symmetric memory buffer is already initialized.")
    _GLOBAL_SYMMETRIC_MEMORY_BUFFER = symmetric_memory_buffer(get_tensor_model_parallel_group())


def destroy_global_symmetric_memory_buffer() -> None:
    """Forget the symmetric memory buffer."""
    global _GLOBAL_SYMMETRIC_MEMORY_BUFFER
    _GLOBAL_SYMMETRIC_MEMORY_BUFFER = None
