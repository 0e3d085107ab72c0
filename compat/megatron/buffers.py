"""Megatron's memory buffers, which its parallel state keeps; imports no megatron before needed."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from compat.megatron.methods import missing

_LATER = object()  # in the global until the buffer is used: initialising imports no megatron


def _make() -> Any:
    try:
        from megatron.core.utils import GlobalMemoryBuffer
    except ImportError as error:
        raise missing("_GLOBAL_MEMORY_BUFFER") from error
    return GlobalMemoryBuffer()


class Buffers:
    """The functions of the module about buffers, as methods of the state."""

    __slots__ = ()

    def get_global_memory_buffer(self: Any) -> Any:
        """Megatron's ``GlobalMemoryBuffer``, made on first use."""
        buffer = self._held("_GLOBAL_MEMORY_BUFFER")
        if buffer is _LATER:
            buffer = self._GLOBAL_MEMORY_BUFFER = _make()
        return buffer

    def _set_global_memory_buffer(self: Any) -> None:
        if self._GLOBAL_MEMORY_BUFFER is not None:
            raise AssertionError("the global memory buffer is already initialized.")
        loaded = "megatron.core.utils" in sys.modules
        self._GLOBAL_MEMORY_BUFFER = _make() if loaded else _LATER

    def destroy_global_memory_buffer(self: Any) -> None:
        """Forget the memory buffer."""
        self._GLOBAL_MEMORY_BUFFER = None

    def get_global_symmetric_memory_buffer(self: Any) -> Any:
        """Megatron 0.16's buffer for inference; only where it was set up."""
        return self._held("_GLOBAL_SYMMETRIC_MEMORY_BUFFER")

    def _set_global_symmetric_memory_buffer(self: Any) -> None:
        if self._GLOBAL_SYMMETRIC_MEMORY_BUFFER is not None:
            raise AssertionError("the global symmetric memory buffer is already initialized.")
        from megatron.core.utils import GlobalSymmetricMemoryBuffer

        self._GLOBAL_SYMMETRIC_MEMORY_BUFFER = GlobalSymmetricMemoryBuffer(
            size_in_mb=256, process_group=self.get_tensor_model_parallel_group()
        )

    def destroy_global_symmetric_memory_buffer(self: Any) -> None:
        """Forget the symmetric memory buffer."""
        self._GLOBAL_SYMMETRIC_MEMORY_BUFFER = None


def release_megatrons(abort: bool) -> None:
    """Release the buffers that megatron itself keeps on groups, as upstream's teardown does."""
    fused = sys.modules.get("megatron.core.transformer.moe.fused_a2a")
    symmetric = sys.modules.get("megatron.core.inference.symmetric_memory")
    for owner, name in (
        (None if abort else fused, "nccl_ep_finalize"),  # may wait for other ranks
        (getattr(symmetric, "SymmetricMemoryManager", None), "destroy"),
    ):
        with suppress(Exception):  # what cannot be released must not keep groups alive
            getattr(owner, name, lambda: None)()
