"""A command that starts a job: which programs, which script, which sizes. No torch.

Every flag of each program is read, listed as without effect, or named as not read; what may hold
sizes and is not read is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from compat.cli.line import ASSIGNMENT, Command
from compat.cli.reader import OF_SCRIPT, RANKS_BESIDE, Option, Reader, options_of
from compat.cli.world import LAUNCHERS, options_of_variables, read_programs
from compat.planned.flags import Flag, flags_of
from compat.planned.job import Job, JobError, settings_of

SHELLS = ("bash", "sh")
_PROGRAMS = flags_of("programs")


@dataclass
class Launch:
    """A command, taken apart: programs that start each other, the last of them a script."""

    programs: list[tuple[str, list[Option]]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)  # that env sets
    script: str | None = None  # "": the line has only flags
    words: Sequence[str] = ()  # of the script
    unknown: str = ""  # a program that is not known

    @property
    def has_launcher(self) -> bool:
        """Whether a program starts the script on a number of ranks."""
        return any(name in LAUNCHERS for name, _ in self.programs)


def taken_apart(words: Sequence[str]) -> Launch:
    """The programs of a command, in their order, and the script with its words."""
    launch = Launch()
    rest = list(words)
    while rest and launch.script is None:
        word = rest[0]
        if word.startswith("-"):
            # A line that begins with a flag has sizes and no script.
            launch.script = ""
            launch.words = rest
        elif word.endswith(".py"):
            launch.script = word
            launch.words = rest[1:]
        elif program_of(word) is None:
            launch.unknown = word
            break
        else:
            rest = behind(launch, rest)
    if ":" in words and launch.has_launcher:
        raise JobError(
            "the command has another part of the job behind a colon. Give the sizes instead of "
            "the command: --world-size 64 --tp 4."
        )
    for word in words:
        # Pasted from a web page a dash may be an en dash.
        if launch.programs and re.match("[\u2010-\u2015\u2212]", word):
            raise JobError(f"{word} begins with a dash of another kind than -. Write it with -.")
    return launch


def program_of(word: str) -> Flag | None:
    """The row of a program; its values are the words that it takes before another program."""
    return _PROGRAMS.get(word.rpartition("/")[2])


def behind(launch: Launch, words: Sequence[str]) -> list[str]:
    """The words behind those of the first program; none behind the script that it starts."""
    program = _PROGRAMS[words[0].rpartition("/")[2]]
    name = program.meaning
    if program.kind == "container":
        launch.programs.append((name, []))
        return _in_container(words)
    table = flags_of(name)
    options, rest = options_of(words[1:], table, name)
    while program.kind == "env" and rest and (assignment := ASSIGNMENT.fullmatch(rest[0])):
        launch.variables[assignment[1]] = assignment[2]
        del rest[0]
    more_options, rest = options_of(rest[int(program.values) :], table, name)
    launch.programs.append((name, options + more_options))
    meanings = {option.row.meaning for option in options}
    # python -c CODE starts no script.
    if "code" in meanings or program.kind == "nothing":
        return []
    # torchrun train.py, python -m training; torchrun --no-python hypergrid-launch train.py
    is_script = program.kind == "script" and "program" not in meanings
    if "module" in meanings:
        is_script = True
    if is_script and rest and rest[0] not in _PROGRAMS:
        launch.script = rest[0]
        launch.words = rest[1:]
    return rest


def _in_container(words: Sequence[str]) -> list[str]:
    """The command in a container: ``apptainer exec --nv image.sif torchrun train.py``.

    It begins with the first word that names a known program or a script and is no flag's value.
    Variables of launchers that the container is given are refused.
    """
    for place in range(2, len(words)):
        before = words[place - 1]
        word = words[place]
        may_be_value = before.startswith("-") and "=" not in before
        is_shell = word.rpartition("/")[2] in SHELLS
        is_command = is_shell or program_of(word) is not None or word.endswith(".py")
        if re.search(r"\b(PET|HYPERGRID)_", word) is not None:
            raise JobError(f"{before} {word} is not read. {RANKS_BESIDE}")
        if is_command and not may_be_value:
            return list(words[place:])
    return []


def job_of(command: Command, **flags: Any) -> Job:
    """The job that a command starts: with its launchers' flags, and Megatron's.

    ``flags`` win over the command's, and are named with ``_`` for ``-``: ``tp=4``. JobError if the
    words do not decide it.
    """
    launch = taken_apart(command.words)
    if launch.unknown:
        raise JobError(
            f"{launch.unknown} is not known, nor how often it starts the rest of its words. Give "
            f"the words that it starts, or a script of bash behind --run."
        )
    if launch.script is None:
        raise JobError(
            "the command starts no Python program. Give the one with torchrun or srun, or a script "
            "of bash behind --run."
        )
    variables = {**command.variables, **launch.variables}
    reader = Reader(settings_of(flags))
    for option in options_of_variables("ours", variables):
        reader.read(option, reader.settings)
    read_programs(reader, launch.programs, variables)
    table = dict(OF_SCRIPT)
    if launch.has_launcher:
        # Of the script's own flags none says how many ranks its launcher starts.
        for name in ("world-size", "gpus-per-node", "nvlink-domain"):
            table[name] = Flag("1")
    for option in options_of(launch.words, table)[0]:
        reader.read(option, reader.settings)
    return reader.finish()
