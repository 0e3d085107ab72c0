"""A command that starts a job: which programs, which script, which sizes. No torch.

Every flag of each program is read, listed as without effect, or named as not read; a word whose
text is not known is refused unless it can change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compat.cli.bash import Word
from compat.cli.reader import Option, Reader, options_of
from compat.cli.world import LAUNCHERS, read_programs, set_ranks
from compat.planned.flags import Flag, flags_of
from compat.planned.job import SIZES, Job, JobError, of_settings, settings_of

_PROGRAMS = flags_of("programs")
_OF_SCRIPT = {**flags_of("megatron"), **SIZES}


@dataclass
class Launch:
    """A command, taken apart: programs that start each other, the last of them a script."""

    programs: list[tuple[str, list[Option]]] = field(default_factory=list)
    script: Word | None = None
    words: list[Word] = field(default_factory=list)  # of the script
    unknown: list[Word] = field(default_factory=list)  # a program that is not known, and its words


def taken_apart(words: Sequence[Word]) -> Launch:
    """The programs of a command, in their order, and the script with its words."""
    launch = Launch()
    rest = list(words)
    while rest and launch.script is None:
        word = rest[0]
        program = _program(word)
        if word.text.startswith("-"):
            # A line that begins with a flag has sizes and no script.
            launch.script = replace(word, text="")
            launch.words = rest
        elif word.text.endswith(".py"):
            launch.script = word
            launch.words = rest[1:]
        elif program is None:
            launch.unknown = rest
            break
        else:
            rest = _behind(launch, program, rest[1:])
    for word in words:
        # Pasted from a web page a dash may be an en dash; " : " separates programs of mpirun.
        if launch.programs and re.match("[\u2010-\u2015\u2212]|:$", word.text) and not word.holes:
            raise JobError(
                f"{word.text} (line {word.line}) begins with a dash of another kind than -, or "
                f"another part of the job. Write it with -, or give the sizes instead of the line."
            )
    return launch


def _program(word: Word) -> Flag | None:
    """The row of a program; its values are the words that it takes before another program."""
    if word.holes:
        return None
    name = word.text.rpartition("/")[2]
    return _PROGRAMS.get(name)


def _behind(launch: Launch, program: Flag, words: Sequence[Word]) -> list[Word]:
    """The words behind those of a program; none behind the script that it starts."""
    name = program.meaning
    table = flags_of(name)
    options, rest = options_of(words, table, name)
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
    if is_script and rest and rest[0].text not in _PROGRAMS:
        launch.script = rest[0]
        launch.words = rest[1:]
    return rest


def job_of(words: Sequence[Word], variables: Mapping[str, Word] | None = None, **flags: Any) -> Job:
    """The job that a command starts: with its launchers' flags, and Megatron's.

    ``variables`` are those of its environment; ``flags`` override the command's, named with ``_``
    for ``-``: ``tp=4``. JobError, with all that is missing, if the text does not decide it.
    """
    launch = taken_apart(words)
    variables = variables or {}
    reader = Reader(settings_of(flags))
    if launch.unknown and not launch.unknown[0].holes:
        word = launch.unknown[0]
        raise JobError(
            f"{word.text} (line {word.line}) is not known, nor how often it starts the rest of its "
            f"line. Paste what it starts."
        )
    # What the text leaves open is collected, and refused all at once.
    for word in launch.unknown:
        reader.lacks(word)
    if launch.script is not None:
        reader.lacks(launch.script)
    if "HYPERGRID_ORDER" in variables:
        order = variables["HYPERGRID_ORDER"]
        option = Option("HYPERGRID_ORDER", SIZES["order"], [order], order.line)
        reader.read(option, reader.settings)
    launchers = read_programs(reader, launch.programs, variables)
    for option in options_of(launch.words, _OF_SCRIPT)[0]:
        reader.read(option, reader.settings)
    reader.finish()
    if launchers:
        set_ranks(reader.settings, launchers)
    job = of_settings(reader.settings)
    return replace(job, assumed=(*reader.assumed, *job.assumed), flags=reader.flags)


def rank_of(words: Sequence[Word]) -> int:
    """How much of a job a command is: 2 is one with a launcher, 1 one without, 0 none."""
    launch = taken_apart(words)
    if not launch.unknown:
        if launch.script is None:
            return 0
        has_launcher = any(name in LAUNCHERS for name, _ in launch.programs)
        return 1 + has_launcher
    # A program that is not known may start the launchers behind it any number of times.
    for word in launch.unknown:
        program = _program(word)
        if program is not None and program.meaning in LAUNCHERS:
            return 2
    # $LAUNCHER train.py
    if launch.unknown[0].holes:
        return 2
    return 0


def script_of(words: Sequence[Word]) -> tuple[str, list[str]]:
    """The script or module that a command starts, "" if it has none, and the words after it.

    JobError if the text leaves one of these words open.
    """
    launch = taken_apart(words)
    reader = Reader({})
    script = ""
    if launch.script is not None:
        reader.lacks(launch.script)
        script = launch.script.text
    for word in launch.words:
        reader.lacks(word)
    reader.finish()
    return script, [word.text for word in launch.words]
