"""Runs an unchanged file of a Megatron-LM checkout on gloo ranks of this machine's CPU.

    python scripts/on_gloo.py 8 FOLDER Megatron-LM pretrain_gpt.py ARGUMENTS
    python -m compat.launch scripts/on_gloo.py 8 FOLDER Megatron-LM tests/unit_tests/test_utils.py

One process imports Megatron and forks the ranks. CUDA is answered by the CPU and NCCL by gloo. Rank
3 prints to FOLDER/rank3.log. Into FOLDER/rank3.txt go the losses and the gradient norm of each
training step, in all digits, or the outcome of each test. The exit status is 1 if a rank of a
training failed, or had to be killed.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

# A rank that failed leaves others in a collective: they have so many seconds to end.
GRACE = 60.0
# A rank ends after so many seconds, whatever it waits for.
LIMIT = 580


def main() -> None:
    """Import what the file imports, fork the ranks, and wait for them."""
    count, folder, checkout, file, *arguments = sys.argv[1:]
    ranks = int(count)
    os.chdir(folder)
    sys.path.insert(0, checkout)
    answer_cuda(ranks)
    is_training = not file.startswith("tests")
    if is_training:
        answer_builds()
        runpy.run_path(f"{checkout}/{file}", run_name="imported")
        record_steps()
    else:
        # The tests' own utilities import it, where the release has them.
        import_module("megatron.training")
    listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        # As under torchrun: the process that started the ranks serves their store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    processes = set()
    for rank in range(ranks):
        process = os.fork()
        if process:
            processes.add(process)
            continue
        listener.close()
        become(rank)
        if is_training:
            sys.argv = [file, *arguments]
            runpy.run_path(f"{checkout}/{file}", run_name="__main__")
        else:
            run_tests(checkout, [file, *arguments])
            # Outcomes are written down: an orderly end takes longer than the tests.
            os._exit(0)
        return
    store = dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    succeeded = wait_for(processes)
    del store
    # Without the tidying of what was imported for the ranks alone.
    os._exit(0 if succeeded else 1)


def answer_cuda(ranks: int) -> None:
    """Make torch answer with the CPU what training and tests ask of CUDA and NCCL."""
    from compat.verification import on_cpu

    on_cpu.adapt()
    # Compilers of kernels ask what kind of GPU there is.
    torch.compiler.set_stance("force_eager")
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: ranks
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        major=8, minor=0, name="CPU", total_memory=0
    )
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.memory_stats = lambda *_: {}
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *_: 0)
    cuda.max_memory_reserved = cuda.memory_reserved
    module: Any = torch.nn.Module
    module.cuda = lambda self, *_: self
    OnCpu().__enter__()
    backend: Any = dist.Backend
    backend.NCCL = backend.GLOO
    distributed: Any = dist
    barrier = dist.barrier
    # One that names a CUDA device would ask for NCCL.
    distributed.barrier = lambda group=None, async_op=False, **_: barrier(group, async_op)


class OnCpu(torch.overrides.TorchFunctionMode):
    """Makes on the CPU what is asked for on a CUDA device."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if str(named.get("device")).startswith("cuda"):
            named["device"] = "cpu"
        return function(*args, **named)


def answer_builds() -> None:
    """Answer what training compiles in the checkout before it begins.

    The index of data sets comes from the installed wheel of megatron-core, where it is compiled.
    """
    folder = Path(torch.__file__).parents[1] / "megatron" / "core" / "datasets"
    spec = PathFinder.find_spec("helpers_cpp", [str(folder)])
    if spec is None or spec.loader is None:
        sys.exit(f"{folder} has no compiled helpers_cpp: install the wheel of megatron-core")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["megatron.core.datasets.helpers_cpp"] = module
    for name, function in (
        ("megatron.core.datasets.utils", "compile_helpers"),
        ("megatron.legacy.fused_kernels", "load"),
    ):
        with contextlib.suppress(ModuleNotFoundError):
            setattr(import_module(name), function, lambda *_: None)
    # 0.16.1 asks for its value also where there is no Transformer Engine.
    moe_utils: Any = import_module("megatron.core.transformer.moe.moe_utils")
    moe_utils.__dict__.setdefault("te_general_gemm", None)


def record_steps() -> None:
    """Let Megatron's own log of a step also go to this rank's file, in all digits."""
    training: Any = import_module("megatron.training.training")
    log = training.training_log
    signature = inspect.signature(log)

    def logged(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        losses = {}
        for name, loss in given["loss_dict"].items():
            losses[name] = float(loss)
        step = [given["iteration"], losses, float(given["grad_norm"])]
        with open(f"rank{os.environ['RANK']}.txt", "a") as file:
            file.write(f"{json.dumps(step)}\n")
        return log(*args, **kwargs)

    training.training_log = logged


def become(rank: int) -> None:
    """Make this forked process a rank, as torchrun does."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    printed = os.open(f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    torch.set_num_threads(1)
    signal.alarm(LIMIT)


def run_tests(checkout: str, files: list[str]) -> None:
    """Run these files of tests with pytest, and write down the outcome of each test."""
    import pytest

    class Outcomes:
        """Writes outcomes down as they come: a rank that hangs leaves those before."""

        def pytest_runtest_logreport(self, report: Any) -> None:
            # A test is set up, called and torn down: a failure of any part, or the call.
            if report.when != "call" and report.passed:
                return
            outcome = [report.nodeid, report.outcome, report.longreprtext.splitlines()[-1:]]
            with open(f"rank{os.environ['RANK']}.txt", "a") as file:
                file.write(f"{json.dumps(outcome)}\n")

        def pytest_runtest_logfinish(self) -> None:
            close_left_groups()

    paths = [f"{checkout}/{file}" for file in files]
    # A conftest.py of upstream's downloads data; its settings end at the first failure.
    options = ["--noconftest", "-o", "addopts=", "-p", "no:cacheprovider", "-q"]
    pytest.main([*options, *paths], [Outcomes()])
    with open(f"rank{os.environ['RANK']}.txt", "a") as file:
        file.write(f"{json.dumps(['all files', 'passed', []])}\n")


def close_left_groups() -> None:
    """Close groups that a test left open, as stock does with all of its own.

    Each gloo group has two threads and several sockets: after some thirty tests ranks would stall.
    """
    state: Any = import_module("megatron.core.parallel_state")
    if not dist.is_initialized() or state.model_parallel_is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def wait_for(processes: set[int]) -> bool:
    """Whether all processes end well; those that do not end after another failed are killed."""
    succeeded = True
    deadline = float("inf")
    while processes and time.monotonic() < deadline:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            time.sleep(0.05)
            continue
        processes.discard(process)
        if status:
            succeeded = False
            deadline = min(deadline, time.monotonic() + GRACE)
    for process in processes:
        os.kill(process, signal.SIGKILL)
    return succeeded


if __name__ == "__main__":
    main()
