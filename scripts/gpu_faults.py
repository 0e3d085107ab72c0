"""What ranks do on GPUs when one of them fails, and how long they take: checks of ``gpu_check``."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpu_rows import Row, gathered, join, members_that_sum

import hypergrid
from compat.state import ParallelState
from hypergrid import AbortedError, AgreementError, CreationError
from hypergrid.groups.pool import GroupPool
from hypergrid.messages import in_words

PATIENCE = 20  # seconds that ranks wait for one that does not connect
PAIRS = 6  # of stock and ours


def culprit() -> int:
    """The rank that does it: 5 of 8, which has groups with 4 and 7 in the demo's layout."""
    return 5 * dist.get_world_size() // 8


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def disagreement(device: torch.device, label: str, default: str) -> list[Row]:
    """One rank asks for something else: all raise, and the next call works."""
    layout = join(device, default)
    share = "all" if dist.get_rank() == culprit() else "none"
    faults = []
    start = time.monotonic()
    try:
        ParallelState.create(**layout, share=share, create_gloo_process_groups=False)
        faults.append("no rank raised")
    except AgreementError as error:
        if f"rank {culprit()}" not in str(error):
            faults.append(f"the rank is not named: {error}")
    seconds = time.monotonic() - start
    state = ParallelState.create(**layout, create_gloo_process_groups=False)
    faults += members_that_sum(state, device)
    slowest = max(gathered(seconds))
    return [Row(label, f"AgreementError on all after at most {slowest:.2f} s", faults)]


def waits_in_all_reduce(device: torch.device) -> tuple[threading.Thread, list[float]]:
    """A thread that waits for the whole world; it notes when it is free."""
    freed = []

    def wait() -> None:
        try:
            dist.all_reduce(torch.ones(1, device=device))
            synchronize(device)
        except (RuntimeError, ValueError):
            pass  # gloo's and torch's, when the group is aborted
        freed.append(time.monotonic())

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, freed


def freed_by_abort(device: torch.device, takes_part: bool) -> tuple[str, list[str]]:
    """Abort all groups, three seconds into an all_reduce; what was seen, and faults."""
    faults = []
    waiting = None
    if takes_part:
        waiting, freed = waits_in_all_reduce(device)
    time.sleep(3)
    start = time.monotonic()
    hypergrid.abort(default=True)
    observed = f"abort {time.monotonic() - start:.1f} s"
    print(observed, flush=True)  # in the log of a rank that does not end
    if waiting is not None:
        waiting.join(PATIENCE)
        if freed and freed[0] < start:
            observed += ", free before it"
        elif freed:
            observed += f", free after {freed[0] - start:.1f} s"
        else:
            faults.append(f"not free {PATIENCE} s after the abort")
    try:
        hypergrid.raise_if_aborted()
        faults.append("raise_if_aborted() did not raise")
    except AbortedError:
        pass
    return observed, faults


def second_life(device: torch.device, default: str) -> list[str]:
    """New groups in the same process; faults."""
    layout = join(device, default, life=1)
    state = ParallelState.create(**layout, create_gloo_process_groups=False)
    return members_that_sum(state, device)


def abort(device: torch.device, label: str, default: str) -> list[Row]:
    """Every rank aborts, in an all_reduce that one never joins; all begin again."""
    state = ParallelState.create(**join(device, default), create_gloo_process_groups=False)
    faults = members_that_sum(state, device)
    takes_part = dist.get_rank() != culprit()
    observed, of_abort = freed_by_abort(device, takes_part)
    faults += of_abort + second_life(device, default)
    return [Row(label, f"{observed}; second life", faults)]


def killed(device: torch.device, label: str, default: str) -> list[Row]:
    """One rank is killed, the others abort, and half of the world begins again."""
    state = ParallelState.create(**join(device, default), create_gloo_process_groups=False)
    faults = members_that_sum(state, device)
    rank = dist.get_rank()
    world = dist.get_world_size()
    survivors = [other for other in range(world) if other != culprit()]
    if rank == culprit():
        os.kill(os.getpid(), signal.SIGKILL)
    observed, of_abort = freed_by_abort(device, takes_part=True)
    faults += of_abort
    again = survivors[: max(1, world // 2)]
    if rank in again:
        os.environ.update(RANK=str(again.index(rank)), WORLD_SIZE=str(len(again)))
        faults += second_life(device, default)
        observed += "; second life"
    return [Row(label, observed, faults)]


def connecting(device: torch.device, label: str, default: str, how: str) -> list[Row]:
    """One rank raises, or is killed, before its third group, while the others connect theirs."""
    # An unbound default group connects by a barrier that hypergrid gives up; in a split of a bound
    # one a rank would wait without a limit.
    if default == "bound":
        os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] = "1"
        os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(PATIENCE)
    layout = join(device, default)
    make = GroupPool.make
    calls = []

    def fails(pool: GroupPool, *args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 3 and dist.get_rank() == culprit():
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("planted")
        return make(pool, *args, **options)

    faults = []
    observed = ""
    start = time.monotonic()
    try:
        with mock.patch.object(GroupPool, "make", fails):
            ParallelState.create(
                **layout,
                connect="eager",
                create_gloo_process_groups=False,
                distributed_timeout_minutes=PATIENCE / 60,
            )
        faults.append("no error")
    except (CreationError, RuntimeError) as error:
        is_named = "planted" in str(error)
        if how == "raises" and not is_named:
            faults.append(f"it does not name the planted error: {error}")
        if not isinstance(error, CreationError) and not is_named:
            faults.append(f"another error: {error}")
        observed = f"after {time.monotonic() - start:.1f} s {in_words(error)}"
    return [Row(label, observed, faults)]


def figures(device: torch.device, label: str, default: str) -> list[Row]:
    """Initialise, first use and destroy: stock and ours in turn, in one process a rank."""
    layout = join(device, default)
    stock = import_module("megatron.core.parallel_state")
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(PAIRS):
        one_pair(stock, layout, device, seconds)
    rows = []
    # The slowest rank's time is that of the job.
    for name, times in seconds.items():
        slowest = [max(of_ranks) for of_ranks in zip(*gathered(times), strict=True)]
        median = statistics.median(slowest)
        observed = f"median {median:.3f} s, {min(slowest):.3f} to {max(slowest):.3f} s"
        rows.append(Row(f"{label}: {name}", f"{observed} ({PAIRS} times)"))
    return rows


def one_pair(
    stock: Any, layout: dict[str, int], device: torch.device, seconds: dict[str, list[float]]
) -> None:
    """One life of stock's groups and one of ours, with the seconds of each phase."""
    arguments = {**layout, "create_gloo_process_groups": False}
    before = {*dist.distributed_c10d._world.pg_map}

    def timed(name: str, call: Callable[[], object]) -> None:
        dist.barrier()
        seconds[name].append(seconds_of(call))

    def use() -> None:
        groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]
        for group in groups:
            dist.all_reduce(torch.ones(1, device=device), group=group)
        synchronize(device)

    def left() -> list[dist.ProcessGroup]:
        world = dist.distributed_c10d._world
        groups = [group for group in world.pg_map if group not in before]
        return sorted(groups, key=lambda group: world.pg_names[group], reverse=True)

    timed("stock initialises", lambda: stock.initialize_model_parallel(**arguments))
    timed("stock's first use", use)
    timed("stock destroys", stock.destroy_model_parallel)
    # What stock leaves, as torch's own destroy_process_group() without a group would end it.
    groups = left()
    title = f"torch destroys what stock leaves ({len(groups)} groups)"
    timed(title, lambda: [*map(dist.destroy_process_group, groups)])
    states = []
    timed("ours initialises", lambda: states.append(ParallelState.create(**arguments)))
    timed("our first use", use)
    timed("ours destroys", states[0].destroy)


CHECKS: dict[str, Callable[..., list[Row]]] = {
    "disagreement": disagreement,
    "abort": abort,
    "killed": killed,
    "connecting": connecting,
    "figures": figures,
}
DEFAULTS = ("unbound", "bound")


def faults_jobs() -> list[tuple[str, ...]]:
    """The label, the check and its arguments, the most valuable first."""
    jobs = []
    for default in DEFAULTS:
        for check in ("killed", "abort", "disagreement"):
            jobs.append((f"{check}, {default}", check, f"{check}, {default}", default))
        for how in ("killed", "raises"):
            label = f"{how} while others connect, {default}"
            jobs.append((label, "connecting", label, default, how))
    return jobs
