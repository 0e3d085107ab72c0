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
        self.rank = rank
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        self.tp = grid.create_pg("tp")
        self.dp = grid.create_pg("dp")
        self.world = dist.group.WORLD

    def turns(self, *groups, count=3):
        for _ in range(count):
            for group in groups or (self.tp, self.dp):
                dist.all_reduce(torch.ones(4), group=group)


def sleeps(job):
    job.turns()
    if job.rank == 3:
        time.sleep(1000)


def calls_another_operation(job):
    job.turns()
    if job.rank == 2:
        dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4), group=job.tp)


def takes_another_order(job):
    job.turns(job.tp, job.world)
    if job.rank == 1:
        job.turns(job.world, job.tp)


def raises(job):
    job.turns()
    if job.rank == 0:
        raise ValueError("the batch is empty")


def is_stopped(job):
    job.turns()
    if job.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def is_killed(job):
    job.turns()
    if job.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def does_not_send(job):
    """Ranks 0 and 2 are the stages of a pipeline over "dp"; gloo does not record recv."""
    job.turns(job.tp)
    if job.rank == 2:
        time.sleep(1000)
    if job.rank == 0:
        dist.recv(torch.ones(4), 2, group=job.dp)


@pytest.mark.parametrize(
    "fault, kind, ranks, group",
    [
        (sleeps, "never entered", (3,), "tp"),
        (calls_another_operation, "mismatch", (2,), "tp"),
        (takes_another_order, "order", (1,), "the default group"),
        (raises, "raised", (0,), "tp"),
        (is_stopped, "no dump", (2,), "tp"),
        (is_killed, "no dump", (2,), "tp"),
        (does_not_send, "never entered", (2,), "tp"),
        (Job.turns, "ok", (), None),
    ],
)
def test_the_first_cause_is_named(fault, kind, ranks, group, tmp_path):
    """Further faults are those of tests/megatron/test_hanging_gpt.py."""

    def run(rank):
        job = Job(rank)
        fault(job)
        if ranks:
            job.turns()

    recorded = tmp_path / "recorded"
    recorded.mkdir()
    diagnosis = diagnose(read(hang(4, run, recorded)))
    answer = torchfrtrace(completed(recorded, tmp_path / "completed"))
    print(diagnosis.sentence, *diagnosis.chain, "torchfrtrace:", answer.text, sep="\n")
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.group) == (kind, ranks, group), diagnosis
    # Told the members, torch's analysis names all ranks that are missed anywhere.
    assert not answer.ranks or answer.ranks & set(ranks), answer
