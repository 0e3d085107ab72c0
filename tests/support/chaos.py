"""Chaos: one random fault at a random Python call of an operation, on real gloo ranks.

A case is drawn from a seed and a number alone, so that ``chaos.run(Case.of(seed, number))`` tries
it again. Each rank is a forked process that writes what it saw, step by step, into a file; the
parent reads the files and judges them by the laws.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import random
import re
import resource
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
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
from tests.support.forked import served
from tests.support.soaking import measured
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


class Injected(BaseException):
    """Goes through whatever handles an Exception."""


@dataclass
class Seen:
    """What one rank wrote, and how its process ended."""

    steps: dict[str, Any] = field(default_factory=dict)
    status: int = 0  # as of os.waitpid
    finished: bool = False  # else the parent had to end it
    printed: str = ""

    @property
    def ended_by_itself(self) -> bool:
        """Whether the process reached its last line."""
        return self.finished and self.status == 0


# The life of one rank.


class _Life:
    """One rank's part of a case; ``report`` writes a step into the rank's file."""

    def __init__(self, case: Case, rank: int, directory: Path, harness: dist.Store) -> None:
        self.case = case
        self.rank = rank
        self.file = directory / f"{rank}.jsonl"
        self.harness = harness
        self.meetings = 0
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
        """Wait for all ranks, through a store that has no part in the faults."""
        self.meetings += 1
        self.harness.add(f"meeting {self.meetings}", 1)
        while self.harness.add(f"meeting {self.meetings}", 0) < self.case.world:
            time.sleep(0.01)

    # Operations, as a job calls them.

    def initialise(self, tensor: int | None = None) -> None:
        tensor = self.case.tensor if tensor is None else tensor
        self.module.initialize_model_parallel(tensor, distributed_timeout_minutes=TIMEOUT / 60)

    def create(self, tensor: int | None = None) -> None:
        tensor = self.case.tensor if tensor is None else tensor
        shape = [tensor, self.case.world // tensor]
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
        case = self.case
        operation = getattr(self, case.operation)
        for _ in range(2):  # the first one fills caches, which changes the number of calls
            self.prepare()
            self.meet()
            with _counted() as calls:
                operation()
            self.meet()
            self.clean_up()
        before = measured()
        self.prepare()
        self.meet()
        start = time.monotonic()
        error = ""
        try:
            with self.faulty(calls[0]):
                operation(*self.odd_arguments())
        except (Exception, KeyboardInterrupt, Injected) as raised:
            error = f"{type(raised).__name__}: {raised}"
            traceback.clear_frames(raised.__traceback__)
        self.report("operation", [time.monotonic() - start, error])
        self.wait_for_side_effects()
        start = time.monotonic()
        self.clean_up()
        self.report("clean-up", time.monotonic() - start)
        self.report("left", _growth(before))
        if case.fault in PASSING:
            self.meet()
            self.initialise_again()
            total = torch.ones(1)
            dist.all_reduce(total, group=self.module.get_data_parallel_group())
            self.report("again", total.item() == case.world // case.tensor)
            self.meet()
            self.clean_up()
        self.report("end", True)

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

    def odd_arguments(self) -> tuple[int, ...]:
        """Another size on the faulty rank, where the operation takes one."""
        odd = self.case.fault == "argument" and self.rank == self.case.rank
        takes_one = self.case.operation in ("initialise", "create")
        return (3 - self.case.tensor,) if odd and takes_one else ()

    @contextlib.contextmanager
    def faulty(self, calls: int) -> Iterator[None]:
        """Inside, the fault happens on its rank, once, at its place among ``calls``."""
        case = self.case
        if self.rank != case.rank or case.fault == "argument":
            yield
            return
        number = max(1, round(case.place * calls))
        limits = {kind: resource.getrlimit(kind) for kind in _LIMITS}
        try:
            with _at_call(number, self.happen):
                yield
        finally:
            sys.setprofile(None)
            for kind, limit in limits.items():
                resource.setrlimit(kind, limit)

    def happen(self) -> None:
        """The fault itself."""
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
        status = Path("/proc/self/status").read_text()
        used = re.search(r"VmSize:\s+(\d+)", status)
        assert used is not None
        _limit(resource.RLIMIT_AS, int(used[1]) * 1024 + (1 << 20))

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
            sys.setprofile(None)
            hypergrid.abort()
            os._exit(0)

    def wait_for_side_effects(self) -> None:
        """What the fault has started ends too: a thread, a child."""
        if self.thread is not None:
            self.thread.join(TIMEOUT + 2 * SLACK)
            self.report("thread", None if self.thread.is_alive() else self.thread_seconds)
        if self.child:
            end = time.monotonic() + SLACK
            status = None
            while status is None and time.monotonic() < end:
                pid, code = os.waitpid(self.child, os.WNOHANG)
                status = code if pid else None
                time.sleep(0.01)
            if status is None:
                os.kill(self.child, signal.SIGKILL)
                os.waitpid(self.child, 0)
            self.report("child", status)


_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_FSIZE)


def _limit(kind: int, amount: int) -> None:
    """Set the soft limit, which the process may raise again."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount, hard))


def _is_counted(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    # Stock's file has no path, but a name such as "<megatron-core 0.16.1 parallel_state.py>".
    return path.startswith((*OURS, "<megatron-core "))


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the Python calls inside, of our code or of stock's."""
    calls = [0]

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and _is_counted(frame):
            calls[0] += 1

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def _at_call(number: int, happen: Callable[[], None]) -> Iterator[None]:
    """Call ``happen`` where the ``number``-th Python call inside begins."""
    calls = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        if event != "call" or not _is_counted(frame):
            return
        calls += 1
        if calls == number:
            sys.setprofile(None)
            happen()

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def _connections(other_than: int) -> list[socket.socket]:
    """Duplicates of this process's connected TCP sockets, but for those to one port."""
    connections = []
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # closed meanwhile
            continue
        try:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and connection.getpeername()[1] != other_than:
                connections.append(connection)
                continue
        except OSError:  # it listens, or was never connected
            pass
        connection.close()
    return connections


def _growth(before: dict[str, int]) -> dict[str, int]:
    """What there is more than before; gloo closes in threads of its own, so wait a little."""
    end = time.monotonic() + SLACK
    while True:
        after = measured()
        growth = {}
        for name in ("groups", "names", "descriptors", "threads", "files"):
            growth[name] = after[name] - before[name]
        growth["MiB"] = (after["KiB"] - before["KiB"]) // 1024 - 32  # the allocator's own habits
        growth = {name: more for name, more in growth.items() if more > 0}
        if not growth or time.monotonic() > end:
            return growth
        time.sleep(0.05)


def _rank_main(case: Case, rank: int, directory: Path, ports: tuple[int, int]) -> None:
    """The process of one rank; never returns."""
    status = 1
    try:
        printed = os.open(directory / f"{rank}.printed", os.O_WRONLY | os.O_CREAT)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.close(printed)
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
        elif case.store_on_rank_0:
            store = dist.TCPStore("127.0.0.1", int(harness.get("port")), is_master=False)
        else:
            store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world)
        life = _Life(case, rank, directory, harness)
        life.run()
        harness.add("ended", 1)
        # A rank that serves the store would take it along. No one waits for a killed rank.
        end = time.monotonic() + TIMEOUT + 2 * SLACK
        survivors = case.world - (case.fault == "kill")
        while serves and harness.add("ended", 0) < survivors and time.monotonic() < end:
            time.sleep(0.01)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


# The parent.


def run(case: Case) -> list[Seen]:
    """Live through a case; what each rank saw."""
    with (
        tempfile.TemporaryDirectory() as name,
        served() as (_, harness_port),
        served() as (_, store_port),
    ):
        directory = Path(name)
        ranks: dict[int, int] = {}
        for rank in range(case.world):
            pid = os.fork()
            if pid == 0:
                _rank_main(case, rank, directory, (harness_port, store_port))
            ranks[pid] = rank
        statuses = _wait(ranks, case)
        return [_seen(directory, rank, statuses.get(rank)) for rank in range(case.world)]


def _wait(ranks: dict[int, int], case: Case) -> dict[int, int]:
    """The statuses of the ranks that ended in time; the others are ended."""
    left = dict(ranks)
    statuses: dict[int, int] = {}
    continues: dict[int, float] = {}  # pid: when a stopped process goes on
    end = time.monotonic() + 60 + 4 * (TIMEOUT + SLACK)
    lost_since = 0.0
    while left and time.monotonic() < end:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if not ended:
                continue
            if os.WIFSTOPPED(status):
                continues[pid] = time.monotonic() + case.pause
                continue
            statuses[left.pop(pid)] = status
            lost_since = lost_since or (time.monotonic() if status else 0.0)
        for pid in [pid for pid, when in continues.items() if time.monotonic() >= when]:
            os.kill(pid, signal.SIGCONT)
            del continues[pid]
        # Others would wait at a meeting for a rank that has ended with an error.
        if lost_since and time.monotonic() > lost_since + 3 * (TIMEOUT + SLACK):
            break
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return statuses


def _seen(directory: Path, rank: int, status: int | None) -> Seen:
    seen = Seen(finished=status is not None, status=status or 0)
    file = directory / f"{rank}.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        step, value = json.loads(line)
        seen.steps[step] = value
    printed = directory / f"{rank}.printed"
    seen.printed = printed.read_text(errors="replace") if printed.exists() else ""
    return seen


# The laws.


def broken_laws(case: Case, world: list[Seen]) -> dict[str, str]:
    """Which laws a case broke, and how: a sentence for each."""
    broken: dict[str, str] = {}
    happened = "fault" in world[case.rank].steps or case.fault == "argument"
    for rank, seen in enumerate(world):
        guilty = rank == case.rank
        if guilty and case.fault == "kill" and happened:
            continue
        waits_at_a_meeting = "operation" in seen.steps and not seen.finished
        # For a rank whose process has ended: that one is judged.
        if waits_at_a_meeting and any(other.finished and other.status for other in world):
            continue
        if not seen.ended_by_itself:
            how = "did not end" if not seen.finished else f"ended with status {seen.status}"
            last_words = seen.printed[-600:]
            broken["survives"] = f"rank {rank} {how} after {list(seen.steps)}: {last_words}"
            continue
        _judge_rank(case, rank, seen, happened, broken)
    return broken


def _judge_rank(case: Case, rank: int, seen: Seen, happened: bool, broken: dict[str, str]) -> None:
    guilty = rank == case.rank
    seconds, error = seen.steps["operation"]
    pause = case.pause if case.fault in ("stop", "late") else 0.0
    allowed = TIMEOUT + SLACK + (pause if guilty else 0.0)
    if seconds > allowed or seen.steps["clean-up"] > TIMEOUT + SLACK:
        spent = f"{seconds:.1f} s, clean-up {seen.steps['clean-up']:.1f} s"
        broken["in time"] = f"rank {rank} needed {spent}: {error}"
    thread_seconds = seen.steps.get("thread", 0.0)
    if thread_seconds is None or thread_seconds > TIMEOUT + SLACK:
        broken["in time"] = f"the second thread of rank {rank} needed {thread_seconds} s"
    if error and not happened:
        broken["cause"] = f"rank {rank} without a fault: {error}"
    if error and not guilty and not _names_the_cause(case, error):
        broken["cause"] = f"rank {rank}: {error}"
    if seen.steps.get("child", 0) != 0:
        broken["survives"] = f"the child of rank {rank} ended with {seen.steps['child']}"
    left = dict(seen.steps["left"])
    if case.fault == "thread":
        left.pop("MiB", None)
    if left:
        broken["nothing left"] = f"rank {rank}: {left} after {error or 'no error'}"
    if seen.steps.get("again") is False:
        broken["again"] = f"rank {rank} has a wrong sum after {error or 'no error'}"


def _names_the_cause(case: Case, error: str) -> bool:
    """Whether a survivor's error has the faulty rank, what it said, or the store that it served."""
    causes = ["injected", "KeyboardInterrupt", "hypergrid.abort()", "two threads", "thread"]
    if any(cause in error for cause in causes):
        return True
    if case.rank == 0 and case.store_on_rank_0 and "store" in error:
        return True
    if re.search(rf"(?<![\d.]){case.rank}(?![\d.])", error):
        return True
    for first, last, step in re.findall(r"(\d+)\.\.(\d+)(?: step (\d+))?", error):
        if case.rank in range(int(first), int(last) + 1, int(step or 1)):
            return True
    return False


@dataclass
class Outcome:
    """All cases of a run: what the laws say, and how many processes ended, ours and stock's."""

    tried: int = 0
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
        outcome.tried += 1
        outcome.happened += "fault" in world[case.rank].steps or case.fault == "argument"
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
    same = replace(case, operation="initialise", stock=True)
    for place in (case.place, 0.5, 1.0):
        world = run(replace(same, place=place))
        if "survives" in broken_laws(same, world):
            return True
    return False
