"""The verdict on flight recorders in NCCL's form: first cause, group and kind."""

import json

import pytest

from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import diagnose, lasting
from tests.support.peer import torchfrtrace
from tests.support.recorded import SECOND, START, Rank, stack, write

TP, OTHER, DP, PP, WORLD = "11", "12", "21", "31", "0"
GROUPS = {
    WORLD: ("default_pg", [0, 1, 2, 3]),
    TP: ("TENSOR", [0, 1]),
    OTHER: ("TENSOR", [2, 3]),
    DP: ("DATA", [0, 2]),
    "22": ("DATA", [1, 3]),
    PP: ("PIPELINE", [0, 2]),
}


class Job:
    """Four ranks that made three equal turns; further calls are made by hand."""

    def __init__(self, directory, turns=3, backend="nccl"):
        self.directory = directory
        self.ranks = [Rank(rank, GROUPS, backend) for rank in range(4)]
        self.tp = lambda rank: TP if rank < 2 else OTHER
        self.dp = lambda rank: DP if rank in (0, 2) else "22"
        for _ in range(turns):
            for rank in range(4):
                self.call(rank, self.tp(rank)).call(rank, self.dp(rank))

    def call(self, rank, group, *args, **options):
        self.ranks[rank].call(group, *args, **options)
        return self

    def verdict(self, without=(), **options):
        write(self.directory, [rank for rank in self.ranks if rank.rank not in without])
        return diagnose(read(self.directory), **options)


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_nothing_is_wrong(job):
    found = job.verdict()
    assert found.ok and found.sentence == (
        "Nothing is wrong: 4 ranks made 24 calls, and nobody is stuck."
    )


def test_a_job_whose_scripts_have_ended_is_well_if_nobody_waited_for_its_last_call(job):
    job.call(2, OTHER).call(3, OTHER, done=False)
    for rank in range(4):
        stack(job.directory, rank, [], reason="ended")
    found = job.verdict()
    assert found.ok and found.sentence == (
        "Nothing is wrong: 4 ranks made 26 calls, and the script of every rank ended, none by "
        "an exception."
    )


def test_a_rank_whose_script_has_ended_is_the_cause_if_others_wait_for_it(job):
    job.call(2, OTHER, done=False)
    stack(job.directory, 3, [], reason="ended")
    found = job.verdict()
    assert (found.kind, found.ranks) == ("never entered", (3,))
    assert "the script of rank 3 has ended, and its last call was all_reduce" in found.sentence


def test_the_rank_that_never_came_is_told_from_those_behind_it(job):
    job.call(2, OTHER, done=False).call(0, TP).call(1, TP)
    job.call(0, DP, done=False).call(1, "22", done=False, after=400)
    found = job.verdict()
    assert (found.kind, found.ranks, found.group, found.members) == (
        "never entered",
        (3,),
        "TENSOR",
        (2, 3),
    )
    assert found.sentence == (
        "Rank 3 never entered all_reduce #4 of TENSOR 2..3, which rank 2 has been in for at least "
        "6 min 40 s; its last call was all_reduce #3 of DATA."
    )
    assert found.chain[1] == "ranks 0..1 wait in 2 calls."
    assert found.waiting == {0: (2,), 1: (3,), 2: (3,)}
    assert found.states[3] == "cause" and found.states[0] == "waiting"


def test_a_rank_is_named_with_its_host_its_stack_and_for_how_long(job):
    end = START + 700 * SECOND
    for rank in range(4):
        where = [("/x/torch/distributed/distributed_c10d.py", 9, "all_reduce")] * (rank != 3)
        stack(
            job.directory, rank, [*where, ("/home/torch/data.py", 30 + rank, "load")], written=end
        )
    job.call(2, OTHER, done=False).call(0, TP).call(1, TP)
    assert job.verdict().sentence == (
        "Rank 3 (host0) never entered all_reduce #4 of TENSOR 2..3, which rank 2 has "
        "been in for 11 min 33 s; it is in load (/home/torch/data.py:33), and its last call was "
        "all_reduce #3 of DATA."
    )


def test_who_waits_for_a_moment_is_not_stuck(job):
    for rank in range(4):
        stack(job.directory, rank, [("train.py", 1, "step")], written=job.ranks[0].now + SECOND)
    job.call(2, OTHER, done=False, after=0.9)
    assert job.verdict().ok
    assert not job.verdict(patience=0.05).ok


def test_a_rank_without_a_dump_is_the_cause(job):
    job.call(1, TP, done=False)
    found = job.verdict(without=[0])
    assert (found.kind, found.ranks, found.group) == ("no dump", (0,), "TENSOR")
    assert "left no dump" in found.sentence


def test_the_error_that_came_first_is_the_cause_and_lost_connections_are_not(job):
    stack(job.directory, 0, error="RuntimeError: Connection closed by peer", written=START + SECOND)
    stack(job.directory, 1, error="ValueError: the batch is empty", written=START + SECOND)
    job.call(0, TP)  # ended with the error
    found = job.verdict()
    assert (found.kind, found.ranks, found.group) == ("raised", (1,), "TENSOR")
    assert "raised ValueError: the batch is empty." in found.sentence


@pytest.mark.parametrize(
    "one, other, said",
    [
        ({"name": "all_reduce"}, {"name": "broadcast"}, "broadcast"),
        ({"size": [4]}, {"size": [5]}, "all_reduce of size [5]"),
        ({"dtype": "Float"}, {"dtype": "Half"}, "all_reduce of dtype Half"),
        ({"name": "broadcast root=0"}, {"name": "broadcast root=1"}, "broadcast with root=1"),
    ],
)
def test_the_minority_made_another_call(job, one, other, said):
    for rank in range(4):
        job.call(rank, WORLD, done=False, **(other if rank == 2 else one))
    found = job.verdict()
    assert (found.kind, found.ranks, found.group) == ("mismatch", (2,), "the default group")
    assert found.sentence.startswith(f"Rank 2 called {said} as #1 of the default group 0..3, where")


def test_of_two_ranks_that_differ_both_are_named(job):
    job.call(0, TP, "all_gather", done=False).call(1, TP, "broadcast", done=False)
    found = job.verdict()
    assert (found.kind, found.ranks, found.certain) == ("mismatch", (0, 1), False)
    assert found.sentence.endswith(
        "Not certain: they may be right, and another rank made a call too many or too few."
    )


def test_of_two_that_differ_the_one_is_named_that_did_otherwise_before(job):
    job.call(0, TP, done=False).call(1, TP, "broadcast", done=False)
    found = job.verdict()
    assert (found.kind, found.ranks, found.certain) == ("mismatch", (1,), False)
    assert "There 1 other rank that had done the same until then called" in found.sentence
    for rank in (2, 3):
        job.call(rank, OTHER)
    found = job.verdict()
    assert (found.kind, found.ranks, found.certain) == ("mismatch", (1,), True)
    assert (
        "There 3 other ranks that had done the same until then called all_reduce #4 of TENSOR, as "
        "rank 1 did in earlier steps." in found.sentence
    )


def test_what_may_differ_between_members_is_no_mismatch(job):
    for rank in range(4):
        job.call(rank, WORLD, "all_to_all", size=[rank + 1], done=False)
    assert job.verdict().kind == "slow"


def test_a_skipped_call_is_seen_where_the_calls_differ(job):
    for rank in range(4):
        if rank != 1:
            job.call(rank, WORLD, "broadcast")
        job.call(rank, WORLD, "all_gather", done=False).call(rank, WORLD, "barrier", done=False)
    found = job.verdict()
    assert (found.kind, found.ranks) == ("mismatch", (1,))
    assert "called barrier as #2 of the default group" in found.sentence
    assert "until then called broadcast #1 of the default group." in found.sentence


def test_a_circle_names_the_rank_with_another_order(tmp_path):
    job = Job(tmp_path, turns=0)
    for _ in range(3):
        for rank in range(4):
            job.call(rank, job.tp(rank)).call(rank, WORLD)
    for rank in range(4):
        job.call(rank, WORLD if rank == 1 else job.tp(rank), done=rank > 1)
    job.ranks[1].entries[-1].update(state="started", retired=False)
    job.call(2, WORLD, done=False).call(3, WORLD, done=False)
    found = job.verdict()
    assert (found.kind, found.ranks) == ("order", (1,))
    assert found.certain and found.sentence.startswith(
        "Rank 1 called all_reduce #4 of the default group after all_reduce #3 of the default "
        "group, where all_reduce #4 of TENSOR is next. There 3 other ranks that had done the same "
    )
    assert found.chain[:2] == (
        "rank 0 is in all_reduce #4 of TENSOR 0..1 and waits for rank 1.",
        "rank 1 is in all_reduce #4 of the default group 0..3 and waits for rank 0.",
    )


def test_a_circle_without_a_pattern_names_all_of_it(tmp_path):
    groups = {"1": ("A", [0, 1]), "2": ("B", [0, 1])}
    one, other = (Rank(rank, groups) for rank in range(2))
    one.call("1", done=False)
    other.call("2", done=False)
    found = diagnose(read(write(tmp_path, [one, other])))
    assert (found.kind, found.ranks) == ("order", (0, 1))
    assert found.sentence == (
        "Deadlock: ranks 0..1 wait for each other in all_reduce #1 of A 0..1 and all_reduce #1 of "
        "B 0..1. Not certain: which of them did not do what was due cannot be seen."
    )


def test_a_stage_that_waits_for_what_nobody_sends(job):
    job.call(2, PP, "recv 1<-0", done=False, after=60)
    found = job.verdict()
    assert (found.kind, found.ranks, found.group) == ("never entered", (0,), "PIPELINE")
    assert found.sentence.startswith(
        "Rank 0 never sent what rank 2 has been waiting for in recv from rank 0 to rank 2 of PIPE"
    )


def test_a_stage_that_sends_twice(tmp_path):
    job = Job(tmp_path, turns=0)
    for _ in range(3):
        job.call(0, PP, "send 0->1").call(2, PP, "recv 1<-0")
        for rank in (0, 2):
            job.call(rank, DP).call(rank, job.tp(rank))
            job.call(rank + 1, job.tp(rank))
    job.call(0, PP, "send 0->1").call(2, PP, "recv 1<-0")
    job.call(0, PP, "send 0->1", done=False)
    job.call(2, DP, done=False).call(2, OTHER, done=False).call(3, OTHER, done=False)
    found = job.verdict()
    assert (found.kind, found.ranks, found.group) == ("order", (0,), "PIPELINE")
    assert "Rank 0 called send 0->1 #5 of PIPELINE after send 0->1 #4 of" in found.sentence


def test_a_collective_that_all_are_in_is_slow(job):
    for rank in range(4):
        job.call(rank, WORLD, done=False, after=1)
    found = job.verdict()
    assert (found.kind, found.group, found.seq) == ("slow", "the default group", 1)
    assert "nobody is missing" in found.sentence


IN_RECV = [("/x/torch/distributed/distributed_c10d.py", 9, "recv"), ("/job/stages.py", 3, "take")]
IN_REDUCE = [("/x/torch/distributed/distributed_c10d.py", 9, "all_reduce")]


@pytest.fixture
def gloo(tmp_path):
    """The same job on gloo, which records no sends and receives."""
    return Job(tmp_path, backend="gloo")


def stacks(job, frames, **written):
    for rank, mine in enumerate(frames):
        after = written.get(f"rank_{rank}", 60)
        stack(job.directory, rank, mine, written=job.ranks[rank].now + after * SECOND)


def test_a_rank_in_a_receive_that_is_not_recorded_is_named_with_doubt(gloo):
    for rank in (0, 1, 2):
        gloo.call(rank, WORLD, done=False)
    stacks(gloo, [IN_REDUCE, IN_REDUCE, IN_REDUCE, IN_RECV])
    found = gloo.verdict()
    assert (found.kind, found.ranks, found.certain) == ("never entered", (3,), False)
    assert found.sentence.endswith(
        "Not certain: sends and receives are not recorded, and ranks may wait for others in one. "
        "HYPERGRID_RECORD_P2P=1 records them."
    )
    assert "; it is in take (/job/stages.py:3), and its last call" in found.sentence


def test_ranks_that_may_wait_for_each_other_in_receives_are_all_named(gloo):
    gloo.call(2, OTHER, done=False)
    gloo.call(0, TP, done=False)
    stacks(gloo, [IN_REDUCE, IN_RECV, IN_REDUCE, IN_RECV])
    found = gloo.verdict()
    assert (found.kind, found.ranks, found.certain) == ("order", (1, 3), False)
    assert found.sentence.startswith("Ranks 1, 3 are in a send or recv. Not certain: ")
    assert found.chain[2] == "ranks 0, 2 wait in 2 calls."


def test_who_is_in_a_receive_for_a_moment_is_not_stuck(gloo):
    stacks(gloo, [IN_RECV, IN_RECV, [], []], rank_0=0.5, rank_1=0.5)
    assert gloo.verdict().ok


def test_without_stacks_a_rank_may_be_in_a_receive(gloo):
    gloo.call(2, OTHER, done=False)
    found = gloo.verdict()
    assert (found.kind, found.ranks, found.certain) == ("never entered", (3,), False)
    assert "ranks may wait for others in one" in found.sentence


def test_a_rank_whose_flight_recorder_is_missing_is_not_accused(job):
    job.call(2, OTHER, done=False).call(0, TP, done=False)
    stacks(job, [IN_REDUCE, [("/job/data.py", 3, "load")], IN_REDUCE, IN_REDUCE])
    found = job.verdict(without=[1, 3])
    assert (found.kind, found.certain) == ("never entered", False)
    assert "Not certain: the flight recorder of ranks 1, 3 is missing" in found.sentence
    found = job.verdict(without=[3])
    assert (found.kind, found.ranks, found.certain) == ("never entered", (1,), True)


def test_stacks_alone_are_not_taken_for_a_job_that_is_well(job):
    stacks(job, [IN_REDUCE] * 4)
    found = job.verdict(without=range(4))
    assert (found.kind, found.ok) == ("empty", False)
    assert found.chain[0].startswith("rank 0 is in all_reduce (/x/torch/")


def test_recorders_without_one_call_are_not_taken_for_a_job_that_is_well(tmp_path):
    job = Job(tmp_path, turns=0)
    found = job.verdict()
    assert (found.kind, found.ok) == ("empty", False)
    assert found.sentence.startswith("No collective is recorded. Torch keeps calls with TORCH_FR")
    stacks(job, [IN_REDUCE] * 4)
    found = job.verdict()
    assert found.kind == "empty" and len(found.chain) == 2


def test_a_dump_that_is_older_than_the_call_it_misses_says_little(job):
    job.call(2, OTHER, done=False, after=300)
    stacks(job, [[], [], IN_REDUCE, [("/job/data.py", 3, "load")]], rank_3=1)
    found = job.verdict()
    assert (found.ranks, found.certain) == ((3,), False)
    assert "its dump was written before that call, or while it still worked" in found.sentence


def test_a_rank_without_a_dump_for_which_nobody_waits_is_named_with_doubt(job):
    found = job.verdict(without=[3])
    assert (found.kind, found.ranks, found.certain) == ("no dump", (3,), False)
    assert found.sentence == (
        "Rank 3 left no dump: ended, stopped or unreachable. Not certain: nobody is seen to wait "
        "for it."
    )


def test_of_one_dump_of_many_little_is_certain(job):
    job.call(0, WORLD, done=False)
    found = job.verdict(without=[1, 2, 3])
    assert (found.kind, found.ranks, found.certain) == ("no dump", (1, 2, 3), False)
    assert found.sentence == (
        "Ranks 1..3 never entered all_reduce #1 of the default group 0..3, which rank 0 is in; "
        "they left no dump: ended, stopped or unreachable. Not certain: this may not be the "
        "directory of all ranks."
    )


def test_a_rank_whose_dump_is_cut_is_not_said_to_have_ended(job):
    job.call(2, OTHER, done=False)
    write(job.directory, job.ranks)
    whole = (job.directory / "trace_3").read_bytes()
    (job.directory / "trace_3").write_bytes(whole[: len(whole) // 2])
    found = diagnose(read(job.directory))
    assert (found.kind, found.ranks, found.certain) == ("no dump", (3,), False)
    assert found.sentence.endswith(
        "its dump could not be read. Not certain: what it did is not known."
    )


@pytest.mark.parametrize(
    "other, said",
    [
        (
            {"groups": {WORLD: ("default_pg", [0, 1])}},
            "the job has 2 ranks by the files of rank 0 and 4 ranks by the files of rank 1. ",
        ),
        ({"later": 90}, "the calls of rank 1 ended before those of rank 0 began"),
    ],
)
def test_files_of_two_jobs_are_seen_to_be_mixed(job, other, said):
    job.ranks[0] = Rank(0, other.get("groups", GROUPS))
    job.ranks[0].now = job.ranks[3].now + other.get("later", 0) * SECOND
    job.call(0, WORLD).call(2, OTHER, done=False)
    job.ranks[2].now += 200 * SECOND
    found = job.verdict()
    assert not found.certain and said in found.sentence
    assert found.sentence.endswith("The files seem to be of two jobs, or of two times.")


def test_a_rank_that_calls_seldom_is_not_taken_for_another_jobs(job):
    for _ in range(300):
        for rank in range(3):
            job.call(rank, TP if rank < 2 else OTHER)
    for rank in range(3):
        del job.ranks[rank].entries[:200]
    assert job.verdict().certain


def test_members_that_the_recorder_lacks_come_from_hypergrid_dump(job):
    for rank in range(4):
        mine = [
            {"owner": "x", "label": f"my {desc}", "dims": ["tp"], "ranks": ranks, "name": name}
            | {"backend": "gloo", "description": desc, "shared_with": None}
            for name, (desc, ranks) in GROUPS.items()
            if rank in ranks
        ]
        said = {"schema": 1, "rank": rank, "world_size": 4, "host": "a", "pid": 7, "groups": mine}
        (job.directory / f"groups_{rank}.json").write_text(json.dumps(said))
        job.ranks[rank].config = lambda: {"": {"name": "", "desc": "", "ranks": "[]"}}
    job.call(3, OTHER, done=False)
    found = job.verdict(without=[2])
    assert (found.kind, found.ranks, found.group) == ("no dump", (2,), "my TENSOR")
    assert "(pid 7 on a)" in found.sentence


def test_recorders_that_wrapped_around_are_compared_from_where_they_begin(job):
    for rank in range(4):
        job.call(rank, WORLD, done=rank != 1)
        del job.ranks[rank].entries[: rank + 1]
    job.ranks[3].entries.pop()
    assert job.verdict().ranks == (3,)


def test_a_verdict_is_plain_data(job):
    job.call(2, OTHER, done=False)
    said = json.loads(json.dumps(job.verdict().to_json()))
    assert said["schema"] == 1 and not said["ok"] and said["ranks"] == [3]


def test_durations_have_two_units():
    assert [lasting(int(s * SECOND)) for s in (0.25, 59, 492, 7380)] == [
        "0.2 s",
        "59.0 s",
        "8 min 12 s",
        "2 h 3 min",
    ]


def never_came(job):
    job.call(2, OTHER, done=False)


def another_operation(job):
    for rank in range(4):
        job.call(rank, WORLD, "broadcast" if rank == 2 else "all_reduce", done=False)


def another_size(job):
    for rank in range(4):
        job.call(rank, WORLD, size=[4 + (rank == 1)], done=False)


def another_dtype(job):
    for rank in range(4):
        job.call(rank, WORLD, dtype="Half" if rank == 1 else "Float", done=False)


def two_differ(job):
    job.call(0, TP, "all_gather", done=False).call(1, TP, "broadcast", done=False)


def others_wait_behind(job):
    job.call(2, OTHER, done=False).call(0, TP).call(1, TP)
    job.call(0, DP, done=False).call(1, "22", done=False)


def left_no_dump(job):
    job.call(1, TP, done=False)
    job.ranks[0].entries = []


def all_is_well(job):
    pass


@pytest.mark.parametrize(
    "fault",
    [
        *(never_came, another_operation, another_size, another_dtype, two_differ),
        *(others_wait_behind, left_no_dump, all_is_well),
    ],
)
def test_whom_torchfrtrace_names_we_name_too(job, fault):
    fault(job)
    without = [rank.rank for rank in job.ranks if not rank.entries]
    ours, theirs = job.verdict(without), torchfrtrace(job.directory)
    print(ours.sentence, theirs.text, theirs.error, sep="\n")
    assert bool(theirs.ranks) == (not ours.ok) and not theirs.error, theirs
    # It names every rank that is missed anywhere, also those that only wait behind the cause.
    assert not theirs.ranks or theirs.ranks & set(ours.ranks), (theirs, ours)
    assert len(theirs.ranks) != 1 or theirs.ranks <= set(ours.ranks), (theirs, ours)
