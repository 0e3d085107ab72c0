"""Scripts of clusters and the launches that they start; what bash makes of one command.

A case is a script with its launches in its head:

    # arguments: --tp 8                                 how it is called
    # environment: SLURM_ARRAY_TASK_ID=2                what its user has set
    # sbatch: SLURM_NNODES=2                            what SLURM sets by its #SBATCH lines
    # status: 3                                         how it ends, 0 if not said, or: timeout
    # order: any                                        the launches are sorted
    # launches: torchrun --nproc-per-node 8 train.py    one line for each launch, or: nothing
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent / "cli"
SCRIPTS = HERE / "cluster_scripts"


@dataclass(frozen=True)
class Case:
    """A script, how it is called, and what its user sees."""

    path: Path
    arguments: list[str]
    environment: dict[str, str]
    of_sbatch: dict[str, str]
    launches: list[str]
    status: int | None
    """None: it does not end."""
    is_ordered: bool

    @property
    def timeout(self) -> float:
        return 60 if self.status is not None else 5


def cases() -> Iterable[Case]:
    """All scripts that say what they launch; others are read by them."""
    for path in sorted(SCRIPTS.glob("*.sh")):
        head: dict[str, list[str]] = {}
        for name, value in re.findall(r"^# (\w+): (.*)$", path.read_text(), re.MULTILINE):
            head.setdefault(name, []).append(value)
        if "launches" in head:
            (status,) = head.get("status", ["0"])
            yield Case(
                path=path,
                arguments=shlex.split(*head.get("arguments", [""])),
                environment=_assignments(*head.get("environment", [""])),
                of_sbatch=_assignments(*head.get("sbatch", [""])),
                launches=[line for line in head["launches"] if line != "nothing"],
                status=None if status == "timeout" else int(status),
                is_ordered="order" not in head,
            )


def _assignments(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(text))


def short_scripts() -> Iterable[tuple[str, list[str]]]:
    """Texts of short_scripts.txt; behind --> the launches of each, and a status other than 0."""
    for block in (HERE / "short_scripts.txt").read_text().rstrip("\n").split("\n===\n"):
        text, *launches = block.split("\n--> ")
        yield text, launches


def in_words(launches: Iterable[Any], home: Path) -> list[str]:
    """Launches as lines, each with the variables that its launcher reads in front."""
    lines = []
    for launch in launches:
        words = list(launch.words)
        for name, value in sorted(launch.variables.items(), reverse=True):
            if name.startswith(("PET_", "OMPI_")):
                words.insert(0, f"{name}={value}")
        line = shlex.join(words).replace("\n", "\\n").replace("\r", "\\r")
        line = line.replace(str(home), "HOME")
        # The folder of a stand-in, which `python $(which torchrun)` has in its words.
        lines.append(re.sub(r"/\S*/hypergrid-\w+/", "", line))
    return lines


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
