"""Real gloo ranks hang in many ways; who is named, and that the simulator stops where they do.

A case is a row of ``real.txt``, or a function where torch's own Python decides what is called.
"""

import ctypes
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import diagnose
from tests.support.hanging import call_on_gloo, hang
from tests.support.laws import summary, verdict
from tests.support.programs import cases, written_program
from tests.support.recorded import Rank, write
from tests.support.simulation import Run

CASES = cases(Path(__file__).with_name("real.txt"))


@pytest.fixture(autouse=True)
def with_sends(monkeypatch):
    monkeypatch.setenv("HYPERGRID_RECORD_P2P", "1")


@pytest.mark.parametrize("name", CASES)
def test_the_guilty_rank_of_a_real_hang_is_named(name, tmp_path):
    program = written_program(CASES[name])
    hang(program.world, partial(call_on_gloo, program), tmp_path)
    diagnosis = diagnose(read(tmp_path))
    assert ("verdict", summary(diagnosis)) in CASES[name], diagnosis.sentence


# What the simulator has no word for, and where it knows less.
ONLY_REAL = {
    "a group that one rank does not create": "no word",
    "a monitored barrier that one misses": "no word",
    "nobody is stuck": "a rank whose script has ended may leave no file",
    "one that validates on rank 0": "real gloo ends no rank that expects too little",
}


@pytest.mark.parametrize("name", [name for name in CASES if name not in ONLY_REAL])
def test_the_simulator_leaves_what_real_ranks_leave(name):
    diagnosis = verdict(Run(written_program(CASES[name]), random.Random(0)))
    assert ("verdict", summary(diagnosis)) in CASES[name], diagnosis.sentence


# Programs of which torch's own Python makes the calls.


def ddp_with_a_branch(rank):
    """Rank 1 once leaves out a layer, whose gradient the others reduce."""
    first = torch.nn.Linear(4, 4)
    second = torch.nn.Linear(4, 4)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([first, second])

        def forward(self, x, depth):
            return torch.nn.Sequential(*self.layers[:depth])(x)

    net = DistributedDataParallel(Net())
    for depth in (2, 2, 2, 1 if rank == 1 else 2):
        net(torch.ones(2, 4), depth).sum().backward()
    dist.barrier()


def ddp_on_some_ranks(rank):
    if rank == 1:
        time.sleep(1000)
    DistributedDataParallel(torch.nn.Linear(4, 4))


@pytest.mark.slow
@pytest.mark.usefixtures("loaded_dynamo")
@pytest.mark.parametrize("body", [ddp_with_a_branch, ddp_on_some_ranks])
def test_the_rank_that_ddp_waits_for_is_named(body, tmp_path):
    diagnosis = diagnose(read(hang(3, body, tmp_path)))
    assert diagnosis.ranks == (1,), diagnosis.sentence


def weights_group(file, rank):
    """A group of a trainer and an inference engine, as RL frameworks make it."""
    c10d = dist.distributed_c10d
    group, _ = c10d._new_process_group_helper(
        2, rank, [], "gloo", dist.FileStore(file, 2), group_name="weights",
        timeout=c10d.default_pg_timeout,
    )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def test_a_wait_for_an_engine_outside_of_the_job_is_named(tmp_path):
    def train(rank):
        if rank == 0:
            file = str(tmp_path / "weights")
            if os.fork() == 0:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with the trainer
                weights_group(file, 1)
                time.sleep(1000)
            group = weights_group(file, 0)
            dist.broadcast(torch.ones(8), group=group, group_src=0)
            dist.all_reduce(torch.ones(8), group=group)
        dist.all_reduce(torch.ones(8))

    recording = tmp_path / "recording"
    diagnosis = diagnose(read(hang(2, train, recording)))
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.certain) == ("outside", (0,), False)
    assert "of weights" in diagnosis.sentence
    assert "whose member 1 is outside of this job" in diagnosis.sentence


def test_a_member_beyond_the_world_is_certainly_outside(tmp_path):
    """Two trainers, of which rank 0 sends weights to an engine; torch's dumps have no more."""
    groups = {"0": ("default_pg", [0, 1]), "weights": ("undefined", [0, 2])}
    trainers = [Rank(rank, groups) for rank in range(2)]
    trainers[0].call("0").call("weights", "broadcast", done=False)
    trainers[1].call("0").call("0", done=False)
    diagnosis = diagnose(read(write(tmp_path, trainers)))
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.certain) == ("outside", (0,), True)
    assert "whose member 2 is outside of this job." in diagnosis.sentence
