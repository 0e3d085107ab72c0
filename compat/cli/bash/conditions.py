"""Conditions: ``[ ... ]``, ``test`` and ``[[ ... ]]``, as far as the text decides them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from operator import eq, ge, gt, le, lt, ne
from typing import TypeAlias

from compat.cli.bash.values import is_unknown

Status: TypeAlias = bool | None  # of a command; None: not known
COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": eq, "-ne": ne, "-lt": lt, "-le": le, "-gt": gt, "-ge": ge,
}  # fmt: skip
_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,17})")
LITERAL = re.compile(r"[\w./:=,@%-]*")
# Of a text that is compared with a pattern: a pattern with several * takes a power of its length.
_LONGEST_TEXT = 4096
_MOST_STARS = 2


def negated(status: Status) -> Status:
    """The status of ``! command``."""
    if status is None:
        return None
    return not status


def matches(expression: str | None, text: str, longest: int = _LONGEST_TEXT) -> Status:
    """Whether a text matches a pattern of ``pattern_of``; None if that is not known."""
    if expression is None or is_unknown(text):
        return None
    if re.escape(text) == expression:
        return True
    # Whether ? is a character or a byte depends on the locale.
    is_read = text.isascii() and len(text) <= longest
    if not is_read or expression.count(".*") > _MOST_STARS:
        return None
    return re.fullmatch(expression, text, re.S) is not None


def holds(words: Sequence[str]) -> Status:
    """Whether a condition of these words holds; None if the text does not decide it.

    >>> holds(["8", "-gt", "4"])
    True
    """
    if words[:1] == ["!"] and len(words) > 1:
        return negated(holds(words[1:]))
    # A part that is not known may make it hold or not.
    if is_unknown("".join(words)):
        return None
    match words:
        case []:
            return False
        case [text]:
            return text != ""
        case ["-z", text]:
            return text == ""
        case ["-n", text]:
            return text != ""
        case [first, "=" | "==", second]:
            return first == second
        case [first, "!=", second]:
            return first != second
        case [first, operator, second] if operator in COMPARED:
            # Of other texts [ says that they are no numbers.
            if _NUMBER.fullmatch(first) and _NUMBER.fullmatch(second):
                return COMPARED[operator](int(first), int(second))
    return None
