"""Real ranks that really hang: forked gloo processes that dump what a job would leave."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hypergrid
from tests.support.forked import _wait

_STILL = 1.5  # seconds in one place: longer than the diagnosis' patience


def hang(
    world: int,
    body: Callable[[int], Any],
    directory: Path,
    *,
    silent: Collection[int] = (),
    timeout: float = 60,
) -> Path:
    """Call ``body(rank)`` on each rank; when all but ``silent`` ranks stand still, they dump.

    A rank whose process has ended is silent too: gloo aborts on messages of an unexpected size.
    Each rank writes groups_N.json, trace_N and stack_N.json to ``directory``, given back; a thread
    of its own does that, as its main thread may be in a collective. All processes are ended.
    """
    children = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _rank(rank, world, body, directory)
        children[pid] = rank
    speaking = set(range(world)) - set(silent)
    deadline = time.monotonic() + timeout
    try:
        while not all((directory / f"stack_{rank}.json").exists() for rank in speaking):
            for pid in [each for each in children if os.waitpid(each, os.WNOHANG)[0]]:
                speaking.discard(children.pop(pid))
            if time.monotonic() > deadline:
                raise AssertionError(f"no dumps in time: {sorted(os.listdir(directory))}")
            if all((directory / f".still_{rank}").exists() for rank in speaking):
                (directory / ".go").touch()
            time.sleep(0.05)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        _wait(children, time.monotonic() + 10)
    return directory


def _rank(rank: int, world: int, body: Callable[[int], Any], directory: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.disable()  # pytest's: gloo aborts where another dtype arrives
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), TORCH_FR_BUFFER_SIZE="2000")
    error = None
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(directory / ".store"), world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300)
        )
        dist.barrier()
        threading.Thread(target=_watch, args=(rank, directory), daemon=True).start()
        body(rank)
    except BaseException as raised:
        traceback.print_exc(file=sys.__stderr__)
        error = f"{type(raised).__name__}: {raised}"
    if error:
        dump(rank, directory, error)
        (directory / f".still_{rank}").touch()
    while True:
        time.sleep(1)  # its connections stay open, as in a process that is not yet gone


def _watch(rank: int, directory: Path) -> None:
    place, since = None, time.monotonic()
    mark = directory / f".still_{rank}"
    while not (directory / ".go").exists():
        now = [(frame[0], frame[1]) for frame in _frames()]
        if now != place:
            place, since = now, time.monotonic()
            mark.unlink(missing_ok=True)
        elif time.monotonic() - since > _STILL:
            mark.touch()
        time.sleep(0.05)
    dump(rank, directory, None)


def _frames() -> list[list[Any]]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = []
    while frame is not None:
        frames.append([frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name])
        frame = frame.f_back
    return frames


def dump(rank: int, directory: Path, error: str | None) -> None:
    stack = directory / f"stack_{rank}.json"
    if stack.exists():
        return
    hypergrid.dump(directory / f"groups_{rank}.json")
    trace = torch._C._distributed_c10d._dump_fr_trace()
    (directory / f"trace_{rank}").write_bytes(trace)
    record = {
        "schema": 1,
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "written_ns": time.time_ns(),
        "reason": "exception" if error else "SIGUSR1",
        "error": error,
        "threads": [{"name": "MainThread", "main": True, "frames": _frames()}],
    }
    part = stack.with_suffix(".part")
    part.write_text(json.dumps(record))
    part.rename(stack)
