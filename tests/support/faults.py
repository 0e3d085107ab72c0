"""The fault injector: one fault, on one rank, somewhere in one operation, on real gloo ranks.

A :class:`Case` says what goes wrong and where; :func:`run` lives through it in forked processes,
each of which writes what it saw, step by step; :func:`broken_laws` judges what they wrote. A new
fault is a short function in ``AT_A_CALL`` or ``AROUND``. ``scripts/soak`` draws cases.
"""

from __future__ import annotations

import contextlib
import ctypes
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
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import hypergrid
from compat import members_only
from compat import parallel_state as ps
from compat.state import SLOTS, ParallelState
from hypergrid.groups import pool
from tests.support import OURS, own_keys
from tests.support.forked import (
    LATE,
    fork_logged,
    open_groups,
    own_sockets,
    run_ranks,
    served,
    statuses,
)

FOUND_WITHIN = 30.0  # seconds after which a rank that has ended is named, whatever the timeout
SLACK = 10.0  # seconds more, for a machine that has other work
# With nearly every kind of group.
RICH = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "hierarchical_context_parallel_sizes": [1, 2],
    "expert_model_parallel_size": 2,
    "num_distributed_optimizer_instances": 2,
    "hybrid_context_parallel": True,
}
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor_model_parallel_size": 2},
    {"tensor_model_parallel_size": 4, "share": "all"},
    {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    {"context_parallel_size": 2, "order": "cp-tp-ep-dp-pp"},
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "connect": "lazy"},
    {"num_distributed_optimizer_instances": 2, "share": "all"},
    {"tensor_model_parallel_size": 2, "creation": "everyone"},
]


class Injected(BaseException):
    """Goes through whatever handles an Exception."""


@contextlib.contextmanager
def at_call(number: int, happen: Callable[[], None]) -> Iterator[list[CodeType]]:
    """Call ``happen`` where the ``number``-th call of a function of ours begins; gives the calls.

    The calls are counted from 1. A generator that goes on is no call.
    """
    calls: list[CodeType] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        is_ours = frame.f_code.co_filename.startswith(OURS) and frame.f_lasti < 4
        if event == "call" and is_ours:
            calls.append(frame.f_code)
            if len(calls) == number:
                sys.setprofile(None)
                happen()

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def happens_at_group(number: int | None, happen: Callable[[], object]) -> Iterator[None]:
    """Call ``happen`` where torch is asked for this rank's ``number``-th group."""
    new_group = dist.new_group
    count = 0

    @members_only
    def counted_new_group(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            happen()
        return new_group(*args, **kwargs)

    with mock.patch.object(dist, "new_group", counted_new_group):
        yield


# What a process has.


def process_state() -> dict[str, Any]:
    """What an initialisation that fails must leave as before it."""
    return {
        "groups in torch's map": len(c10d._world.pg_map),
        "groups in torch's other maps": len(c10d._world.pg_names) + len(c10d._world.tags_to_pg),
        "running group number": c10d._world.group_count,
        "environment": dict(os.environ),
        "pools": len(pool.live_pools()),
        "initialised": ps.is_initialized(),
        "slots": [s for s in SLOTS if getattr(ps, s) and s != "_HYBRID_DP_CP_GROUPS"],
    }


def changes_since(before: dict[str, Any]) -> str:
    after = process_state()
    changed = [name for name in before if before[name] != after[name]]
    return ", ".join(f"{name}: {before[name]} -> {after[name]}" for name in changed)


def measured() -> dict[str, int]:
    """What this process has, as it is left when all that ended is collected."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "groups": len(open_groups()),
        "names": len(c10d._world.pg_names),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "objects": len(gc.get_objects()),
        "KiB": int(status["VmRSS"].split()[0]),
    }


def grown(before: dict[str, int], allowed: dict[str, int]) -> dict[str, int]:
    """How much more there is than is allowed; gloo closes in threads of its own: waits for them."""
    end = time.monotonic() + SLACK
    while True:
        after = measured()
        growth = {name: after[name] - before[name] for name in allowed}
        growth = {name: more for name, more in growth.items() if more > allowed[name]}
        if not growth or time.monotonic() > end:
            return growth
        time.sleep(0.05)


# Cases.


@dataclass(frozen=True)
class Case:
    """One life of a world, and what goes wrong in it."""

    fault: str
    operation: str = "initialise"
    world: int = 4
    rank: int = 2  # that has the fault
    place: float = 0.5  # where: 0.0 is the first call of the operation, 1.0 the last
    pause: float = 2.0  # seconds, of a rank that is stopped or late
    timeout: float = 6.0  # seconds: that of the groups
    store_on_rank_0: bool = False  # else a process of its own serves the store, as torchrun's agent
    leaves: bool = False  # every process ends as soon as its operation has: the store's host too

    @classmethod
    def drawn(cls, seed: int, number: int) -> Case:
        rng = random.Random(f"{seed}/{number}")
        fault = rng.choice([*AT_A_CALL, *AROUND])
        world = rng.choice([4, 6, 8, 12, 16])
        # Who has ended is known before its timeout where a rank serves the store.
        is_long = fault in ("kill", "stop", "late") and rng.random() < 0.5
        return cls(
            fault=fault,
            operation=rng.choice(OPERATIONS),
            world=world,
            rank=rng.randrange(world),
            place=rng.random(),
            pause=rng.choice([2.0, 10.0]),
            timeout=180.0 if is_long else 6.0,
            store_on_rank_0=is_long or rng.random() < 0.5,
        )


class Life:
    """One rank's part of a case; ``report`` writes a step into the rank's file."""

    def __init__(self, case: Case, rank: int, file: Path, harness: dist.TCPStore) -> None:
        self.case = case
        self.rank = rank
        self.file = file
        self.harness = harness  # a store that has no part in the faults
        self.meetings = 0
        self.tensor = 2
        self.grid: hypergrid.HyperCommGrid | None = None
        self.ends: list[Callable[[], None]] = []  # of threads and children that a fault started

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
        ps.initialize_model_parallel(
            self.tensor, distributed_timeout_minutes=self.case.timeout / 60
        )

    def create(self) -> None:
        shape = [self.tensor, self.case.world // self.tensor]
        self.grid = hypergrid.HyperCommGrid(shape, ["tp", "dp"])
        for dims in ("dp", "tp-dp"):
            self.grid.create_pg(dims, timeout=timedelta(seconds=self.case.timeout))

    def suspend(self) -> None:
        ps.current_state().suspend()

    def resume(self) -> None:
        ps.current_state().resume()

    def abort(self) -> None:
        hypergrid.abort()

    def destroy(self) -> None:
        ps.destroy_model_parallel()

    def prepare(self) -> None:
        """What an operation needs before it."""
        if self.case.operation not in ("initialise", "create"):
            self.initialise()
        if self.case.operation == "resume":
            self.suspend()
        self.meet()

    def clean_up(self) -> None:
        """As a job does that goes on in the same process; waits for nobody."""
        if self.grid is not None:
            self.grid.destroy(abort=True)
            self.grid = None
        ps.destroy_model_parallel(abort=True)

    def run(self) -> None:
        """The whole life: twice without the fault, once with it, once more after it."""
        operation = getattr(self, self.case.operation)
        for _ in range(2):  # the first one fills caches, which changes the number of calls
            self.prepare()
            with at_call(0, lambda: None) as calls:
                operation()
            self.meet()
            self.clean_up()
        before = measured()
        self.prepare()
        start = time.monotonic()
        error = self.run_with_the_fault(operation, len(calls))
        self.report("operation", [time.monotonic() - start, error])
        if self.case.leaves:
            os._exit(0)
        for end in self.ends:
            end()
        start = time.monotonic()
        self.clean_up()
        self.report("clean-up", time.monotonic() - start)
        # The allocator has habits of its own, and so has a second thread's.
        allowed = dict.fromkeys(("groups", "names", "descriptors", "threads"), 0)
        self.report("left", grown(before, allowed | {"KiB": 32 << 10}))
        if self.case.fault not in LASTING:
            self.meet()
            self.initialise_again()
            total = torch.ones(1)
            dist.all_reduce(total, group=ps.get_data_parallel_group())
            self.report("again", total.item() == self.case.world // self.tensor)
            self.meet()
            self.clean_up()
        self.report("end", True)

    def run_with_the_fault(self, operation: Callable[[], None], calls: int) -> str:
        """The operation, in which the fault happens on its rank; its error."""
        fault: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.rank == self.case.rank and self.case.fault in AROUND:
            fault = AROUND[self.case.fault](self)
        elif self.rank == self.case.rank:
            fault = at_call(max(1, round(self.case.place * calls)), self.happen)
        try:
            with _restoring_limits(), fault:
                operation()
        except (Exception, KeyboardInterrupt, Injected) as raised:
            traceback.clear_frames(raised.__traceback__)
            return f"{type(raised).__name__}: {raised}"
        return ""

    def happen(self) -> None:
        self.report("fault", True)
        AT_A_CALL[self.case.fault](self)

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


OPERATIONS = ("initialise", "create", "suspend", "resume", "abort", "destroy")


# The faults.


def _raise(error: BaseException) -> None:
    raise error


def _use_up_memory(life: Life) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + (1 << 20))


def _shut_a_connection(life: Life) -> None:
    """Shut one connection of this process, and not that of the harness."""
    connections = []
    duplicates = own_sockets()
    for duplicate in duplicates:
        with contextlib.suppress(OSError):  # listens, or was never connected
            if duplicate.getpeername()[1] != life.harness.port:
                connections.append(duplicate)
    if connections:
        chosen = connections[int(life.case.place * 1000) % len(connections)]
        with contextlib.suppress(OSError):  # its other end may have closed it already
            chosen.shutdown(socket.SHUT_RDWR)
    for duplicate in duplicates:
        duplicate.close()


def _start_a_thread(life: Life) -> None:
    def create_a_state() -> None:
        with contextlib.suppress(Exception):
            state = ParallelState.create(distributed_timeout_minutes=life.case.timeout / 60)
            state.destroy(abort=True)

    thread = threading.Thread(target=create_a_state, daemon=True)
    thread.start()

    def end() -> None:
        thread.join(life.case.timeout + SLACK)
        life.report("thread ends", not thread.is_alive())

    life.ends.append(end)


def _stop(life: Life) -> None:
    """Stop this process; a child lets it go on after the pause."""
    own_id = os.getpid()
    waker = subprocess.Popen(["sh", "-c", f"sleep {life.case.pause}; kill -CONT {own_id}"])
    os.kill(own_id, signal.SIGSTOP)
    waker.wait()


def _fork(life: Life) -> None:
    child = os.fork()
    if child == 0:
        hypergrid.abort()
        os._exit(0)
    life.ends.append(lambda: life.report("child", statuses({child: 0}, SLACK)[0]))


@contextlib.contextmanager
def _another_argument(life: Life) -> Iterator[None]:
    life.report("fault", True)
    usual = life.tensor
    life.tensor = 1
    try:
        yield
    finally:
        life.tensor = usual


# What happens once, where a call begins.
AT_A_CALL: dict[str, Callable[[Life], None]] = {
    "kill": lambda life: os.kill(os.getpid(), signal.SIGKILL),
    "stop": _stop,
    "exception": lambda life: _raise(Injected("injected")),
    "interrupt": lambda life: _raise(KeyboardInterrupt()),
    "late": lambda life: time.sleep(life.case.pause),
    "descriptors": lambda life: _limit(resource.RLIMIT_NOFILE, 3),
    "memory": _use_up_memory,
    "connection": _shut_a_connection,
    "thread": _start_a_thread,
    "fork": _fork,
}
# What holds while the operation runs: context managers.
AROUND: dict[str, Callable[[Life], contextlib.AbstractContextManager[None]]] = {
    "argument": _another_argument,
}
# After these the process is of no more use; gloo itself ends one without descriptors or memory.
LASTING = ("kill", "descriptors", "memory", "connection")


def _limit(kind: int, amount: int) -> None:
    """Set the soft limit, which the process may raise again."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount, hard))


@contextlib.contextmanager
def _restoring_limits() -> Iterator[None]:
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)
    limits = {kind: resource.getrlimit(kind) for kind in kinds}
    try:
        yield
    finally:
        for kind, limit in limits.items():
            resource.setrlimit(kind, limit)


# A world of processes.


def _live(case: Case, rank: int, directory: Path, harness_port: int, store_port: int) -> None:
    """The process of one rank."""
    gc.freeze()  # a collection would look at all that the parent has, and copy its pages
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(_most_seconds(case) - SLACK)  # a rank that hangs shows where
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
    Life(case, rank, directory / f"{rank}.jsonl", harness).run()
    harness.add("ended", 1)
    # A rank that serves the store would take it along. No one waits for a killed rank.
    end = time.monotonic() + FOUND_WITHIN
    survivors = case.world - (case.fault == "kill")
    while serves and harness.add("ended", 0) < survivors and time.monotonic() < end:
        time.sleep(0.01)


def _most_seconds(case: Case) -> float:
    return 60 + case.pause + 4 * (min(case.timeout, FOUND_WITHIN) + SLACK)


@dataclass
class RankOutcome:
    """What one rank wrote, and how its process ended."""

    steps: dict[str, Any]
    status: int  # of its exit; LATE: the parent had to end it
    printed: str


def run(case: Case) -> list[RankOutcome]:
    """Live through a case; the outcome of each rank."""
    with (
        tempfile.TemporaryDirectory() as name,
        served() as (_, harness_port),
        served() as (_, store_port),
    ):
        directory = Path(name)
        rank_of: dict[int, int] = {}
        for rank in range(case.world):
            live = functools.partial(_live, case, rank, directory, harness_port, store_port)
            rank_of[fork_logged(live, directory / f"{rank}.printed")] = rank
        status_of_rank = statuses(rank_of, _most_seconds(case))
        world = []
        for rank in range(case.world):
            printed = (directory / f"{rank}.printed").read_text(errors="replace")
            file = directory / f"{rank}.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
            steps = dict(map(json.loads, lines))
            world.append(RankOutcome(steps, status_of_rank[rank], printed))
        return world


# The laws.


def broken_laws(case: Case, world: list[RankOutcome]) -> list[str]:
    """The laws that a case broke, and how: a sentence each."""
    broken = []
    has_happened = "fault" in world[case.rank].steps
    one_ended_badly = any(outcome.status not in (0, LATE) for outcome in world)
    for rank, outcome in enumerate(world):
        may_end = rank == case.rank and has_happened and case.fault in LASTING
        waits_at_a_meeting = "operation" in outcome.steps and outcome.status == LATE
        # A rank that waits for one whose process has ended: that one is judged.
        if (may_end and outcome.status) or (waits_at_a_meeting and one_ended_badly):
            continue
        if outcome.status:
            broken.append(
                f"survives: rank {rank} has status {outcome.status} after {list(outcome.steps)}: "
                f"{outcome.printed[-600:]}"
            )
            continue
        for law in _broken_by_rank(case, rank, outcome.steps, has_happened):
            broken.append(f"{law}, rank {rank}: {outcome.steps}")
    return broken


def _broken_by_rank(
    case: Case, rank: int, steps: dict[str, Any], has_happened: bool
) -> Iterator[str]:
    """The laws that a rank broke that came to its last line."""
    is_faulty = rank == case.rank
    seconds, error = steps["operation"]
    allowed = min(case.timeout, FOUND_WITHIN) + SLACK
    is_paused = case.fault in ("stop", "late")
    if seconds > allowed + case.pause * is_paused or steps.get("clean-up", 0) > allowed:
        yield "in time"
    if error and not has_happened:
        yield "no error without a fault"
    if error and not is_faulty and not _names_the_cause(case, error):
        yield "the cause is named"
    # Groups are created in a fifth of their timeout.
    if error and is_paused and case.pause < case.timeout / 5:
        yield "a rank that lives is waited for"
    if steps.get("thread ends") is False or steps.get("child"):
        yield "a thread and a child end too"
    if steps.get("left"):
        yield "nothing left"
    if steps.get("again") is False:
        yield "right sums in the next life"


def _names_the_cause(case: Case, error: str) -> bool:
    """Whether a survivor's error has the faulty rank, what it said, or the store that it served."""
    causes = ["injected", "KeyboardInterrupt", "hypergrid.abort()", "thread"]
    if case.rank == 0 and case.store_on_rank_0 and case.fault in LASTING:
        causes.append("lost the store")
    if any(cause in error for cause in causes):
        return True
    if re.search(rf"(?<![\d.]){case.rank}(?![\d.])", error):
        return True
    spans = re.findall(r"(\d+)\.\.(\d+)(?: step (\d+))?", error)
    return any(
        case.rank in range(int(first), int(last) + 1, int(step or 1)) for first, last, step in spans
    )


# Promises that tests try a few times and scripts/soak more often: each gives what broke them.


def random_faults(count: int, seed: int) -> list[str]:
    """One random fault at a random call: the laws hold."""
    broken = []
    for number in range(count):
        case = Case.drawn(seed, number)
        for law in broken_laws(case, run(case)):
            broken.append(f"case {number} of seed {seed}, {case}: {law}")
    return broken


def faults_in_every_function(count: int = 1, _seed: int = 0) -> list[str]:
    """A fault at the first ``count`` and the last call of each function: the process is as before.

    In one process, over a fake world of 16 ranks; and a retry works.
    """
    broken = []
    dist.init_process_group("fake", rank=5, world_size=16, store=FakeStore())
    try:
        for _ in range(2):  # the first fills caches, which changes the number of calls
            with at_call(0, lambda: None) as calls:
                ps.initialize_model_parallel(**RICH)
            ps.destroy_model_parallel()
        numbers_of: dict[CodeType, list[int]] = {}
        for number, code in enumerate(calls, start=1):
            numbers_of.setdefault(code, []).append(number)
        assert numbers_of
        for code, numbers in numbers_of.items():
            for number in {*numbers[:count], numbers[-1]}:
                if changes := _changes_by_a_fault_at(number):
                    broken.append(f"{code} (call {number}): {changes}")
                ps.destroy_model_parallel()
        ps.initialize_model_parallel(**RICH)
        ps.destroy_model_parallel()
    finally:
        dist.destroy_process_group()
    return broken


def _changes_by_a_fault_at(number: int) -> str:
    before = process_state()
    with at_call(number, lambda: _raise(Injected())):
        try:
            ps.initialize_model_parallel(**RICH)
        except Injected:
            return changes_since(before)
    # The fault was survived, then all of it must be there.
    return "" if ps.is_initialized() else "nothing raised and nothing built"


def _many_lives(rank: int, cycles: int, seed: int) -> dict[str, int]:
    """What grew on this rank in many lives; a number of lives before are not counted."""
    warm_up = LAYOUTS * max(2, cycles // 40)
    counted = random.Random(seed).choices(LAYOUTS, k=cycles)

    def live_all(layouts: list[dict[str, Any]]) -> int:
        for layout in layouts:
            ps.initialize_model_parallel(**layout)
            for group in (ps.get_data_parallel_group(), ps.get_model_parallel_group()):
                dist.all_reduce(torch.ones(1), group=group)
            ps.destroy_model_parallel()
            ps.destroy_model_parallel()
        dist.barrier()
        keys = len(own_keys(c10d._get_default_store()))
        dist.barrier()
        return keys

    keys = live_all(warm_up)
    before = measured()
    more_keys = live_all(counted) - keys
    allowed = {"groups": 0, "descriptors": 0, "threads": 0, "objects": 100}
    # Rank 0 serves the store, where torch keeps the addresses of every gloo group.
    if cycles >= 100 and rank:  # below that, the allocator's own habits
        allowed["KiB"] = 16 * cycles
    growth = grown(before, allowed)
    return growth | ({"keys": more_keys} if more_keys > 8 else {})


def lives(cycles: int, seed: int = 1) -> list[str]:
    """Initialise, use and destroy with changing sizes: counts and memory stay flat."""
    growths = run_ranks(4, _many_lives, cycles, seed, timeout=60 + 2 * cycles)
    return [f"rank {rank}: {growth}" for rank, growth in enumerate(growths) if growth]
