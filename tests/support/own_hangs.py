"""Small programs of real gloo ranks, as people write them; each hangs in its own way.

    python -m tests.support.own_hangs DIRECTORY [NAME...]    # records them; by default all

A program is a function of the rank. They were written from docs/hangs.md, without a look at the
rules that judge them. Each says whose doing the hang is, how many ranks it has, and whether the
files decide it: where two programs with another culprit each leave the same, nobody is certain.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support import hung

STEPS = 6  # in the last of them each program does what makes it hang


@dataclass(frozen=True)
class OwnHang:
    """One program: ``guilty`` may be empty, where nobody of the job is to blame."""

    body: Callable[[int], object]
    world: int
    guilty: tuple[int, ...]


PROGRAMS: dict[str, OwnHang] = {}


def hangs(world: int, *guilty: int) -> Callable[[Callable[[int], object]], Callable[[int], object]]:
    """Enter the function into the table of programs."""

    def enter(body: Callable[[int], object]) -> Callable[[int], object]:
        PROGRAMS[body.__name__] = OwnHang(body, world, guilty)
        return body

    return enter


def steps(number: int = STEPS) -> None:
    for _ in range(number):
        dist.all_reduce(torch.ones(8))


def is_last(step: int) -> bool:
    return step == STEPS - 1


@hangs(4, 2)
def log_of_two_that_one_skips(rank):
    log = dist.new_group([1, 2])
    steps()
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=log)
    steps()


@hangs(8, 5)
def writers_of_whom_one_is_missing(rank):
    writers = dist.new_group([1, 3, 5, 7])
    steps()
    if rank in (1, 3, 7):
        dist.barrier(group=writers)
    steps()


@hangs(4, 2)
def message_that_nobody_receives(rank):
    steps()
    if rank == 1:
        dist.send(torch.ones(1 << 20), 2)
    steps()


@hangs(4, 3)
def data_set_that_times_out(rank):
    for step in range(STEPS):
        if is_last(step) and rank == 3:
            raise TimeoutError("Read timed out.")
        time.sleep(0.05)
        dist.all_reduce(torch.ones(8))
    steps()


@hangs(4, 1)
def storage_that_resets_its_connection(rank):
    steps()
    if rank == 1:
        raise ConnectionResetError(104, "Connection reset by peer")
    time.sleep(0.5)
    dist.barrier()


@hangs(4, 2)
def one_batch_fewer(rank):
    for _ in range(STEPS - (rank == 2)):
        dist.all_reduce(torch.ones(8))
        dist.all_reduce(torch.ones(64))
    dist.barrier()


@hangs(4, 0)
def stops_early_alone(rank):
    for step in range(STEPS):
        dist.all_reduce(torch.ones(8))
        if is_last(step) and rank == 0:
            break
        dist.all_gather([torch.ones(2)] * 4, torch.ones(2))
    dist.broadcast(torch.ones(3), 0)


@hangs(4, 0)
def validates_on_rank_0(rank):
    for step in range(STEPS):
        dist.all_reduce(torch.ones(8))
        if is_last(step) and rank == 0:
            dist.all_reduce(torch.ones(2))  # the mean of the loss that only rank 0 measures
    steps()


@hangs(6, 1)
def leaves_out_a_step_with_nan(rank):
    tp = dist.new_subgroups_by_enumeration([[0, 1], [2, 3], [4, 5]])[0]
    dp = dist.new_subgroups_by_enumeration([[0, 2, 4], [1, 3, 5]])[0]
    for step in range(STEPS):
        for _ in range(2):
            dist.all_reduce(torch.ones(8), group=tp)
        if is_last(step) and rank == 1:
            continue
        dist.all_reduce(torch.ones(32), group=dp)
    steps()


@hangs(4, 0)
def writes_a_checkpoint_for_long(rank):
    steps()
    if rank == 0:
        time.sleep(1000)
    dist.barrier()


@hangs(4, 2)
def waits_for_a_lock(rank):
    steps()
    if rank == 2:
        while not Path("/nowhere/lock").exists():
            time.sleep(0.5)
    steps()


@hangs(3, 1)
def ddp_with_a_branch(rank):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(4, 4)
            self.b = torch.nn.Linear(4, 4)

        def forward(self, x, with_b):
            x = self.a(x)
            return self.b(x) if with_b else x

    net = DistributedDataParallel(Net())
    for step in range(STEPS):
        net(torch.ones(2, 4), not (is_last(step) and rank == 1)).sum().backward()
    dist.barrier()


@hangs(4, 3)
def group_that_one_rank_does_not_create(rank):
    steps()
    if rank != 3:
        dist.new_group([0, 1])
    else:
        time.sleep(1000)
    steps()


@hangs(4, 2)
def monitored_barrier_that_one_misses(rank):
    steps()
    if rank == 2:
        time.sleep(1000)
    dist.monitored_barrier()


@hangs(4, 3)
def gathers_where_others_scatter(rank):
    for step in range(STEPS):
        dist.all_reduce(torch.ones(8))
        if is_last(step) and rank == 3:
            dist.all_gather([torch.ones(2)] * 4, torch.ones(2))
        else:
            dist.broadcast(torch.ones(2), 0)
    dist.barrier()


@hangs(4, 2)
def longer_sequence(rank):
    for step in range(STEPS):
        length = 128 if is_last(step) and rank == 2 else 64
        dist.all_reduce(torch.ones(length))
    dist.barrier()


@hangs(4, 1)
def two_groups_the_other_way_round(rank):
    tp = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    dp = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    for step in range(STEPS):
        order = (None, tp) if is_last(step) and rank == 1 else (tp, None)
        for group in order:
            dist.all_reduce(torch.ones(8), group=group)
        dist.all_reduce(torch.ones(4), group=dp)


@hangs(3, 2)
def one_microbatch_more(rank):
    for step in range(STEPS):
        count = 3 if is_last(step) and rank == 2 else 2
        for _ in range(count):
            if rank > 0:
                dist.recv(torch.ones(8), rank - 1)
            if rank < 2:
                dist.send(torch.ones(8), rank + 1)
        dist.all_reduce(torch.ones(1))


@hangs(4, 3)
def another_interval_of_logging(rank):
    interval = 3 if rank != 3 else 4
    for step in range(1, 2 * STEPS):
        dist.all_reduce(torch.ones(8))
        if step % interval == 0:
            dist.all_reduce(torch.ones(2))


@hangs(4, 1)
def expert_without_tokens(rank):
    ep = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    for step in range(STEPS):
        if not (is_last(step) and rank == 1):
            dist.all_to_all_single(torch.ones(2), torch.ones(2), group=ep)
        dist.all_reduce(torch.ones(8))


@hangs(4, 2)
def is_out_of_memory(rank):
    steps()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    steps()


def weights_group(file, rank):
    """A group of a trainer and an inference engine, as RL frameworks make it."""
    c10d = dist.distributed_c10d
    group, _ = c10d._new_process_group_helper(
        2, rank, [], "gloo", dist.FileStore(file, 2), group_name="weights",
        timeout=c10d.default_pg_timeout,
    )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


@hangs(4, 3)
def group_whose_member_does_not_create_it(rank):
    steps()
    if rank != 3:
        dist.new_group([0, 1, 2, 3])
    else:
        time.sleep(1000)


@hangs(4, 1)
def ddp_on_some_ranks(rank):
    net = torch.nn.Linear(4, 4)
    if rank == 1:
        time.sleep(1000)
    DistributedDataParallel(net)


@hangs(2)
def engine_that_does_not_take_the_weights(rank):
    steps()
    if rank == 0:
        with tempfile.TemporaryDirectory() as directory:
            file = f"{directory}/store"
            if os.fork() == 0:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with the trainer
                weights_group(file, 1)
                time.sleep(1000)
            group = weights_group(file, 0)
            dist.broadcast(torch.ones(8), group=group, group_src=0)
            dist.all_reduce(torch.ones(8), group=group)
    steps()


def main(directory: str, *names: str) -> None:
    os.environ.setdefault("HYPERGRID_RECORD_P2P", "1")
    for name in names or PROGRAMS:
        program = PROGRAMS[name]
        into = Path(directory, name)
        into.mkdir(parents=True)
        start = time.monotonic()
        try:
            hung.hang(program.world, program.body, into)
        except TimeoutError as error:
            print(f"{name}: {error}", flush=True)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
