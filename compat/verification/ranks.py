"""Ranks on this machine: one process loads megatron-core for the CPU and forks the others.

The caller's process keeps its torch as it is: what answers for CUDA is put in place in the child.
The child is forked, or is a new Python process with the packages of a checkout. All processes end
with their parent.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from compat.swap import install
from compat.verification import on_cpu

T = TypeVar("T")
MAX_RANKS = 16
_WEEK = 604_800.0  # seconds
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_IMPORTED = (
    "distributed",
    "optimizer",
    "pipeline_parallel",
    "dist_checkpointing",
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "transformer.moe.moe_layer",
)
# What a process sends to its parent.
_TEXT = "text"  # of ``say``
_RESULT = "result"
_ERROR = "error"
_parents: list[Any] = []  # the parent's end of this process, if it has one


class Refused(Exception):
    """A rank raised, with the kind and text of its error; or it ended, or is not ready in time."""


def in_child(body: Callable[[], T]) -> T:
    """Run ``body`` in a forked process in which megatron-core runs on the CPU; its result."""
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError("verify forks processes: call it before CUDA is used in this one.")
    return _in_processes("fork", 1, partial(_adapted, body, None, True), ValueError)[0]


def in_checkout(
    body: Callable[[], T],
    checkout: Path,
    is_replaced: bool = False,
    listen: Callable[[str], None] = lambda _: None,
) -> T:
    """Run ``body``, which can be pickled, in a new process that imports megatron of ``checkout``.

    Its ``parallel_state`` is the checkout's own, or hypergrid's if the job replaces it. ``listen``
    is called with each text that ``body`` gives to ``say``, at once.
    A forked process would keep the modules that this one has imported from elsewhere.
    """
    adapted = partial(_adapted, body, checkout.resolve(), is_replaced)
    # A new process begins with the path of this one, and imports hypergrid before it runs a body.
    with mock.patch.object(sys, "path", [str(checkout.resolve()), *sys.path]):
        return _in_processes("spawn", 1, adapted, ValueError, listen=listen)[0]


def say(text: str) -> None:
    """Give a text to the process that verifies, while this one still works."""
    for parent in _parents:
        _send(parent, _TEXT, text)


def on_ranks(world: int, body: Callable[[int], T], timeout: float) -> list[T]:
    """Run ``body(rank)`` on each of ``world`` forked ranks of a gloo job; their results.

    Refused, with the first rank's error, if one raises or ends; all others are then ended.
    """
    with tempfile.TemporaryDirectory(prefix="hypergrid-verify-") as directory:
        joined = partial(_joined, world, directory, body)
        return _in_processes("fork", world, joined, timeout=timeout)


def _joined(world: int, directory: str, body: Callable[[int], T], rank: int) -> T:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    store = f"file://{directory}/store"
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store, timeout, rank=rank, world_size=world)
    return body(rank)


def _adapted(body: Callable[[], T], checkout: Path | None, is_replaced: bool, _: int) -> T:
    import torch

    if checkout is not None:
        # What Megatron prints is no part of the report, which may be JSON.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    cuda: Any = torch.cuda
    # A GPU may have been found before: torch would remember it.
    cuda.is_available = lambda: False
    cuda.device_count = lambda: 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.set_num_threads(1)
    # Compilers of kernels ask what kind of GPU there is, and take longer than a small step.
    torch.compiler.set_stance("force_eager")
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    logging.disable(logging.ERROR)  # megatron-core's advice, once for each rank and step
    on_cpu.adapt()
    if is_replaced and "megatron.core.parallel_state" not in sys.modules:
        install()
    for name in _IMPORTED:  # once, before ranks are forked
        import_module(f"megatron.core.{name}")
    core = Path(str(sys.modules["megatron.core"].__file__)).parent
    if checkout is not None and core != checkout / "megatron" / "core":
        raise ValueError(f"megatron.core was imported from {core}, not from {checkout}.")
    on_cpu.replace_parts()
    return body()


def _in_processes(
    method: str,
    count: int,
    body: Callable[[int], T],
    *plain_errors: type[Exception],
    timeout: float = _WEEK,
    listen: Callable[[str], None] = lambda _: None,
) -> list[T]:
    """Run ``body(number)`` in new processes; their results, or the first error of one of them.

    An error that is none of ``plain_errors`` arrives as Refused.
    """
    context: Any = multiprocessing.get_context(method)
    end = time.monotonic() + timeout
    processes = []
    number_of = {}
    results: list[Any] = [None] * count
    try:
        for number in range(count):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (os.getpid(), sender, body, number, plain_errors)
            process = context.Process(target=_answer, args=arguments)
            process.start()
            sender.close()
            processes.append(process)
            number_of[receiver] = number
        while number_of:
            ready = connection.wait(number_of, max(0.0, end - time.monotonic()))
            if not ready:
                late = sorted(number_of.values())
                raise Refused(f"ranks {late} did not finish a step in time")
            for receiver in ready:
                kind, value = _received(receiver)
                if kind == _ERROR:
                    raise value
                if kind == _TEXT:
                    listen(value)
                else:
                    results[number_of.pop(receiver)] = value
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results


def _answer(
    parent_id: int,
    parent: Any,
    body: Callable[[int], Any],
    number: int,
    plain_errors: tuple[type[Exception], ...],
) -> None:
    """Send the result of ``body(number)``, or its error, to the parent of this process."""
    _end_with_parent(parent_id)
    _parents[:] = [parent]
    kind = _RESULT
    try:
        value = body(number)
    except BaseException as error:
        kind = _ERROR
        value = error
        if not isinstance(error, plain_errors):
            value = Refused(text_of(error))
    _send(parent, kind, value)
    signal.pause()  # its connections are needed until the parent ends all


def _send(parent: Any, kind: str, value: Any) -> None:
    # Pickled here: the connection would share a tensor's memory, which ends with this process.
    parent.send_bytes(pickle.dumps((kind, value)))


def _received(sender: Any) -> tuple[str, Any]:
    try:
        message = sender.recv_bytes()
    except (EOFError, OSError):
        return _ERROR, Refused("a process ended without a word: was it killed?")
    kind, value = pickle.loads(message)
    return kind, value


def _end_with_parent(parent: int) -> None:
    """Let Linux kill this process when its parent ends, however that ends."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before this call.
    if os.getppid() != parent:
        os._exit(1)


def text_of(error: BaseException) -> str:
    """The kind and the sentence of an error; the line that raised it, if it has no sentence."""
    sentence = " ".join(str(error).split())
    if not sentence:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        sentence = f"{frame.line} ({Path(frame.filename).name}, line {frame.lineno})"
    return f"{type(error).__name__}: {sentence}"
