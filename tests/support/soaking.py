"""Promises about failures, each tried as often as asked: by the tests for seconds, by soak longer.

Every function gives a :class:`Tally`; what was not kept is named in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from compat import members_only
from compat import parallel_state as ps
from compat.state import SLOTS, ParallelState
from hypergrid.agreement.commit import _Memory, _Round
from hypergrid.groups import pool
from hypergrid.policy import Abilities, Policy
from tests.support import OURS, own_keys
from tests.support.counting import CountingStore
from tests.support.forked import RankFailure, open_groups, run_ranks, run_scripts, total

TIMEOUT = 3.0  # seconds that ranks wait for each other where one of them fails
_RICH = {
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


@dataclass
class Tally:
    """How often a promise was tried, what broke it, and a word on what was seen."""

    promise: str
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    seen: str = ""

    def check(self) -> None:
        """For tests: it was tried, and kept each time."""
        assert self.tried and not self.lost, str(self)

    def results(
        self, title: str, world: int, body: Callable[..., Any], *args: Any, **how: Any
    ) -> Any:
        """What ``body`` gives on each rank; [], and the promise is lost, if one raises or hangs."""
        try:
            return run_ranks(world, body, *args, **how)
        except RankFailure as failure:
            self.lost.append(f"{title}: {failure.line}")
            return []

    def __str__(self) -> str:
        kept = f"{self.tried - len(self.lost)} of {self.tried} kept"
        return "\n".join([f"{self.promise}: {kept} {self.seen}".rstrip(), *self.lost[:5]])


class Injected(BaseException):
    """Goes through whatever handles an Exception."""


def _traces() -> dict[str, Any]:
    """What an initialisation must leave behind when it fails: all this as before it."""
    return {
        "groups in torch's map": len(c10d._world.pg_map),
        "groups in torch's other maps": len(c10d._world.pg_names) + len(c10d._world.tags_to_pg),
        "running group number": c10d._world.group_count,
        "environment": dict(os.environ),
        "pools": len(pool.live_pools()),
        "initialised": ps.is_initialized(),
        "slots": [s for s in SLOTS if getattr(ps, s) and s != "_HYBRID_DP_CP_GROUPS"],
    }


def _changes(before: dict[str, Any]) -> str:
    after = _traces()
    return ", ".join(f"{k}: {before[k]} -> {after[k]}" for k in before if before[k] != after[k])


def _refusal(call: Callable[..., Any], *args: Any, **arguments: Any) -> str:
    """The error that a call ends with, as "TypeError: its text"; "" if it works."""
    try:
        call(*args, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def _fault_at(number: int) -> Iterator[list[str]]:
    """Raise :class:`Injected` where the ``number``-th call of a function of ours begins."""
    entered: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        ours = code.co_filename.startswith(OURS)
        if event == "call" and ours and frame.f_lasti < 4:
            entered.append(f"{os.path.basename(code.co_filename)}:{code.co_qualname}")
            if len(entered) == number:
                sys.setprofile(None)
                raise Injected(f"injected at the entry of {entered[-1]}")

    sys.setprofile(profile)
    try:
        yield entered
    finally:
        sys.setprofile(None)


def faults_in_every_function(each: int = 1, arguments: dict[str, Any] | None = None) -> Tally:
    """A fault at the first ``each`` and the last entry of every function that initialising enters.

    In one process, over a fake world of 16 ranks.
    """
    tally = Tally("a fault in any function leaves the process as before, and a retry works")
    arguments = _RICH if arguments is None else arguments
    dist.init_process_group("fake", rank=5, world_size=16, store=FakeStore())
    try:
        for _ in range(2):  # the first fills caches, which changes the number of calls
            with _fault_at(0) as entered:
                ps.initialize_model_parallel(**arguments)
            ps.destroy_model_parallel()
        calls_of: dict[str, list[int]] = {}
        for number, function in enumerate(entered, start=1):
            calls_of.setdefault(function, []).append(number)
        chosen = set[int]()
        for numbers in calls_of.values():
            chosen.update(numbers[:each], numbers[-1:])
        for number in sorted(chosen):
            tally.tried += 1
            changes = _changes_by_a_fault_at(number, arguments)
            if changes:
                tally.lost.append(f"{entered[number - 1]} (call {number}): {changes}")
            ps.destroy_model_parallel()
        ps.initialize_model_parallel(**arguments)
        ps.destroy_model_parallel()
        tally.seen = f"{len(calls_of)} functions"
    finally:
        dist.destroy_process_group()
    return tally


def _changes_by_a_fault_at(number: int, arguments: dict[str, Any]) -> str:
    before = _traces()
    with _fault_at(number):
        try:
            ps.initialize_model_parallel(**arguments)
        except Injected:
            return _changes(before)
    # The fault was survived, then all of it must be there.
    return "" if ps.is_initialized() else "nothing raised and nothing built"


def _fails_half_way(rank: int, fails_on: int, at: int, arguments: dict[str, Any]) -> Any:
    """How many groups this rank creates; what it hears, after how long, and what is left."""
    new_group = dist.new_group
    calls = []
    before = _traces()

    @members_only
    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if rank == fails_on and len(calls) == at:
            raise RuntimeError("injected: no more communicators")
        return new_group(*args, **kwargs)

    start = time.monotonic()
    limit = {"distributed_timeout_minutes": TIMEOUT / 60}
    with mock.patch("torch.distributed.new_group", failing):
        text = _refusal(ps.initialize_model_parallel, **arguments, **limit)
    seconds = time.monotonic() - start
    changes = _changes(before) if text else ""
    ps.destroy_model_parallel()
    dist.barrier()  # the caller's own: all have heard of it, now all try again
    ps.initialize_model_parallel(**arguments)
    total(ps.get_model_parallel_group())
    ps.destroy_model_parallel()
    return len(calls), text, seconds, changes + _changes(before)


def faults_on_one_rank(steps: list[int] | None = None, world: int = 4) -> Tally:
    """One of several real ranks cannot create its so-manieth group: all say so, and try again."""
    tally = Tally("a rank that cannot create a group: all ranks say so in time, a retry works")
    arguments = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    fewest = min(count for count, *_ in run_ranks(world, _fails_half_way, -1, 0, arguments))
    slowest = 0.0
    for at in steps or range(1, fewest + 1):
        tally.tried += 1
        fails_on = at % world
        title = f"group {at} of rank {fails_on}"
        body = _fails_half_way
        results = tally.results(title, world, body, fails_on, at, arguments, timeout=60)
        for rank, (_, text, seconds, changes) in enumerate(results):
            slowest = max(slowest, seconds)
            is_told = text.startswith("CreationError: ") and "injected: no more comm" in text
            if not is_told or changes or seconds > TIMEOUT + 8:
                heard = f"{text or 'no error'} {changes}"
                tally.lost.append(f"{title}: rank {rank} after {seconds:.1f} s: {heard}")
                break
    tally.seen = f"{fewest} groups a rank, the last rank heard of it after {slowest:.1f} s"
    return tally


# What one rank is asked for instead, and a word of the error that all others raise.
_DIFFERENCES: list[tuple[str, dict[str, Any]]] = [
    ("tensor_model_parallel_size", {"tensor_model_parallel_size": 4}),
    ("pipeline_model_parallel_size", {"pipeline_model_parallel_size": 2}),
    ("order", {"order": "dp-tp-cp-ep-pp"}),
    ("share", {"share": "all"}),
    ("connect", {"connect": "lazy"}),
    ("distributed_timeout_minutes", {"distributed_timeout_minutes": 5}),
    ("create_gloo_process_groups", {"create_gloo_process_groups": False}),
    ("EMBEDDING_GROUP", {"get_embedding_ranks": lambda ranks: []}),
    ("tensor_model_parallel_size", {"tensor_model_parallel_size": 3}),
    ("tensor_model_parallel_size", {"tensor_model_parallel_size": 0}),
    ("tensor_model_parallel_size", {"tensor_model_parallel_size": "2"}),
    ("tp-tp-dp", {"order": "tp-tp-dp"}),
    ("no/such/file", {"nccl_communicator_config_path": "no/such/file.yaml"}),
    ("overlap", {"local_world_size": 4}),
]


def _one_differs(rank: int, cases: list[tuple[int, dict[str, Any]]]) -> Any:
    heard = []
    for odd, difference in cases:
        arguments = {"tensor_model_parallel_size": 2}
        if rank == odd:
            arguments |= difference
        before = _traces()
        start = time.monotonic()
        text = _refusal(ps.initialize_model_parallel, **arguments)
        heard.append((text, time.monotonic() - start, _changes(before)))
        ps.destroy_model_parallel()
        dist.barrier()
    ps.initialize_model_parallel(2)
    total(ps.get_data_parallel_group())
    return heard


def disagreements(count: int, seed: int = 1, world: int = 8) -> Tally:
    """One rank is asked for something else, or refuses: all raise within 10 s, all can go on."""
    tally = Tally("arguments that differ or are refused on one rank: every rank says so", count)
    rng = random.Random(seed)
    words = []
    cases = []
    for number in range(count):
        word, difference = rng.choice(_DIFFERENCES)
        if number < len(_DIFFERENCES):
            word, difference = _DIFFERENCES[number]
        # A window that leaves its own rank out has nobody to agree with: keep the odd one inside.
        inside = difference.get("local_world_size", world)
        words.append(word)
        cases.append((rng.randrange(inside), difference))
    results = tally.results("all", world, _one_differs, cases, timeout=60 + 2 * count)
    if not results:
        return tally
    slowest = 0.0
    for (odd, difference), word, *heard in zip(cases, words, *results, strict=True):
        seconds = max(seconds for _, seconds, _ in heard)
        slowest = max(slowest, seconds)
        is_heard = all(text and not changes for text, _, changes in heard)
        others = {text for rank, (text, _, _) in enumerate(heard) if rank != odd}
        is_one_text = len(others) == 1 and word in min(others)
        if not is_heard or not is_one_text or seconds > 10:
            tally.lost.append(f"rank {odd} with {difference}: {heard}")
    tally.seen = f"the last rank heard of it after {slowest:.1f} s"
    return tally


def _fails_and_ends(rank: int, way: str, odd: int) -> None:
    """One rank differs, refuses or cannot create; all end, by ``os._exit`` but for "raises"."""
    arguments: dict[str, Any] = {"distributed_timeout_minutes": TIMEOUT / 60}
    if rank == odd and way == "cannot create":
        failure = RuntimeError("injected: no more communicators")
        dist.new_group = members_only(mock.Mock(side_effect=failure))
    elif rank == odd:
        arguments["tensor_model_parallel_size"] = 3 if way == "refuses" else 2
    try:
        ps.initialize_model_parallel(**arguments)
    except RuntimeError as error:
        if way == "raises":
            raise
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)


_TOLD = {
    "raises": "tensor_model_parallel_size is 2 on rank {} and 1 on rank",
    "differs": "tensor_model_parallel_size is 2 on rank {} and 1 on rank",
    "refuses": "world size 4 is not divisible by tensor_model_parallel_size=3",
    "cannot create": "injected: no more communicators",
}


def hosts_that_leave(runs: int, world: int = 4) -> Tally:
    """One rank fails, and all end, also the one that serves the store."""
    tally = Tally("one rank fails and the store's host ends: every rank has said how", runs)
    for number, (way, told) in enumerate(_TOLD.items()):
        odd = world - 1 - number % 2 * (world - 2)  # the last one, and rank 1
        printed = run_scripts(world, _fails_and_ends, way, odd, runs=-(-runs // len(_TOLD)))
        for run, texts in enumerate(printed):
            for rank, text in enumerate(texts):
                last_line = (text.splitlines() or [""])[-1]
                is_alone = way != "cannot create"  # where torch writes of its own timeouts
                if told.format(odd) not in last_line or (is_alone and "TCPStore" in text):
                    tally.lost.append(f"{way}, run {run}, rank {rank}: {last_line[:400]}")
    return tally


def _in_two_threads(rank: int, late: int, turned: bool, orders: list[dict[str, Any]]) -> Any:
    """Each of two threads creates a state; rank ``late`` begins last, and ``turned`` turns it."""
    texts = [""] * len(orders)

    def create(number: int) -> None:
        try:
            state = ParallelState.create(**orders[number], distributed_timeout_minutes=0.5)
        except RuntimeError as error:
            texts[number] = f"{type(error).__name__}: {error}"
        else:
            texts[number] = f"works with {total(state.get_tensor_model_parallel_group()):.0f}"

    time.sleep(rank == late)
    threads = [threading.Thread(target=create, args=(number,)) for number in range(len(orders))]
    if turned and rank == late:
        threads.reverse()
    start = time.monotonic()
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    dist.barrier()
    ParallelState.create(tensor_model_parallel_size=2).destroy()
    return texts, seconds


def threads_at_once(runs: int, world: int = 4) -> Tally:
    """Two threads of each rank create states at once, in one order or not, alike or not."""
    tally = Tally("two threads create at once: no hang, no mix, all ranks say who was refused")
    for number in range(runs):
        tally.tried += 1
        size = (4, 2)[number % 2]  # of the second thread
        turned = number // 2 % 2 == 1
        late = number % world
        orders = [{"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": size}]
        title = f"run {number}, turned: {turned}, sizes 2 and {size}"
        results = tally.results(title, world, _in_two_threads, late, turned, orders, timeout=60)
        working = []  # the results of the threads that have a state
        first_to_start = set()
        for rank, (texts, _) in enumerate(results):
            working += [text for text in texts if text.startswith("works")]
            first_to_start.add(texts[turned and rank == late])
        # Where the first threads of all ranks were asked for the same, all have it.
        all_work = size == 2 or not turned
        is_kept = len(working) == all_work * world
        is_kept &= not all_work or first_to_start == {"works with 2"}
        is_kept &= all("two threads of rank" in " ".join(texts) for texts, _ in results)
        is_kept &= all(seconds <= 20 for _, seconds in results)
        if results and not is_kept:
            tally.lost.append(f"{title}: {results}")
    return tally


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
        "files": len(os.listdir(".")),
        "objects": len(gc.get_objects()),
        "KiB": int(status["VmRSS"].split()[0]),
    }


def _many_lives(rank: int, cycles: int, seed: int, make: Callable[..., None]) -> Any:
    rng = random.Random(seed)
    counts = []
    keys = []
    warm_up = max(2 * len(LAYOUTS), cycles // 5)
    for cycle in range(warm_up + cycles):
        if cycle >= warm_up and (cycle - warm_up) % max(cycles // 4, 1) == 0:
            dist.barrier()
            counts.append(measured())
            keys.append(own_keys(c10d._get_default_store()))
            dist.barrier()
        layout = LAYOUTS[cycle % len(LAYOUTS)] if cycle < warm_up else rng.choice(LAYOUTS)
        make(layout, rank)
    dist.barrier()
    return [*counts, measured()], keys


def _live(layout: dict[str, Any], rank: int) -> None:
    ps.initialize_model_parallel(**layout)
    for group in (ps.get_data_parallel_group(), ps.get_model_parallel_group()):
        dist.all_reduce(torch.ones(1), group=group)
    ps.destroy_model_parallel()
    ps.destroy_model_parallel()


def lives(cycles: int, seed: int = 1, world: int = 4) -> Tally:
    """Initialise and destroy with changing sizes: counts and memory stay flat."""
    tally = Tally("initialise, use, destroy: counts and memory stay flat", tried=cycles)
    results = tally.results("all", world, _many_lives, cycles, seed, _live, timeout=60 + cycles)
    if not results:
        return tally
    grown = 0.0
    for rank, (counts, keys) in enumerate(results):
        first = counts[0]
        last = counts[-1]
        for what in ("groups", "descriptors", "threads"):
            if last[what] > first[what]:
                tally.lost.append(f"rank {rank}: {what} {first[what]} -> {last[what]}")
        if last["objects"] > first["objects"] + 100:
            tally.lost.append(f"rank {rank}: objects {first['objects']} -> {last['objects']}")
        if len(keys[-1]) > len(keys[0]) + 8:
            tally.lost.append(f"rank {rank}: keys {keys[0]} -> {keys[-1]}")
        if rank:  # rank 0 serves the store, where torch keeps the addresses of every gloo group
            grown = max(grown, (last["KiB"] - first["KiB"]) / cycles)
    if grown > 16 and cycles >= 100:  # below that, the allocator's own habits
        tally.lost.append(f"memory grows by {grown:.1f} KiB a life: {results[-1][0]}")
    last = results[-1][0][-1]
    tally.seen = (
        f"{last['groups']} group, {last['descriptors']} descriptors, {last['threads']} threads, "
        f"{grown:.1f} KiB a life, {len(results[0][1][-1])} keys of ours in the store"
    )
    return tally


def _missing_at_the_store(rank: int, missing: list[int], seconds: float) -> Any:
    """The error, the operations and how long it took; ranks have a store connection, no group."""
    if rank in missing:
        return None
    base = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    store, world = CountingStore(base), int(os.environ["WORLD_SIZE"])
    if base.add("started", 1) == world - len(missing):
        base.set("go", "")
    base.wait(["go"], timedelta(minutes=2))
    start, limit = time.monotonic(), timedelta(seconds=seconds)
    with mock.patch.object(dist, "get_rank", return_value=rank):
        round_ = _Round(store, range(world), _Memory())
        round_.arrive({"tp": 2}, Abilities(), Policy())
        error = round_.outcome(limit).get("error", "no error")
    return error, sum(store.counts.values()), time.monotonic() - start


def missing_ranks(runs: int, seed: int = 1, world: int = 256, seconds: float = 10.0) -> Tally:
    """Some of many ranks do not come: plain processes with a connection to the store each."""
    tally = Tally(f"missing ranks of {world}: one error, in time, with the ranks", runs)
    rng = random.Random(seed)
    slowest = 0.0
    most = 0.0
    for run in range(runs):
        missing = sorted(rng.sample(range(1, world), 1 + run % 3))
        title = f"run {run}, without {missing}"
        body = _missing_at_the_store
        how = {"backend": "", "timeout": 240}
        results = [*filter(None, tally.results(title, world, body, missing, seconds, **how))]
        if not results:
            continue
        texts = {text for text, _, _ in results}
        operations = sum(count for _, count, _ in results)
        longest = max(waited for _, _, waited in results)
        slowest = max(slowest, longest)
        most = max(most, operations / world)
        ranks = ", ".join(map(str, missing))
        told = f"{len(missing)} of {world} ranks ({ranks}) did not reach group creation"
        if len(texts) > 1 or told not in min(texts):
            tally.lost.append(f"{title}: {texts}")
        elif longest > 4 * seconds or operations > (8 + 2 * longest) * world:
            tally.lost.append(f"{title}: {longest:.1f} s, {operations} operations")
    tally.seen = f"{most:.1f} operations a rank, the last rank heard of it after {slowest:.1f} s"
    return tally
