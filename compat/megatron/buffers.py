"""Megatron's memory buffers, which its parallel state keeps; imports no megatron before needed."""

from __future__ import annotations

import sys
from typing import Any


class GlobalMemoryBuffer:
    """Becomes Megatron's when it is first used, so that initialising imports no megatron."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        megatrons = _memory_buffer()
        self.__class__ = type(megatrons)
        self.__dict__ = vars(megatrons)
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
    if "megatron.core.utils" in sys.modules:
        return _memory_buffer()
    return GlobalMemoryBuffer()


def symmetric_memory_buffer(group: Any) -> Any:
    from megatron.core.utils import GlobalSymmetricMemoryBuffer

    return GlobalSymmetricMemoryBuffer(size_in_mb=256, process_group=group)
