"""Python commands in processes forked from one that has imported torch: a start costs no seconds.

Not for what depends on the interpreter's own start, such as `sitecustomize` or ``-I``.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.support import ROOT, own_lines

T = TypeVar("T")
PRELOADED = (
    *("torch", "torch.distributed", "torch.testing._internal.distributed.fake_pg"),
    # What megatron-core imports, and nothing of megatron-core or of this project.
    *("torch._dynamo", "torch._inductor.compile_fx", "torch.onnx", "torch.distributed.checkpoint"),
    *("torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.cpp_extension"),
    *("einops", "yaml"),
)


def run(
    *arguments: str, cwd: Any = ROOT, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` with this checkout on its path; options but ``-W`` are not known.

    Its output is without the lines that gloo prints in torch 2.9 for each group.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    with tempfile.TemporaryDirectory() as directory:
        streams = [Path(directory, name) for name in ("out", "err")]
        request = [arguments, str(cwd), environment, [*map(str, streams)], timeout]
        server = _server()
        assert server.stdin and server.stdout
        print(json.dumps(request), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        out, error = (stream.read_text() for stream in streams)
        return subprocess.CompletedProcess(arguments, status, own_lines(out), error)


def call(function: Callable[..., T], *arguments: Any, timeout: float = 300) -> T:
    """What a function of a module gives in such a process, which has this one's path."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "call")
        file.write_bytes(pickle.dumps((function.__module__, function.__name__, arguments)))
        code = f"import sys; sys.path[:] = {sys.path!r}; from tests.support.warm import _call"
        done = run("-c", f"{code}; _call({str(file)!r})", timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        result: T = pickle.loads(file.read_bytes())
        return result


def _call(file: str) -> None:
    module, name, arguments = pickle.loads(Path(file).read_bytes())
    result = getattr(importlib.import_module(module), name)(*arguments)
    Path(file).write_bytes(pickle.dumps(result))


@functools.cache
def _server() -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", __name__], cwd=ROOT, **pipes)  # type: ignore


def preload() -> None:
    """Import what megatron-core imports, once for all processes that are forked from this one."""
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError:  # an extra that is not installed
            continue


def _serve() -> None:
    of_caller = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [folder for folder in sys.path[1:] if folder not in of_caller]
    preload()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    gc.freeze()
    for line in sys.stdin:
        arguments, cwd, environment, streams, timeout = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            for number, file in enumerate([os.devnull, *streams]):
                os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(environment)
            places = filter(None, environment["PYTHONPATH"].split(os.pathsep))
            sys.path[:] = [*places, *path]
            _exit(arguments)
        deadline = time.monotonic() + timeout
        ended = 0
        while not ended:
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended and time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                deadline += timeout
            time.sleep(0.005)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _exit(arguments: list[str]) -> None:
    code: Any = 0
    try:
        _main(arguments)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


def _main(arguments: list[str]) -> None:
    while arguments[0] == "-W":
        warnings._processoptions([arguments[1]])  # type: ignore[attr-defined]
        arguments = arguments[2:]
    kind, *rest = arguments
    if kind == "-c":
        sys.argv[:], sys.path[:0] = ["-c", *rest[1:]], [""]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.argv[:], sys.path[:0] = rest, [os.getcwd()]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:], sys.path[:0] = arguments, [os.path.dirname(os.path.abspath(kind))]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _serve()
