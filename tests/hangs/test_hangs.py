"""Real ranks hang in many ways; the verdict names the rank, the group and the kind."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from hypergrid import HyperCommGrid
from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import diagnose
from tests.support.hung import hang
from tests.support.peer import completed, torchfrtrace


class Job:
    """Four ranks, tp=2 and dp=2; each turn reduces over tp, then over dp."""

    def __init__(self, rank):
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        self.rank, self.tp, self.dp = rank, grid.create_pg("tp"), grid.create_pg("dp")
        self.world = dist.group.WORLD

    def turns(self, many=3):
        for _ in range(many):
            self.reduce(self.tp)
            self.reduce(self.dp)

    def reduce(self, group, *, size=4, dtype=torch.float32):
        dist.all_reduce(torch.ones(size, dtype=dtype), group=group)


def slept_through(job):
    job.turns()
    if job.rank == 3:
        time.sleep(1000)
    job.turns()


def skipped_a_call(job):
    job.turns()
    if job.rank != 1:
        job.reduce(job.tp)
    job.reduce(job.dp)
    job.turns()
    job.reduce(job.world)


def called_another_operation(job):
    job.turns()
    if job.rank == 2:
        dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4), group=job.tp)
    job.turns()


def gave_another_size(job):
    job.turns()
    job.reduce(job.world, size=4 + 60000 * (job.rank == 1))
    job.turns()


def gave_another_dtype(job):
    job.turns()
    dtype = torch.float64 if job.rank == 2 else torch.float32
    job.reduce(job.world, dtype=dtype)
    job.turns()


def took_another_order(job):
    for turn in range(4):
        first, second = (job.tp, job.world)
        if turn == 3 and job.rank == 1:
            first, second = second, first
        job.reduce(first)
        job.reduce(second)


def raised(job):
    job.turns()
    if job.rank == 0:
        raise ValueError("the batch is empty")
    job.turns()


def stopped(job):
    job.turns()
    if job.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    job.turns()


def was_killed(job):
    job.turns()
    if job.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    job.turns()


def did_not_send(job):
    """Ranks 0 and 2 are the stages of a pipeline over "dp"; gloo does not record recv."""
    for _ in range(3):
        job.reduce(job.tp)
    if job.rank == 2:
        time.sleep(1000)
    if job.rank == 0:
        dist.recv(torch.ones(4), 2, group=job.dp)
    job.reduce(job.tp)


def finished(job):
    job.turns()


@pytest.mark.parametrize(
    "fault, kind, ranks, group",
    [
        (slept_through, "never entered", (3,), "tp"),
        (skipped_a_call, "order", (1,), "the default group"),
        (called_another_operation, "mismatch", (2,), "tp"),
        (gave_another_size, "mismatch", (1,), "the default group"),
        (gave_another_dtype, "mismatch", (2,), "the default group"),
        (took_another_order, "order", (1,), "the default group"),
        (raised, "raised", (0,), "tp"),
        (stopped, "no dump", (2,), "tp"),
        (was_killed, "no dump", (2,), "tp"),
        (did_not_send, "never entered", (2,), "tp"),
        (finished, "ok", (), None),
    ],
)
def test_the_first_cause_is_named(fault, kind, ranks, group, tmp_path):
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    diagnosis = diagnose(read(hang(4, lambda rank: fault(Job(rank)), recorded)))
    theirs = torchfrtrace(completed(recorded, tmp_path / "completed"))
    print(diagnosis.sentence, *diagnosis.chain, "torchfrtrace:", theirs.text, sep="\n")
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.group) == (kind, ranks, group), diagnosis
    # Told the members, torch's analysis names all ranks that are missed anywhere.
    assert not theirs.ranks or theirs.ranks & set(ranks), theirs
