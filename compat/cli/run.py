"""Runs a launch script with bash, without its launchers: stand-ins record what would start.

A stand-in comes before the launcher of its name on PATH, and before that as a function of bash,
since scripts put folders in front of PATH: before each command of bash it is first again. srun,
containers and ssh start their inner command here, so that bash expands what is in there too. A
launcher that is called by its path is the real one.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from compat.cli.launch import SHELLS, Launch, behind, program_of, taken_apart
from compat.cli.line import ASSIGNMENT, Command
from compat.cli.reader import OF_SCRIPT, options_of
from compat.cli.world import LAUNCHERS, head_of, variables_of_step
from compat.planned.flags import flags_of
from compat.planned.job import PARALLEL, JobError

_FOLDER = "HG_STAND_INS"  # variable: where the stand-ins are
_OUTER = "HG_STARTED_BY"  # variable: the words of srun or mpirun that started this process
# Programs that a laptop has, and that change nothing before they start the next one.
_REAL = ("nohup", "exec", "timeout", "nice", "taskset", "setsid", "which", "env")
# They would submit, change or end jobs.
_NOT_RUN = ("sbatch", "salloc", "scancel", "qsub", "bsub")
_NAMED = """#!/bin/sh
echo "hypergrid: ${0##*/} is not run; a script that it would submit goes behind --run" >&2
"""
# Scripts put folders in front of PATH, and start launchers by timeout, nohup and exec.
_FIRST_ON_PATH = f"""trap 'case $PATH in "${_FOLDER}":*) ;; *) PATH=${_FOLDER}:$PATH ;; esac' DEBUG
"""
# What scripts ask a cluster, answered where the machine is none.
_LAST_ON_PATH = {
    "module": "#!/bin/sh\n",
    "scontrol": """#!/bin/sh
[ "$2" = hostnames ] || exit 1
host=0
while [ "$host" -lt "${SLURM_NNODES:-1}" ]; do echo "host$host"; host=$((host + 1)); done
""",
}
_OF_SCONTROL = "BASH_FUNC_scontrol%%"
_SCONTROL = """() { [ "$1" = show ] || { echo "hypergrid: scontrol $1 is not run" >&2; return; }
command scontrol "$@"
}"""
# Variables of each SLURM job that change no group, for scripts that end without them.
_OF_EACH_JOB = {
    **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), "1"),
    **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), "0"),
    **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), "localhost"),
}
_LAST_SECONDS = 2  # for processes that a script has left in the background
_STAND_IN = "import sys; sys.path.insert(0, {root!r}); from compat.cli.run import main; main()"


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
    text = script.read_text("utf-8", "surrogateescape")
    of_slurm = head_of(text)
    if "\n#SBATCH" in text:
        of_slurm |= _OF_EACH_JOB
        of_slurm["SLURM_SUBMIT_DIR"] = str(script.resolve().parent)
    with tempfile.TemporaryDirectory(prefix="hypergrid-") as name:
        folder = Path(name)
        environment = {**of_slurm, **os.environ, **_stand_ins(folder)}
        words = ["bash", str(script.resolve()), *arguments]
        try:
            status = _run(words, directory or script.resolve().parent, environment, timeout)
        finally:
            _end_processes(folder)
        recorded = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    commands = [Command(launch["words"], launch["variables"]) for launch in recorded]
    return Recording(commands, status)


def _stand_ins(folder: Path) -> dict[str, str]:
    """Write the stand-ins into a folder; the variables with which bash finds them first."""
    code = _STAND_IN.format(root=str(Path(__file__).parents[2]))
    texts = dict.fromkeys(_NOT_RUN, _NAMED)
    # Another shell would not look here first.
    texts["sh"] = f'#!/bin/sh\nexec {shutil.which("bash")} "$@"\n'
    for program in flags_of("programs"):
        is_other_python = program.startswith("python3.")
        is_module = "." in program and not is_other_python
        is_missing = is_other_python and shutil.which(program) is None
        if not (is_module or is_missing or program in _REAL):
            words = shlex.join([sys.executable, "-I", "-c", code, program])
            # Also for a program that starts without our variables, as env -i starts it.
            texts[program] = f'#!/bin/sh\n{_FOLDER}={shlex.quote(str(folder))} exec {words} "$@"\n'
    last = folder / "last"
    last.mkdir()
    for program, text in _LAST_ON_PATH.items():
        (last / program).write_text(text)
        (last / program).chmod(0o755)
    variables = {_FOLDER: str(folder)}
    variables[_OF_SCONTROL] = os.environ.get(_OF_SCONTROL, _SCONTROL)
    variables["PATH"] = f"{folder}:{os.environ.get('PATH', os.defpath)}:{last}"
    for program, text in texts.items():
        path = folder / program
        path.write_text(text)
        path.chmod(0o755)
        variables[f"BASH_FUNC_{program}%%"] = f'() {{ "${_FOLDER}/{program}" "$@"\n}}'
    for program in _REAL:
        if program != "exec":
            found_first = f'PATH=${_FOLDER}:$PATH command {program} "$@"'
            variables[f"BASH_FUNC_{program}%%"] = f"() {{ {found_first}\n}}"
    # Bash reads this file first, and the user's own one.
    start_up = folder / "start_up"
    start_up.write_text(_FIRST_ON_PATH)
    if "BASH_ENV" in os.environ:
        start_up.write_text(f". {shlex.quote(os.environ['BASH_ENV'])}\n{_FIRST_ON_PATH}")
    variables["BASH_ENV"] = str(start_up)
    return variables


def _run(
    words: Sequence[str], directory: Path, environment: dict[str, str], timeout: float
) -> int | None:
    """The status of a process, of which nothing is left behind; None if it did not end."""
    end = time.monotonic() + timeout
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
        end = min(end, time.monotonic() + _LAST_SECONDS)
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


def _end_processes(folder: Path) -> None:
    """End what a script has left in sessions of their own: all that have its variable."""
    variable = f"{_FOLDER}={folder}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if variable in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def main() -> None:
    """Stand in for a program: record the job that it would start, or start its inner command."""
    words = sys.argv[1:]
    outer = json.loads(os.environ.get(_OUTER, "[]"))
    try:
        if _starts_a_job(words, bool(outer)):
            _record([*outer, *words])
        elif words[0].startswith("python"):
            _execute(words, dict(os.environ), _path_without_stand_ins())
        else:
            _start_inner(words, outer)
    except JobError:
        # A flag that is not known: the reader refuses these words by name.
        _record([*outer, *words])


def _starts_a_job(words: Sequence[str], has_outer: bool) -> bool:
    program = program_of(words[0])
    if program is None or program.kind == "script":
        # accelerate config, torchrun --help
        return program is None or not {"--help", "-h", "--version", "config", "env"} & {*words[1:2]}
    if program.meaning != "python":
        return False
    launch = taken_apart(words)
    if launch.script is None:
        return False
    if has_outer or len(launch.programs) > 1:
        return True
    for flag, row, values in options_of(launch.words, OF_SCRIPT)[0]:
        override = values[0].partition("=")[0].rpartition(".")[2] if values and not flag else ""
        if row.meaning in PARALLEL or override in PARALLEL:
            return True
    return False


def _record(words: Sequence[str]) -> None:
    variables = {}
    for name, value in os.environ.items():
        if not _is_of_stand_ins(name):
            variables[name] = value
    variables["PATH"] = _path_without_stand_ins()
    folder = Path(os.environ[_FOLDER])
    record = folder / f"{time.time_ns():020}-{os.getpid()}"
    record.write_text(json.dumps({"words": list(words), "variables": variables}))
    record.rename(record.with_suffix(".json"))


def _start_inner(words: Sequence[str], outer: Sequence[str]) -> None:
    """Start the command that srun, a container or ssh would start, once and here."""
    launch = Launch()
    rest = behind(launch, words)
    if not rest:
        return
    # srun -n 2 a : -n 3 b
    if rest[0] == ":":
        _record([*outer, *words])
        return
    name, options = launch.programs[0]
    own_words = words[: len(words) - len(rest)]
    # A folder that is not here is one of the container, or of the host.
    variables = {**os.environ, "BASH_FUNC_cd%%": '() { builtin cd "$@" 2> /dev/null || :\n}'}
    if name in LAUNCHERS:
        variables[_OUTER] = json.dumps([*outer, *own_words])
    if name == "srun":
        variables = variables_of_step(options, variables)
    if words[0] == "ssh":
        rest = ["bash", "-c", " ".join(rest)]
    has_container = any(option.flag == "--container-image" for option in options)
    if name in ("container", "ssh") or has_container:
        variables = _variables_elsewhere(own_words, variables)
    _execute(rest, variables, variables["PATH"])


def _is_of_stand_ins(name: str) -> bool:
    """Whether a variable is one that stand-ins need."""
    return name in (_FOLDER, _OUTER, "BASH_ENV") or name.startswith("BASH_FUNC_")


def _variables_elsewhere(words: Sequence[str], variables: dict[str, str]) -> dict[str, str]:
    """The variables that a command sees in a container or behind ssh: its flags', perhaps ours."""
    is_clean = words[0] in ("docker", "podman", "ssh")
    takes_lists = words[0] in ("apptainer", "singularity")
    if takes_lists:
        is_clean = bool({"-e", "--cleanenv", "-c", "--contain", "-C", "--containall"} & {*words})
    visible = {}
    for name, value in variables.items():
        if not is_clean or _is_of_stand_ins(name) or name == "HOME":
            visible[name] = value
    for place, word in enumerate(words):
        flag, equals, text = word.partition("=")
        if flag == "--env-file":
            raise JobError(f"{word} is not read")
        if flag != "--env" and (flag != "-e" or takes_lists):
            continue
        if not equals and place + 1 < len(words):
            text = words[place + 1]
        # docker -e NAME=value, -e NAME; apptainer --env NAME=value,NAME=value
        for part in text.split(",") if takes_lists else [text]:
            assignment = ASSIGNMENT.fullmatch(part)
            if assignment is not None:
                visible[assignment[1]] = assignment[2]
            elif part in variables:
                visible[part] = variables[part]
    # Its programs are not those of this machine: none but stand-ins run, as if they succeeded.
    visible["PATH"] = os.environ[_FOLDER]
    visible["BASH_FUNC_command_not_found_handle%%"] = "() { :\n}"
    return visible


def _execute(words: Sequence[str], variables: dict[str, str], path: str) -> None:
    """Become a program of ``path``, or the stand-in of its name; a shell is bash."""
    name = words[0].rpartition("/")[2]
    program = shutil.which(words[0], path=path)
    stand_in = Path(variables[_FOLDER]) / name
    if name in SHELLS:
        program = shutil.which("bash") or "/bin/bash"
        words = ["bash", *_without_login(words[1:])]
    elif variables["PATH"] == path and stand_in.exists():
        program = str(stand_in)
    if program is not None:
        os.execve(program, list(words), variables)
    if path != variables[_FOLDER]:
        print(f"{words[0]}: command not found", file=sys.stderr)
        sys.exit(127)


def _without_login(words: Sequence[str]) -> Sequence[str]:
    """The words of a shell that reads no profile, which would set PATH anew: -lc becomes -c."""
    flags = words[0] if words else ""
    if flags == "--login" or not flags.startswith("-") or "l" not in flags:
        return words[int(flags == "--login") :]
    rest = flags.replace("l", "")
    return [*([rest] if rest != "-" else []), *words[1:]]


def _path_without_stand_ins() -> str:
    folders = os.environ.get("PATH", os.defpath).split(":")
    return ":".join(path for path in folders if not path.startswith(os.environ[_FOLDER]))
