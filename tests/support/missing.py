"""A rank that does not arrive: killed, stopped for a while, or late. What do the others say of it?

The oracle is the parent process, which knows what it did to which rank.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from compat import members_only
from compat import parallel_state as ps
from tests.support.forked import statuses

AT_ONCE = 8  # runs beside each other: their ranks mostly sleep
FOUND_WITHIN = 30.0  # seconds after the end of a process
SLACK = 15.0  # seconds more, for a machine that has other work
STOPPED = 20.0  # seconds
LATE = 40.0  # seconds


class Case(NamedTuple):
    """One run: ``fate`` strikes the rank ``victim`` of ``world`` after ``delay`` seconds."""

    world: int
    victim: int
    fate: str  # killed, killed inside (it has arrived, and creates its groups), stopped, late
    delay: float


def cases(seed: int) -> Any:
    """Random cases, without end."""
    rng = random.Random(seed)
    for fate in itertools.cycle(("killed", "stopped", "late")):
        world = rng.randint(4, 16)
        yield Case(world, rng.randrange(world), fate, 3 * rng.random())


def _rank(rank: int, case: Case, port: int, file: Path) -> None:
    """Life of one rank; leaves in ``file`` what it heard and how many seconds after the fate."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world)
    dist.barrier()
    if rank == case.victim:
        time.sleep(case.delay)
        if case.fate == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if case.fate == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if case.fate == "late":
            time.sleep(LATE)
        if case.fate == "killed inside":
            dist.new_group = members_only(lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    begin = time.monotonic()
    try:
        ps.initialize_model_parallel(distributed_timeout_minutes=3)
        heard = ""
    except Exception as error:
        heard = f"{type(error).__name__}: {error}"
    file.write_text(json.dumps([heard, time.monotonic() - begin - case.delay]))
    end = time.monotonic() + 8
    while rank == 0 and time.monotonic() < end:  # the others read from its store
        time.sleep(0.2)
        if sum(path.name.isdecimal() for path in file.parent.iterdir()) == case.world:
            break


def try_case(case: Case) -> str:
    """What was wrong in one run; "" if nothing was."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        port = _free_port()
        rank_of = {}
        for rank in range(case.world):
            process = os.fork()
            if process == 0:
                printed = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
                os.dup2(printed, 2)
                try:
                    _rank(rank, case, port, folder / str(rank))
                    os._exit(0)
                finally:
                    os._exit(1)
            rank_of[process] = rank
        victim = next(process for process, rank in rank_of.items() if rank == case.victim)
        if case.fate == "stopped":
            os.waitpid(victim, os.WUNTRACED)
            time.sleep(STOPPED)
            os.kill(victim, signal.SIGCONT)
        statuses(rank_of, 120)
        return _judged(case, folder)


def _free_port() -> int:
    """Outside of the ports that the system hands out, in order to be free a moment later."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _judged(case: Case, folder: Path) -> str:
    wrong = []
    for rank in range(case.world):
        is_killed = case.fate.startswith("killed")
        if rank == case.victim and is_killed:
            continue
        file = folder / str(rank)
        if not file.exists():
            log = (folder / f"{rank}.log").read_text()[-300:]
            wrong.append(f"rank {rank} did not end: {log}")
            continue
        heard, seconds = json.loads(file.read_text())
        if not is_killed:
            if heard:
                wrong.append(f"rank {rank} heard of a rank that lives: {heard}")
            continue
        words = f"rank {case.victim} of ranks 0..{case.world - 1} cannot take part"
        if case.victim == 0:  # which serves the store
            words = "lost the store through which ranks agree"
        if words not in heard:
            wrong.append(f"rank {rank} heard after {seconds:.0f} s: {heard}")
        elif seconds > FOUND_WITHIN + SLACK:
            wrong.append(f"rank {rank} heard after {seconds:.0f} s")
    return f"{case}: {'; '.join(wrong)}" if wrong else ""


def try_cases(chosen: list[Case]) -> list[str]:
    """What was wrong in each run; several run at the same time."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        waiting = list(enumerate(chosen))
        running: dict[int, int] = {}
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                number, case = waiting.pop(0)
                process = os.fork()
                if process == 0:
                    try:
                        Path(folder, str(number)).write_text(try_case(case))
                        os._exit(0)
                    finally:
                        os._exit(1)
                running[process] = number
            for process in list(running):
                ended, _ = os.waitpid(process, os.WNOHANG)
                if ended:
                    number = running.pop(process)
                    file = Path(folder, str(number))
                    text = file.read_text() if file.exists() else f"{chosen[number]}: no result"
                    wrong.append(text)
                    if sys.stderr.isatty():
                        print(f"\r{len(wrong)} of {len(chosen)}", end="", file=sys.stderr)
            time.sleep(0.1)
    return list(filter(None, wrong))
