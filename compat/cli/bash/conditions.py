"""Conditions: ``[ ... ]``, ``test`` and ``[[ ... ]]``, as far as the text decides them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from operator import eq, ge, gt, le, lt, ne
from typing import Any, TypeAlias

from compat.cli.bash.tokens import commands_in
from compat.cli.bash.values import OPEN, Hole, is_unknown

Script: TypeAlias = Any  # of script.py, which imports this file
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": eq, "-ne": ne, "-lt": lt, "-le": le, "-gt": gt, "-ge": ge,
}  # fmt: skip
_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,17})")
_MAY_ASSIGN = re.compile(r"\$\(\(|\$\{\w+:?=|\s-(eq|ne|lt|le|gt|ge)\s")
_LITERAL = re.compile(r"[\w./:=,@%-]*")


def holds(script: Script, text: str) -> bool | None:
    """Whether a condition holds; None if the text does not decide it."""
    if text.startswith("[["):
        return _double_holds(script, text[2:-2])
    if text.startswith("(("):
        is_true: bool | None = script.sum_holds(text[2:-2])
        return is_true
    return single_holds(script, commands_in(text).words[0][1:-1])


def single_holds(script: Script, written: Sequence[str]) -> bool | None:
    """``[ WRITTEN ]``, whose words are split as those of every command."""
    words = script.words(written)
    if any(OPEN in word for word in words):
        return None
    match words:
        case ["!", *operands] if operands:
            is_true = _compared(operands)
            return None if is_true is None else not is_true
    return _compared(words)


def _compared(words: Sequence[str]) -> bool | None:
    match words:
        case []:
            return False
        case [text]:
            return None if is_unknown(text) else text != ""
        case ["-z" | "-n" as operator, text]:
            return None if is_unknown(text) else (text == "") == (operator == "-z")
        case [left, operator, right]:
            if is_unknown(left) or is_unknown(right):
                return None
            if operator in ("=", "==", "!="):
                return (left == right) == (operator != "!=")
            if operator in _COMPARED and _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right):
                return _COMPARED[operator](int(left), int(right))
    return None


def _double_holds(script: Script, text: str) -> bool | None:
    """``[[ TEXT ]]``: comparisons with && and ||, whose words are not split."""
    is_simple = not re.search(r"[<>()]|=~", text)
    is_chain = "&&" in text or "||" in text
    if _MAY_ASSIGN.search(text) and (is_chain or not is_simple):
        script.state.forget(f"line {script.line} has a condition that may assign it")
    if not is_simple:
        return None
    written = commands_in(text.replace("\n", " ")).words
    alternatives: list[bool | None] = []
    for alternative in _parts(written[0] if written else [], "||"):
        clauses = [_clause_holds(script, clause) for clause in _parts(alternative, "&&")]
        alternatives.append(_all(clauses))
    negated = _all([None if is_true is None else not is_true for is_true in alternatives])
    return None if negated is None else not negated


def _parts(words: Sequence[str], separator: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == separator:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _all(statuses: Sequence[bool | None]) -> bool | None:
    if False in statuses:
        return False
    return None if None in statuses else True


def _clause_holds(script: Script, written: Sequence[str]) -> bool | None:
    if written[:1] == ["!"]:
        is_true = _clause_holds(script, written[1:])
        return None if is_true is None else not is_true
    texts = [script.text(word) for word in written]
    match texts:
        case [left, operator, right] if operator in _COMPARED:
            # Both sides are sums.
            numbers = [script.number(left), script.number(right)]
            if any(isinstance(number, Hole) for number in numbers):
                return None
            return _COMPARED[operator](*numbers)
        case [_, "=" | "==" | "!=", right] if not _LITERAL.fullmatch(right):
            return None  # the right side is a pattern
    return _compared(texts)
