"""What bash starts, by bash itself: scripts as clusters have them, and single commands."""

import contextlib
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from compat.cli.run import launches
from tests.support import cluster_scripts
from tests.support.cluster_scripts import (
    SCRIPTS,
    as_called,
    cases,
    essential,
    is_job,
    short_scripts,
    single_commands,
    words_of_line,
)

CASES = {case.path.stem: case for case in cases()}
OWN_PATH = [name for name, case in CASES.items() if case.has_own_path]
OTHERS = [name for name in CASES if name not in OWN_PATH]
COMMANDS = single_commands()


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """All that a script has of the user's environment, in this process too."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    found = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "USER": "somebody",
        "LANG": "C.UTF-8",
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


def seen(started, ordered=True):
    """The words of the launches that start a job, and the variables that a launcher may read."""
    jobs = []
    for launch in started:
        if is_job(as_called(launch.words)):
            # env in front of a launcher sets variables.
            in_front = launch.words[1:] if launch.words[0] == "env" else []
            assignments = [word for word in in_front if re.match(r"\w+=", word)]
            variables = launch.variables | dict(word.split("=", 1) for word in assignments)
            read = {
                name: value
                for name, value in variables.items()
                if name.startswith(("PET_", "OMPI_"))
            }
            jobs.append((essential(launch.words), read))
    return jobs if ordered else sorted(jobs, key=str)


def by_bash(case, environment, tmp_path):
    folder = tmp_path / "scripts"
    shutil.copytree(SCRIPTS, folder)
    workplace = tmp_path / "oracle"
    workplace.mkdir()
    # What scripts ask of each SLURM job.
    of_job = {}
    if "#SBATCH" in case.path.read_text():
        of_job = {"SLURM_JOB_ID": "1", "SLURM_JOBID": "1", "SLURM_JOB_NODELIST": "localhost"}
    started, status = cluster_scripts.run(
        folder / case.path.name,
        case.arguments,
        {**of_job, **environment, **case.environment, **case.of_sbatch},
        case.timeout,
        workplace,
    )
    # The next run finds the folder, at the same path, as it was.
    shutil.rmtree(folder)
    return started, exit_status(status)


def by_us(case, tmp_path, monkeypatch):
    folder = tmp_path / "scripts"
    shutil.copytree(SCRIPTS, folder)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    return launches(folder / case.path.name, case.arguments, case.timeout)


def exit_status(status):
    """As a shell names it, also of a process that a signal ended."""
    return 128 - status if status is not None and status < 0 else status


def has_variables_of_sbatch(launch, case):
    """A launch has the variables that sbatch sets by the lines of the file."""
    for variable, value in case.of_sbatch.items():
        # A step of srun has its own numbers.
        if launch.words[0] == "srun" and re.search("NODES|NTASKS", variable):
            continue
        assert launch.variables.get(variable) == value, variable


QUICK = OTHERS[::5]  # of the tests that are not slow


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in OTHERS]
)
def test_a_script_launches_what_bash_launches(name, environment, tmp_path, monkeypatch):
    case = CASES[name]
    expected, status = by_bash(case, environment, tmp_path)
    of_bash = seen(expected, case.is_ordered)
    assert (len(of_bash), status) == (case.launches, case.status), "the head of the script is wrong"
    if case.words:
        of_bash = [(case.words, {})]

    started = time.monotonic()
    recording = by_us(case, tmp_path, monkeypatch)
    taken = time.monotonic() - started
    assert seen(recording.launches, case.is_ordered) == of_bash
    assert exit_status(recording.status) == status
    if status is not None:
        assert taken < case.timeout / 2, "what a script leaves behind is not waited for"
    for launch in recording.launches:
        has_variables_of_sbatch(launch, case)


@pytest.mark.parametrize("name", OWN_PATH)
def test_an_environment_that_the_script_activates_hides_no_launch(
    name, environment, tmp_path, monkeypatch
):
    """And none of its own launchers is started."""
    case = CASES[name]
    expected, status = by_bash(case, environment, tmp_path)
    assert (len(seen(expected)), status) == (case.launches, case.status)

    recording = by_us(case, tmp_path, monkeypatch)
    assert not list(tmp_path.rglob("really_started"))
    assert seen(recording.launches) == seen(expected)


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


def test_short_scripts_launch_what_bash_launches(environment, tmp_path):
    """The cases of earlier rounds, which a reader of bash's text got wrong."""
    job = tmp_path / "scripts" / "job.sh"
    started = 0
    for number, text in enumerate(short_scripts()):
        outcomes = []
        for of_bash in (True, False):
            shutil.rmtree(job.parent, ignore_errors=True)
            job.parent.mkdir()
            job.write_text(f"{text}\n")
            if of_bash:
                workplace = tmp_path / f"oracle_{number}"
                workplace.mkdir()
                calls, status = cluster_scripts.run(job, [], environment, 60, workplace)
            else:
                recording = launches(job, [], 60)
                calls, status = recording.launches, recording.status
            # Both sides of a pipe start at once.
            outcomes.append((seen(calls, ordered=False), exit_status(status)))
        assert outcomes[1] == outcomes[0], text
        started += len(outcomes[0][0])
    assert started >= 80


def test_a_single_command_has_the_words_of_bash():
    from compat.cli.line import command_of

    assert len(COMMANDS["the words of bash"]) == 200
    for command in COMMANDS["the words of bash"]:
        read = command_of(command)
        assert (read.variables, read.words) == words_of_line(command), command


@pytest.mark.parametrize("command", COMMANDS["refused"])
def test_a_command_in_which_a_shell_has_something_to_do_is_refused(command):
    from compat.cli.line import command_of
    from compat.planned.job import JobError

    with pytest.raises(JobError):
        command_of(command)


QUOTED_LINE = "torchrun t.py 'two\nlines'"


@pytest.mark.parametrize("command", [*COMMANDS["the words of bash, or refused"], QUOTED_LINE])
def test_a_command_is_read_as_bash_reads_it_or_refused(command):
    from compat.cli.line import command_of
    from compat.planned.job import JobError

    try:
        read = command_of(command)
    except JobError:
        return
    assert (read.variables, read.words) == words_of_line(command)


@pytest.mark.parametrize("between", ["\n", "\n\n", " \n ", "\\\\\n", "\n#", "\r\n"])
def test_a_second_line_is_refused(between):
    from compat.cli.line import command_of
    from compat.planned.job import JobError

    with pytest.raises(JobError):
        command_of(f"torchrun a.py --tp 2{between}torchrun b.py --tp 4")
