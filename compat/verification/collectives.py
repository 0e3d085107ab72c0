"""torch's collectives, watched: where they are called, what a lost result does, and when it comes.

Each call site is recorded. In one rank, the results of one site can be left out: the rank then has
its own input instead, as if nobody had communicated. Asynchronous collectives deliver at
``wait()``: gloo often has a result before anybody waits for it, and on a GPU a kernel that does not
wait reads what the memory held before. Here it reads NaN.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch

from hypergrid import of_torch

# Each collective, with the arguments that it writes and reads.
_ARGUMENTS = {
    "all_gather": ("tensor_list", "tensor"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "all_reduce": ("tensor", "tensor"),
    "all_to_all_single": ("output", "input"),
    "broadcast": ("tensor", "tensor"),
    "reduce_scatter": ("output", "input_list"),
    "reduce_scatter_tensor": ("output", "input"),
}
_OWN_DIRECTORY = str(Path(__file__).parent)
_TORCH_DIRECTORY = str(Path(torch.__file__).parent)
Results: TypeAlias = Iterable[tuple[torch.Tensor, torch.Tensor]]


class Call(NamedTuple):
    """A collective of several ranks: where it was called, and what it does to how many numbers."""

    site: str
    operation: str
    numel: int


@dataclass
class Watch:
    """The record of this process's collectives, and the site whose results it leaves out."""

    left_out: str = ""
    calls: Counter[Call] = field(default_factory=Counter)
    # Functions of megatron-core that autograd must run in both directions.
    forward: set[str] = field(default_factory=set)
    backward: set[str] = field(default_factory=set)


_watches = [Watch()]


def watch(left_out: str = "") -> Watch:
    """Begin a new record, which the one that was begun before does not see."""
    _watches[:] = [Watch(left_out)]
    return _watches[0]


def expect_backward(name: str, output: torch.Tensor) -> None:
    """Record that a function ran forward, and that its backward pass runs when it does."""
    record = _watches[0]
    node = output.grad_fn
    # Without one nothing is differentiated: a forward pass alone.
    if node is not None:
        record.forward.add(name)
        node.register_hook(lambda *_: record.backward.add(name))


def call_site(frame: FrameType | None) -> str:
    """The line of megatron or of the user that this frame is in, or was called from.

    Example: ``tensor_parallel/mappings.py:25 (in _CopyToModelParallelRegion.backward)``. A helper
    of its own file is told by who called it. "" is a line of ours.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH_DIRECTORY):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_OWN_DIRECTORY):
        return ""
    file_name = frame.f_code.co_filename
    line = frame.f_lineno
    code = frame.f_code
    # Many sites share the helper, and few its caller.
    if frame.f_back is not None and frame.f_back.f_code.co_filename == file_name:
        code = frame.f_back.f_code
    qualified_name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
    _, _, function = qualified_name.rpartition("<locals>.")
    _, _, below_megatron = file_name.rpartition("megatron/core/")
    if below_megatron == file_name:
        below_megatron = Path(file_name).name
    return f"{below_megatron}:{line} (in {function})"


class _LateWork:
    """A handle whose ``wait()`` copies the results to where the caller expects them."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.results: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        done = self.work.wait(*args, **kwargs)
        _deliver(self.results)
        self.results.clear()
        return done


# The handles of coalesced collectives that are being collected, by group.
_collecting: dict[Any, _LateWork] = {}


@functools.cache  # what is replaced once must not be again
def watch_collectives() -> None:
    """Replace torch's collectives, also where megatron has imported them by name."""
    distributed: Any = torch.distributed
    importers: list[Any] = [distributed]
    # Who imported a collective by name calls the original for ever.
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "megatron" and module is not None:
            importers.append(module)
    for name, (written, read) in _ARGUMENTS.items():
        collective = getattr(distributed, name)
        watched = _watched(collective, written, read)
        for importer in importers:
            for attribute, value in list(vars(importer).items()):
                if value is collective:
                    setattr(importer, attribute, watched)
    of_torch.wrap_coalescing_manager(_late_manager, importers)


def _watched(collective: Callable[..., Any], written: str, read: str) -> Callable[..., Any]:
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def started(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        arguments = call.arguments
        group = arguments.get("group")
        outputs = _listed(arguments[written])
        results: list[torch.Tensor] = []  # that the outputs get in the end, if not at once
        call_of_site = Call(
            site=f"{collective.__name__} in {call_site(sys._getframe(1))}",
            operation=str(arguments.get("op", "")),
            numel=sum(output.numel() for output in outputs),
        )
        if _is_left_out(call_of_site, group):
            results = _own_results(outputs, _listed(arguments[read]), group)
        is_late = arguments.get("async_op", False)
        if is_late:
            written_later = [output.detach().clone() for output in outputs]
            results = results or written_later
            # The input may be a part of the output, as a rank's shard is of a gathered buffer.
            if written != read and torch.is_tensor(arguments[read]):
                arguments[read] = arguments[read].detach().clone()
            is_one = torch.is_tensor(arguments[written])
            arguments[written] = written_later[0] if is_one else written_later
            for output in outputs:
                # Integers have no NaN.
                if output.is_floating_point():
                    output.detach().fill_(float("nan"))
        work = collective(*call.args, **call.kwargs)
        handle = _collecting.get(group, _LateWork(work))
        handle.results.extend(zip(outputs, results, strict=False))
        if is_late and work is not None:
            return handle
        # A rank outside of the group gets no handle.
        if group not in _collecting:
            _deliver(handle.results)
        return work

    return started


def _is_left_out(call: Call, group: Any) -> bool:
    """Record the call, unless it is ours or nobody else is in the group."""
    record = _watches[0]
    if call.site.endswith(" in ") or torch.distributed.get_world_size(group) < 2:
        return False
    record.calls[call] += 1
    return call.site == record.left_out


def _listed(tensors: Any) -> Sequence[torch.Tensor]:
    return [tensors] if torch.is_tensor(tensors) else tensors


def _own_results(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: Any
) -> list[torch.Tensor]:
    """The rank's own input, in the shapes of the outputs.

    Of a larger input it is the rank's own part, as of a scatter; a smaller one is repeated.
    """
    # A copy: the outputs are overwritten meanwhile, and may be the inputs.
    values = torch.cat([part.detach().flatten() for part in inputs])
    own = []
    for output in outputs:
        first = torch.distributed.get_rank(group) * output.numel()
        places = torch.arange(first, first + output.numel())
        part = torch.zeros_like(output)
        if values.numel():
            part = values[places % values.numel()].view(output.shape)
        own.append(part)
    return own


def _deliver(results: Results) -> None:
    for output, result in results:
        output.detach().copy_(result)


def _late_manager(manager: Callable[..., Any]) -> Callable[..., Any]:
    """A manager of coalesced collectives whose handle delivers all of them at its ``wait()``."""

    @contextlib.contextmanager
    def collecting(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        with manager(group, device, async_ops) as work:
            handle = _LateWork(work)
            _collecting[group] = handle
            try:
                yield handle
            finally:
                del _collecting[group]
        if not async_ops:
            _deliver(handle.results)

    return collecting
