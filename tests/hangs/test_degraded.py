"""The verdict where evidence is not whole: files missing, other names, other times, no roots."""

import json
import os
import random
import shutil
from dataclasses import replace

import pytest

from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import diagnose
from tests.hangs.test_laws import GROUPS, Op, Program, Run, step, third, verdict
from tests.support import programs
from tests.support.recorded import SECOND, START, Rank, stack, write

WORLD = {"0": ("default_pg", [0, 1, 2, 3])}


def world(calls=3, backend="nccl", ranks=4):
    """Ranks that made equal calls of the default group."""
    everyone = [
        Rank(rank, {"0": ("default_pg", [*range(ranks)])}, backend) for rank in range(ranks)
    ]
    for rank in everyone:
        for _ in range(calls):
            rank.call("0")
    return everyone


# A rank without a file.


def test_a_rank_that_is_seen_not_to_have_entered_comes_before_one_without_a_file(tmp_path):
    """Ranks 0 and 2 are in the fourth call, rank 3 ended the third, and rank 1 left no file."""
    everyone = world()
    for rank in (0, 2):
        everyone[rank].call("0", done=False)
    del everyone[1]
    found = diagnose(read(write(tmp_path, everyone)))
    assert (found.kind, found.ranks) == ("never entered", (3,)), found.sentence


def test_of_a_host_without_files_nobody_is_named_with_certainty(tmp_path):
    everyone = world(ranks=16)
    for rank in range(8):
        everyone[rank].call("0", done=False)
    found = diagnose(read(write(tmp_path, everyone[:8])))
    assert (found.kind, found.ranks) == ("no dump", tuple(range(8, 16)))
    assert not found.certain, found.sentence


def test_one_rank_without_a_file_is_certain_where_everyone_else_did_what_was_due(tmp_path):
    everyone = world()
    for rank in everyone:
        rank.call("0", done=False)
    found = diagnose(read(write(tmp_path, everyone[1:])))
    assert (found.kind, found.ranks, found.certain) == ("no dump", (0,), True), found.sentence


def test_a_rank_without_a_file_is_not_certain_where_another_raised(tmp_path):
    everyone = world()
    for rank in everyone:
        rank.call("0", done=False)
    for rank in (1, 2):
        stack(tmp_path, rank, [("train.py", 3, "step")], written=everyone[1].now + 60 * SECOND)
    stack(tmp_path, 3, error="ValueError: the batch is empty", written=everyone[1].now)
    found = diagnose(read(write(tmp_path, everyone[1:])))
    assert found.ranks != (0,) or not found.certain, found.sentence


def test_a_member_of_a_group_is_a_rank_of_the_job_where_no_file_has_the_size_of_the_job(tmp_path):
    one = Rank(0, {"1": ("A", [0, 2])})
    one.call("1", done=False)
    found = diagnose(read(write(tmp_path, [one])))
    assert (found.kind, found.ranks, found.certain) == ("no dump", (2,), False), found.sentence


def test_a_rank_is_in_the_call_that_it_has_entered_and_not_in_one_that_is_queued(tmp_path):
    """Ranks 0 and 1 receive from each other, and rank 0 has queued a call of ranks 0 and 2."""
    groups = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("PP", [0, 1]), "2": ("PP", [2, 3])}
    groups |= {"3": ("DP", [0, 2]), "4": ("DP", [1, 3])}
    everyone = [Rank(rank, groups) for rank in range(4)]
    for rank in everyone:
        stages, replicas = str(1 + rank.rank // 2), str(3 + rank.rank % 2)
        name = "send 1->0" if rank.rank % 2 else "recv 0<-1"
        for _ in range(12):
            rank.call(stages, name).call(replicas)
        name = "recv 1<-0" if rank.rank == 1 else name
        rank.call(stages, name, done=False).call(replicas, done=False)
        rank.entries[-1].update(state="scheduled", time_discovered_started_ns=None)
    del everyone[2]
    for rank in everyone:
        stack(tmp_path, rank.rank, [("train.py", 3, "step")], written=rank.now + 60 * SECOND)
    found = diagnose(read(write(tmp_path, everyone)))
    assert found.ranks == (1,) and not found.certain, found.sentence
    assert "It is in recv from rank 0 to rank 1 of PP." in found.sentence


# Names of NCCL's backends.


@pytest.mark.parametrize("prefix", ["nccl", "nccl2", "nccl-lazy"])
def test_every_backend_of_nccl_records_its_sends_so_a_rank_in_none_is_certain(tmp_path, prefix):
    everyone = world(backend=prefix)
    for rank in everyone[:3]:
        rank.call("0", done=False)
    found = diagnose(read(write(tmp_path, everyone)))
    assert (found.ranks, found.certain) == ((3,), True), found.sentence


# Sends in the default group.


def test_sends_in_the_default_group_do_not_hide_that_two_ranks_skip_a_gradient():
    """Ranks 2 and 3 skip one of four equal all_reduces of the third step."""
    ops = [step(rank // 4) * 5 for rank in range(8)]
    program = Program(ops, GROUPS, [], nccl=True, stacks=True)
    for rank in (2, 3):
        program = third(program, rank, 13, [])
    found = verdict(Run(programs.with_sends_in_the_world(program), random.Random(1)))
    assert found.ranks == (2, 3), found.sentence


# Roots.


def test_a_broadcast_that_nobody_finishes_may_have_two_roots(tmp_path):
    everyone = world()
    for rank in everyone:
        rank.call("0", "broadcast", done=False)
    found = diagnose(read(write(tmp_path, everyone)))
    assert (found.kind, found.certain) == ("slow", False)
    assert "torch does not record roots" in found.sentence


def test_an_all_reduce_that_nobody_finishes_has_no_root(tmp_path):
    everyone = world()
    for rank in everyone:
        rank.call("0", done=False)
    found = diagnose(read(write(tmp_path, everyone)))
    assert (found.kind, found.certain) == ("slow", True), found.sentence


def test_a_call_is_not_slow_with_certainty_if_members_may_be_missing(tmp_path):
    """Gloo's recorder has no members: the one file of two that is left knows one rank."""
    (one, _) = world(backend="gloo", ranks=2)
    one.call("0", done=False)
    one.config = lambda: {"": {"name": "", "desc": "", "ranks": "[]"}}
    found = diagnose(read(write(tmp_path, [one])))
    assert not found.certain, found.sentence


# Recordings of other moments.


def test_a_rank_that_was_still_working_when_it_wrote_is_not_certain(tmp_path):
    everyone = world()
    moment = everyone[3].now + SECOND // 2
    for rank in everyone[:3]:
        rank.call("0", done=False, after=0.1)
        stack(tmp_path, rank.rank, [("train.py", 3, "step")], written=rank.now + 300 * SECOND)
    stack(tmp_path, 3, [("train.py", 3, "step")], written=moment)
    found = diagnose(read(write(tmp_path, everyone)))
    assert (found.ranks, found.certain) == ((3,), False), found.sentence


def test_a_send_that_was_received_after_the_sender_wrote_accuses_nobody(tmp_path):
    sender, receiver = world(ranks=2)
    sender.call("0", "send 0->1", done=False)
    receiver.call("0", "recv 1<-0", after=60)
    found = diagnose(read(write(tmp_path, [sender, receiver])))
    assert not found.ranks, found.sentence


def test_a_call_that_all_are_in_is_not_slow_with_certainty_where_others_wait_for_its_ranks(
    tmp_path,
):
    groups = {"1": ("A", [0, 1]), "2": ("B", [1, 2])}
    everyone = [Rank(rank, groups) for rank in range(3)]
    for rank, group in ((0, "1"), (1, "1"), (2, "2")):
        everyone[rank].call(group, done=False)
    found = diagnose(read(write(tmp_path, everyone)))
    assert (found.kind, found.certain) == ("slow", False), found.sentence


def test_a_file_that_is_older_than_the_call_it_misses_is_not_certain(tmp_path):
    everyone = world()
    for rank in everyone[:3]:
        rank.call("0", done=False, after=300)
    write(tmp_path, everyone)
    os.utime(tmp_path / "trace_3", ns=(everyone[3].now + SECOND, everyone[3].now + SECOND))
    found = diagnose(read(tmp_path))
    assert (found.ranks, found.certain) == ((3,), False), found.sentence


def life(path, started, job="none"):
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "life": {"started_ns": started, "job": job}}))


def test_files_of_a_rank_that_did_not_start_again_are_named_and_not_used(tmp_path):
    everyone = world()
    for rank in everyone[:3]:
        rank.call("0", done=False)
        stack(tmp_path, rank.rank, [("train.py", 3, "step")], written=rank.now + 300 * SECOND)
        life(tmp_path / f"stack_{rank.rank}.json", START - SECOND)
    stack(tmp_path, 3, error="ValueError: an old error", written=START - 100 * SECOND)
    life(tmp_path / "stack_3.json", START - 200 * SECOND)
    found = diagnose(read(write(tmp_path, everyone)))
    assert (found.kind, found.ranks) == ("no dump", (3,)), found.sentence
    assert found.problems[0].startswith("the files of rank 3 are of another start of the job")


def test_files_of_another_job_are_named_and_not_used(tmp_path):
    everyone = world()
    for rank in everyone:
        stack(tmp_path, rank.rank, [("train.py", 3, "step")], written=rank.now + 300 * SECOND)
        life(tmp_path / f"stack_{rank.rank}.json", START + rank.rank, f"job{rank.rank // 3}")
    assert "are of another start" in read(write(tmp_path, everyone)).problems[0]


def test_torch_s_own_files_of_a_restart_are_judged_by_their_times(tmp_path):
    """The calls of rank 3 ended 30 s before those of the others began."""
    everyone = world()
    for rank in everyone[:3]:
        for entry in rank.entries:
            entry["time_created_ns"] += 40 * SECOND
            entry["time_discovered_started_ns"] += 40 * SECOND
            entry["time_discovered_completed_ns"] += 40 * SECOND
        rank.now += 40 * SECOND
        rank.call("0", done=False)
    found = diagnose(read(write(tmp_path, everyone)))
    assert not found.certain, found.sentence


# Special files.


def test_a_file_of_the_kernel_is_not_read_for_ever(tmp_path):
    write(tmp_path, world())
    (tmp_path / "trace_6").symlink_to("/proc/kmsg")
    os.mkfifo(tmp_path / "trace_7")
    (tmp_path / "trace_8").symlink_to("/dev/zero")
    found = read(tmp_path)
    assert sorted(found.ranks) == [0, 1, 2, 3]


def test_files_above_the_limit_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("hypergrid.hangs.reading._MOST_FILES", 3)
    progress = []
    found = read(write(tmp_path, world()), progress=lambda *numbers: progress.append(numbers))
    assert found.problems[0] == "1 files, from trace_3 on, are not read: the limit is 3 files."
    assert progress == [(1, 3), (2, 3), (3, 3)]


# Sentences.


def test_a_receive_that_is_queued_behind_another_call_is_no_deadlock_of_both():
    """Of two ranks in a circle, the sentence says what each waits in."""
    ops = [[*step(rank // 4) * 5] for rank in range(8)]
    program = Program(ops, GROUPS, [], nccl=True, stacks=True)
    found = verdict(Run(third(program, 5, 13, []), random.Random(1)))
    for line in found.chain:
        assert "in it, ranks" not in line or "on the way" not in line, line


@pytest.mark.parametrize("name", ["monitored_barrier", "gather"])
def test_a_call_that_stacks_show_and_torch_does_not_record_names_who_is_not_in_it(tmp_path, name):
    """Gloo's monitored_barrier is no entry of the recorder: the stacks show who is in it."""
    everyone = world(backend="gloo")
    file = "/x/torch/distributed/distributed_c10d.py"
    for rank in everyone:
        frames = [(file, 9, name)] if rank.rank != 2 else []
        frames = [*frames, ("/job/train.py", 3, "step")]
        stack(tmp_path, rank.rank, frames, written=rank.now + 300 * SECOND)
    found = diagnose(read(write(tmp_path, everyone)))
    assert found.ranks == (2,) and not found.certain, found.sentence
    assert name in found.sentence


@pytest.mark.parametrize("fault", ["skip", "stuck"])
def test_a_verdict_is_short_enough_for_three_o_clock(fault):
    program = Program(
        [step(rank // 4) * 5 for rank in range(8)], GROUPS, [], nccl=True, stacks=True
    )
    new = [] if fault == "skip" else [Op("stuck")]
    found = verdict(Run(third(program, 5, 13, new), random.Random(1)))
    assert len(found.chain) <= 4, found.chain


def test_a_directory_with_and_without_the_guilty_rank_s_files(tmp_path):
    """What is taken away from a recording makes nobody guilty with certainty."""
    program = Program(
        [step(rank // 4) * 5 for rank in range(8)], GROUPS, [], nccl=True, stacks=True
    )
    run = Run(third(program, 5, 13, []), random.Random(1))
    whole = tmp_path / "whole"
    whole.mkdir()
    programs.write(replace_guilty(run), whole)
    for rank in range(8):
        part = tmp_path / f"without_{rank}"
        shutil.copytree(whole, part)
        for name in (f"trace_{rank}", f"stack_{rank}.json"):
            (part / name).unlink()
        found = diagnose(read(part))
        assert not found.certain or found.ranks == (5,), (rank, found.sentence)


def replace_guilty(run):
    run.program = replace(run.program, guilty={5: "skip"})
    return run
