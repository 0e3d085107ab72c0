"""Conditions: ``[ ... ]`` and ``[[ ... ]]``, as far as the text decides them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from operator import eq, ge, gt, le, lt, ne
from typing import TypeAlias

from compat.cli.bash.values import is_unknown

Status: TypeAlias = bool | None  # of a command; None: not known
COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": eq,
    "-ne": ne,
    "-lt": lt,
    "-le": le,
    "-gt": gt,
    "-ge": ge,
}
NUMBER = re.compile(r"0|[1-9]\d{0,17}")  # 010 is 8, and -1 is not read


def negated(status: Status) -> Status:
    """The status of ``! command``."""
    return None if status is None else not status


def holds(words: Sequence[str]) -> Status:
    """Whether a condition of these words holds; None if the text does not decide it.

    >>> holds(["8", "-gt", "4"])
    True
    """
    # A part that is not known may make it hold or not, and $X may be several words.
    if is_unknown("".join(words)):
        return None
    match words:
        case ["!", _, *_]:
            return negated(holds(words[1:]))
        case [text]:
            return text != ""
        case ["-z" | "-n" as operator, text]:
            return (text == "") == (operator == "-z")
        case [first, "=" | "==", second]:
            return first == second
        case [first, "!=", second]:
            return first != second
        # Of other texts [ says that they are no numbers.
        case [first, operator, second] if NUMBER.fullmatch(first) and NUMBER.fullmatch(second):
            if operator in COMPARED:
                return COMPARED[operator](int(first), int(second))
    return None
