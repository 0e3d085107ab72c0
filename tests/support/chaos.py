"""Chaos: one random fault at a random Python call of an operation, on real gloo ranks.

A case is drawn from a seed and a number alone, so that ``chaos.run(Case.of(seed, number))`` tries
it again. Each rank is a forked process that writes what it saw, step by step, into a file; the
parent reads the files and judges them by the laws.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import os
import random
import re
import resource
import signal
import socket
import stat
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import hypergrid
from compat import parallel_state as ours
from compat.state import ParallelState
from tests.support import OURS
from tests.support.forked import fork_logged, served, statuses
from tests.support.soaking import Injected, at_call, measured
from tests.support.stock import load_stock

TIMEOUT = 6.0  # seconds: that of the groups
SLACK = 10.0  # seconds beyond the timeout within which every survivor has ended
SHORT_PAUSE = 2.0  # seconds: a rank that is late, but in time
LONG_PAUSE = TIMEOUT + 4.0  # seconds: a rank that is too late
WORLDS = (4, 6, 8, 12, 16)
FAULTS = (
    "kill",
    "stop",
    "exception",
    "interrupt",
    "late",
    "argument",
    "descriptors",
    "memory",
    "socket",
    "disk",
    "thread",
    "fork",
)
OPERATIONS = ("initialise", "create", "suspend", "resume", "abort", "destroy")
# Faults that are over when the operation has ended: after it all ranks can initialise again.
PASSING = ("stop", "exception", "interrupt", "late", "argument", "disk", "thread", "fork")
LAWS = ("in time", "cause", "survives", "nothing left", "again")


@dataclass(frozen=True)
class Case:
    """One life of a world, and what goes wrong in it."""

    world: int
    fault: str
    operation: str
    rank: int  # that has the fault
    place: float  # where: 0.0 is the first Python call of the operation, 1.0 the last
    pause: float  # seconds, of a rank that is stopped or late
    store_on_rank_0: bool  # else a process of its own serves the store, as torchrun's agent does
    tensor: int  # tensor-parallel size
    stock: bool = False  # Megatron's own parallel_state instead of ours

    @classmethod
    def of(cls, seed: int, number: int) -> Case:
        """The case with this number; 72 in a row have each fault in each operation once."""
        rng = random.Random(f"{seed}/{number}")
        pairs = [(fault, operation) for fault in FAULTS for operation in OPERATIONS]
        random.Random(f"{seed}/{number // len(pairs)}").shuffle(pairs)
        fault, operation = pairs[number % len(pairs)]
        world = rng.choice(WORLDS)
        return cls(
            world=world,
            fault=fault,
            operation=operation,
            rank=rng.randrange(world),
            place=rng.random(),
            pause=rng.choice([SHORT_PAUSE, LONG_PAUSE]),
            store_on_rank_0=rng.random() < 0.5,
            tensor=rng.choice([1, 2]),
        )


@dataclass
class RankOutcome:
    """What one rank wrote, and how its process ended."""

    steps: dict[str, Any] = field(default_factory=dict)
    status: int = 0  # as of os.waitpid
    finished: bool = False  # else the parent had to end it
    printed: str = ""


# The life of one rank.


class _Life:
    """One rank's part of a case; ``report`` writes a step into the rank's file."""

    def __init__(self, case: Case, rank: int, directory: Path, harness: dist.TCPStore) -> None:
        self.case = case
        self.rank = rank
        self.file = directory / f"{rank}.jsonl"
        self.harness = harness  # a store that has no part in the faults
        self.meetings = 0
        self.tensor = case.tensor
        self.grid: hypergrid.HyperCommGrid | None = None
        self.module: Any = load_stock("0.16.1") if case.stock else ours
        self.thread: threading.Thread | None = None
        self.thread_seconds = 0.0
        self.child = 0

    def report(self, step: str, value: Any) -> None:
        """Write at once: a process that is killed has said what it did until then."""
        with self.file.open("a") as file:
            file.write(json.dumps([step, value]) + "\n")

    def meet(self) -> None:
        """Wait for all ranks."""
        self.meetings += 1
        self.harness.add(f"meeting {self.meetings}", 1)
        while self.harness.add(f"meeting {self.meetings}", 0) < self.case.world:
            time.sleep(0.01)

    # Operations, as a job calls them.

    def initialise(self) -> None:
        self.module.initialize_model_parallel(self.tensor, distributed_timeout_minutes=TIMEOUT / 60)

    def create(self) -> None:
        shape = [self.tensor, self.case.world // self.tensor]
        self.grid = hypergrid.HyperCommGrid(shape, ["tp", "dp"])
        timeout = timedelta(seconds=TIMEOUT)
        self.grid.create_pg("dp", timeout=timeout)
        self.grid.create_pg("tp-dp", timeout=timeout)

    def suspend(self) -> None:
        self.module.current_state().suspend()

    def resume(self) -> None:
        self.module.current_state().resume()

    def abort(self) -> None:
        hypergrid.abort()

    def destroy(self) -> None:
        self.module.destroy_model_parallel()

    def prepare(self) -> None:
        """What an operation needs before it."""
        if self.case.operation in ("suspend", "resume", "abort", "destroy"):
            self.initialise()
        if self.case.operation == "resume":
            self.suspend()

    def clean_up(self) -> None:
        """As a job does that goes on in the same process; waits for nobody."""
        if self.case.stock:
            self.module.destroy_model_parallel()
            return
        if self.grid is not None:
            self.grid.destroy(abort=True)
            self.grid = None
        self.module.destroy_model_parallel(abort=True)

    def run(self) -> None:
        """The whole life: once without the fault, once with it, once more after it."""
        operation = getattr(self, self.case.operation)
        for _ in range(2):  # the first one fills caches, which changes the number of calls
            self.prepare()
            self.meet()
            with at_call(0, self.happen, is_counted) as calls:
                operation()
            self.meet()
            self.clean_up()
        before = measured()
        self.prepare()
        self.meet()
        start = time.monotonic()
        error = self.run_with_the_fault(len(calls))
        self.report("operation", [time.monotonic() - start, error])
        self.wait_for_side_effects()
        start = time.monotonic()
        self.clean_up()
        self.report("clean-up", time.monotonic() - start)
        self.report("left", _growth(before))
        if self.case.fault in PASSING:
            self.meet()
            self.initialise_again()
            total = torch.ones(1)
            dist.all_reduce(total, group=self.module.get_data_parallel_group())
            self.report("again", total.item() == self.case.world // self.case.tensor)
            self.meet()
            self.clean_up()
        self.report("end", True)

    def run_with_the_fault(self, calls: int) -> str:
        """The operation, in which the fault happens on its rank, once, at its place; its error."""
        operation = getattr(self, self.case.operation)
        fault: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.rank == self.case.rank and self.case.fault == "argument":
            self.tensor = 3 - self.case.tensor
        elif self.rank == self.case.rank:
            fault = at_call(max(1, round(self.case.place * calls)), self.happen, is_counted)
        try:
            with _restoring_limits(), fault:
                operation()
        except (Exception, KeyboardInterrupt, Injected) as raised:
            traceback.clear_frames(raised.__traceback__)
            return f"{type(raised).__name__}: {raised}"
        finally:
            self.tensor = self.case.tensor
        return ""

    def initialise_again(self) -> None:
        """A second thread of one rank has asked for groups that no other rank has asked for.

        So the next creation of the others may be the one that it is refused in, and they say so.
        """
        try:
            self.initialise()
        except hypergrid.AgreementError as error:
            if self.case.fault != "thread" or "two threads" not in str(error):
                raise
            self.initialise()

    # The faults.

    def happen(self) -> None:
        self.report("fault", True)
        getattr(self, f"_{self.case.fault}")()

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)  # the parent lets it continue

    def _exception(self) -> None:
        raise Injected("injected")

    def _interrupt(self) -> None:
        raise KeyboardInterrupt

    def _late(self) -> None:
        time.sleep(self.case.pause)

    def _descriptors(self) -> None:
        _limit(resource.RLIMIT_NOFILE, 3)

    def _memory(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + (1 << 20))

    def _disk(self) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _limit(resource.RLIMIT_FSIZE, 0)

    def _socket(self) -> None:
        connections = _connections(other_than=self.harness.port)
        if connections:
            chosen = connections[int(self.case.place * 1000) % len(connections)]
            with contextlib.suppress(OSError):  # its other end may have closed it already
                chosen.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()

    def _thread(self) -> None:
        def create_a_state() -> None:
            start = time.monotonic()
            with contextlib.suppress(Exception):
                state = ParallelState.create(distributed_timeout_minutes=TIMEOUT / 60)
                state.destroy(abort=True)
            self.thread_seconds = time.monotonic() - start

        self.thread = threading.Thread(target=create_a_state, daemon=True)
        self.thread.start()

    def _fork(self) -> None:
        self.child = os.fork()
        if self.child == 0:
            hypergrid.abort()
            os._exit(0)

    def wait_for_side_effects(self) -> None:
        """Wait until a thread or a child that the fault has started has ended."""
        if self.thread is not None:
            self.thread.join(TIMEOUT + 2 * SLACK)
            self.report("thread", None if self.thread.is_alive() else self.thread_seconds)
        if self.child:
            self.report("child", statuses({self.child: self.rank}, SLACK)[self.rank])


@contextlib.contextmanager
def _restoring_limits() -> Iterator[None]:
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
    limits = {kind: resource.getrlimit(kind) for kind in kinds}
    try:
        yield
    finally:
        for kind, limit in limits.items():
            resource.setrlimit(kind, limit)


def _limit(kind: int, amount: int) -> None:
    """Set the soft limit, which the process may raise again."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount, hard))


def is_counted(frame: FrameType) -> bool:
    """Whether it is a call of our code, or of stock's."""
    path = frame.f_code.co_filename
    # Stock's file has no path, but a name such as "<megatron-core 0.16.1 parallel_state.py>".
    return path.startswith((*OURS, "<megatron-core "))


def _connections(other_than: int) -> list[socket.socket]:
    """Duplicates of this process's connected TCP sockets, but for those to one port."""
    connections = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, listens, or was never connected
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and connection.getpeername()[1] != other_than:
                connections.append(connection)
    return connections


def _growth(before: dict[str, int]) -> dict[str, int]:
    """What there is more than before; gloo closes in threads of its own, so wait a little."""
    end = time.monotonic() + SLACK
    while True:
        after = measured()
        growth = {"MiB": (after["KiB"] - before["KiB"]) // 1024 - 32}  # the allocator's own habits
        for name in ("groups", "names", "descriptors", "threads", "files"):
            growth[name] = after[name] - before[name]
        growth = {name: more for name, more in growth.items() if more > 0}
        if not growth or time.monotonic() > end:
            return growth
        time.sleep(0.05)


def _live(case: Case, rank: int, directory: Path, ports: tuple[int, int]) -> None:
    """The process of one rank."""
    private = directory / f"directory of {rank}"
    private.mkdir()
    os.chdir(private)
    gc.freeze()  # a collection would look at all that the parent has, and copy its pages
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(60 + 4 * TIMEOUT)  # a rank that hangs shows where
    harness_port, store_port = ports
    harness = dist.TCPStore("127.0.0.1", harness_port, is_master=False)
    serves = case.store_on_rank_0 and rank == 0
    if serves:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        harness.set("port", str(store.port))
    else:
        if case.store_on_rank_0:
            store_port = int(harness.get("port"))
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world)
    _Life(case, rank, directory, harness).run()
    harness.add("ended", 1)
    # A rank that serves the store would take it along. No one waits for a killed rank.
    end = time.monotonic() + TIMEOUT + 2 * SLACK
    survivors = case.world - (case.fault == "kill")
    while serves and harness.add("ended", 0) < survivors and time.monotonic() < end:
        time.sleep(0.01)


# The parent.


def run(case: Case) -> list[RankOutcome]:
    """Live through a case; the outcome of each rank."""
    with (
        tempfile.TemporaryDirectory() as name,
        served() as (_, harness_port),
        served() as (_, store_port),
    ):
        directory = Path(name)
        ports = (harness_port, store_port)
        rank_of: dict[int, int] = {}
        for rank in range(case.world):
            live = functools.partial(_live, case, rank, directory, ports)
            rank_of[fork_logged(live, directory / f"{rank}.printed")] = rank
        status_of_rank = _wait(rank_of, case)
        return [_outcome(directory, rank, status_of_rank.get(rank)) for rank in range(case.world)]


def _wait(rank_of: dict[int, int], case: Case) -> dict[int, int]:
    """The statuses of the ranks that ended in time; the others are ended."""
    running = dict(rank_of)
    status_of_rank: dict[int, int] = {}
    continues: dict[int, float] = {}  # when a stopped process goes on
    end = time.monotonic() + 60 + 4 * (TIMEOUT + SLACK)
    while running and time.monotonic() < end:
        for process in list(running):
            ended, status = os.waitpid(process, os.WNOHANG | os.WUNTRACED)
            if ended and os.WIFSTOPPED(status):
                continues[process] = time.monotonic() + case.pause
            elif ended:
                if status and not any(status_of_rank.values()):
                    # Others would wait at a meeting for a rank that has ended with an error.
                    end = min(end, time.monotonic() + 3 * (TIMEOUT + SLACK))
                status_of_rank[running.pop(process)] = status
        for process, moment in list(continues.items()):
            if time.monotonic() >= moment:
                os.kill(process, signal.SIGCONT)
                del continues[process]
        time.sleep(0.01)
    for process in running:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return status_of_rank


def _outcome(directory: Path, rank: int, status: int | None) -> RankOutcome:
    printed = (directory / f"{rank}.printed").read_text(errors="replace")
    file = directory / f"{rank}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    steps = dict(map(json.loads, lines))
    return RankOutcome(steps, status or 0, finished=status is not None, printed=printed)


# The laws.


def happened(case: Case, world: list[RankOutcome]) -> bool:
    """Whether the operation reached the fault."""
    return "fault" in world[case.rank].steps or case.fault == "argument"


def broken_laws(case: Case, world: list[RankOutcome]) -> dict[str, str]:
    """Which laws a case broke, and how: a sentence for each."""
    broken: dict[str, str] = {}
    has_ended_badly = any(outcome.finished and outcome.status for outcome in world)
    for rank, outcome in enumerate(world):
        is_killed = case.fault == "kill" and rank == case.rank and happened(case, world)
        waits_at_a_meeting = "operation" in outcome.steps and not outcome.finished
        # It waits for a rank whose process has ended: that one is judged.
        if is_killed or (waits_at_a_meeting and has_ended_badly):
            continue
        if not outcome.finished or outcome.status:
            how = f"ended with status {outcome.status}" if outcome.finished else "did not end"
            last_words = outcome.printed[-600:]
            broken["survives"] = f"rank {rank} {how} after {list(outcome.steps)}: {last_words}"
            continue
        for law, how in _broken_by_rank(case, rank, outcome.steps, happened(case, world)):
            broken[law] = f"rank {rank} {how}"
    return broken


def _broken_by_rank(
    case: Case, rank: int, steps: dict[str, Any], is_expected: bool
) -> Iterator[tuple[str, str]]:
    """The laws that a rank broke that came to its last line; ``is_expected``: there was a fault."""
    is_faulty = rank == case.rank
    seconds, error = steps["operation"]
    after_error = f"after {error or 'no error'}"
    allowed = TIMEOUT + SLACK
    pause = case.pause if is_faulty and case.fault in ("stop", "late") else 0.0
    if seconds > allowed + pause or steps["clean-up"] > allowed:
        yield "in time", f"needed {seconds:.1f} s, clean-up {steps['clean-up']:.1f} s: {error}"
    thread_seconds = steps.get("thread", 0.0)
    if thread_seconds is None or thread_seconds > allowed:
        yield "in time", f"has a second thread that needed {thread_seconds} s"
    if error and not is_expected:
        yield "cause", f"without a fault: {error}"
    if error and not is_faulty and not _names_the_cause(case, error):
        yield "cause", f"raised {error}"
    if steps.get("child", 0) != 0:
        yield "survives", f"has a child that ended with {steps['child']}"
    growth = dict(steps["left"])
    if case.fault == "thread":
        growth.pop("MiB", None)
    if growth:
        yield "nothing left", f"has {growth} more {after_error}"
    if steps.get("again") is False:
        yield "again", f"has a wrong sum {after_error}"


def _names_the_cause(case: Case, error: str) -> bool:
    """Whether a survivor's error has the faulty rank, what it said, or the store that it served."""
    causes = ["injected", "KeyboardInterrupt", "hypergrid.abort()", "two threads", "thread"]
    if case.rank == 0 and case.store_on_rank_0:
        causes.append("store")
    if any(cause in error for cause in causes):
        return True
    if re.search(rf"(?<![\d.]){case.rank}(?![\d.])", error):
        return True
    spans = re.findall(r"(\d+)\.\.(\d+)(?: step (\d+))?", error)
    return any(
        case.rank in range(int(first), int(last) + 1, int(step or 1)) for first, last, step in spans
    )


@dataclass
class Outcome:
    """All cases of a run: what the laws say, and how many processes ended, ours and stock's."""

    happened: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    ended: int = 0
    ended_with_stock: int = 0


def try_cases(seed: int, numbers: range) -> Outcome:
    """Live through the cases with these numbers.

    Where a process of ours ended that was not killed, Megatron's own parallel_state goes through
    the same fault three times while it initialises: if one of its processes ends too, the law is
    kept, since it is gloo that ends a process without descriptors or memory.
    """
    outcome = Outcome()
    for number in numbers:
        case = Case.of(seed, number)
        world = run(case)
        broken = broken_laws(case, world)
        outcome.happened += happened(case, world)
        if "survives" in broken:
            outcome.ended += 1
            if _stock_ends_too(case):
                outcome.ended_with_stock += 1
                broken = {}
        for law in LAWS:
            outcome.kept[law] += law not in broken
        for law, how in broken.items():
            outcome.broken.append(f"{law}: case {number} of seed {seed}, {case}: {how}")
    return outcome


def _stock_ends_too(case: Case) -> bool:
    for place in (case.place, 0.5, 1.0):
        stock_case = replace(case, operation="initialise", stock=True, place=place)
        if "survives" in broken_laws(stock_case, run(stock_case)):
            return True
    return False
