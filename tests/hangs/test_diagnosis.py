"""The verdict on flight recorders in NCCL's form: the first cause, its group and kind."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import diagnose, lasting
from tests.support.peer import torchfrtrace
from tests.support.recorded import SECOND, START, Rank, stack, write

GROUPS = {
    "0": ("default_pg", [0, 1, 2, 3]),
    "11": ("TENSOR", [0, 1]),
    "12": ("TENSOR", [2, 3]),
    "21": ("DATA", [0, 2]),
    "22": ("DATA", [1, 3]),
    "31": ("PIPELINE", [0, 2]),
}
LABELS = {"world": "default_pg", "tp": "TENSOR", "dp": "DATA", "pp": "PIPELINE"}
TORCH = "/x/torch/distributed/distributed_c10d.py"
STACKS = {
    "reduce": [(TORCH, 9, "all_reduce")],
    "recv": [(TORCH, 9, "recv"), ("/job/stages.py", 3, "take")],
    "load": [("/home/torch/data.py", 33, "load")],
    "": [],
}


class Job:
    """Four ranks that made three equal turns over tp and dp; further calls are made by hand."""

    def __init__(self, directory, turns=3, backend="nccl"):
        self.directory = directory
        self.ranks = [Rank(rank, GROUPS, backend) for rank in range(4)]
        for _ in range(turns):
            for rank in range(4):
                self.calls(rank, "tp dp")

    def calls(self, rank, text, after=1):
        """Of "tp dp=broadcast..." the second has not ended: broadcast in the rank's group DATA."""
        for word in text.split():
            group, _, name = word.removesuffix("...").partition("=")
            done = not word.endswith("...")
            name = name.replace("_", " ") if name.startswith(("send", "recv")) else name
            self.call(rank, group, name or "all_reduce", done=done, after=after)

    def call(self, rank, group, name="all_reduce", **options):
        for key, (label, members) in GROUPS.items():
            if label == LABELS[group] and rank in members:
                self.ranks[rank].call(key, name, **options)

    def stacks(self, *names, seconds_later=60, **seconds_of):
        """The stack of each rank; "rank_1=5" wrote its own 5 seconds after its last call."""
        for rank, name in enumerate(names):
            seconds = seconds_of.get(f"rank_{rank}", seconds_later)
            written = self.ranks[rank].now + int(seconds * SECOND)
            stack(self.directory, rank, STACKS[name], written=written)

    def verdict(self, without=(), **options):
        write(self.directory, [rank for rank in self.ranks if rank.rank not in without])
        return diagnose(read(self.directory), **options)


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


@dataclass
class Case:
    """What ranks did after the equal turns, what is left of it, and the verdict."""

    calls: Mapping[str, str]  # of ranks
    kind: str
    ranks: tuple[int, ...] = ()
    certain: bool = True
    words: str = ""
    group: str | None = None
    stacks: Sequence[str] = ()
    written: Mapping[str, float] = field(default_factory=dict)
    without: Sequence[int] = ()  # files of calls
    errors: Mapping[int, str] = field(default_factory=dict)
    backend: str = "nccl"


EVERYONE = "0 1 2 3"
UNRECORDED_SENDS = "Not certain: sends and receives are not recorded, and ranks may wait for others"
LEFT_NONE = "left no dump: ended, stopped or unreachable"
VERDICTS = {
    "nothing is wrong": Case(
        {}, "ok", words="Nothing is wrong: 4 ranks made 24 calls, and nobody is stuck."
    ),
    # One rank that waits for nobody.
    "a rank that never entered is told from those that wait behind it": Case(
        {"2": "tp...", "0": "tp dp...", "1": "tp dp..."},
        *("never entered", (3,), True, "Rank 3 never entered all_reduce #4 of TENSOR 2..3, which"),
        group="TENSOR",
    ),
    "it is named with its host, its stack and for how long others wait": Case(
        {"2": "tp...", "0": "tp", "1": "tp"},
        *("never entered", (3,), True),
        "Rank 3 (host0) never entered all_reduce #4 of TENSOR 2..3, which rank 2 has been in for "
        "1 min 0 s; it is in load (/home/torch/data.py:33), and its last call was all_reduce #3 "
        "of DATA.",
        stacks=("reduce", "reduce", "reduce", "load"),
    ),
    "a stage waits for what nobody sends": Case(
        {"2": "pp=recv_1<-0..."},
        *("never entered", (0,), False),
        "Rank 0 never sent what rank 2 has been waiting for in recv from rank 0 to rank 2 of PIPE",
        group="PIPELINE",
    ),
    "a rank without a dump is the cause if others wait for it": Case(
        {"1": "tp..."}, "no dump", (0,), False, LEFT_NONE, group="TENSOR", without=[0]
    ),
    "one rank without a file is certain where everyone else did what was due": Case(
        {EVERYONE: "world..."}, "no dump", (0,), True, LEFT_NONE, without=[0]
    ),
    "a rank that is seen not to have entered comes before one without a file": Case(
        {"0 2": "world..."}, "never entered", (3,), True, without=[1]
    ),
    "the error that came first is the cause, and lost connections are not": Case(
        {"0": "tp"},
        *("raised", (1,), True, "raised ValueError: the batch is empty."),
        group="TENSOR",
        errors={0: "RuntimeError: Connection closed by peer", 1: "ValueError: the batch is empty"},
    ),
    # Different calls at one place.
    "the minority called another operation": Case(
        {"0 1 3": "world...", "2": "world=broadcast..."},
        *(
            "mismatch",
            (2,),
            False,
            "Rank 2 called broadcast as #1 of the default group 0..3, where",
        ),
        group="the default group",
    ),
    "of two ranks that differ both are named": Case(
        {"0": "tp=all_gather...", "1": "tp=broadcast..."},
        *("mismatch", (0, 1), False),
        "Not certain: they may be right, and another rank made a call too many or too few.",
    ),
    "of two that differ the one is named that did otherwise before": Case(
        {"0": "tp...", "1": "tp=broadcast..."},
        *("mismatch", (1,), False, "There 1 other rank that had done the same until then called"),
    ),
    "with certainty, if other ranks of its role did as the other": Case(
        {"0": "tp...", "1": "tp=broadcast...", "2 3": "tp"},
        *("mismatch", (1,), True),
        "There 3 other ranks that had done the same until then called all_reduce #4 of TENSOR, as "
        "rank 1 did in earlier steps.",
    ),
    "a skipped call is seen where the calls differ": Case(
        {
            "0 2 3": "world=broadcast world=all_gather... world=barrier...",
            "1": "world=all_gather... world=barrier...",
        },
        *("mismatch", (1,), False, "until then called broadcast #1 of the default group."),
    ),
    # Everyone is in the call.
    "a collective that all are in is slow": Case(
        {EVERYONE: "world..."}, "slow", words="nobody is missing", group="the default group"
    ),
    "a broadcast that nobody finishes may have two roots": Case(
        {EVERYONE: "world=broadcast..."}, "slow", (), False, "torch does not record roots"
    ),
    "a call of all its members is not slow with certainty where others wait for these": Case(
        {"0 1": "tp...", "2": "pp..."}, "slow", (), False
    ),
    # What is not recorded.
    "a rank in a receive that is not recorded is named with doubt": Case(
        {"0 1 2": "world..."},
        *("never entered", (3,), False, UNRECORDED_SENDS),
        stacks=("reduce", "reduce", "reduce", "recv"),
        backend="gloo",
    ),
    "ranks that may wait for each other in receives are all named": Case(
        {"2": "tp...", "0": "tp..."},
        *("order", (1, 3), False, "Ranks 1, 3 are in a send or recv. Not certain: "),
        stacks=("reduce", "recv", "reduce", "recv"),
        backend="gloo",
    ),
    "a rank in a receive for a moment is not stuck": Case(
        {},
        "ok",
        (),
        False,
        stacks=("recv", "recv"),
        written={"rank_0": 0.5, "rank_1": 0.5},
        backend="gloo",
    ),
    "without stacks a rank may be in a receive": Case(
        {"2": "tp..."}, "never entered", (3,), False, UNRECORDED_SENDS, backend="gloo"
    ),
    "a rank whose flight recorder is missing is not accused": Case(
        {"2": "tp...", "0": "tp..."},
        *("never entered", (1,), False),
        "Not certain: the flight recorder of ranks 1, 3 is missing",
        stacks=("reduce", "load", "reduce", "reduce"),
        without=[1, 3],
    ),
    "a rank that is seen comes before one whose flight recorder is missing": Case(
        {"2": "tp...", "0": "tp..."},
        *("never entered", (1,), True),
        stacks=("reduce", "load", "reduce", "reduce"),
        without=[3],
    ),
    "stacks alone are not taken for a job that is well": Case(
        {}, "empty", stacks=["reduce"] * 4, without=range(4)
    ),
    "a dump that is older than the call it misses says little": Case(
        {"2": "tp..."},
        *("never entered", (3,), False),
        "its dump was written before that call, or while it still worked",
        stacks=("", "", "reduce", "load"),
        written={"rank_3": 0.5},
    ),
    "a rank without a dump for which nobody waits is named with doubt": Case(
        {},
        *("no dump", (3,), False, f"Rank 3 {LEFT_NONE}. Not certain: nobody is seen to wait for"),
        without=[3],
    ),
    "of one dump of many little is certain": Case(
        {"0": "world..."},
        *("no dump", (1, 2, 3), False),
        "Ranks 1..3 never entered all_reduce #1 of the default group 0..3, which rank 0 is in; "
        f"they {LEFT_NONE}. Not certain: this may not be the directory of all ranks.",
        without=[1, 2, 3],
    ),
    "a rank without a file is not certain where another raised": Case(
        {EVERYONE: "world..."},
        *("no dump", (0,), False),
        stacks=("", "load", "load"),
        errors={3: "ValueError: the batch is empty"},
        without=[0],
    ),
}


def judged(directory, case):
    job = Job(directory, backend=case.backend)
    for ranks, calls in case.calls.items():
        for rank in ranks.split():
            job.calls(int(rank), calls)
    job.stacks(*case.stacks, **case.written)
    for rank, error in case.errors.items():
        stack(directory, rank, error=error, written=START + SECOND)
    return job.verdict(case.without)


@pytest.mark.parametrize("name", VERDICTS)
def test_the_first_cause_is_named(name, tmp_path):
    case = VERDICTS[name]
    diagnosis = judged(tmp_path, case)
    verdict = (diagnosis.kind, diagnosis.ranks, diagnosis.certain)
    assert verdict == (case.kind, case.ranks, case.certain), diagnosis.sentence
    assert case.words in diagnosis.sentence
    assert case.group in (None, diagnosis.group)
    assert diagnosis.ok == (case.kind == "ok") and len(diagnosis.chain) <= 4


COMPARED = (
    "nothing is wrong",
    "a rank that never entered is told from those that wait behind it",
    "a rank without a dump is the cause if others wait for it",
    "the minority called another operation",
    "of two ranks that differ both are named",
)


@pytest.mark.parametrize("name", COMPARED)
def test_whom_torchfrtrace_names_we_name_too(name, tmp_path):
    ours = judged(tmp_path, VERDICTS[name])
    theirs = torchfrtrace(tmp_path)
    print(ours.sentence, theirs.text, theirs.error, sep="\n")
    assert bool(theirs.ranks) == (not ours.ok) and not theirs.error, theirs
    # It names every rank that is missed anywhere, even those that only wait behind the cause.
    assert not theirs.ranks or theirs.ranks & set(ours.ranks), (theirs, ours)
    assert len(theirs.ranks) != 1 or theirs.ranks <= set(ours.ranks), (theirs, ours)


@pytest.mark.parametrize(
    "argument, usual, other, words",
    [
        ("size", [4], [5], "all_reduce of size [5]"),
        ("dtype", "Float", "Half", "all_reduce of dtype Half"),
        ("name", "broadcast root=0", "broadcast root=1", "broadcast with root=1"),
    ],
)
def test_the_minority_called_with_another_argument(job, argument, usual, other, words):
    for rank in range(4):
        job.call(rank, "world", done=False, **{argument: other if rank == 2 else usual})
    diagnosis = job.verdict()
    assert (diagnosis.kind, diagnosis.ranks) == ("mismatch", (2,))
    assert diagnosis.sentence.startswith(f"Rank 2 called {words} as #1 of the default group 0..3")


def test_what_may_differ_between_members_is_no_mismatch(job):
    for rank in range(4):
        job.call(rank, "world", "all_to_all", size=[rank + 1], done=False)
    assert job.verdict().kind == "slow"


def test_a_verdict_is_plain_data_with_who_waits_for_whom_and_for_how_long(job):
    job.calls(2, "tp...")
    job.calls(0, "tp dp...")
    job.calls(1, "tp")
    job.calls(1, "dp...", after=400)
    diagnosis = job.verdict()
    assert "which rank 2 has been in for at least 6 min 40 s; its last call" in diagnosis.sentence
    assert diagnosis.chain[1] == "ranks 0..1 wait in 2 calls."
    assert diagnosis.members == (2, 3)
    assert diagnosis.waiting == {0: (2,), 1: (3,), 2: (3,)}
    assert diagnosis.states == {0: "waiting", 1: "waiting", 2: "waiting", 3: "cause"}
    data = json.loads(json.dumps(diagnosis.to_json()))
    assert (data["schema"], data["ok"], data["ranks"]) == (1, False, [3])


def test_a_job_whose_scripts_have_ended_is_well_if_nobody_waited_for_its_last_call(job):
    job.calls(2, "tp")
    job.calls(3, "tp...")
    for rank in range(4):
        stack(job.directory, rank, reason="ended")
    diagnosis = job.verdict()
    assert diagnosis.ok and "and the script of every rank ended, none by" in diagnosis.sentence


def test_a_rank_whose_script_has_ended_is_the_cause_if_others_wait_for_it(job):
    job.calls(2, "tp...")
    stack(job.directory, 3, reason="ended")
    diagnosis = job.verdict()
    assert (diagnosis.kind, diagnosis.ranks) == ("never entered", (3,))
    assert "the script of rank 3 has ended, and its last call was all_reduce" in diagnosis.sentence


def test_who_waits_for_less_than_the_patience_is_not_stuck(job):
    for rank in range(4):
        stack(job.directory, rank, STACKS["load"], written=job.ranks[0].now + SECOND)
    job.calls(2, "tp...", after=0.9)
    assert job.verdict().ok
    assert not job.verdict(patience=0.05).ok


def test_a_circle_names_the_rank_with_another_order(tmp_path):
    job = Job(tmp_path, turns=0)
    for rank in range(4):
        job.calls(rank, "tp world " * 3)
    for rank, calls in enumerate(("tp...", "world...", "tp world...", "tp world...")):
        job.calls(rank, calls)
    diagnosis = job.verdict()
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.certain) == ("order", (1,), True)
    assert diagnosis.sentence.startswith(
        "Rank 1 called all_reduce #4 of the default group after all_reduce #3 of the default "
        "group, where all_reduce #4 of TENSOR is next. There 3 other ranks that had done the same "
    )
    assert diagnosis.chain[:2] == (
        "rank 0 is in all_reduce #4 of TENSOR 0..1 and waits for rank 1.",
        "rank 1 is in all_reduce #4 of the default group 0..3 and waits for rank 0.",
    )


def test_a_circle_without_a_pattern_names_all_of_it(tmp_path):
    groups = {"1": ("A", [0, 1]), "2": ("B", [0, 1])}
    ranks = [Rank(rank, groups).call(str(rank + 1), done=False) for rank in range(2)]
    diagnosis = diagnose(read(write(tmp_path, ranks)))
    assert (diagnosis.kind, diagnosis.ranks) == ("order", (0, 1))
    assert diagnosis.sentence == (
        "Deadlock: ranks 0..1 wait for each other in all_reduce #1 of A 0..1 and all_reduce #1 of "
        "B 0..1. Not certain: which of them did not do what was due cannot be seen."
    )


def test_a_stage_that_sends_twice(tmp_path):
    job = Job(tmp_path, turns=0)
    for _ in range(3):
        job.calls(0, "pp=send_0->1 dp tp")
        job.calls(2, "pp=recv_1<-0 dp tp")
        job.calls(1, "tp")
        job.calls(3, "tp")
    job.calls(0, "pp=send_0->1 pp=send_0->1...")
    job.calls(2, "pp=recv_1<-0 dp... tp...")
    job.calls(3, "tp...")
    diagnosis = job.verdict()
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.group) == ("order", (0,), "PIPELINE")
    assert "Rank 0 called send 0->1 #5 of PIPELINE after send 0->1 #4 of" in diagnosis.sentence


def test_recorders_without_one_call_are_not_taken_for_a_job_that_is_well(tmp_path):
    job = Job(tmp_path, turns=0)
    diagnosis = job.verdict()
    assert (diagnosis.kind, diagnosis.ok) == ("empty", False)
    assert diagnosis.sentence.startswith("No collective is recorded. Torch keeps calls with TORCH")
    job.stacks(*["reduce"] * 4)
    diagnosis = job.verdict()
    assert diagnosis.kind == "empty"
    assert diagnosis.chain[0].startswith("rank 0 is in all_reduce (/x/torch/")


def test_a_rank_whose_dump_is_cut_is_not_said_to_have_ended(job):
    job.calls(2, "tp...")
    job.verdict()
    content = (job.directory / "trace_3").read_bytes()
    (job.directory / "trace_3").write_bytes(content[: len(content) // 2])
    diagnosis = diagnose(read(job.directory))
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.certain) == ("no dump", (3,), False)
    assert diagnosis.sentence.endswith(
        "its dump could not be read. Not certain: what it did is not known."
    )


def test_a_rank_that_calls_seldom_is_not_taken_for_one_of_another_job(job):
    for rank in range(3):
        job.calls(rank, "tp " * 300)
        del job.ranks[rank].entries[:200]
    assert job.verdict().certain


def test_members_that_the_recorder_lacks_come_from_hypergrid_dump(job):
    for rank in job.ranks:
        groups = []
        for name, (label, members) in rank.groups.items():
            group = {"owner": "x", "label": f"my {label}", "dims": ["tp"], "ranks": members}
            group |= {"name": name, "description": label, "backend": "gloo", "shared_with": None}
            groups.append(group)
        dump = {"schema": 1, "rank": rank.rank, "world_size": 4, "host": "a", "pid": 7}
        path = job.directory / f"groups_{rank.rank}.json"
        path.write_text(json.dumps({**dump, "groups": groups}))
        rank.config = lambda: {"": {"name": "", "desc": "", "ranks": "[]"}}
    job.calls(3, "tp...")
    diagnosis = job.verdict(without=[2])
    assert (diagnosis.ranks, diagnosis.group) == ((2,), "my TENSOR")
    assert "(pid 7 on a)" in diagnosis.sentence


def test_recorders_that_wrapped_around_are_compared_from_where_they_begin(job):
    for rank in range(4):
        job.calls(rank, "world..." if rank == 1 else "world")
        del job.ranks[rank].entries[: rank + 1]
    job.ranks[3].entries.pop()
    assert job.verdict().ranks == (3,)


def test_durations_have_two_units():
    texts = [lasting(int(seconds * SECOND)) for seconds in (0.25, 59, 492, 7380)]
    assert texts == ["0.2 s", "59.0 s", "8 min 12 s", "2 h 3 min"]
