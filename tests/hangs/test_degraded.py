"""The verdict where evidence is not whole: files missing, other names, other times."""

import json
import os
import random

import pytest

from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import diagnose
from tests.hangs.test_laws import GROUPS, Op, Program, Run, step, third, verdict
from tests.support import programs
from tests.support.recorded import SECOND, START, Rank, stack, write

IN_STEP = [("train.py", 3, "step")]


class World:
    """Ranks that made three equal calls of the default group, and the files that they leave."""

    def __init__(self, directory, size=4, backend="nccl"):
        self.directory = directory
        members = [*range(size)]
        self.ranks = [Rank(rank, {"0": ("default_pg", members)}, backend) for rank in members]
        for _ in range(3):
            self.call(*members)

    def call(self, *ranks, name="all_reduce", done=True, after=1):
        for rank in ranks:
            self.ranks[rank].call("0", name, done=done, after=after)

    def stacks(self, *ranks, frames=IN_STEP, **options):
        """Stacks that were written 300 s after the last call of each rank."""
        for rank in ranks:
            written = self.ranks[rank].now + 300 * SECOND
            stack(self.directory, rank, frames, **{"written": written, **options})

    def verdict(self, without=()):
        write(self.directory, [rank for rank in self.ranks if rank.rank not in without])
        return diagnose(read(self.directory))


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@pytest.fixture
def gpt():
    """tp=2 dp=2 pp=2: five steps of four equal gradients each."""
    ops = [step(rank // 4) * 5 for rank in range(8)]
    return Program(ops, GROUPS, [], nccl=True, stacks=True)


# A rank without a file.


def test_of_a_host_without_files_nobody_is_named_with_certainty(tmp_path):
    world = World(tmp_path, size=16)
    world.call(*range(8), done=False)
    diagnosis = world.verdict(without=range(8, 16))
    assert (diagnosis.kind, diagnosis.ranks) == ("no dump", tuple(range(8, 16)))
    assert not diagnosis.certain, diagnosis.sentence


def test_a_member_of_a_group_is_a_rank_of_the_job_where_no_file_has_the_size_of_the_job(tmp_path):
    rank = Rank(0, {"1": ("A", [0, 2])}).call("1", done=False)
    diagnosis = diagnose(read(write(tmp_path, [rank])))
    assert (diagnosis.ranks, diagnosis.certain) == ((2,), False), diagnosis.sentence


def test_a_call_is_not_slow_with_certainty_if_members_may_be_missing(tmp_path):
    """Gloo's recorder has no members: the one file of two that is left knows one rank."""
    world = World(tmp_path, size=2, backend="gloo")
    world.call(0, done=False)
    world.ranks[0].config = lambda: {"": {"name": "", "desc": "", "ranks": "[]"}}
    diagnosis = world.verdict(without=[1])
    assert not diagnosis.certain, diagnosis.sentence


def test_a_rank_is_in_the_call_that_it_has_entered_and_not_in_one_that_is_queued(tmp_path):
    """Ranks 0 and 1 receive from each other, and rank 0 has queued a call of ranks 0 and 2."""
    groups = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("PP", [0, 1]), "2": ("PP", [2, 3])}
    groups |= {"3": ("DP", [0, 2]), "4": ("DP", [1, 3])}
    for number in (0, 1, 3):
        rank = Rank(number, groups)
        stages = str(1 + number // 2)
        replicas = str(3 + number % 2)
        name = "send 1->0" if number % 2 else "recv 0<-1"
        for _ in range(12):
            rank.call(stages, name).call(replicas)
        if number == 1:
            name = "recv 1<-0"
        rank.call(stages, name, done=False).call(replicas, done=False)
        rank.entries[-1].update(state="scheduled", time_discovered_started_ns=None)
        stack(tmp_path, number, IN_STEP, written=rank.now + 60 * SECOND)
        write(tmp_path, [rank])
    diagnosis = diagnose(read(tmp_path))
    assert (diagnosis.ranks, diagnosis.certain) == ((1,), False), diagnosis.sentence
    assert "It is in recv from rank 0 to rank 1 of PP." in diagnosis.sentence


def test_what_is_taken_away_from_a_recording_makes_nobody_guilty_with_certainty(gpt, tmp_path):
    run = Run(third(gpt, 5, 13, []), random.Random(1))
    for rank in range(8):
        directory = tmp_path / str(rank)
        directory.mkdir()
        programs.write(run, directory)
        for name in (f"trace_{rank}", f"stack_{rank}.json"):
            (directory / name).unlink()
        diagnosis = diagnose(read(directory))
        assert not diagnosis.certain or diagnosis.ranks == (5,), (rank, diagnosis.sentence)


# Names of NCCL's backends, and sends in the default group.


@pytest.mark.parametrize("prefix", ["nccl", "nccl2", "nccl-lazy"])
def test_every_backend_of_nccl_records_its_sends_so_a_rank_in_none_is_certain(tmp_path, prefix):
    world = World(tmp_path, backend=prefix)
    world.call(0, 1, 2, done=False)
    diagnosis = world.verdict()
    assert (diagnosis.ranks, diagnosis.certain) == ((3,), True), diagnosis.sentence


def test_sends_in_the_default_group_do_not_hide_that_two_ranks_skip_a_gradient(gpt):
    """Ranks 2 and 3 skip one of four equal all_reduces of the third step."""
    program = third(third(gpt, 2, 13, []), 3, 13, [])
    diagnosis = verdict(Run(programs.with_sends_in_the_world(program), random.Random(1)))
    assert diagnosis.ranks == (2, 3), diagnosis.sentence


# Recordings of other moments.


def test_a_rank_that_was_still_working_when_it_wrote_is_not_certain(world):
    moment = world.ranks[3].now + SECOND // 2
    world.call(0, 1, 2, done=False, after=0.1)
    world.stacks(0, 1, 2)
    world.stacks(3, written=moment)
    diagnosis = world.verdict()
    assert (diagnosis.ranks, diagnosis.certain) == ((3,), False), diagnosis.sentence


def test_a_send_that_was_received_after_the_sender_wrote_accuses_nobody(tmp_path):
    world = World(tmp_path, size=2)
    world.call(0, name="send 0->1", done=False)
    world.call(1, name="recv 1<-0", after=60)
    assert not world.verdict().ranks


def test_a_file_that_is_older_than_the_call_it_misses_is_not_certain(world):
    world.call(0, 1, 2, done=False, after=300)
    world.verdict()
    changed = world.ranks[3].now + SECOND
    os.utime(world.directory / "trace_3", ns=(changed, changed))
    diagnosis = diagnose(read(world.directory))
    assert (diagnosis.ranks, diagnosis.certain) == ((3,), False), diagnosis.sentence


# Files of another start of the job, or of another job.


def test_files_of_a_rank_that_did_not_start_again_are_named_and_not_used(world):
    world.call(0, 1, 2, done=False)
    world.stacks(0, 1, 2, life={"started_ns": START - SECOND, "job": "none"})
    old_life = {"started_ns": START - 200 * SECOND, "job": "none"}
    old_error = "ValueError: an old error"
    world.stacks(3, error=old_error, written=START - 100 * SECOND, life=old_life)
    diagnosis = world.verdict()
    assert (diagnosis.kind, diagnosis.ranks) == ("no dump", (3,)), diagnosis.sentence
    assert diagnosis.problems[0].startswith("the files of rank 3 are of another start of the job")


def test_files_of_another_job_are_named_and_not_used(world):
    for rank in range(4):
        world.stacks(rank, life={"started_ns": START + rank, "job": f"job{rank // 3}"})
    assert "are of another start" in world.verdict().problems[0]


def test_torch_s_own_files_of_a_restart_are_judged_by_their_times(world):
    """The calls of rank 3 ended 30 s before those of the others began."""
    for rank in world.ranks[:3]:
        rank.now += 40 * SECOND
        for entry in rank.entries:
            for name in ("created", "discovered_started", "discovered_completed"):
                entry[f"time_{name}_ns"] += 40 * SECOND
    world.call(0, 1, 2, done=False)
    diagnosis = world.verdict()
    assert not diagnosis.certain
    assert "the calls of rank 3 ended before those of rank 0 began" in diagnosis.sentence
    assert diagnosis.sentence.endswith("The files seem to be of two jobs, or of two times.")


def test_files_that_name_jobs_of_two_sizes_are_seen_to_be_mixed(world):
    world.ranks[0] = Rank(0, {"0": ("default_pg", [0, 1])}).call("0")
    diagnosis = world.verdict()
    sizes = "the job has 2 ranks by the files of rank 0 and 4 ranks by the files of rank 1"
    assert not diagnosis.certain and sizes in diagnosis.sentence


# Special files.


def test_a_file_of_the_kernel_is_not_read_for_ever(world):
    world.verdict()
    (world.directory / "trace_6").symlink_to("/proc/kmsg")
    os.mkfifo(world.directory / "trace_7")
    (world.directory / "trace_8").symlink_to("/dev/zero")
    assert sorted(read(world.directory).ranks) == [0, 1, 2, 3]


def test_files_above_the_limit_are_named(world, monkeypatch):
    monkeypatch.setattr("hypergrid.hangs.reading._MOST_FILES", 3)
    progress = []
    world.verdict()
    recording = read(world.directory, progress=lambda *numbers: progress.append(numbers))
    (problem,) = recording.problems
    assert problem == "1 files, from trace_3 on, are not read: the limit is 3 files."
    assert progress == [(1, 3), (2, 3), (3, 3)]


# Sentences.


def test_a_deadlock_is_of_the_calls_that_ranks_have_entered_and_not_of_queued_ones(gpt):
    """Rank 5 has queued a send behind its all_reduce, and rank 1 the receive of that."""
    diagnosis = verdict(Run(third(gpt, 5, 13, []), random.Random(1)))
    assert diagnosis.chain[:2] == (
        "rank 5 is in all_reduce #3 of the default group 0..7 and waits for rank 7.",
        "rank 7 is in all_reduce #12 of DP 5, 7 and waits for rank 5.",
    )


@pytest.mark.parametrize("function", ["monitored_barrier", "gather"])
def test_a_call_that_only_stacks_show_names_who_is_not_in_it(tmp_path, function):
    """Gloo's monitored_barrier is no entry of the recorder: the stacks show who is in it."""
    world = World(tmp_path, backend="gloo")
    file = "/x/torch/distributed/distributed_c10d.py"
    world.stacks(0, 1, 3, frames=[(file, 9, function), *IN_STEP])
    world.stacks(2)
    diagnosis = world.verdict()
    assert (diagnosis.ranks, diagnosis.certain) == ((2,), False), diagnosis.sentence
    assert f"Rank 2 (host0) did not take part in {function}" in diagnosis.sentence


@pytest.mark.parametrize("other_calls", [[], [Op("stuck")]])
def test_a_verdict_is_short_enough_for_three_o_clock(gpt, other_calls):
    diagnosis = verdict(Run(third(gpt, 5, 13, other_calls), random.Random(1)))
    assert len(diagnosis.chain) <= 4, diagnosis.chain
    assert json.dumps(diagnosis.to_json())
