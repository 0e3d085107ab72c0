"""Ranks on this machine: one process loads megatron-core for the CPU and forks the others.

The caller's process keeps its torch as it is: what answers for CUDA is put in place in the child.
The child is forked, or is a new Python process with the packages of a checkout. All processes end
with their parent.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from compat.swap import install
from compat.verification import on_cpu

T = TypeVar("T")
MAX_RANKS = 16
_NEWEST_NEEDED = (3, 12)  # the Python that some modules of Megatron-LM's main branch need
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_IMPORTED = (
    *("distributed", "optimizer", "pipeline_parallel", "dist_checkpointing"),
    *("models.gpt", "models.gpt.gpt_layer_specs", "transformer.moe.moe_layer"),
)


class Refused(Exception):
    """A rank raised: the kind and text of its error, and as ``trace`` the traceback."""

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text, trace)
        self.trace = trace

    def __str__(self) -> str:
        return str(self.args[0])


def in_child(body: Callable[[], T]) -> T:
    """Run ``body`` in a forked process in which megatron-core runs on the CPU; its result."""
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError("verify forks processes: call it before CUDA is used in this one.")
    with tempfile.TemporaryDirectory(prefix="hypergrid-verify-") as directory:
        outcome_file = Path(directory, "outcome")
        pid = _fork(lambda: _adapted(body), outcome_file, ValueError)
        try:
            os.waitpid(pid, 0)
        except BaseException:
            _end([pid])
            raise
        return _outcome(outcome_file)


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
    with tempfile.TemporaryDirectory(prefix="hypergrid-verify-") as directory:
        request = Path(directory, "request")
        request.write_bytes(pickle.dumps((body, checkout, is_replaced)))
        search_path = [str(checkout.resolve()), *sys.path]
        read_end, write_end = os.pipe()
        arguments = ["\n".join(search_path), directory, str(os.getpid()), str(write_end)]
        # What Megatron prints is no part of the report, which may be JSON.
        process = subprocess.Popen(
            [sys.executable, "-c", _NEW_PROCESS, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[write_end],
        )
        os.close(write_end)
        try:
            # The pipe ends with the process and its ranks.
            with os.fdopen(read_end) as progress:
                for line in progress:
                    listen(json.loads(line))
            process.wait()
        finally:
            process.kill()
        return _outcome(Path(directory, "outcome"))


_listeners: list[int] = []  # where the new process writes what ``say`` is given


def say(text: str) -> None:
    """Give a text to the process that verifies, while this one still works."""
    for write_end in _listeners:
        os.write(write_end, f"{json.dumps(text)}\n".encode())


# The path is replaced before anything is imported: -c puts the current directory first.
_NEW_PROCESS = (
    "import sys; sys.path[:] = sys.argv[1].split(chr(10)); "
    "from compat.verification.ranks import answer; answer(sys.argv[2], *map(int, sys.argv[3:]))"
)


def answer(directory: str, parent: int, write_end: int) -> None:
    """Answer the request in this directory, in the new process of ``in_checkout``."""
    _end_with_parent(parent)
    _listeners.append(write_end)

    def answered() -> Any:
        body, checkout, is_replaced = pickle.loads(Path(directory, "request").read_bytes())
        return _adapted(body, checkout, is_replaced)

    _write(answered, Path(directory, "outcome"), ValueError)


def _adapted(body: Callable[[], T], checkout: Path | None = None, is_replaced: bool = True) -> T:
    import torch

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
    try:
        for name in _IMPORTED:  # once, before ranks are forked
            import_module(f"megatron.core.{name}")
    except (ImportError, SyntaxError) as error:
        raise with_python(error) from error
    core = Path(str(sys.modules["megatron.core"].__file__)).parent
    if checkout is not None and core != checkout.resolve() / "megatron" / "core":
        raise ValueError(f"megatron.core was imported from {core}, not from {checkout}.")
    on_cpu.replace_parts()
    return body()


def with_python(error: Exception) -> Exception:
    """The error, with the remedy where syntax or a standard module is newer than this Python."""
    of_python = isinstance(error, SyntaxError)
    if isinstance(error, ImportError):
        of_python = error.name in sys.stdlib_module_names
    if sys.version_info >= _NEWEST_NEEDED or not of_python:
        return error
    needed = ".".join(map(str, _NEWEST_NEEDED))
    return ValueError(f"this Megatron-LM needs Python {needed} or later: {_text(error)}")


def on_ranks(world: int, body: Callable[[int], T], timeout: float) -> list[T]:
    """Run ``body(rank)`` on each of ``world`` forked ranks of a gloo job; their results.

    Refused, with the first rank's error, if one raises or ends; all others are then ended.
    """
    with tempfile.TemporaryDirectory(prefix="hypergrid-verify-") as directory:
        files = [Path(directory, str(rank)) for rank in range(world)]
        children = {}
        for rank, outcome_file in enumerate(files):
            pid = _fork(lambda rank=rank: _joined(rank, world, directory, body), outcome_file)  # type: ignore[misc]
            children[pid] = rank
        try:
            _wait(dict(children), files, time.monotonic() + timeout)
            return [_outcome(outcome_file) for outcome_file in files]
        finally:
            _end(children)


def _joined(rank: int, world: int, directory: str, body: Callable[[int], T]) -> T:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    store = dist.FileStore(str(Path(directory, "store")), world)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    return body(rank)


def _wait(running: dict[int, int], files: Sequence[Path], end: float) -> None:
    while running:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            rank = running.pop(pid)
            _outcome(files[rank])  # raises what this rank raised
        elif time.monotonic() > end:
            late = sorted(running.values())
            raise Refused(f"ranks {late} did not finish a step in time")
        else:
            time.sleep(0.01)


def _fork(body: Callable[[], Any], outcome_file: Path, *plain_errors: type[Exception]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    if pid := os.fork():
        return pid
    _end_with_parent(parent)
    os._exit(_write(body, outcome_file, *plain_errors))


def _end_with_parent(parent: int) -> None:
    """Let Linux kill this process when its parent ends, however that ends."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before this call.
    if os.getppid() != parent:
        os._exit(1)


def _write(body: Callable[[], Any], outcome_file: Path, *plain_errors: type[Exception]) -> int:
    """Run ``body`` and write its result or error to a file; the exit status."""
    code = 0
    try:
        outcome = (True, body())
    except BaseException as error:
        code = 1
        if not isinstance(error, plain_errors):
            error = Refused(_text(error), traceback.format_exc())
        outcome = (False, error)
    part = outcome_file.with_suffix(".part")
    part.write_bytes(pickle.dumps(outcome))
    part.rename(outcome_file)
    return code


def _text(error: BaseException) -> str:
    """The kind and the sentence of an error; the line that raised it, if it has no sentence."""
    sentence = " ".join(str(error).split())
    if not sentence:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        sentence = f"{frame.line} ({Path(frame.filename).name}, line {frame.lineno})"
    return f"{type(error).__name__}: {sentence}"


def _outcome(outcome_file: Path) -> Any:
    if not outcome_file.exists():
        raise Refused("a process ended without a word: was it killed?")
    is_result, value = pickle.loads(outcome_file.read_bytes())
    if not is_result:
        raise value
    return value


def _end(pids: Any) -> None:
    for pid in pids:
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        except (ChildProcessError, ProcessLookupError):
            continue
