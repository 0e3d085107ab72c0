"""What bash starts, by bash itself: scripts as clusters have them, and single commands.

A case is a row: a script and its launches, in ``cluster_scripts/`` or ``short_scripts.txt``. The
launches were compared with what bash starts with printing programs in place of its launchers.
"""

import contextlib
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from compat.cli.line import command_of
from compat.cli.run import launches
from compat.planned.job import JobError
from tests.support.cluster_scripts import (
    SCRIPTS,
    cases,
    in_words,
    short_scripts,
    single_commands,
    words_of_line,
)

CASES = list(cases())
COMMANDS = single_commands()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home directory, and all that a script has of the user's environment, in this process."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.setenv("LANG", "C.UTF-8")
    return tmp_path


QUICK = CASES[::5]  # of the tests that are not slow


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.path.stem, marks=() if case in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_script_launches_what_bash_launches(case, home, monkeypatch):
    folder = home / "scripts"
    shutil.copytree(SCRIPTS, folder)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    started = time.monotonic()
    recording = launches(folder / case.path.name, case.arguments, case.timeout)
    taken = time.monotonic() - started
    lines = in_words(recording.launches, home)
    assert (lines if case.is_ordered else sorted(lines)) == case.launches
    assert recording.status == case.status
    if case.status is not None:
        assert taken < case.timeout / 2, "what a script leaves behind is not waited for"
    assert not list(home.rglob("really_started")), "a launcher of the script's own was started"
    for launch in recording.launches:
        for variable, value in case.of_sbatch.items():
            # A step of srun has its own numbers.
            if launch.words[0] != "srun" or not re.search("NODES|NTASKS", variable):
                assert launch.variables.get(variable) == value, variable


@pytest.mark.slow
@pytest.mark.parametrize(("text", "expected"), short_scripts(), ids=lambda value: str(value)[:60])
def test_a_short_script_launches_what_bash_launches(text, expected, home):
    """The cases of earlier rounds, which a reader of bash's text got wrong."""
    job = home / "job.sh"
    job.write_text(f"{text}\n")
    recording = launches(job, [], 60)
    lines = sorted(in_words(recording.launches, home))  # both sides of a pipe start at once
    if recording.status:
        lines.append(f"status {recording.status}")
    assert lines == expected


def test_a_script_that_sets_path_anew_hides_no_launch(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("export PATH=/opt/of_no_machine/bin\ntorchrun --nproc-per-node 8 train.py\n")
    (launch,) = launches(script, [], 60).launches
    assert launch.words == ["torchrun", "--nproc-per-node", "8", "train.py"]


@pytest.mark.parametrize(
    "script",
    [
        "f() { PATH=$REAL:$PATH; timeout 10 torchrun t.py --tp 2; }; f",
        "( PATH=$REAL:$PATH; nohup torchrun t.py --tp 2 )",
        "X=$(PATH=$REAL:$PATH; nohup torchrun t.py --tp 2)",
        "PATH=$REAL:$PATH; exec torchrun t.py --tp 2",
        "echo 'PATH=$REAL:$PATH; torchrun t.py --tp 2' > in.sh; sh in.sh",
        'env -i PATH="$PATH" torchrun t.py --tp 2',
        "docker run --rm image bash -c 'touch really_started; torchrun t.py --tp 2'",
        "docker run image bash -c 'set -e; python prepare.py; torchrun t.py --tp 2'",
        "docker run -e=TP=2 -eX=3 --ulimit a=-1 image bash -c 'torchrun t.py --tp $TP'",
        "ssh host 'touch really_started; torchrun t.py --tp 2'",
    ],
)
def test_no_launcher_and_nothing_of_a_container_is_really_started(script, tmp_path, monkeypatch):
    real = tmp_path / "real"
    real.mkdir()
    (real / "torchrun").write_text(f"#!/bin/sh\ntouch {tmp_path}/really_started\n")
    (real / "torchrun").chmod(0o755)
    monkeypatch.setenv("REAL", str(real))
    job = tmp_path / "job.sh"
    job.write_text(f"{script}\n")
    (launch,) = launches(job, [], 60).launches
    assert not list(tmp_path.rglob("really_started"))
    assert launch.words[0] == "torchrun" and launch.words[-2:] == ["--tp", "2"]


def test_nothing_outlives_a_script_that_does_not_end(tmp_path):
    job = tmp_path / "job.sh"
    job.write_text(f"trap '' TERM; nohup sleep 3{os.getpid()} & sleep 400\n")
    assert launches(job, [], 3).status is None
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert f"3{os.getpid()}".encode() not in path.read_bytes().split(b"\0")


def test_a_single_command_has_the_words_of_bash():
    assert len(COMMANDS["the words of bash"]) == 200
    for command in COMMANDS["the words of bash"]:
        read = command_of(command)
        assert (read.variables, read.words) == words_of_line(command), command


@pytest.mark.parametrize("command", COMMANDS["refused"])
def test_a_command_in_which_a_shell_has_something_to_do_is_refused(command):
    with pytest.raises(JobError):
        command_of(command)


QUOTED_LINE = "torchrun t.py 'two\nlines'"


@pytest.mark.parametrize("command", [*COMMANDS["the words of bash, or refused"], QUOTED_LINE])
def test_a_command_is_read_as_bash_reads_it_or_refused(command):
    try:
        read = command_of(command)
    except JobError:
        return
    assert (read.variables, read.words) == words_of_line(command)


@pytest.mark.parametrize("between", ["\n", "\n\n", " \n ", "\\\\\n", "\n#", "\r\n"])
def test_a_second_line_is_refused(between):
    with pytest.raises(JobError):
        command_of(f"torchrun a.py --tp 2{between}torchrun b.py --tp 4")
