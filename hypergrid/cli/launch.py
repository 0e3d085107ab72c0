"""A command that starts a job: which launchers, how many ranks, which sizes. No torch.

Every flag of each program is read, listed as without effect, or named as not read; a word whose
text is not known is refused unless it can change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compat.planned.flags import Flag, flags_of
from compat.planned.job import SIZES, Job, JobError, of_settings, settings_of
from hypergrid.cli.bash import Word
from hypergrid.cli.reader import Option, Reader
from hypergrid.cli.world import Options, ranks_of

_PROGRAMS = {
    **{name: name for name in ("torchrun", "srun", "mpirun", "deepspeed", "accelerate")},
    **dict.fromkeys(("torch.distributed.run", "torch.distributed.launch"), "torchrun"),
    "mpiexec": "mpirun",
    "compat.launch": "ours",
    "hypergrid-launch": "ours",
}
_OF_SCRIPT = {**flags_of("megatron"), **SIZES}


@dataclass
class Launch:
    """A command, taken apart."""

    launchers: list[tuple[str, list[Option]]] = field(default_factory=list)
    script: str = ""
    words: list[Word] = field(default_factory=list)  # of the script
    is_job: bool = False
    unknown: list[Word] = field(
        default_factory=list
    )  # programs and wrappers of which nothing is known
    environment: dict[str, Word] = field(default_factory=dict)


def taken_apart(words: Sequence[Word]) -> Launch:
    """The launchers of a command, in their order, and the script with its words."""
    launch = Launch()
    for word in words:
        if word.text[:1] in "\u2010\u2011\u2012\u2013\u2014\u2212" and word.text:
            raise JobError(
                f"{word.text} (line {word.line}) begins with a dash of another kind than -, as "
                f"some editors write it. Write it with - or --."
            )
    rest = list(words)
    while rest:
        word = rest[0]
        if word.text == ":" and launch.launchers:
            raise JobError(
                f"line {word.line} of the launch line starts a job of several parts, whose hosts "
                f"differ. Give --world-size and --gpus-per-node instead of the line."
            )
        name = word.text.rpartition("/")[2]
        program = "python" if re.fullmatch(r"python[\d.]*", name) else _PROGRAMS.get(name, "")
        if word.text.startswith("-") or name.endswith(".py"):
            launch.is_job = True
            launch.script = "" if word.text.startswith("-") else word.text
            launch.words = rest[1:] if launch.script else rest
            break
        if f"{name}/" in flags_of("wrappers"):
            rest = _behind_wrapper(launch, name, rest[1:])
        elif program:
            rest = _behind_launcher(launch, program, rest[1:])
        else:
            launch.unknown = rest
            # A program that is not known, and starts a launcher, may do it any number of times.
            texts = [word.text.rpartition("/")[2] for word in rest]
            launch.is_job = bool(word.holes) or any(text in _PROGRAMS for text in texts[1:])
            break
    return launch


def _behind_wrapper(launch: Launch, name: str, words: Sequence[Word]) -> list[Word]:
    table = {key.partition("/")[2]: row for key, row in flags_of("wrappers").items()
             if key.startswith(f"{name}/")}  # fmt: skip
    options, rest = options_of(words, table, name)
    launch.launchers.append((name, options))
    rest = rest[int(table[""].values) :]
    while name == "env" and rest and "=" in rest[0].text:
        variable, _, value = rest[0].text.partition("=")
        launch.environment[variable] = replace(rest.pop(0), text=value)
    return rest


def _behind_launcher(launch: Launch, program: str, words: list[Word]) -> list[Word]:
    """The words behind a launcher's flags; those of a script where it comes next."""
    if program == "accelerate" and words and words[0].text == "launch":
        words = words[1:]
    options, rest = options_of(words, flags_of(program), program)
    launch.launchers.append((program, options))
    meanings = {option.row.meaning for option in options if option.row}
    starts_module = "module" in meanings
    if "code" in meanings or not rest:
        return []
    if starts_module and _PROGRAMS.get(rest[0].text):
        return rest
    if starts_module or (
        program in ("torchrun", "deepspeed", "accelerate", "ours") and "program" not in meanings
    ):
        if rest[0].holes or (program == "python" and not starts_module):
            launch.unknown = rest
        launch.is_job = True
        launch.script = rest[0].text
        launch.words = rest[1:]
        return []
    return rest


def options_of(
    words: Sequence[Word], table: Mapping[str, Flag], program: str = ""
) -> tuple[list[Option], list[Word]]:
    """The options of a program, and the words behind them; of a script, "", all words."""
    options = []
    place = 0
    while place < len(words):
        word = words[place]
        if not word.text.startswith("-") or word.text == "-":
            if program and not (word.is_open and not word.text):
                break
            options.append(Option("", None, [word]))
            place += 1
            continue
        place += 1
        if word.text == "--" and program:
            break
        flag, equals, value = word.text.partition("=")
        row = _row(table, flag, program)
        if row is None and program and not flag.startswith("--"):  # -N16
            row = _row(table, flag[:2], program)
            flag, equals, value = flag[:2], "=", word.text[2:]
        if row is None and program and not equals:
            raise JobError(
                f"{flag} of {program} (line {word.line}) is not known, nor whether a value "
                f"follows. Leave it out, or write {flag}=VALUE."
            )
        values = [replace(word, text=value)] if equals else []
        count = 0 if equals else _values_behind(words[place:], row)
        values += words[place : place + count]
        place += count
        if row is not None and row.values == "1" and not values:
            raise JobError(f"{flag} has no value in the launch line. Write a number after it.")
        options.append(Option(flag, row, values or [word]))
    return options, list(words[place:])


def _row(table: Mapping[str, Flag], flag: str, program: str) -> Flag | None:
    name = flag.lstrip("-").replace("_", "-")
    if name not in table and program == "torchrun" and flag.startswith("--"):
        longer = [known for known in table if known.startswith(name)]  # argparse takes a beginning
        name = longer[0] if len(longer) == 1 else name
    return table.get(name)


def _values_behind(words: Sequence[Word], row: Flag | None) -> int:
    """How many of the next words are a flag's values."""
    most = {"?": 1, "*": len(words), "+": len(words)}.get(row.values) if row else len(words)
    if row is not None and most is None:
        return (
            min(int(row.values), len(words))
            if not words or not words[0].text.startswith("--")
            else 0
        )
    flags = (i for i, word in enumerate(words) if re.match(r"-(?![\d.])", word.text))
    return min(most or 0, next(flags, len(words)))


def job_of(words: Sequence[Word], variables: Mapping[str, Word] | None = None, **flags: Any) -> Job:
    """The job that a command starts: with its launchers' flags, and Megatron's.

    ``variables`` are those of its environment; ``flags`` override the command's, named with ``_``
    for ``-``: ``tp=4``. JobError, with all that is missing, if the text does not decide it.
    """
    launch = taken_apart(words)
    variables = {**(variables or {}), **launch.environment}
    reader = Reader(settings_of(flags))
    for word in launch.unknown[:1]:
        if not word.holes:
            raise JobError(
                f"{word.text} (line {word.line}) is not known, nor how often it starts the rest of "
                f"its line. Paste what it starts."
            )
    for word in launch.unknown:
        if word.holes:
            reader.lacks("The launch line", word)
    of_launchers: list[tuple[str, Options]] = []
    for program, options in launch.launchers:
        meanings: Options = {}
        for flag, row, values in options:
            if row is None and not flag:
                reader.lacks("The launch line", values[0])
            elif row is None:
                reader.flags["not read"].append(flag)
            elif row.meaning == "order":
                reader.read(Option(flag, row, values))
            elif row.meaning:
                meanings[row.meaning] = (flag, values)
            elif any(word.is_open for word in values):
                reader.lacks(flag, next(word for word in values if word.is_open))
        of_launchers.append((program, meanings))
    options, _ = options_of(launch.words, _OF_SCRIPT)
    for option in options:
        reader.read(option)
    if "HYPERGRID_ORDER" in variables and "order" not in reader.settings:
        reader._set("HYPERGRID_ORDER", SIZES["order"], [variables["HYPERGRID_ORDER"]])
    of_script = reader.flags["used"]
    reader.flags["used"] = []
    ranks_of(reader, of_launchers, variables)
    reader.flags["used"] += of_script
    reader.finish()
    job = of_settings(reader.settings)
    assumed = (*reader.assumed, *job.assumed)
    return replace(job, assumed=assumed, flags=reader.flags)


def rank_of(words: Sequence[Word]) -> int:
    """How much of a job a command is: 0 is none, 4 one with a launcher and sizes."""
    launch = taken_apart(words)
    if not launch.is_job:
        return 0
    is_open = any(word.is_open for word in words)
    texts = [word.text.partition("=")[0] for word in (*launch.words, *launch.unknown)]
    names = [re.sub(r"^(--|.*\.)", "", text).replace("_", "-") for text in texts]
    has_sizes = is_open or any(name in SIZES for name in names)
    has_launcher = any(program in _PROGRAMS for program, _ in launch.launchers)
    return 1 + 2 * has_sizes + (has_launcher or bool(launch.unknown))


def script_of(words: Sequence[Word]) -> tuple[str, list[str]]:
    """The script or module that a command starts, "" if it has none, and the words after it.

    JobError if the text leaves one of these words open.
    """
    launch = taken_apart(words)
    reader = Reader({})
    for word in launch.words:
        if word.holes:
            reader.lacks(word.text or "The launch line", word)
    reader.finish()
    return launch.script, [word.text for word in launch.words]
