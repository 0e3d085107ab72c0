"""A command that starts a job: which programs, which script, which sizes. No torch.

Every flag of each program is read, listed as without effect, or named as not read; what may hold
sizes and is not read is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from compat.cli.line import Command
from compat.cli.reader import OF_SCRIPT, RANKS_BESIDE, Option, Reader, options_of
from compat.cli.world import LAUNCHERS, options_of_variables, read_programs
from compat.planned.flags import Flag, flags_of
from compat.planned.job import Job, JobError, of_settings, settings_of

SHELLS = ("bash", "sh")
# By program how many words it takes before another program.
_PROGRAMS = flags_of("programs")
_NOT_READ = (*SHELLS, "env", "which")  # what they start is for --run
_OF_RANKS = ("world-size", "gpus-per-node", "nvlink-domain")  # flags


@dataclass
class Launch:
    """A command, taken apart: programs that start each other, the last of them a script."""

    programs: list[tuple[str, list[Option]]] = field(default_factory=list)
    script: str | None = None  # "": the line has only flags
    words: Sequence[str] = ()  # of the script
    unknown: str = ""  # a program that is not known


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
        elif word.rpartition("/")[2] not in _PROGRAMS:
            launch.unknown = word
            break
        else:
            rest = behind(launch, rest)
    if ":" in words and any(name in LAUNCHERS for name, _ in launch.programs):
        raise JobError(
            "the command has another part of the job behind a colon. Give the sizes instead of "
            "the command: --world-size 64 --tp 4."
        )
    for word in words:
        # Pasted from a web page a dash may be an en dash.
        if launch.programs and re.match("[\u2010-\u2015\u2212]", word):
            raise JobError(f"{word} begins with a dash of another kind than -. Write it with -.")
    return launch


def behind(launch: Launch, words: Sequence[str]) -> list[str]:
    """The words behind those of the first program; none behind the script that it starts."""
    program = _PROGRAMS[words[0].rpartition("/")[2]]
    name = program.meaning
    if program.kind == "container":
        launch.programs.append((name, []))
        return _in_container(words)
    table = flags_of(name)
    options, rest = options_of(words[1:], table, name)
    more_options, rest = options_of(rest[int(program.values) :], table, name)
    launch.programs.append((name, options + more_options))
    meanings = {option.row.meaning for option in options}
    # python -c CODE starts no script.
    if "code" in meanings:
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
    for place, (before, word) in enumerate(pairwise(words[1:]), 2):
        if re.search(r"\b(PET|HYPERGRID)_", word) is not None:
            raise JobError(f"{before} {word} is not read. {RANKS_BESIDE}")
        name = word.rpartition("/")[2]
        is_command = name in _NOT_READ or name in _PROGRAMS or name.endswith(".py")
        may_be_value = before.startswith("-") and "=" not in before
        if is_command and not may_be_value:
            return list(words[place:])
    return []


def job_of(command: Command, **flags: Any) -> Job:
    """The job that a command starts: with its launchers' flags, and Megatron's.

    ``flags`` win over the command's, and are named with ``_`` for ``-``: ``tp=4``. JobError if the
    words do not decide it.
    """
    launch = taken_apart(command.words)
    if launch.script is None:
        raise JobError(
            f"it is not known which Python program {launch.unknown or 'the command'} starts, nor "
            f"how often. Give the words that it starts, with torchrun or srun, or a script of bash "
            f"behind --run."
        )
    reader = Reader(settings_of(flags))
    for option in options_of_variables("ours", command.variables):
        reader.read(option, reader.settings)
    read_programs(reader, launch.programs, command.variables)
    table = OF_SCRIPT
    if launch.script:
        # Of a script's own flags none says on how many ranks it runs.
        table = {**OF_SCRIPT, **dict.fromkeys(_OF_RANKS, Flag("1"))}
    for option in options_of(launch.words, table)[0]:
        reader.read(option, reader.settings)
    return replace(of_settings(reader.settings), flags=reader.flags)
