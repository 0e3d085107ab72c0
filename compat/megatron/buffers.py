"""Megatron's memory buffers, which its parallel state keeps; imports no megatron before needed."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any


class GlobalMemoryBuffer:
    """Becomes Megatron's when it is first used, so that initialising imports no megatron."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _memory_buffer()
        self.__class__, self.__dict__ = type(made), vars(made)
        return getattr(self, name)


def _memory_buffer() -> Any:
    try:
        from megatron.core.utils import GlobalMemoryBuffer
    except ImportError as error:
        raise AssertionError(
            "global memory buffer is not initialized: there is no megatron.core.utils."
        ) from error
    return GlobalMemoryBuffer()


def memory_buffer() -> Any:
    """Megatron's ``GlobalMemoryBuffer``, or what becomes it."""
    return _memory_buffer() if "megatron.core.utils" in sys.modules else GlobalMemoryBuffer()


def symmetric_memory_buffer(group: Any) -> Any:
    from megatron.core.utils import GlobalSymmetricMemoryBuffer

    return GlobalSymmetricMemoryBuffer(size_in_mb=256, process_group=group)


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
