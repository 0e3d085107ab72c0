"""The verdict on flight recorders in NCCL's form: the first cause, its group and kind."""

import json
import os
import re
from pathlib import Path

import pytest

from hypergrid.hangs.reading import read
from hypergrid.hangs.recording import Frame
from hypergrid.hangs.sentences import lasting, place_of
from hypergrid.hangs.verdict import diagnose
from tests.support import recorded
from tests.support.laws import summary
from tests.support.programs import cases, written_calls
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
    "monitored_barrier": [(TORCH, 9, "monitored_barrier"), ("train.py", 3, "step")],
    "new_group": [(TORCH, 9, "_new_process_group_helper"), (TORCH, 5, "new_group")],
    "load": [("/home/torch/data.py", 33, "load")],
    "idle": [],
}


class Job:
    """Four ranks that made three equal turns over tp and dp; further calls are made by hand."""

    def __init__(self, directory, turns=3, backend="nccl"):
        self.directory = directory
        self.backend = backend
        self.ranks = [Rank(rank, GROUPS, backend) for rank in range(4)]
        for rank in range(4):
            self.calls(rank, "tp dp " * turns)

    def calls(self, rank, text, after=1):
        """Make the calls of the text: dp is the rank's group DATA."""
        recorder = self.ranks[rank]
        name_of = {label: name for name, (label, _) in recorder.groups.items()}
        for call in written_calls(text):
            name = call.name
            if not name.startswith("all_"):
                name = name.replace("_", " ")
            recorder.call(
                name_of[LABELS[call.group]],
                name,
                done=not call.end,
                after=after,
                size=[call.size],
                dtype=call.dtype,
            )
            if call.end == "?":
                recorder.entries[-1].update(state="scheduled", time_discovered_started_ns=None)

    def verdict(self, missing=()):
        write(self.directory, [rank for rank in self.ranks if rank.rank not in missing])
        return diagnose(read(self.directory))


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


CASES = cases(Path(__file__).with_name("verdicts.txt"))


def judged(directory, name):
    """The verdict on a case."""
    job = Job(directory)
    after = 1
    seconds_after_calls = 60
    options = {}  # of stacks
    last_error = START
    missing = []
    old = []
    for subject, text in CASES[name]:
        ranks = [int(rank) for rank in re.findall(r"\d", subject)]
        match subject.rstrip("0123 "):
            case "turns":
                job = Job(directory, turns=int(text), backend=job.backend)
            case "backend":
                job = Job(directory, backend=text)
            case "after":
                after = float(text)
            case "at":
                seconds_after_calls = float(text)
            case "life":
                seconds, job_name = text.split()
                started = START + int(seconds) * SECOND
                options = {"life": {"started_ns": started, "job": job_name}}
            case "no file":
                missing = ranks
            case "old file":
                old = ranks
            case "calls":
                for rank in ranks:
                    job.calls(rank, text, after)
            case "lost":
                for rank in ranks:
                    del job.ranks[rank].entries[: int(text)]
            case "no members":
                for rank in ranks:
                    job.ranks[rank].config = recorded.NO_MEMBERS
            case "stack":
                for rank in ranks:
                    written = job.ranks[rank].now + int(seconds_after_calls * SECOND)
                    stack(directory, rank, STACKS[text], written=written, **options)
            case "error" | "error in a call" | "error in the script":
                frames = ()
                if "in a call" in subject:
                    frames = STACKS["reduce"]
                elif "in the script" in subject:
                    frames = STACKS["load"]
                for rank in ranks:
                    last_error += SECOND
                    stack(directory, rank, frames, error=text, written=last_error)
            case "ended":
                for rank in ranks:
                    stack(directory, rank, reason="ended")
    write(directory, [recorder for recorder in job.ranks if recorder.rank not in missing])
    for rank in old:
        moment = job.ranks[rank].now + SECOND
        os.utime(directory / f"trace_{rank}", ns=(moment, moment))
    return diagnose(read(directory))


@pytest.mark.parametrize("name", CASES)
def test_the_first_cause_is_named(name, tmp_path):
    diagnosis = judged(tmp_path, name)
    for subject, text in CASES[name]:
        if subject == "verdict":
            assert summary(diagnosis) == text, diagnosis.sentence
        elif subject == "group":
            assert diagnosis.group == text
        elif subject == "says":
            assert text in diagnosis.sentence
        elif subject == "problem":
            assert diagnosis.problems[0].startswith(text)
    lines = tuple(text for subject, text in CASES[name] if subject == "line")
    assert not lines or diagnosis.chain == lines
    # With the sentence, five.
    assert diagnosis.ok == (diagnosis.kind == "ok") and len(diagnosis.chain) <= 4


def test_a_verdict_is_plain_data_with_who_waits_for_whom_and_for_how_long(job):
    job.calls(2, "tp...")
    job.calls(0, "tp dp...")
    job.calls(1, "tp")
    job.calls(1, "dp...", after=400)
    diagnosis = job.verdict()
    assert (
        "in which rank 2 has waited for at least 6 min 40 s; it last called" in diagnosis.sentence
    )
    assert diagnosis.members == (2, 3)
    assert diagnosis.waiting == {0: (2,), 1: (3,), 2: (3,)}
    assert diagnosis.states == {0: "waiting", 1: "waiting", 2: "waiting", 3: "cause"}
    data = json.loads(json.dumps(diagnosis.to_json()))
    assert (data["schema"], data["ok"], data["ranks"]) == (1, False, [3])


def test_who_waits_for_less_than_a_second_is_not_stuck(job):
    for rank in range(4):
        stack(job.directory, rank, STACKS["load"], written=job.ranks[0].now + SECOND)
    job.calls(2, "tp...", after=0.9)
    assert job.verdict().ok
    for rank in range(4):
        stack(job.directory, rank, STACKS["load"], written=job.ranks[0].now + 3 * SECOND)
    assert not job.verdict().ok


def test_a_rank_whose_dump_is_cut_is_not_said_to_have_ended(job):
    job.calls(2, "tp...")
    job.verdict()
    content = (job.directory / "trace_3").read_bytes()
    (job.directory / "trace_3").write_bytes(content[: len(content) // 2])
    diagnosis = diagnose(read(job.directory))
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.certain) == ("no dump", (3,), False)
    assert diagnosis.sentence.endswith(
        "Not certain: the flight recorder of rank 3 is missing or cut, and what was called there "
        "is not known."
    )
    assert diagnosis.problems[0].startswith("trace_3 cannot be read")


def test_of_a_host_without_files_nobody_is_named_with_certainty(tmp_path):
    ranks = [Rank(rank, {"0": ("default_pg", range(16))}) for rank in range(16)]
    for rank in ranks:
        rank.call("0").call("0", done=False)
    diagnosis = diagnose(read(write(tmp_path, ranks[:8])))
    assert (diagnosis.kind, diagnosis.ranks) == ("no dump", tuple(range(8, 16)))
    assert not diagnosis.certain, diagnosis.sentence


def test_a_member_of_a_group_is_a_rank_of_the_job_where_no_file_has_the_size_of_the_job(tmp_path):
    rank = Rank(0, {"1": ("A", [0, 2])}).call("1", done=False)
    diagnosis = diagnose(read(write(tmp_path, [rank])))
    assert (diagnosis.ranks, diagnosis.certain) == ((2,), False), diagnosis.sentence


def test_files_that_name_jobs_of_two_sizes_are_seen_to_be_mixed(job):
    job.ranks[0] = Rank(0, {"0": ("default_pg", [0, 1])}).call("0")
    diagnosis = job.verdict()
    sizes = "the files name jobs of two sizes, those of rank 1 and of rank 0"
    assert not diagnosis.certain and sizes in diagnosis.sentence


def test_members_that_the_recorder_lacks_come_from_hypergrid_dump(job):
    for recorder in job.ranks:
        content = recorded.dumped(recorder.rank, 4, recorder.groups, dims=["tp"])
        for group in content["groups"]:
            group["label"] = f"my {group['description']}"
        path = job.directory / f"groups_{recorder.rank}.json"
        path.write_text(json.dumps(content))
        recorder.config = recorded.NO_MEMBERS
    job.calls(3, "tp...")
    diagnosis = job.verdict(missing=[2])
    assert (diagnosis.ranks, diagnosis.group) == ((2,), "my TENSOR")
    assert "(pid 1002 on host0)" in diagnosis.sentence


def test_a_script_that_is_called_as_a_module_of_python_is_the_job_s_own():
    """Such as "python profile.py", whose frames have that name."""
    stack = [Frame("/usr/lib/python3.11/threading.py", 327, "wait"), Frame("profile.py", 7, "step")]
    assert place_of(stack) == "step (profile.py:7)"


def test_durations_have_two_units():
    texts = [lasting(int(seconds * SECOND)) for seconds in (0.25, 59, 492, 7380)]
    assert texts == ["0.2 s", "59.0 s", "8 min 12 s", "2 h 3 min"]
