"""The two-phase commit at the store, for bench.py: one job as JSON in, its result as JSON out.

Real: plain processes, each with one connection to one TCPStore, take turns with torch's own store
barrier and, where gloo is asked for, with ``dist.barrier``. Simulated: virtual ranks in one process
on a store that counts.
"""

from __future__ import annotations

import copy
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch.distributed as dist
from bench_sides import answer
from torch.distributed import distributed_c10d as c10d

from hypergrid.agreement import store as connection
from hypergrid.agreement.commit import Phase, _Memory, _Round, all_or_none
from hypergrid.policy import Abilities, Policy
from tests.support.counting import CountingStore
from tests.support.forked import run_ranks, served

PROPOSAL = {"plan": "0" * 64, "tensor_model_parallel_size": 8, "arguments": "x" * 900}
MINUTE = timedelta(minutes=1)
SERVER_CALLS = ("add", "wait", "compare_set")


def two_phases(store: dist.Store, ranks: range, memory: _Memory) -> None:
    here = _Round(store, ranks, memory)
    here.arrive(PROPOSAL, Abilities(), Policy())
    epoch = here.outcome(MINUTE)["epoch"]
    with all_or_none(store, epoch, ranks, MINUTE):
        pass


def in_turns(world: int, body: Callable[..., Any], kinds: list[str], gloo: bool = False) -> Any:
    """Each process calls ``body`` once per kind, together: their results and the server's CPU."""

    def one(rank: int) -> list[Any]:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=MINUTE)
        if rank == world:  # conducts the others
            used = []
            for turn in range(len(kinds) + 1):
                while store.add(f"ready/{turn}", 0) < world:
                    time.sleep(0.05)
                used.append(cpu(server))
                store.set(f"go/{turn}", "")
            return [after - before for before, after in pairwise(used)]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if gloo:
            own = dist.PrefixStore("gloo", store)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=world)
        found, kept = [], dict[str, Any]()
        for turn, kind in enumerate(kinds):
            store.add(f"ready/{turn}", 1)
            store.wait([f"go/{turn}"], MINUTE)
            found.append(body(store, rank, world, turn, kind, kept))
        store.add(f"ready/{len(kinds)}", 1)
        return found

    with served() as (server, port):
        *results, used = run_ranks(world + 1, one, backend="", timeout=250)
    return results, used


def cpu(process: int) -> float:
    """Seconds of all threads."""
    threads = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e9


def wire(store: dist.Store) -> int:
    """Bytes sent and received so far on the connections to the store."""
    total = 0
    for each in connection._connections(store):
        with each:
            info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            total += sum(int.from_bytes(info[at : at + 8], sys.byteorder) for at in (120, 128))
    return total


def operations(clients: int, calls: int) -> dict[str, float]:
    """Seconds of CPU that one operation costs the process that serves a saturated store."""

    def body(store: Any, rank: int, world: int, turn: int, kind: str, kept: dict[str, Any]) -> None:
        store.set("key", "x" * 150)
        if kind == "add":
            for _ in range(calls):
                store.add("hypergrid/0..131071/3/prepare/arrived", 123456789)
        elif kind == "wait":
            for _ in range(calls):
                store.wait(["key"], MINUTE)
        elif kind == "compare_set":
            for _ in range(calls):
                store.compare_set("key", "?", "?")

    _, used = in_turns(clients, body, list(SERVER_CALLS))
    return {kind: s / clients / calls for kind, s in zip(SERVER_CALLS, used, strict=True)}


def processes(world: int, turns: int, gloo: bool) -> dict[str, dict[str, list[float]]]:
    """Kind of turn -> seconds from the last arrival to the last verdict, and what it cost."""
    kinds = ["nothing", "barrier", "phases", *["gloo"] * gloo]

    def body(base: Any, rank: int, world: int, turn: int, kind: str, kept: Any) -> list[float]:
        store = CountingStore(dist.PrefixStore(kind, base))
        memory, sent, start = kept.setdefault(kind, _Memory()), wire(base), time.monotonic()
        if kind == "barrier":
            c10d._store_based_barrier(rank, store, str(turn), world, MINUTE)
        elif kind == "phases":
            with mock.patch.object(dist, "get_rank", lambda: rank):
                two_phases(store, range(world), memory)
        elif kind == "gloo":
            dist.barrier()
        else:  # so that the bench's own operations come one by one, as after the other kinds
            time.sleep(0.1 + 0.4 * rank / world)
        end = time.monotonic()
        return [start, end, sum(store.counts.values()), wire(base) - sent]

    results, used = in_turns(world, body, kinds * (turns + 1), gloo)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn, (kind, seconds) in enumerate(zip(kinds * (turns + 1), used, strict=True)):
        starts, ends, counts, sizes = zip(*(rows[turn] for rows in results), strict=True)
        first = "first " * (turn < len(kinds))
        found[kind][f"{first}seconds"].append(max(ends) - max(starts))
        found[kind][f"{first}operations"].append(sum(counts) / world)
        found[kind][f"{first}bytes"].append(sum(sizes) / world)
        found[kind][f"{first}cpu"].append(seconds / world)
    for measured in found.values():
        for name in ("first cpu", "cpu"):  # without the bench's own operations
            idle = median(found["nothing"][name])
            measured[name] = [max(0.0, each - idle) for each in measured[name]]
    return found


def simulated(world: int, case: str) -> dict[str, float]:
    """Operations, round trips and characters per rank of ``world`` virtual ranks."""
    store, ranks = CountingStore(dist.HashStore()), range(world)
    arriving = range(world - (case == "missing"))
    start, made = time.process_time(), dict[bool, _Round]()
    at = 0

    def back(rank: int) -> _Round:
        """The round as this rank sees it; a million of them at once would fill the memory."""
        here = copy.copy(made[case == "different" and rank == 1])
        here.rank, here.entry = rank, [rank, *here.entry[1:]]
        here.memory, here.phase = _Memory(), Phase(here.phase.store, ranks, rank)
        return here

    with mock.patch.object(dist, "get_rank", lambda: at):
        for at in arriving:
            here = _Round(store, ranks, _Memory())
            odd = case == "different" and at == 1
            here.arrive({**PROPOSAL, "odd": odd}, Abilities(), Policy())
            made.setdefault(odd, here)
    if case == "missing":  # the first whose time is up calls the roll, and all answer
        assert back(0).phase.publish("roll call", early=True)
        for at in arriving:
            phase = back(at).phase
            phase.store.wait(["outcome"], MINUTE)
            phase._answer()
        assert f"1 of {world} ranks" in phase._missing()
    elif case == "different":
        for at in arriving:
            here = back(at)
            here.phase.store.wait(["outcome"], MINUTE)
            here.phase.tell(here.digest, here.entry)
        for at in reversed(arriving):  # the last one to tell decides
            here = back(at)
            here.phase._told = at + 1
            assert "different groups" in here.outcome(MINUTE)["error"]
    else:
        for at in arriving:
            assert back(at).outcome(MINUTE)["epoch"] == f"0..{world - 1}/0"
        phases = dist.PrefixStore("commit", store)
        for at in arriving:
            if Phase(phases, ranks, at).arrive() == world:
                Phase(phases, ranks, at).publish("")
        assert {Phase(phases, ranks, at).outcome(MINUTE, str) for at in arriving} == {""}
    return {
        "operations": sum(store.counts.values()) / world,
        "trips": store.trips / world,
        "bytes": store.characters / world,
        "seconds": time.process_time() - start,
    }


if __name__ == "__main__":
    answer(operations, processes, simulated)
