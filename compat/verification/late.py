"""Asynchronous collectives deliver at ``wait()``; until then, their outputs hold NaN.

gloo often has a result before anybody waits for it. On a GPU, a kernel that does not wait reads
what the memory held before. Here it reads NaN, and a ``wait()`` that is missing is seen.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hypergrid import of_torch

# The collectives that megatron-core starts without waiting for them, with the arguments that they
# write and read.
_ARGUMENTS = {
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "all_reduce": ("tensor", "tensor"),
    "reduce_scatter_tensor": ("output", "input"),
}


class _LateWork:
    """A handle whose ``wait()`` copies the results to where the caller expects them."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.results: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        done = self.work.wait(*args, **kwargs)
        for output, result in self.results:
            output.detach().copy_(result)
        self.results.clear()
        return done


# The handles of coalesced collectives that are being collected, by group.
_collecting: dict[Any, _LateWork] = {}


def deliver_at_wait() -> None:
    """Replace torch's collectives, also where megatron has imported them by name."""
    distributed: Any = torch.distributed
    importers: list[Any] = [distributed]
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "megatron" and module is not None:
            importers.append(module)
    for name, (written, read) in _ARGUMENTS.items():
        collective = getattr(distributed, name)
        late = _late(collective, written, read)
        for importer in importers:
            for attribute, value in list(vars(importer).items()):
                if value is collective:
                    setattr(importer, attribute, late)
    of_torch.wrap_coalescing_manager(_late_manager, importers)


def _late(collective: Callable[..., Any], written: str, read: str) -> Callable[..., Any]:
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def started(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        arguments = call.arguments
        if not arguments.get("async_op", False):
            return collective(*args, **kwargs)
        output = arguments[written]
        # The input may be a part of the output, as a rank's shard is of a gathered buffer.
        arguments[read] = arguments[read].detach().clone()
        if written != read:
            arguments[written] = torch.empty_like(output)
        result = arguments[written]
        # Integers have no NaN.
        if output.is_floating_point():
            output.detach().fill_(float("nan"))
        work = collective(*call.args, **call.kwargs)
        handle = _collecting.get(arguments.get("group"))
        if handle is None:
            # A rank outside of the group gets no handle.
            if work is None:
                return None
            handle = _LateWork(work)
        handle.results.append((output, result))
        return handle

    return started


def _late_manager(manager: Callable[..., Any]) -> Callable[..., Any]:
    """A manager of coalesced collectives whose handle delivers all of them at its ``wait()``."""

    @contextlib.contextmanager
    def collecting(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        with manager(group, device, async_ops) as work:
            if not async_ops:
                yield work
                return
            handle = _LateWork(work)
            _collecting[group] = handle
            try:
                yield handle
            finally:
                del _collecting[group]

    return collecting
