"""Reads the options of programs, and the settings of a job from them.

The tables of options are in ``compat/planned/flags``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import islice, takewhile
from typing import Any, NamedTuple

from compat.cli.line import LONGEST
from compat.planned.flags import Flag, flags_of
from compat.planned.job import (
    NOT_READ,
    PARALLEL,
    SIZES,
    STRAY,
    USED,
    WITHOUT_EFFECT,
    WITHOUT_VALUE,
    JobError,
)
from hypergrid.messages import shown

OF_SCRIPT = {**flags_of("megatron"), **SIZES}
READINGS = (USED, WITHOUT_EFFECT, NOT_READ, STRAY, WITHOUT_VALUE)
_MOST_VALUES = {"?": 1, "*": LONGEST, "+": LONGEST}  # a number stands for itself
# argparse and click take both forms, SLURM and MPI only their own.
_TAKES_UNDERSCORES = ("torchrun", "accelerate", "deepspeed", "ours")
_DIM = "(tp|pp|cp|ep|dp|etp|vp)p?"
# --tp_size, --epParallel; --size-of-pp
_SIZE_OF_DIM = (
    rf"(?:^|[-_.]){_DIM}[-_.]?(?:size|parallel)"
    rf"|(?:size|parallel)[\w-]{{0,20}}[-_.]{_DIM}(?:$|[-_.])"
)
# --my-parallel-sizes, --recipe
_MAY_HOLD_SIZES = re.compile(
    rf"(?i)(?<!sequence[-_])parallel|config|cfg|yaml|recipe|args|{_SIZE_OF_DIM}"
)
RANKS_BESIDE = "Give --world-size and --gpus-per-node beside the command."
# Of two short names each is soon like the other.
_SHORTEST = 6  # letters
_LONG_SIZES = [name for name in SIZES if len(name) >= _SHORTEST]
_ALIKE = 0.9  # of 1: two edits of a name of 26 letters
_NAMES = [name.replace("-", "_") for name in SIZES]
# Files of sizes, and overrides of Bridge, NeMo and verl, whose other sizes are in the program:
# model.tensor_model_parallel_size=4, tp=4, model={tp: 4}
_HOLDS_SIZES = re.compile(
    rf"\.(ya?ml|toml)\Z|{'|'.join(PARALLEL)}|\b({'|'.join(_NAMES)})['\"]?\s*[=:]"
)

_UNLISTED = Flag("*", "unlisted")  # has all words up to the next flag


class Option(NamedTuple):
    """A flag as it is written, its row in the program's table, and its values.

    A word that stands alone has no flag.
    """

    flag: str
    row: Flag
    values: list[str]


def options_of(
    words: Sequence[str], table: Mapping[str, Flag], program: str = ""
) -> tuple[list[Option], list[str]]:
    """The options of a program, and the words behind them; of a script, "", all words."""
    options = []
    rest = list(words)
    while rest and not (program and _is_value(rest[0])):
        word = rest.pop(0)
        if _is_value(word):
            options.append(Option("", _UNLISTED, [word]))
            continue
        if program and word == "--":
            continue
        text = re.sub(r"^(-[A-Za-z])(?=\d)", r"\1=", word)  # -N16 is -N=16
        flag, equals, value = text.partition("=")
        name = flag.lstrip("-")
        if program in _TAKES_UNDERSCORES:
            name = name.replace("_", "-")
        row = table.get(name, _UNLISTED)
        # How many words such a flag takes is open, and so where the script begins.
        if row is _UNLISTED and program:
            raise JobError(
                f"{flag} of {program} is not known. Leave it out, or give the sizes instead of the "
                f"command: --world-size 64 --tp 4."
            )
        if equals:
            values = [value]
        else:
            most_values = int(_MOST_VALUES.get(row.values, row.values))
            values = list(takewhile(_is_value, islice(rest, most_values)))
            del rest[: len(values)]
        options.append(Option(flag, row, values))
    return options, rest


def _is_value(word: str) -> bool:
    """Whether a word is no flag: -1, - and words without a dash."""
    return re.match(r"-(?![\d.]|$)", word) is None


class Reader:
    """Reads the settings of a job. ``overrides`` are settings that win over the command's."""

    def __init__(self, overrides: Mapping[str, Any]) -> None:
        self.overrides = overrides
        self.settings: dict[str, Any] = dict(overrides)
        self.flags: dict[str, list[str]] = {reading: [] for reading in READINGS}
        self._flag_before = ""  # it takes no value

    def read(self, option: Option, settings: dict[str, Any]) -> None:
        """Read one option into the settings of the job, or of a launcher."""
        flag, row, values = option
        if row is _UNLISTED:
            self._read_unlisted(option)
            self._flag_before = ""
            return
        self._flag_before = flag if row.values == "0" else ""
        is_of_job = settings is self.settings
        # It says what a program starts, which is no setting; or the command's overrides win.
        if row.kind == "starts" or (is_of_job and row.meaning in self.overrides):
            return
        text = " ".join(values)
        # Without a pattern every value is refused.
        if row.meaning == "refused" and re.search(row.kind, text) is not None:
            if is_of_job:
                raise _may_hold_sizes(flag)
            raise JobError(f"{flag} {text} is not read. {RANKS_BESIDE}")
        # A shell may have left it out: --load $CHECKPOINT.
        lacks_value = not values and row.values not in ("0", "?", "*")
        if row.meaning in ("", "refused"):
            self.flags[WITHOUT_EFFECT].append(flag)
            if lacks_value and is_of_job:
                self.flags[WITHOUT_VALUE].append(flag)
            return
        if lacks_value:
            raise JobError(f"{flag} has no value in the command. Write it behind the flag.")
        if row.kind != "model":
            self.flags[USED].append(f"{flag} {text}".strip())
            remedy = "Write its number, or leave the flag out." if is_of_job else RANKS_BESIDE
            settings[row.meaning] = _value_of(option, remedy)
            return
        # The planned groups are the same, whatever the model is. Only `check` needs its number,
        # and a shell may have left it empty.
        self.flags[WITHOUT_EFFECT].append(flag)
        if row.values == "0" or re.fullmatch(r"\d{1,18}", text) is not None:
            settings[row.meaning] = _value_of(option)

    def _read_unlisted(self, option: Option) -> None:
        """A word or a flag of a script that its table does not have."""
        flag, _, values = option
        meant = _meant(flag)
        if meant:
            raise JobError(
                f"{flag} is not a flag of Megatron, which has --{meant}. Write that if it is "
                f"meant, or give the sizes instead of the command: --world-size 64 --tp 4."
            )
        for value in values:
            if _HOLDS_SIZES.search(value) is not None:
                raise _may_hold_sizes(value)
        name = flag or values[0]
        if _MAY_HOLD_SIZES.search(flag or name.rpartition("=")[0]) is not None:
            raise _may_hold_sizes(name)
        if self._flag_before and not flag and "=" not in name:
            self.flags[STRAY].append(f"{shown(name)} behind {self._flag_before}")
        self.flags[NOT_READ].append(name)


def _value_of(option: Option, remedy: str = "") -> Any:
    """The value of an option, a number if its row says nothing else."""
    flag, row, values = option
    if row.values == "0":
        return True
    if row.kind == "text":
        return " ".join(values)
    for value in values:
        if re.fullmatch(r"-?\d{1,18}", value) is None:
            raise JobError(f"{flag} must be a whole number, got {shown(value)}. {remedy}")
    numbers = list(map(int, values))
    return numbers if row.values == "+" else numbers[0]


def _meant(flag: str) -> str:
    """The flag of Megatron that holds a size and is meant by one that no table has; "" if none."""
    name = flag.lstrip("-").replace("_", "-").lower()
    # --tensor-model-par: Megatron's parser takes no beginning of a flag.
    beginning = [size_flag for size_flag in _LONG_SIZES if size_flag.startswith(name)]
    # --tensor_model_parallel_size, which it does not take either, and two letters too few.
    alike = get_close_matches(name, _LONG_SIZES, 1, _ALIKE)
    if len(name) >= _SHORTEST and (beginning or alike):
        return (*beginning, *alike)[0]
    dim = re.search(_SIZE_OF_DIM, name)
    if dim is None or "dp" in dim.groups():
        return ""  # no flag holds the size of dp
    row = SIZES[dim[1] or dim[2]]
    # Of the names of a size the first is Megatron's.
    return next(size_flag for size_flag, other in SIZES.items() if other.meaning == row.meaning)


def _may_hold_sizes(name: str) -> JobError:
    return JobError(
        f"{name} may hold sizes that are not read. Give all sizes, such as --world-size 64 --tp 4, "
        f"instead of the command, or the plan of the job itself (compat.launch --plan)."
    )
