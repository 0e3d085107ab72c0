"""Real ranks that really hang: forked gloo processes, each of which records what a job leaves."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hypergrid
from hypergrid.hangs import record

_LOOK = 0.3  # seconds between looks at the processes
_STILL = 6  # looks that find a process at rest: longer than the diagnosis' patience


def hang(world: int, body: Callable[[int], Any], directory: Path, seconds: float = 60) -> Path:
    """Call ``body(rank)`` on each rank; when all stand still, they record. All are ended then.

    Of a rank whose process has ended or is stopped there is no recording, but what it wrote itself.
    """
    with forked(world, lambda rank: _rank(rank, world, body, directory)) as rank_of:
        for rank in range(world):
            started = directory / f"started_{rank}"
            wait_for(started.exists, seconds, f"rank {rank} did not start")
        wait_for_rest(rank_of, seconds)
        ask(rank_of, directory, seconds)
    return directory


def _rank(rank: int, world: int, body: Callable[[int], Any], directory: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.disable()  # pytest's: gloo aborts where another dtype arrives
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), TORCH_FR_BUFFER_SIZE="2000")
    try:
        torch.set_num_threads(1)
        record._LOOK = _LOOK
        hypergrid.record(directory)
        store = dist.FileStore(str(directory / ".store"), world)
        timeout = timedelta(seconds=300)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        dist.barrier()
        (directory / f"started_{rank}").touch()
        body(rank)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    while True:
        time.sleep(1)  # its connections stay open, as in a process that is not yet gone


@contextmanager
def forked(world: int, run: Callable[[int], object]) -> Iterator[dict[int, int]]:
    """Fork a process for each rank, which ends after ``run``; gives the rank of each process."""
    rank_of = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            run(rank)
            os._exit(0)
        rank_of[pid] = rank
    try:
        yield rank_of
    finally:
        for pid in rank_of:
            os.kill(pid, signal.SIGKILL)
        for pid in rank_of:
            os.waitpid(pid, 0)


def wait_for(condition: Callable[[], object], seconds: float, title: str) -> None:
    """Wait until the condition holds; TimeoutError with the title where it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(title)
        time.sleep(_LOOK)


def wait_for_rest(processes: Iterable[int], seconds: float) -> None:
    """Wait until none of the processes uses its processor any more."""
    end = time.monotonic() + seconds
    still_looks = 0
    before = None
    while still_looks < _STILL:
        used = [_used(pid) for pid in processes]
        is_running = any(state == "R" for _, state in used)
        still_looks = 0 if is_running or used != before else still_looks + 1
        before = used
        if time.monotonic() > end:
            raise TimeoutError("the ranks did not come to rest")
        time.sleep(_LOOK)


def ask(rank_of: Mapping[int, int], directory: Path, seconds: float) -> None:
    """Have every rank that still runs write at once."""
    begin = time.time_ns()
    running = {}
    for pid, rank in rank_of.items():
        _, state = _used(pid)
        if state not in "ZT":
            running[pid] = rank
    (directory / record.ASKED).touch()
    for rank in running.values():
        stack = directory / f"stack_{rank}.json"
        wait_for(
            lambda stack=stack: _written(stack) >= begin, seconds, f"rank {rank} did not write"
        )


def _written(stack: Path) -> int:
    """When these stacks were written, in nanoseconds; 0 before they are there."""
    return int(json.loads(stack.read_text())["written_ns"]) if stack.exists() else 0


def _used(pid: int) -> tuple[int, str]:
    """Hundredths of seconds of processor time of its main thread, and that thread's state."""
    try:
        status = Path(f"/proc/{pid}/task/{pid}/stat").read_text()
    except OSError:
        return 0, "Z"
    fields = status.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]), fields[0]
