"""The demo's GPT really hangs on eight gloo ranks, and the verdict names who did it, where and how.

The layout is tp=2 pp=2 dp=2: rank 5 has tp=1 dp=0 pp=1. ``tests/support/hanging.py`` hangs it.
"""

import json
import os
import random
import shutil
import subprocess
import sys

import pytest

from hypergrid.hangs.reading import read
from hypergrid.hangs.recording import Calls
from hypergrid.hangs.verdict import diagnose
from tests.support import ROOT, replay, simulation, table

VERDICTS = {fault: row for fault, *row in table("megatron/hangs_of_gpt.txt")}


# What of that differs where sends and receives are not recorded, as by torch on gloo.
COLLECTIVES_ONLY = {
    "skips": ("never entered", {5}),  # it is in a receive, and may wait there for another rank
    "sends twice": ("order", {1, 4, 5}),  # one of them; all are in a send or receive
}
# Without them nothing confirms the calls of each other rank: a rank without a dump is then named,
# and not with certainty. (The connections of the other ranks without a dump were lost.)
UNCONFIRMED = {"stopped"}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """The directories with the recording of every hang, by the fault."""
    directory = tmp_path_factory.mktemp("hangs")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.hanging", str(directory)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=2400,
    )
    assert done.returncode == 0, done.stdout
    return {fault: directory / fault.replace(" ", "_") for fault in VERDICTS}


@pytest.mark.parametrize("fault", VERDICTS)
def test_the_verdict_on_a_real_hang_is_right(recordings, fault):
    kind, text, group, words = VERDICTS[fault]
    rank = int(text)
    assert json.loads((recordings[fault] / "fault.json").read_text())["rank"] == rank
    recording = read(recordings[fault])
    assert recording.world_size == 8 and not recording.problems
    diagnosis = diagnose(recording)
    assert (diagnosis.kind, diagnosis.ranks) == (kind, (rank,)), diagnosis.sentence
    assert diagnosis.certain or fault in UNCONFIRMED, diagnosis.sentence
    assert rank in diagnosis.members
    members = ", ".join(map(str, diagnosis.members))
    assert group in ("any", f"{diagnosis.group} of {members}")
    assert f"Rank {rank} (" in diagnosis.sentence and words in diagnosis.sentence


@pytest.mark.parametrize("fault", VERDICTS)
def test_without_sends_and_receives_the_verdict_is_right_or_says_what_is_unknown(recordings, fault):
    kind, text, *_ = VERDICTS[fault]
    rank = int(text)
    recording = read(recordings[fault])
    for rank_recording in recording.ranks.values():
        calls = rank_recording.calls
        is_collective = [not call.p2p for call in calls]
        rank_recording.calls = Calls(calls.titles, calls.rows[is_collective])
    diagnosis = diagnose(recording)
    is_certain = fault not in COLLECTIVES_ONLY and fault not in UNCONFIRMED
    doubt = "ranks may wait for others in a call that is not recorded"
    if fault in UNCONFIRMED:
        doubt = "the flight recorder of rank 5 is missing"
    assert diagnosis.certain == is_certain, diagnosis.sentence
    assert (f"Not certain: {doubt}" in diagnosis.sentence) != is_certain
    kind, ranks = COLLECTIVES_ONLY.get(fault, (kind, {rank}))
    assert diagnosis.kind == kind
    assert rank in diagnosis.ranks and ranks.issuperset(diagnosis.ranks)
    assert diagnosis.group is None or rank in diagnosis.members


@pytest.mark.parametrize("fault", VERDICTS)
@pytest.mark.parametrize("files", ["trace_", "trace_ groups_", "stack_", "stack_ groups_"])
def test_nobody_is_accused_without_a_doubt_who_did_not_do_it(recordings, fault, files, tmp_path):
    for path in recordings[fault].iterdir():
        if path.name.startswith(tuple(files.split())):
            shutil.copy(path, tmp_path)
    diagnosis = diagnose(read(tmp_path))
    if diagnosis.certain:
        _, rank, *_ = VERDICTS[fault]
        assert not diagnosis.ok and diagnosis.ranks in ((), (int(rank),)), diagnosis.sentence


# Where the simulator does not come to rest in the same calls, and why.
ELSEWHERE = {
    "killed": "which calls of ranks that lost a connection are marked as ended is chance",
    "ended": "the same",
    "raised": "the same",
    "raised and stays": "the same",
    "dtype": "the same; and gloo ends one of the ranks that receive too much, whichever it is",
    "size": "gloo ends a call of three bytes more for all but the rank that expects them",
    "sends twice": "of a batch that sends twice, the receive ends before the send",
}


@pytest.mark.parametrize("fault", VERDICTS)
def test_the_simulator_stops_where_real_ranks_stopped_with_the_same_verdict(
    recordings, fault, tmp_path
):
    """The calls that the real ranks made, as programs."""
    real = read(recordings[fault])
    kind, text, *_ = VERDICTS[fault]
    rank = int(text)
    # Of a rank without a dump: where it goes on until others wait for it, or as it was before.
    without_fault = read(recordings["sleeping" if fault in replay.FAULTS else "size"])
    program = replay.program(real, without_fault, fault, rank)
    simulation.write(simulation.Run(program, random.Random(0)), tmp_path)
    simulated = read(tmp_path)
    diagnosis = diagnose(simulated)
    verdict = (diagnosis.kind, diagnosis.ranks, diagnosis.certain)
    assert verdict == (kind, (rank,), True), diagnosis.sentence
    if fault not in ELSEWHERE:
        assert replay.unfinished(simulated) == replay.unfinished(real)
