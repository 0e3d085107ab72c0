"""Text of which parts are not known: each such part is one character, a mark, that names a hole.

So an unknown part survives concatenation, arrays and quotes, and each word says what it rests on.
Marks are of Unicode's supplementary private use area, which a script may not contain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST = 1 << 17  # characters of a script, and of each value in it
# Behind the mark of an unquoted part: it may be several words, or none.
OPEN = "\U000f0000"
# In a word that is expanded: where the next word begins, and quotes, which count if empty, too.
END = "\U00100000"
QUOTED = "\U00100001"
MARK = re.compile("[\U000f0000-\U000fffff]")
PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_FIRST = 0xF0001
_MOST_HOLES = 32_000


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
    """All holes of a script, each with its mark."""

    def __init__(self) -> None:
        self._index: dict[Hole, int] = {}

    def mark(self, hole: Hole) -> str:
        """The character that stands for the hole."""
        number = self._index.setdefault(hole, len(self._index))
        if number == _MOST_HOLES:
            raise ScriptError("too much of the launch line is not decided by its text.")
        return chr(_FIRST + number)

    def in_text(self, text: str) -> list[Hole]:
        """The holes of a text."""
        holes = list(self._index)
        in_text = []
        for mark in MARK.findall(text):
            if mark != OPEN:
                in_text.append(holes[ord(mark) - _FIRST])
        return in_text

    def word(self, text: str, line: int) -> Word:
        """The word of a command."""
        # The value of --flag=$VALUE is taken for one word, as people mean it.
        is_open = OPEN in text.partition("=")[0]
        return Word(plain(text), line, tuple(self.in_text(text)), is_open)


def is_unknown(text: str) -> bool:
    """Whether a part of the text is not known."""
    return MARK.search(text) is not None


def opened(text: str) -> str:
    """The text, of which each part that is not known may be several words."""
    closed = text.replace(OPEN, "")
    return MARK.sub(lambda match: match[0] + OPEN, closed)


def plain(text: str) -> str:
    """The text without marks."""
    return MARK.sub("", text)


def names_in(text: str) -> set[str]:
    """The names that a text lists."""
    return set(text.split())
