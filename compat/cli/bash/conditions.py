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


def negated(status: Status) -> Status:
    """The status of ``! command``."""
    return None if status is None else not status


def holds(words: Sequence[str]) -> Status:
    """Whether a condition of these words holds; None if the text does not decide it.

    >>> holds(["8", "-gt", "4"])
    True
    """
    match words:
        case []:
            return False
        case ["!", *operands] if operands:
            return negated(holds(operands))
        case [text]:
            return None if is_unknown(text) else text != ""
        case ["-z" | "-n" as operator, text]:
            return None if is_unknown(text) else (text == "") == (operator == "-z")
        case [first, operator, second] if not is_unknown(first + second):
            if operator in ("=", "==", "!="):
                return (first == second) == (operator != "!=")
            if operator in COMPARED and _NUMBER.fullmatch(first) and _NUMBER.fullmatch(second):
                return COMPARED[operator](int(first), int(second))
    return None
