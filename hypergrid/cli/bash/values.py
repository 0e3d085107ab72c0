"""Text of which parts are not known: each such part is one character, a mark, that names a hole.

So an unknown part survives concatenation, arrays and quotes, and each word says what it rests on.
Marks are of Unicode's supplementary private use area, which a script may not contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

LONGEST = 1 << 17  # characters of a script, and of each value in it
QUOTED = "\U000f0000"  # a word in quotes is a word even if it is empty
MARK = re.compile("[\U000f0000-\U000fffff]")
_FIRST = 0xF0002
_MOST_HOLES = 16_000
_PATTERN = re.compile(r"[*?\[]")

Value: TypeAlias = str | list[str]


class ScriptError(ValueError):
    """A script that cannot be followed; the message says where, and what to write instead."""


@dataclass(frozen=True)
class Hole:
    """A part that the text of a script does not decide."""

    text: str  # as it is written: "$NNODES", "$(nproc)"
    name: str = ""  # of the variable that decides it
    why: str = ""  # a clause: "line 3 may assign it"


@dataclass(frozen=True)
class Word:
    """A word of a command, and what its text does not decide."""

    text: str
    line: int = 0
    holes: tuple[Hole, ...] = ()
    is_open: bool = False  # it may be several words, or none


class Holes:
    """All holes of a script, each with two marks: for some text, and for any number of words."""

    def __init__(self) -> None:
        self._index: dict[Hole, int] = {}

    def text(self, hole: Hole) -> str:
        """The mark for some text."""
        number = self._index.setdefault(hole, len(self._index))
        if number == _MOST_HOLES:
            raise ScriptError("too much of the launch line is not decided by its text.")
        return chr(_FIRST + 2 * number)

    def words(self, hole: Hole) -> str:
        """The mark for any number of words."""
        return opened(self.text(hole))

    def in_text(self, text: str) -> list[Hole]:
        """The holes of a text."""
        holes = list(self._index)
        marks = MARK.findall(text.replace(QUOTED, ""))
        return [holes[(ord(mark) - _FIRST) // 2] for mark in marks]

    def word(self, text: str, line: int) -> Word:
        """The word of a command."""
        # The value of --flag=$VALUE is taken for one word, as people mean it.
        is_open = has_open_words([text.partition("=")[0]])
        return Word(plain(text), line, tuple(self.in_text(text)), is_open)


def names_in(text: str) -> set[str]:
    """The names that a text lists."""
    return set(text.split())


def opened(text: str) -> str:
    """The text as it may be split into words: what is not known may be any number of them."""
    return MARK.sub(lambda found: chr(ord(found[0]) | 1) if found[0] != QUOTED else "", text)


def closed(text: str) -> str:
    """The text as one that is not split."""
    return MARK.sub(lambda found: chr(ord(found[0]) & ~1) if found[0] != QUOTED else "", text)


def is_unknown(text: str) -> bool:
    """Whether a part of the text is not known."""
    return MARK.search(text.replace(QUOTED, "")) is not None


def has_open_words(values: Iterable[str]) -> bool:
    """Whether the values may be more or fewer words than they are."""
    return any(ord(mark) & 1 for value in values for mark in MARK.findall(value))


def plain(text: str) -> str:
    """The text without marks."""
    return MARK.sub("", text)


def split(value: str) -> list[str]:
    """The pieces of an unquoted value, "" before a leading and behind a trailing blank."""
    return re.split(r"[ \t\n]+", opened(value))


def is_pattern(text: str) -> bool:
    """Whether files that match may take the place of an unquoted word."""
    return _PATTERN.search(text) is not None


def touching(parts: Iterable[Sequence[str]]) -> list[str]:
    """The pieces of all parts: the last of each and the first of the next are one."""
    pieces: list[str] = []
    for part in parts:
        if pieces and part:
            pieces[-1] += part[0]
            pieces.extend(part[1:])
        else:
            pieces.extend(part)
    return pieces
