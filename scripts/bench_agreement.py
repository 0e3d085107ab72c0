#!/usr/bin/env python3
"""What the two-phase commit costs at the store: real processes, then virtual ranks up to a million.

    scripts/bench_agreement.py                        # 256 processes; simulations up to 131,072
    scripts/bench_agreement.py --processes 512 --ranks 1048576

Real: plain processes, each with one connection to one TCPStore, run prepare and commit; the peer in
the same run is torch's own ``_store_based_barrier``. Simulated: virtual ranks in one process on a
store that counts, for success, one different rank and one missing rank.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hypergrid.groups.commit import all_or_none
from hypergrid.groups.creation import Abilities
from hypergrid.groups.prepare import _Memory, _Round
from hypergrid.groups.rendezvous import Phase
from hypergrid.policy import Policy
from tests.support.counting import CountingStore

PROPOSAL = {"plan": "0" * 64, "tensor_model_parallel_size": 8, "arguments": "x" * 900}
MINUTE = timedelta(minutes=1)


def two_phases(store: dist.Store, ranks: range, memory: _Memory) -> None:
    here = _Round(store, ranks, memory)
    here.arrive(PROPOSAL, Abilities(), Policy())
    with all_or_none(here.outcome(MINUTE)["epoch"], ranks, MINUTE):
        pass


def rank_of_many(port: int, rank: int, world: int, turns: int, pipe: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=MINUTE)
    memory, seconds = _Memory(), []
    with (
        mock.patch.object(dist, "get_rank", return_value=rank),
        mock.patch("hypergrid.groups.commit.shared_store", return_value=store),
    ):
        for turn in range(2 * turns):
            ready = f"ready/{turn}"
            if store.add(ready, 1) == world:
                store.set(f"{ready}/go", "")
            store.wait([f"{ready}/go"], MINUTE)
            start = time.monotonic()
            if turn % 2:
                two_phases(store, range(world), memory)
            else:
                c10d._store_based_barrier(rank, store, f"peer{turn}", world, MINUTE)
            seconds.append(time.monotonic() - start)
    os.write(pipe, (" ".join(map(str, seconds)) + "\n").encode())


def served() -> tuple[int, int]:
    """A process that serves a store, until it is killed: its id and the port."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        time.sleep(600)
        os._exit(0)
    return pid, int(os.read(read, 16))


def real(world: int, turns: int) -> None:
    server, port = served()  # in a process of its own: a fork beside its threads may hang
    read, write = os.pipe()
    for rank in range(world):
        if os.fork() == 0:
            try:
                rank_of_many(port, rank, world, turns, write)
            finally:
                os._exit(0)
    os.close(write)
    with open(read) as lines:
        rows = [[*map(float, line.split())] for line in lines]
    cpu = Path(f"/proc/{server}/stat").read_text().split()[13:15]
    used = sum(map(int, cpu)) / os.sysconf("SC_CLK_TCK")
    os.kill(server, signal.SIGKILL)
    while rows and os.waitpid(-1, 0)[0] != server:
        pass
    slowest = [max(row[turn] for row in rows) for turn in range(2 * turns)]
    theirs, ours = median(slowest[::2]), median(slowest[1::2])
    print(
        f"{world} processes, median of {turns} turns: two phases {ours:.3f} s until the last rank "
        f"is through, torch's store barrier {theirs:.3f} s, a ratio of {ours / theirs:.1f}; "
        f"{used:.1f} s of CPU in the process that serves the store"
    )


def simulated(world: int, fault: str) -> tuple[float, float, float]:
    """Operations, round trips and bytes per rank of ``world`` virtual ranks."""
    store, ranks, rounds = CountingStore(dist.HashStore()), range(world), []
    present = world - (fault == "missing")
    for rank in range(present):
        with mock.patch.object(dist, "get_rank", return_value=rank):
            here = _Round(store, ranks, _Memory())
        odd = fault == "different" and rank == 1
        here.arrive({**PROPOSAL, "odd": odd}, Abilities(), Policy())
        rounds.append(here)
    if fault == "missing":  # the first whose time is up calls the roll, and all answer
        phases = [each.phase for each in rounds]
        assert phases[0].publish("roll call", early=True)
        for phase in phases:
            phase.store.wait(["outcome"], MINUTE)
            phase._answer()
        assert f"1 of {world} ranks" in phases[0]._missing()
    elif fault == "different":
        for here in rounds:
            here.phase.store.wait(["outcome"], MINUTE)
            here.phase.tell(here.digest, here.entry)
        for here in reversed(rounds):  # the last one to tell decides
            assert "different groups" in here.outcome(MINUTE)["error"]
    else:
        epochs = {here.outcome(MINUTE)["epoch"] for here in rounds}
        arrivals = [Phase(dist.PrefixStore("c", store), ranks, rank) for rank in ranks]
        if [phase.arrive() for phase in arrivals][-1] == world:
            arrivals[-1].publish("")
        assert len(epochs) == 1 and {phase.outcome(MINUTE, str) for phase in arrivals} == {""}
    return sum(store.counts.values()) / world, store.trips / world, store.characters / world


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=131_072, help="of the largest simulation")
    given = parser.parse_args()
    real(given.processes, given.turns)
    print("\n| virtual ranks | case | operations a rank | round trips a rank | bytes a rank |")
    print("|--:|---|--:|--:|--:|")
    world = 64
    while world <= given.ranks:
        for fault in ("success", "different", "missing"):
            operations, trips, size = simulated(world, fault)
            print(f"| {world:,} | {fault} | {operations:.2f} | {trips:.2f} | {size:.0f} |")
        world *= 8


if __name__ == "__main__":
    main()
