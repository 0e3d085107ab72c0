"""Runs a launch script with bash, without its launchers: stand-ins record what would start.

A stand-in comes before the launcher of its name on PATH, and is put there again before each command
of bash, since scripts put folders in front of PATH. srun, containers and ssh start their inner
command here, so that bash expands what is in there too. A launcher that is called by its path is
the real one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from compat.cli.launch import SHELLS, Launch, behind, taken_apart
from compat.cli.line import Command
from compat.cli.world import LAUNCHERS, OF_FIRST_TASK, head_of, variables_of_step
from compat.planned.flags import flags_of
from compat.planned.job import PARALLEL, SIZES, JobError
from hypergrid.files import replace

_FOLDER = "HG_STAND_INS"  # variable: where the stand-ins are
_BASH = shutil.which("bash") or "/bin/bash"
_OUTER = "HG_STARTED_BY"  # variable: the words of srun or mpirun that started this process
# Programs that a laptop has, and that change nothing before they start the next one.
_REAL = ("nohup", "exec", "timeout", "nice", "taskset", "setsid")
_STAND_IN = "import sys; sys.path.insert(0, {root!r}); from compat.cli.run import main; main()"
_STARTS_NOTHING = {"--help", "-h", "--version", "config", "env"}  # behind a launcher
# What runs in place of commands of a cluster that start no job, by their names.
_TEXTS = {
    # They would submit, change or end jobs.
    **dict.fromkeys(
        ("sbatch", "salloc", "scancel", "qsub", "bsub"),
        """#!/bin/sh
echo "hypergrid: ${0##*/} is not run; a script that it would submit goes behind --run" >&2
""",
    ),
    # What scripts ask of a cluster: hosts, and modules where these are no function.
    "scontrol": """#!/bin/sh
[ "$2" = hostnames ] || { echo "hypergrid: scontrol $1 is not run" >&2; exit 1; }
host=0
while [ "$host" -lt "${SLURM_NNODES:-1}" ]; do echo "host$host"; host=$((host + 1)); done
""",
    "module": "#!/bin/sh\n",
}
# Bash reads this before a script: functions and subshells have the trap too.
_START_UP = f"""set -o functrace
trap 'case $PATH in "${_FOLDER}":*) ;; *) PATH=${_FOLDER}:$PATH ;; esac' DEBUG
"""
# In a container or on another host there may be any folder and any program.
_ELSEWHERE = {
    "BASH_FUNC_cd%%": '() { builtin cd "$@" 2> /dev/null || :\n}',
    "BASH_FUNC_command_not_found_handle%%": "() { :\n}",
}
_CLEAN = {"-e", "--cleanenv", "-c", "--contain", "-C", "--containall"}  # flags of apptainer
# Variables of each SLURM job that change no group, for scripts that end without them.
_OF_EACH_JOB = {
    **OF_FIRST_TASK,
    "SLURM_JOB_ID": "1",
    "SLURM_JOBID": "1",
    "SLURM_JOB_NODELIST": "localhost",
    "SLURM_NODELIST": "localhost",
}
_LAST_SECONDS = 2  # for processes that a script has left in the background


@dataclass(frozen=True)
class Recording:
    """The launches of a script in their order, and how it ended; None if it had to be stopped."""

    launches: Sequence[Command]
    status: int | None


def launches(
    script: Path, arguments: Sequence[str], timeout: float, directory: Path | None = None
) -> Recording:
    """Run a script for at most ``timeout`` seconds, in its folder or in ``directory``.

    All its commands run, but those that would start or submit a job; its output goes to the
    standard error. Variables that SLURM sets for the script's ``#SBATCH`` lines are set where the
    environment has none.
    """
    script = script.resolve()
    text = script.read_text("utf-8", "surrogateescape")
    of_slurm = head_of(text)
    if "\n#SBATCH" in text:
        of_slurm |= _OF_EACH_JOB
        of_slurm["SLURM_SUBMIT_DIR"] = str(script.parent)
    with tempfile.TemporaryDirectory(prefix="hypergrid-") as name:
        folder = Path(name)
        environment = {**of_slurm, **os.environ, **_stand_ins(folder)}
        words = ["bash", str(script), *arguments]
        status = _run(words, directory or script.parent, environment, timeout)
        recorded = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    commands = [Command(launch["words"], launch["variables"]) for launch in recorded]
    return Recording(commands, status)


def _stand_ins(folder: Path) -> dict[str, str]:
    """Write the stand-ins into a folder; the variables with which bash finds them first."""
    code = _STAND_IN.format(root=str(Path(__file__).parents[2]))
    texts = dict(_TEXTS)
    # Another shell would not put the folder first again, and would lose functions.
    for shell in SHELLS:
        texts[shell] = f'#!{_BASH}\nexec {_BASH} "$@"\n'
    for program in flags_of("programs"):
        if program not in _REAL:
            words = shlex.join([sys.executable, "-I", "-c", code, program])
            # Also for a program that starts without our variables, as env -i starts it.
            assignment = f"{_FOLDER}={shlex.quote(str(folder))}"
            texts[program] = f'#!/bin/sh\n{assignment} exec {words} "$@"\n'
    for program, text in texts.items():
        path = folder / program
        path.write_text(text)
        path.chmod(0o755)
    start_up = folder / "start_up"
    start_up_of_user = shlex.quote(os.environ.get("BASH_ENV", os.devnull))
    start_up.write_text(f". {start_up_of_user}\n{_START_UP}")
    return {
        _FOLDER: str(folder),
        "PATH": f"{folder}:{os.environ.get('PATH', os.defpath)}",
        "BASH_ENV": str(start_up),
    }


def _run(
    words: Sequence[str], directory: Path, environment: dict[str, str], timeout: float
) -> int | None:
    """The status of a process; None if it did not end. What it leaves in its group is ended."""
    process = subprocess.Popen(
        words,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=2,  # the answer alone goes to the standard output
        start_new_session=True,
    )
    status: int | None = None
    try:
        status = process.wait(timeout)
        # A launch in the background may not be recorded yet.
        end = time.monotonic() + _LAST_SECONDS
        while time.monotonic() < end:
            os.killpg(process.pid, 0)
            time.sleep(0.02)
    except (subprocess.TimeoutExpired, ProcessLookupError):
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status


def main() -> None:
    """Stand in for a program: record the job that it would start, or start its inner command."""
    words = sys.argv[1:]
    outer = json.loads(os.environ.get(_OUTER, "[]"))
    try:
        if not _starts_a_job(words, bool(outer)):
            _start_next(words, outer)
            return
    except JobError:
        pass  # the reader refuses these words, by name
    _record([*outer, *words])


def _starts_a_job(words: Sequence[str], has_outer: bool) -> bool:
    program = flags_of("programs")[words[0]]
    if program.kind == "script":
        # accelerate config, torchrun --help
        return _STARTS_NOTHING.isdisjoint(words[1:2])
    if program.meaning != "python":
        return False
    launch = taken_apart(words)
    if launch.script is None:
        return False
    return has_outer or len(launch.programs) > 1 or any(map(_is_size, launch.words))


def _is_size(word: str) -> bool:
    """Whether a word of a script holds a size: ``--tp``, ``model.tensor_model_parallel_size=4``."""
    written, equals, _ = word.partition("=")
    if not equals and not word.startswith("-"):
        return False
    name = written.rpartition(".")[2].lstrip("-")
    row = SIZES.get(name.replace("_", "-"))
    return row is not None and row.meaning in PARALLEL


def _record(words: Sequence[str]) -> None:
    folder = Path(os.environ[_FOLDER])
    launch = {"words": list(words), "variables": dict(os.environ)}
    record = folder / f"{time.time_ns():020}-{os.getpid()}.json"
    replace(record, json.dumps(launch).encode())


def _start_next(words: Sequence[str], outer: Sequence[str]) -> None:
    """Start the command that srun, a container or ssh would start, once and here.

    Python is the real one.
    """
    folder = os.environ[_FOLDER]
    if words[0].startswith("python"):
        folders = os.environ.get("PATH", os.defpath).split(":")
        path = ":".join(other for other in folders if other != folder)
        _execute(words, os.environ, path)
        return
    launch = Launch()
    rest = behind(launch, words)
    if not rest:
        return
    name, options = launch.programs[0]
    own_words = words[: len(words) - len(rest)]
    variables = dict(os.environ)
    if name in LAUNCHERS:
        variables[_OUTER] = json.dumps([*outer, *own_words])
    if name == "srun":
        variables = variables_of_step(options, variables)
    if name == "ssh":
        rest = ["bash", "-c", " ".join(rest)]
    has_container = any(option.flag == "--container-image" for option in options)
    if name in ("container", "ssh") or has_container:
        variables = _variables_elsewhere(own_words, variables)
    # Of srun's commands the stand-in runs, also of one that is called by its path.
    stand_in = Path(folder, Path(rest[0]).name)
    if stand_in.is_file():
        rest[0] = str(stand_in)
    _execute(rest, variables, variables["PATH"])


def _variables_elsewhere(words: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that a command sees in a container or behind ssh.

    No programs but stand-ins and shells run there, the others as if they succeeded.
    """
    is_apptainer = words[0] in ("apptainer", "singularity")
    is_clean = words[0] in ("docker", "podman", "ssh")
    if is_apptainer:
        is_clean = not _CLEAN.isdisjoint(words)
    visible = dict(variables)
    if is_clean:
        kept = (_FOLDER, _OUTER, "BASH_ENV", "HOME")
        visible = {name: variables[name] for name in kept if name in variables}
    # docker -e NAME=value, -e NAME; apptainer --env NAME=value,NAME=value. Values of other flags
    # that look like these, as of --ulimit memlock=-1, are variables that nobody reads.
    for word in words:
        if word.startswith("--env-file"):
            raise JobError(f"{word} is not read")
        for part in word.split(",") if is_apptainer else [word]:
            name, equals, value = re.sub("^(--env=|-e=?)", "", part).partition("=")
            if name and equals:
                visible[name] = value
            elif name in variables:
                visible[name] = variables[name]
    return {**visible, **_ELSEWHERE, "PATH": variables[_FOLDER]}


def _execute(words: Sequence[str], variables: Mapping[str, str], path: str) -> None:
    """Become a program of that path; without it, end as a shell that does not find it."""
    program = shutil.which(words[0], path=path)
    if program is not None:
        os.execve(program, list(words), dict(variables))
    # In a container it may be there: no folder but that of the stand-ins is on its path.
    if path not in ("", variables[_FOLDER]):
        print(f"{words[0]}: command not found", file=sys.stderr)
        sys.exit(127)
