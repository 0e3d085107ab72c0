"""Reads the settings of a job from its options, and collects all that is not known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from compat.planned.flags import Flag
from compat.planned.job import OF_MODEL, SIZES, JobError
from hypergrid.cli.bash import Hole, Word
from hypergrid.messages import shown

_OF_STAGES = ("num-layers", "with_embedding", "with_loss")  # they decide virtual stages
_TEXTS = ("order", "sharp_enabled_group")
# Overrides of Bridge and NeMo: model.tensor_model_parallel_size=4.
_OVERRIDE = re.compile(r"[+~]*(?:\w+\.)+(\w+)=(.*)", re.S)
_MAY_HOLD_SIZES = re.compile(r"(?i)parallel|config|cfg|yaml|recipe|args")
_OF_OVERRIDES = "sizes that no override names are Megatron's defaults; the program's may differ"
_FILE_OF_SIZES = re.compile(r".*\.(ya?ml|toml)")


class Option(NamedTuple):
    """A flag with its values; without a flag, a word that stands alone."""

    flag: str
    row: Flag | None
    values: list[Word]


class Reader:
    """Reads settings from the options of a launch."""

    def __init__(self, overrides: Mapping[str, Any]) -> None:
        self.overrides = overrides
        self.settings: dict[str, Any] = dict(overrides)
        self.missing: list[str] = []  # sentences
        self.flags: dict[str, list[str]] = {"used": [], "without effect": [], "not read": []}
        self.assumed: list[str] = []

    def lacks(self, what: str, word: Word, flag: str = "") -> None:
        """A word is not known: say what decides it."""
        for hole in word.holes or (Hole(word.text),):
            use = "is" if what.startswith("-") else "uses"
            where = f" (line {word.line})" if word.line else ""
            sentence = f"{what} {use} {hole.text}{where}, which "
            if hole.name:
                why = f": {hole.why}" if hole.why else ""
                sentence += f"the text does not decide{why}. Add --set {hole.name}=VALUE."
            else:
                sentence += "only the job can tell. Write its value in its place."
            if sentence not in self.missing:
                self.missing.append(sentence)

    def number(self, flag: str, words: Sequence[Word]) -> int | None:
        """The value of a flag that takes one whole number; None if it is not known."""
        numbers = self.numbers(flag, words)
        return numbers[0] if numbers else None

    def numbers(self, flag: str, words: Sequence[Word]) -> list[int]:
        """The values of a flag that takes whole numbers; none if one is not known."""
        unknown = [word for word in words if word.holes]
        for word in unknown:
            self.lacks(flag, word)
        if unknown:
            return []
        texts = " ".join(word.text for word in words).split()
        if not texts or not all(re.fullmatch(r"-?\d{1,18}", text) for text in texts):
            raise JobError(f"{flag} must be a whole number, got {shown(' '.join(texts))}.")
        return [int(text) for text in texts]

    def read(self, option: Option) -> None:
        """Read one option of the script."""
        flag, row, values = option
        if not flag:
            self._read_word(values[0])
        elif row is None:
            self._not_read(flag, values)
        elif row.meaning == "refused" or (
            row.meaning == "stages" and any("|" in word.text or word.holes for word in values)
        ):
            raise JobError(
                f"{flag} (line {values[0].line}) holds sizes that are not read. Give the sizes as "
                f"flags, such as --world-size 64 --tp 4, instead of the line."
            )
        elif row.meaning and row.meaning != "stages":
            self._set(flag, row, values)
        else:
            self.flags["without effect"].append(flag)
            for word in values:
                if word.is_open:
                    self.lacks(flag, word)

    def _set(self, flag: str, row: Flag, values: Sequence[Word]) -> None:
        meaning = row.meaning
        if meaning in self.overrides:
            return
        changes_groups = meaning not in OF_MODEL or meaning in _OF_STAGES
        if changes_groups:
            words = [flag, *(word.text for word in values if word.text != flag)]
            self.flags["used"].append(" ".join(words))
        else:
            self.flags["without effect"].append(flag)
            if any(word.holes and not word.is_open for word in values):
                self.settings.pop(meaning, None)
                return
        if row.values == "0":
            self.settings[meaning] = True
        elif meaning in _TEXTS:
            self.settings[meaning] = values[0].text
            if values[0].holes:
                self.lacks(flag, values[0])
        elif numbers := self.numbers(flag, values):
            self.settings[meaning] = numbers if row.values == "+" else numbers[0]

    def _read_word(self, word: Word) -> None:
        override = _OVERRIDE.fullmatch(word.text)
        name = override[1].replace("_", "-") if override else ""
        if override and name in SIZES:
            if _OF_OVERRIDES not in self.assumed:
                self.assumed.append(_OF_OVERRIDES)
            self._set(override[0].partition("=")[0], SIZES[name], [replace(word, text=override[2])])
        elif override and "parallel" in name and "sequence" not in name:
            self._not_read(override[0].partition("=")[0], [word])
        elif word.holes and (word.is_open or not override):
            self.lacks("The launch line", word)
        elif not override:
            self.flags["not read"].append(word.text)

    def _not_read(self, flag: str, values: Sequence[Word]) -> None:
        line = values[0].line
        name = flag.lstrip("-").replace("_", "-")
        close = get_close_matches(name, [known for known in SIZES if len(known) > 6], 1, 0.88)
        if close and "world" not in self.overrides:
            raise JobError(f"{flag} is no flag of Megatron. Did you mean --{close[0]}?")
        files = [word.text for word in values if _FILE_OF_SIZES.fullmatch(word.text)]
        if _MAY_HOLD_SIZES.search(flag) or files:
            shown_file = f" {files[0]}" if files else ""
            raise JobError(
                f"{flag}{shown_file} (line {line}) may hold sizes that are not read. Give the "
                f"sizes as flags, such as --world-size 64 --tp 4, instead of the line."
            )
        self.flags["not read"].append(flag)
        for word in values:
            if word.holes:
                self.lacks(flag, word)

    def finish(self) -> None:
        """Refuse the launch if anything is missing, all at once."""
        if self.missing:
            raise JobError(" ".join(self.missing[:12]))
