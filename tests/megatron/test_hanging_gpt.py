"""The demo's GPT really hangs on eight gloo ranks, and the verdict names who did it, where and how.

The layout is tp=2 pp=2 dp=2: rank 5 has tp=1 dp=0 pp=1. ``tests/support/hanging.py`` hangs it.
"""

import os
import shutil
import subprocess
import sys

import pytest

from hypergrid.hangs.reading import read
from hypergrid.hangs.recording import Calls
from hypergrid.hangs.verdict import diagnose
from tests.support import ROOT, table
from tests.support.hanging import RANK

VERDICTS = {fault: row for fault, *row in table("megatron/hangs_of_gpt.txt")}


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
    kind, group, words = VERDICTS[fault]
    recording = read(recordings[fault])
    assert recording.world_size == 8 and not recording.problems
    diagnosis = diagnose(recording)
    assert (diagnosis.kind, diagnosis.ranks) == (kind, (RANK,)), diagnosis.sentence
    # Of a rank that is stopped, nobody's lost connection confirms that it is gone.
    assert diagnosis.certain or fault == "stopped", diagnosis.sentence
    members = ", ".join(map(str, diagnosis.members))
    assert group in ("any", f"{diagnosis.group} of {members}")
    assert f"Rank {RANK} (" in diagnosis.sentence and words in diagnosis.sentence


@pytest.mark.parametrize("fault", VERDICTS)
def test_nobody_is_accused_without_a_doubt_who_did_not_do_it(recordings, fault, tmp_path):
    """From fewer files, and without the sends and receives that torch does not record on gloo."""
    without_sends = read(recordings[fault])
    for rank_recording in without_sends.ranks.values():
        calls = rank_recording.calls
        is_collective = [not call.p2p for call in calls]
        rank_recording.calls = Calls(calls.titles, calls.rows[is_collective])
    fewer = [without_sends]
    for kinds in (("trace_",), ("trace_", "groups_"), ("stack_",), ("stack_", "groups_")):
        directory = tmp_path / "".join(kinds)
        directory.mkdir()
        for path in recordings[fault].iterdir():
            if path.name.startswith(kinds):
                shutil.copy(path, directory)
        fewer.append(read(directory))
    for recording in fewer:
        diagnosis = diagnose(recording)
        is_right = not diagnosis.ok and diagnosis.ranks in ((), (RANK,))
        assert is_right or not diagnosis.certain, diagnosis.sentence
