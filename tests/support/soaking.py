"""Promises about failures, tried a few times by the tests and more often by scripts/soak.

Every function gives a :class:`Tally`, which names what was not kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from compat import members_only
from compat import parallel_state as ps
from compat.state import SLOTS
from hypergrid.groups import pool
from tests.support import OURS, own_keys
from tests.support.forked import RankFailure, open_groups, run_ranks, run_scripts

TIMEOUT = 3.0  # seconds that ranks wait for each other where one of them fails
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


@dataclass
class Tally:
    """How often a promise was tried, what broke it, and a word on what was seen."""

    promise: str
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    seen: str = ""

    def check(self) -> None:
        """For tests: it was tried, and kept each time."""
        assert self.tried and not self.lost, self.lost[:5]


class Injected(BaseException):
    """Goes through whatever handles an Exception."""


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


@contextlib.contextmanager
def at_call(
    number: int, happen: Callable[[], None], is_counted: Callable[[FrameType], bool]
) -> Iterator[list[CodeType]]:
    """Call ``happen`` where the ``number``-th counted Python call inside begins; gives the calls.

    The calls are counted from 1.
    """
    calls: list[CodeType] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_counted(frame):
            calls.append(frame.f_code)
            if len(calls) == number:
                sys.setprofile(None)
                happen()

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def _is_entry(frame: FrameType) -> bool:
    """Whether a function of ours is entered: a generator that goes on is not."""
    return frame.f_code.co_filename.startswith(OURS) and frame.f_lasti < 4


def _raise_injected() -> None:
    raise Injected("injected")


def faults_in_every_function(count: int = 1) -> Tally:
    """A fault at the first ``count`` and the last entry of every function that initialising enters.

    In one process, over a fake world of 16 ranks.
    """
    tally = Tally("a fault in any function leaves the process as before, and a retry works")
    dist.init_process_group("fake", rank=5, world_size=16, store=FakeStore())
    try:
        for _ in range(2):  # the first fills caches, which changes the number of calls
            with at_call(0, _raise_injected, _is_entry) as entered:
                ps.initialize_model_parallel(**RICH)
            ps.destroy_model_parallel()
        calls_of: dict[str, list[int]] = {}
        for number, code in enumerate(entered, start=1):
            function = f"{os.path.basename(code.co_filename)}:{code.co_qualname}"
            calls_of.setdefault(function, []).append(number)
        for function, numbers in calls_of.items():
            for number in {*numbers[:count], numbers[-1]}:
                tally.tried += 1
                changes = _changes_by_a_fault_at(number)
                if changes:
                    tally.lost.append(f"{function} (call {number}): {changes}")
                ps.destroy_model_parallel()
        ps.initialize_model_parallel(**RICH)
        ps.destroy_model_parallel()
        tally.seen = f"{len(calls_of)} functions"
    finally:
        dist.destroy_process_group()
    return tally


def _changes_by_a_fault_at(number: int) -> str:
    before = process_state()
    with at_call(number, _raise_injected, _is_entry):
        try:
            ps.initialize_model_parallel(**RICH)
        except Injected:
            return changes_since(before)
    # The fault was survived, then all of it must be there.
    return "" if ps.is_initialized() else "nothing raised and nothing built"


# How one rank of four fails, and what the last line of each rank then says.
WAYS_TO_FAIL = {
    "raises": "tensor_model_parallel_size is 2 on rank 3 and 1 on rank",
    "differs": "tensor_model_parallel_size is 2 on rank 3 and 1 on rank",
    "refuses": "world size 4 is not divisible by tensor_model_parallel_size=3",
    "cannot create": "injected: no more communicators",
}


def _fails_and_ends(rank: int, way: str) -> None:
    """Rank 3 fails; all end, by ``os._exit`` but for "raises"."""
    arguments: dict[str, Any] = {"distributed_timeout_minutes": TIMEOUT / 60}
    if rank == 3 and way == "cannot create":
        failure = RuntimeError("injected: no more communicators")
        dist.new_group = members_only(mock.Mock(side_effect=failure))
    elif rank == 3:
        arguments["tensor_model_parallel_size"] = 3 if way == "refuses" else 2
    try:
        ps.initialize_model_parallel(**arguments)
    except RuntimeError as error:
        if way == "raises":
            raise
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)


def hosts_that_leave(runs: int) -> Tally:
    """One rank fails, and all end, also the one that serves the store."""
    tally = Tally("one rank fails and the store's host ends: every rank has said how")
    for way, words in WAYS_TO_FAIL.items():
        for printed in run_scripts(4, _fails_and_ends, way, runs=-(-runs // len(WAYS_TO_FAIL))):
            tally.tried += 1
            for rank, text in enumerate(printed):
                last_line = (text.splitlines() or [""])[-1]
                # Where a rank cannot create, torch writes of its own timeouts too.
                is_noisy = way != "cannot create" and "TCPStore" in text
                if words not in last_line or is_noisy:
                    tally.lost.append(f"{way}, rank {rank}: {last_line[:400]}")
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


def _many_lives(rank: int, cycles: int, seed: int) -> Any:
    """What this rank has before and after many lives; a number of lives before are not counted."""
    rng = random.Random(seed)
    layouts = LAYOUTS * max(2, cycles // 40)
    warm_up = len(layouts)
    layouts += rng.choices(LAYOUTS, k=cycles)
    counts = []
    for number, layout in enumerate([*layouts, {}]):
        if number in (warm_up, warm_up + cycles):
            dist.barrier()
            keys = len(own_keys(c10d._get_default_store()))
            counts.append(measured() | {"keys": keys})
            dist.barrier()
        ps.initialize_model_parallel(**layout)
        for group in (ps.get_data_parallel_group(), ps.get_model_parallel_group()):
            dist.all_reduce(torch.ones(1), group=group)
        ps.destroy_model_parallel()
        ps.destroy_model_parallel()
    return counts


def lives(cycles: int, seed: int = 1, world: int = 4) -> Tally:
    """Initialise and destroy with changing sizes: counts and memory stay flat."""
    tally = Tally("initialise, use, destroy: counts and memory stay flat", tried=cycles)
    allowed = {"groups": 0, "descriptors": 0, "threads": 0, "objects": 100, "keys": 8}
    if cycles >= 100:  # below that, the allocator's own habits
        allowed["KiB"] = 16 * cycles
    try:
        results = run_ranks(world, _many_lives, cycles, seed, timeout=60 + 2 * cycles)
    except RankFailure as failure:
        tally.lost.append(failure.line)
        results = []
    for rank, (first, last) in enumerate(results):
        for name, growth in allowed.items():
            # Rank 0 serves the store, where torch keeps the addresses of every gloo group.
            is_store = name == "KiB" and rank == 0
            if last[name] > first[name] + growth and not is_store:
                tally.lost.append(f"rank {rank}: {name} {first[name]} -> {last[name]}")
        tally.seen = ", ".join(f"{first[name]} -> {last[name]} {name}" for name in allowed)
    return tally
