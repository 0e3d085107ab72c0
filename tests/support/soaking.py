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
        places: dict[str, list[int]] = {}
        for number, where in enumerate(entered, start=1):
            places.setdefault(where, []).append(number)
        chosen = sorted({n for ns in places.values() for n in (*ns[:each], ns[-1])})
        for number in chosen:
            tally.tried += 1
            before, raised = _traces(), False
            with _fault_at(number):
                try:
                    ps.initialize_model_parallel(**arguments)
                except Injected:
                    raised = True
            changes = _changes(before) if raised else ""
            if not raised:  # the fault was survived, then all of it must be there
                changes = "" if ps.is_initialized() else "nothing raised and nothing built"
                ps.destroy_model_parallel()
            if changes:
                tally.lost.append(f"{entered[number - 1]} (call {number}): {changes}")
                ps.destroy_model_parallel()
        ps.initialize_model_parallel(**arguments)
        ps.destroy_model_parallel()
        tally.seen = f"{len(places)} functions"
    finally:
        dist.destroy_process_group()
    return tally


def _failing_half_way(rank: int, fails_on: int, at: int, arguments: dict[str, Any]) -> Any:
    original, calls, before = dist.new_group, [], _traces()

    @members_only
    def new_group(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if rank == fails_on and len(calls) == at:
            raise RuntimeError("injected: no more communicators")
        return original(*args, **kwargs)

    start = time.monotonic()
    text = ""
    with mock.patch("torch.distributed.new_group", new_group):
        try:
            ps.initialize_model_parallel(**arguments, distributed_timeout_minutes=TIMEOUT / 60)
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
    seconds, left = time.monotonic() - start, _changes(before) if text else ""
    ps.destroy_model_parallel()
    dist.barrier()  # the caller's own: all have heard of it, now all try again
    ps.initialize_model_parallel(**arguments)
    total = torch.tensor([1.0])
    dist.all_reduce(total, group=ps.get_model_parallel_group())
    ps.destroy_model_parallel()
    return len(calls), text, seconds, left, _changes(before)


def faults_on_one_rank(steps: list[int] | None = None, world: int = 4) -> Tally:
    """One of several real ranks cannot create its so-manieth group: all say so, and try again."""
    tally = Tally("a rank that cannot create a group: all ranks say so in time, a retry works")
    arguments = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    count = min(each[0] for each in run_ranks(world, _failing_half_way, -1, 0, arguments))
    slowest = 0.0
    for at in steps or range(1, count + 1):
        tally.tried += 1
        fails_on = at % world
        try:
            results = run_ranks(world, _failing_half_way, fails_on, at, arguments, timeout=60)
        except RankFailure as failure:
            tally.lost.append(f"group {at} of rank {fails_on}: {failure.line}")
            continue
        for rank, (_, text, seconds, left, finally_left) in enumerate(results):
            slowest = max(slowest, seconds)
            if (
                not text.startswith("CreationError: ")
                or "injected: no more communicators" not in text
                or left
                or finally_left
                or seconds > TIMEOUT + 8
            ):
                tally.lost.append(
                    f"group {at} of rank {fails_on}: rank {rank} after {seconds:.1f} s: "
                    f"{text or 'no error'} {left} {finally_left}"
                )
                break
    tally.seen = f"{count} groups a rank, the last rank heard of it after {slowest:.1f} s"
    return tally


def _one_differs(rank: int, cases: list[tuple[int, dict[str, Any]]]) -> Any:
    heard = []
    for odd, change in cases:
        before, start = _traces(), time.monotonic()
        try:
            ps.initialize_model_parallel(
                **({"tensor_model_parallel_size": 2} | (change if rank == odd else {}))
            )
            heard.append(("no error", 0.0, ""))
            ps.destroy_model_parallel()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            heard.append((text, time.monotonic() - start, _changes(before)))
        dist.barrier()
    ps.initialize_model_parallel(2)
    dist.all_reduce(torch.ones(1), group=ps.get_data_parallel_group())
    return heard


def _first_and_last(ranks: list[int]) -> list[int]:
    return [ranks[0], ranks[-1]]


def disagreements(count: int, seed: int = 1, world: int = 8) -> Tally:
    """One rank is asked for something else, or refuses: all raise within 10 s, all can go on."""
    tally = Tally("arguments that differ or are refused on one rank: every rank says so")
    rng = random.Random(seed)
    changes: list[tuple[str, dict[str, Any]]] = [
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
    chosen = [changes[i] if i < len(changes) else rng.choice(changes) for i in range(count)]
    cases = [(rng.randrange(world), change) for _, change in chosen]
    # A window that leaves its own rank out has nobody to agree with: keep the odd one inside.
    cases = [(odd % 4 if "local_world_size" in c else odd, c) for odd, c in cases]
    try:
        results = run_ranks(world, _one_differs, cases, timeout=60 + 2 * count)
    except RankFailure as failure:
        tally.tried, tally.lost = count, [failure.line] * count
        return tally
    slowest = 0.0
    for i, ((odd, change), (named, _)) in enumerate(zip(cases, chosen, strict=True)):
        tally.tried += 1
        heard = [result[i] for result in results]
        others = {text for rank, (text, _, _) in enumerate(heard) if rank != odd}
        slowest = max(slowest, *(seconds for _, seconds, _ in heard))
        if (
            any(text == "no error" or left for text, _, left in heard)
            or len(others) > 1
            or named not in next(iter(others))
            or max(seconds for _, seconds, _ in heard) > 10
        ):
            tally.lost.append(f"rank {odd} with {change}: {heard}")
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
    start, before = time.monotonic(), _traces()
    for thread in threads[::-1] if turned and rank == late else threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    dist.barrier()
    ParallelState.create(tensor_model_parallel_size=2).destroy()
    return texts, seconds, [text for text in texts if text.startswith("works")] or _changes(before)


def threads_at_once(runs: int, world: int = 4) -> Tally:
    """Two threads of each rank create states at once, in one order or not, alike or not."""
    tally = Tally("two threads create at once: no hang, no mix, all ranks say who was refused")
    alike: dict[str, Any] = {"tensor_model_parallel_size": 2}
    for number in range(runs):
        other, turned, late = (4, 2)[number % 2], number // 2 % 2 == 1, number % world
        tally.tried += 1
        orders = [alike, {"tensor_model_parallel_size": other}]
        try:
            results = run_ranks(world, _in_two_threads, late, turned, orders, timeout=60)
        except RankFailure as failure:
            tally.lost.append(f"run {number}: {failure.line}")
            continue
        first, second = zip(*(result[0] for result in results), strict=True)
        # The thread of each rank that was first; where these were asked for the same, all have it.
        began = [texts[turned and rank == late] for rank, (texts, *_) in enumerate(results)]
        works = other == 2 or not turned
        if (
            (works and set(began) != {"works with 2"})
            or sum("works" in text for text in first + second) != works * world
            or not all("two threads of rank" in " ".join(texts) for texts, _, _ in results)
            or any(seconds > 20 for _, seconds, _ in results)
        ):
            tally.lost.append(f"run {number}, turned: {turned}, sizes 2 and {other}: {results}")
    return tally


def _measured() -> dict[str, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "groups": len(open_groups()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "objects": len(gc.get_objects()),
        "KiB": int(status["VmRSS"].split()[0]),
    }


def _many_lives(rank: int, cycles: int, seed: int, make: Callable[..., None]) -> Any:
    rng, measured, keys = random.Random(seed), [], []
    warm_up = max(2 * len(LAYOUTS), cycles // 5)
    for cycle in range(warm_up + cycles):
        if cycle >= warm_up and (cycle - warm_up) % max(cycles // 4, 1) == 0:
            dist.barrier()
            measured.append(_measured())
            keys.append(own_keys(c10d._get_default_store()))
            dist.barrier()
        layout = LAYOUTS[cycle % len(LAYOUTS)] if cycle < warm_up else rng.choice(LAYOUTS)
        make(layout, rank)
    dist.barrier()
    return [*measured, _measured()], keys


def _live(layout: dict[str, Any], rank: int) -> None:
    ps.initialize_model_parallel(**layout)
    for group in (ps.get_data_parallel_group(), ps.get_model_parallel_group()):
        dist.all_reduce(torch.ones(1), group=group)
    ps.destroy_model_parallel()
    ps.destroy_model_parallel()


def lives(cycles: int, seed: int = 1, world: int = 4) -> Tally:
    """Initialise and destroy with changing sizes: counts and memory stay flat."""
    tally = Tally("initialise, use, destroy: counts and memory stay flat", tried=cycles)
    try:
        results = run_ranks(world, _many_lives, cycles, seed, _live, timeout=60 + cycles)
    except RankFailure as failure:
        tally.lost = [failure.line] * cycles
        return tally
    grown = 0.0
    for rank, (measured, keys) in enumerate(results):
        first, last = measured[0], measured[-1]
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


def _missing_at_the_store(rank: int, missing: list[int], seconds: float, per_host: int) -> Any:
    """The round trips, the error and how long it took; ranks have a store connection, no group."""
    if rank in missing:
        return None
    base = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    store, world = CountingStore(base), int(os.environ["WORLD_SIZE"])
    os.environ["LOCAL_WORLD_SIZE"] = str(per_host)
    host = f"host{rank // per_host}"
    if base.add("started", 1) == world - len(missing):
        base.set("go", "")
    base.wait(["go"], timedelta(minutes=2))
    start, limit = time.monotonic(), timedelta(seconds=seconds)
    with (
        mock.patch.object(dist, "get_rank", return_value=rank),
        mock.patch("socket.gethostname", return_value=host),
    ):
        here = _Round(store, range(world), _Memory())
        here.arrive({"tp": 2}, Abilities(), Policy())
        error = here.outcome(limit).get("error", "no error")
    return error, store.trips, sum(store.counts.values()), time.monotonic() - start


def missing_ranks(runs: int, seed: int = 1, world: int = 256, seconds: float = 10.0) -> Tally:
    """Some of many ranks do not come: plain processes with a connection to the store each."""
    tally = Tally(f"missing ranks of {world}: one error, in time, with ranks and hosts", runs)
    rng, slowest, most = random.Random(seed), 0.0, 0.0
    for run in range(runs):
        missing = sorted(rng.sample(range(1, world), 1 + run % 3))
        try:
            body = _missing_at_the_store
            results = run_ranks(world, body, missing, seconds, 8, backend="", timeout=240)
        except RankFailure as failure:
            tally.lost.append(f"run {run}: {failure.line}")
            continue
        texts, _, operations, took = zip(*filter(None, results), strict=True)
        slowest, most = max(slowest, *took), max(most, sum(operations) / world)
        named = ", ".join(map(str, missing))
        hosts = ", ".join(dict.fromkeys(f"host{rank // 8}" for rank in missing))
        told = f"{len(missing)} of {world} ranks ({named} on {hosts}) did not reach group creation"
        if len(set(texts)) > 1 or told not in texts[0]:
            tally.lost.append(f"run {run}, without {missing}: {set(texts)}")
        elif max(took) > 4 * seconds or sum(operations) > (8 + 2 * max(took)) * world:
            tally.lost.append(f"run {run}: {max(took):.1f} s, {sum(operations)} operations")
    tally.seen = f"{most:.1f} operations a rank, the last rank heard of it after {slowest:.1f} s"
    return tally
