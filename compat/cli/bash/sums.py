"""Whole numbers that bash computes: ``$((...))``, ``((...))``, indexes of arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from operator import and_, eq, ge, gt, le, lshift, lt, mul, ne, or_, rshift, sub, xor
from typing import Protocol

from compat.cli.bash.state import NAME, State
from compat.cli.bash.tree import Node, literal_of, statements_of
from compat.cli.bash.values import Hole, ScriptError, is_unknown

_NUMBER = re.compile(r"0[xX][\da-fA-F]{1,15}|0[0-7]{0,20}|[1-9]\d{0,17}")
_MOST = 1 << 62  # bash computes in 64 bits, and what overflows is not followed
_LONGEST_SHIFT = 61


class _UnknownSumError(ValueError):
    """The value of an expression is not known, because of this part."""

    def __init__(self, hole: Hole) -> None:
        super().__init__(hole)
        self.hole = hole


class Words(Protocol):
    """The words around a sum: what its parts become."""

    state: State
    line: int

    def text(self, word: Node) -> str:
        """The text of a word."""

    def elements(self, name: str, index: Node | None) -> list[str]:
        """The values of a variable, or of an element of an array."""

    def may_happen(self, node: object) -> None:
        """Lose what an expression that is not known may assign."""

    def check_time(self) -> None:
        """Refuse a script that takes too long to follow."""


def number(words: Words, expression: Node) -> int | Hole:
    """The value of an expression, which may assign variables; a hole if it is not known."""
    try:
        return _evaluated(words, expression)
    except _UnknownSumError as error:
        words.may_happen(expression)
        return error.hole


def _quotient(dividend: int, divisor: int) -> int:
    """The quotient, towards zero: -7 / 2 is -3 in bash, and -4 in Python."""
    if divisor == 0:
        raise ScriptError("the launch line divides by zero.")
    quotient = abs(dividend) // abs(divisor)
    if (dividend < 0) != (divisor < 0):
        return -quotient
    return quotient


def _remainder(dividend: int, divisor: int) -> int:
    return dividend - divisor * _quotient(dividend, divisor)


def _shifted(shift: Callable[[int, int], int]) -> Callable[[int, int], int]:
    def checked(value: int, places: int) -> int:
        if value < 0 or not 0 <= places <= _LONGEST_SHIFT:
            raise _UnknownSumError(Hole("a shift"))
        return shift(value, places)

    return checked


def _power(base: int, exponent: int) -> int:
    if not 0 <= exponent <= _LONGEST_SHIFT:
        raise _UnknownSumError(Hole("a power"))
    return int(base**exponent)


_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": int.__add__, "-": sub, "*": mul, "/": _quotient, "%": _remainder, "**": _power,
    "<<": _shifted(lshift), ">>": _shifted(rshift), "&": and_, "|": or_, "^": xor,
    "==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge,
}  # fmt: skip
_UNARY: Mapping[str, Callable[[int], int]] = {
    "-": int.__neg__, "+": int.__pos__, "~": int.__invert__, "!": lambda value: not value,
}  # fmt: skip


def _evaluated(words: Words, node: Node) -> int:
    """The value of a node."""
    kind = node["Type"]
    operator = node.get("Op", "")
    if kind == "Word":
        return _of_word(words, node)
    if kind == "ParenArithm":
        return _evaluated(words, node["X"])
    if operator in ("++", "--"):
        old_value = _evaluated(words, node["X"])
        new_value = old_value + (1 if operator == "++" else -1)
        _assign(words, node["X"], new_value)
        return old_value if "Post" in node else new_value
    # -2 ** 2 is 4 in bash, and shfmt reads it as -(2 ** 2).
    if kind == "UnaryArithm" and operator in _UNARY and node["X"].get("Op") != "**":
        return _bounded(_UNARY[operator](_evaluated(words, node["X"])))
    if kind == "BinaryArithm":
        return _of_two(words, operator, node["X"], node["Y"])
    raise _UnknownSumError(Hole("$((...))"))


def _of_two(words: Words, operator: str, left: Node, right: Node) -> int:
    """``a + b`` and its like, ``a = b``, ``a && b``, ``a ? b : c``."""
    if operator == "=":
        value = _evaluated(words, right)
        _assign(words, left, value)
        return value
    first = _evaluated(words, left)
    if operator == "?":
        chosen = right["X"] if first else right["Y"]
        return _evaluated(words, chosen)
    if operator == "&&":
        return int(first != 0 and _evaluated(words, right) != 0)
    if operator == "||":
        return int(first != 0 or _evaluated(words, right) != 0)
    second = _evaluated(words, right)
    if operator == ",":
        return second
    # 2 ** 3 ** 2: which of the two comes first is not asked of shfmt.
    if operator == "**" and "**" in (left.get("Op"), right.get("Op")):
        raise _UnknownSumError(Hole("a power"))
    operation = _OPERATIONS.get(operator.removesuffix("="))
    if operator in _OPERATIONS:
        return _bounded(_OPERATIONS[operator](first, second))
    if operation is None:
        raise _UnknownSumError(Hole("$((...))"))
    value = _bounded(operation(first, second))
    _assign(words, left, value)
    return value


def _bounded(value: int) -> int:
    if abs(value) >= _MOST:
        raise _UnknownSumError(Hole("a large number"))
    return int(value)


def _assign(words: Words, word: Node, value: int) -> None:
    name = literal_of(word)
    # Of A[1] = 8 and $X = 8 it is not followed what is assigned.
    if not NAME.fullmatch(name):
        raise _UnknownSumError(Hole("$((...))"))
    state = words.state
    if len(state.value(name)) > 1:
        raise _UnknownSumError(Hole(f"${name}"))
    state.assign(name, [str(value)], words.line)


def _of_word(words: Words, word: Node) -> int:
    """The value of a number, of a variable, or of an expansion that is a number."""
    name = literal_of(word)
    text = words.text(word)
    # X is $X.
    if NAME.fullmatch(name):
        text = words.elements(name, None)[0] or "0"
    if is_unknown(text):
        raise _UnknownSumError(words.state.holes.in_text(text)[0])
    if _NUMBER.fullmatch(text):
        # 010 is 8.
        if text.isdigit() and text[0] == "0":
            return int(text, base=8)
        return int(text, base=0)
    statements = []
    if NAME.fullmatch(name):
        # With A=B+B, B=C+C and so on the values double at each name.
        words.check_time()
        # With X=2+1, $((X * 2)) is 6: the value is an expression of its own.
        statements = statements_of(f"(({text}))")
    if len(statements) == 1 and statements[0].get("Cmd", {}).get("Type") == "ArithmCmd":
        return _evaluated(words, statements[0]["Cmd"]["X"])
    # It is an error, behind which bash leaves the rest of the line out, or another sum: with
    # X=2+1, $(($X * 2)) is 4.
    raise ScriptError(
        f"line {words.line} of the launch line computes {text!r}, which cannot be followed. "
        f"Write the number in its place."
    )
