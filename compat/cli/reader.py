"""Reads the options of programs, and the settings of a job from them; collects all that is missing.

The tables of options are in ``compat/planned/flags``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from compat.cli.bash import LONGEST, Word
from compat.planned.flags import Flag
from compat.planned.job import SIZES, JobError
from hypergrid.messages import shown

_MOST_VALUES = {"?": 1, "*": LONGEST, "+": LONGEST}  # a number stands for itself
# Overrides of Bridge and NeMo: model.tensor_model_parallel_size=4.
_OVERRIDE = re.compile(r"[+~]*((?:\w+\.)+\w+)=(.*)", re.S)
_MOST_SENTENCES = 12  # of what is missing
_OF_OVERRIDES = "sizes that no override names are Megatron's defaults; the program's may differ"
_MAY_HOLD_SIZES = re.compile(r"(?i)(?<!sequence[-_])parallel|config|cfg|yaml|recipe|args")
_FILE_OF_SIZES = re.compile(r".*\.(ya?ml|toml)")


_UNLISTED = Flag("*", "unlisted")  # has all words up to the next flag


class Option(NamedTuple):
    """A flag as it is written, its row in the program's table, and its values.

    A word that stands alone has no flag.
    """

    flag: str
    row: Flag
    values: list[Word]
    line: int


def options_of(
    words: Sequence[Word], table: Mapping[str, Flag], program: str = ""
) -> tuple[list[Option], list[Word]]:
    """The options of a program, and the words behind them; of a script, "", all words."""
    options = []
    place = 0
    while place < len(words):
        word = words[place]
        if not _is_flag(word):
            if program:
                break
            options.append(Option("", _UNLISTED, [word], word.line))
            place += 1
            continue
        place += 1
        if program and word.text == "--":
            continue
        text = re.sub(r"^(-[A-Za-z])(?=\d)", r"\1=", word.text)  # -N16 is -N=16
        flag, equals, value = text.partition("=")
        row = table.get(flag.lstrip("-").replace("_", "-"), _UNLISTED)
        # How many words such a flag takes is open, and so where the script begins.
        if row is _UNLISTED and program:
            raise JobError(
                f"{flag} of {program} (line {word.line}) is not known. Leave it out, or give "
                f"--world-size and the sizes instead of the line."
            )
        values = [replace(word, text=value)]
        if not equals:
            most_values = int(_MOST_VALUES.get(row.values, row.values))
            values = _values_at(words, place, most_values)
            place += len(values)
        if not values and row.values not in ("0", "?", "*"):
            raise JobError(f"{flag} has no value in the launch line. Write it behind the flag.")
        options.append(Option(flag, row, values, word.line))
    return options, list(words[place:])


def _values_at(words: Sequence[Word], place: int, most_values: int) -> list[Word]:
    """The values of a flag: the words from a place on, up to the next flag."""
    values: list[Word] = []
    for word in words[place : place + most_values]:
        if _is_flag(word):
            break
        values.append(word)
    return values


def _is_flag(word: Word) -> bool:
    return re.match(r"-(?![\d.]|$)", word.text) is not None


class Reader:
    """Reads the settings of a job."""

    def __init__(self, overrides: Mapping[str, Any]) -> None:
        self.overrides = overrides
        self.settings: dict[str, Any] = dict(overrides)
        self.missing: list[str] = []  # sentences
        self.flags: dict[str, list[str]] = {"used": [], "without effect": [], "not read": []}
        self.assumed: tuple[str, ...] = ()

    def lacks(self, word: Word, flag: str = "") -> None:
        """Note what decides the unknown parts of a word, which a flag or the launch line uses."""
        user = f"{flag} is" if flag else "The launch line uses"
        for hole in word.holes:
            sentence = f"{user} {hole.text} (line {word.line}), which "
            if hole.name:
                sentence += "the text does not decide"
                if hole.why:
                    sentence += f": {hole.why}"
                sentence += f". Add --set {hole.name}=VALUE."
            else:
                sentence += "only the job can tell. Write its value in its place."
            self.missing.append(sentence)

    def finish(self) -> None:
        """Refuse the launch if anything is missing, all at once."""
        if self.missing:
            sentences = list(dict.fromkeys(self.missing))
            raise JobError(" ".join(sentences[:_MOST_SENTENCES]))

    def numbers(self, flag: str, words: Sequence[Word]) -> list[int]:
        """The values of a flag that takes whole numbers; none if one is not known."""
        numbers = []
        for word in words:
            self.lacks(word, flag)
            if re.fullmatch(r"-?\d{1,18}", word.text):
                numbers.append(int(word.text))
            elif not word.holes:
                raise JobError(f"{flag} must be a whole number, got {shown(word.text)}.")
        if any(word.holes for word in words):
            return []
        return numbers

    def read(self, option: Option, settings: dict[str, Any]) -> None:
        """Read one option into the settings of the job, or of a launcher."""
        flag, row, values, _ = option
        if row is _UNLISTED:
            self._read_unlisted(option)
            return
        # It says what a program starts, which is no setting.
        if row.kind == "starts":
            return
        # The flags of the command win over those of the line.
        if settings is self.settings and row.meaning in self.overrides:
            return
        text = " ".join(word.text for word in values)
        is_unknown = any(word.holes for word in values)
        is_open = any(word.is_open for word in values)
        has_sizes = row.meaning == "refused"
        if row.meaning == "unless":
            has_sizes = re.search(row.kind, text) is not None
            for word in values:
                self.lacks(word, flag)
        if has_sizes:
            raise _may_hold_sizes(option)
        is_of_model = row.kind == "model"
        is_without_effect = row.meaning in ("", "unless")
        # The planned groups are the same, whatever the model is.
        if is_of_model and is_unknown and not is_open:
            is_without_effect = True
        if is_without_effect:
            self.flags["without effect"].append(flag)
            # Several words in its place could be other flags.
            for word in values:
                if word.is_open:
                    self.lacks(word, flag)
            return
        if is_of_model:
            self.flags["without effect"].append(flag)
        else:
            self.flags["used"].append(f"{flag} {text}".strip())
        if row.values == "0":
            settings[row.meaning] = True
        elif row.kind == "text":
            self.lacks(values[0], flag)
            settings[row.meaning] = text
        else:
            numbers = self.numbers(flag, values)
            if numbers:
                is_list = row.values == "+"
                settings[row.meaning] = numbers if is_list else numbers[0]

    def _read_unlisted(self, option: Option) -> None:
        """A word or a flag of a script that its table does not have."""
        flag, _, values, line = option
        override = None if flag else _OVERRIDE.fullmatch(values[0].text)
        if override is not None:
            # model.tensor_model_parallel_size=4
            flag, text = override.groups()
            name = flag.rpartition(".")[2].replace("_", "-")
            if name in SIZES:
                self.assumed = (_OF_OVERRIDES,)
                value = replace(values[0], text=text)
                self.read(Option(flag, SIZES[name], [value], line), self.settings)
                return
        has_file = any(_FILE_OF_SIZES.fullmatch(word.text) for word in values)
        if has_file or _MAY_HOLD_SIZES.search(flag):
            raise _may_hold_sizes(option)
        self.flags["not read"].append(flag or values[0].text)
        for word in values:
            self.lacks(word, flag)


def _may_hold_sizes(option: Option) -> JobError:
    name = option.flag or option.values[0].text
    return JobError(
        f"{name} (line {option.line}) may hold sizes that are not read. Give --world-size and "
        f"--gpus-per-node beside the line, or all sizes, such as --tp 4, instead of it."
    )
