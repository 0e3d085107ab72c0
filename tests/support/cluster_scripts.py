"""What bash starts: scripts of clusters run by bash, with printing programs in place of launchers.

An oracle for `hypergrid check --run`: it imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent.parent / "cli"
SCRIPTS = HERE / "cluster_scripts"

# In place of a program. It appends the number of words, the words, and the variables that a
# launcher may read; a file of its own first, as launches in the background may write at once.
STAND_IN = r"""#!/bin/sh
started() {
    {
        printf '%s\0' "$(($# + 1))" "${0##*/}" "$@"
        /usr/bin/env -0
        printf '\n\0'
    } > RECORD.$$
    /bin/cat RECORD.$$ >> RECORD
    exit 0
}
RULE
[ -n "REAL" ] || { echo "${0##*/}: command not found" >&2; exit 127; }
exec "REAL" "$@"
"""
ALWAYS = 'started "$@"'
# A script with sizes, or a launcher that is a module.
TRAINS = (
    '*" -m torch.distributed."* | *" -m accelerate"* | *parallel[-_]size* '
    '| *" --world-size"* | *torchrun* | *deepspeed*'
)
AS_PYTHON = (
    'case " $1 $2 " in *" -c "* | " - "* | "  ") exec "REAL" "$@" ;; esac\n'
    f'case " $* " in {TRAINS}) started "$@" ;; esac'
)
IN_FRONT = (
    f'case " $* " in *srun* | *mpirun* | *"accelerate launch"* | {TRAINS}) started "$@" ;; esac'
)
AS_MODULE = "exit 0"  # as on a cluster
AS_CONTAINER = 'case $1 in exec | run) started "$@" ;; esac'
RULES = {
    **dict.fromkeys(("torchrun", "srun", "mpirun", "accelerate", "deepspeed", "ibrun"), ALWAYS),
    "ssh": ALWAYS,
    **dict.fromkeys(("python", "python3"), AS_PYTHON),
    **dict.fromkeys(("env", "numactl"), IN_FRONT),
    **dict.fromkeys(("apptainer", "singularity", "docker", "enroot"), AS_CONTAINER),
    "module": AS_MODULE,
    "scontrol": "seq -f host%g 0 $((SLURM_NNODES - 1)); exit 0",
}


@dataclass(frozen=True)
class Case:
    """A script, and what its head says: how it is called, and what its user sees."""

    path: Path
    arguments: list[str]
    environment: dict[str, str]
    of_sbatch: dict[str, str]
    """What SLURM sets for the batch script by its #SBATCH lines, as sbatch's manual has it."""
    launches: int
    status: int | None
    """None: it does not end."""
    is_ordered: bool
    words: list[str]
    """Of its only launch, where bash reads the command on the standard input."""
    has_own_path: bool
    """It puts launchers of its own before all others on PATH."""

    @property
    def timeout(self) -> float:
        return 60 if self.status is not None else 5


@dataclass(frozen=True)
class Launch:
    words: list[str]
    variables: dict[str, str]
    """Those that a launcher may read."""


def cases() -> list[Case]:
    """All scripts that say how many launches their user expects; others are read by them."""
    found = [_case(path) for path in sorted(SCRIPTS.glob("*.sh"))]
    return [case for case in found if case is not None]


def _case(path: Path) -> Case | None:
    head = dict(re.findall(r"^# (\w+): (.*)$", path.read_text(), re.MULTILINE))
    if "launches" not in head:
        return None
    status = head.get("status", "0")
    return Case(
        path=path,
        arguments=shlex.split(head.get("arguments", "")),
        environment=_assignments(head.get("environment", "")),
        of_sbatch=_assignments(head.get("sbatch", "")),
        launches=int(head["launches"].split()[0]),
        status=None if status == "timeout" else int(status),
        is_ordered="any order" not in head["launches"],
        words=shlex.split(head.get("words", "")),
        has_own_path="path" in head,
    )


def _assignments(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(text))


def run(
    script: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    timeout: float,
    workplace: Path,
) -> tuple[list[Launch], int | None]:
    """The launches that ``script`` starts in its own folder, and its status; None: the timeout.

    ``environment`` is all that the script has; ``workplace`` is an empty folder.
    """
    record = workplace / "started"
    record.touch()
    programs = workplace / "programs"
    programs.mkdir()
    for name, rule in RULES.items():
        real = shutil.which(name, path=environment["PATH"]) or ""
        text = STAND_IN.replace("RULE", rule)
        text = text.replace("RECORD", str(record)).replace("REAL", real)
        # Also in place of launchers beside the script, which it may put first on PATH.
        for place in [programs / name, *script.parent.glob(f"*/bin/{name}")]:
            place.write_text(text)
            place.chmod(0o755)

    # No pipes: what the script leaves in the background would hold them open.
    started = subprocess.Popen(
        ["bash", "--norc", str(script), *arguments],
        cwd=script.parent,
        env={**environment, "PATH": f"{programs}:{environment['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    status: int | None
    try:
        status = started.wait(timeout)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    launches = []
    for launch in _launches(record.read_bytes().decode(errors="surrogateescape")):
        if script.name == INNER:
            launches.append(launch)
        else:
            launches += _inside(launch, script, workplace)
    return launches, status


INNER = "of_a_launcher.sh"
STARTERS = ("srun", "mpirun", "ibrun")  # they start the rest of their words on several ranks
LAUNCHERS = ("torchrun", "python", "python3", "accelerate", "deepspeed")
IN_BETWEEN = ("apptainer", "singularity", "docker", "enroot", "numactl", "env", "ssh", "bash", "sh")


def _inside(launch: Launch, script: Path, workplace: Path) -> list[Launch]:
    """What bash starts of a launch whose words are a text or a script for a shell."""
    text = _text_for_a_shell(as_called(launch.words))
    if not text:
        return [launch]
    place = workplace / f"inner_{len(list(workplace.iterdir()))}"
    place.mkdir()
    inner = script.with_name(INNER)
    # A folder of the container or of another host is taken to be there.
    inner.write_text(f'cd() {{ builtin cd "$@" 2> /dev/null || :; }}\n{text}\n')
    variables = {**launch.variables, "HOME": str(workplace)}
    variables["PATH"] = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    for name in ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"):
        variables[name] = "0"
    started, _ = run(inner, [], variables, 20, place)
    inner.unlink()
    outer = _before_a_program(as_called(launch.words))
    return [Launch([*outer, *job.words], job.variables) for job in started]


def _text_for_a_shell(words: Sequence[str]) -> str:
    """What a shell is to run behind srun, in a container or on a host of ssh; "" if none is."""
    if words[0] == "ssh":
        # The words behind the host, which its shell joins.
        values = [place + 1 for place, word in enumerate(words) if word in ("-o", "-p", "-i", "-l")]
        for place, word in enumerate(words[1:], 1):
            if not word.startswith("-") and place not in values:
                return " ".join(words[place + 1 :])
    for place, word in enumerate(words[1:], 1):
        name = word.rpartition("/")[2]
        rest = words[place + 1 :]
        if name in ("bash", "sh") and rest:
            behind = [part for part in rest if not part.startswith("-") and part != "pipefail"]
            if any(re.fullmatch(r"-\w*c", part) for part in rest):
                return behind[0]
            return " ".join(map(shlex.quote, ["source", *behind]))
        if name.endswith(".sh"):
            return " ".join(map(shlex.quote, ["source", *words[place:]]))
        if name in LAUNCHERS:
            return ""
    return ""


def _before_a_program(words: Sequence[str]) -> list[str]:
    """The words of srun and its kind, up to the next program; none of a container."""
    if words[0] not in STARTERS:
        return []
    for place, word in enumerate(words[1:], 1):
        name = word.rpartition("/")[2]
        if name in (*LAUNCHERS, *IN_BETWEEN) or name.endswith((".sh", ".py")):
            return list(words[:place])
    return list(words)


def essential(words: Sequence[str]) -> list[str]:
    """The words from the launcher of ranks on, behind those of the program that starts it."""
    words = as_called(words)
    for place, word in enumerate(words):
        if word.rpartition("/")[2] in LAUNCHERS:
            return [*_before_a_program(words), *words[place:]] if place else words
    return words


def _launches(text: str) -> list[Launch]:
    fields = iter(text.split("\0")[:-1])
    launches = []
    for count in fields:
        words = [next(fields) for _ in range(int(count))]
        variables = {}
        while (field := next(fields)) != "\n":
            name, _, value = field.partition("=")
            variables[name] = value
        launches.append(Launch(words, variables))
    return launches


A_JOB = re.compile(
    r"\.(py|sh)\b|(^|[\s/])(-m|torchrun|accelerate|deepspeed|bash|sh|python3?)(\s|$)"
)


def is_job(words: Sequence[str]) -> bool:
    """Whether a launcher was asked for a program of the user, not for `hostname` and its kind."""
    return A_JOB.search(" ".join(words[1:])) is not None or words[0] in ("torchrun", "accelerate")


def as_called(words: Sequence[str]) -> list[str]:
    """The words without the folder of a launcher: `python $(which torchrun)` has a stand-in's."""
    called = []
    for word in words:
        name = word.rpartition("/")[2]
        called.append(name if word.startswith("/") and name in RULES else word)
    return called


def single_commands() -> dict[str, list[str]]:
    """The commands of single_commands.txt by section; a backslash at a line's end continues one."""
    sections: dict[str, list[str]] = {}
    pending = ""
    for line in (HERE / "single_commands.txt").read_text().splitlines():
        if line.startswith("## "):
            commands = sections.setdefault(line[3:], [])
            continue
        pending += line
        backslashes = len(pending) - len(pending.rstrip("\\"))
        if backslashes % 2:
            pending += "\n"
        else:
            commands.append(pending)
            pending = ""
    return sections


def short_scripts() -> list[str]:
    return (HERE / "short_scripts.txt").read_text().rstrip("\n").split("\n===\n")


# All words of a line, in a bash that finds no program: each is printed, with what is exported.
NO_PROGRAM = r"""
command_not_found_handle() {
    printf '%s\0' "$#" "$@"
    for name in $(compgen -e); do printf '%s=%s\0' "$name" "${!name}"; done
    exit 0
}
"""
OF_BASH = {"PATH", "PWD", "SHLVL", "_", "OLDPWD", "LANG"}


def words_of_line(line: str) -> tuple[dict[str, str], list[str]]:
    """What bash makes of one line: the variables in front of the command, and its words."""
    printed = _bash(NO_PROGRAM + line)
    if printed:
        count, *fields = printed
        words = fields[: int(count)]
        pairs = [field.split("=", 1) for field in fields[int(count) :]]
        return {name: value for name, value in pairs if name not in OF_BASH}, words
    # A command with a folder is looked for as a file, and no handler is called.
    return {}, _bash("printf '%s\\0' " + line)


def _bash(text: str) -> list[str]:
    done = subprocess.run(
        ["/bin/bash", "--norc", "-c", text],
        env={"PATH": "/nonexistent", "LANG": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    return done.stdout.decode(errors="surrogateescape").split("\0")[:-1]
