"""Bash's arithmetic, as far as Python's grammar reads it alike; all else is not known."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from operator import add, mul, sub

_READ_ALIKE = re.compile(r"(?!.*(//|\*\*|\+\+|--|\d_|0[bBoO]))[\w\s+*/%()-]*", re.S)
_LARGEST = 1 << 63


class UnknownSumError(ValueError):
    """The value is not known, or bash refuses the expression."""


def _quotient(dividend: int, divisor: int) -> int:
    if divisor == 0:
        raise UnknownSumError
    quotient = abs(dividend) // abs(divisor)
    return quotient if (dividend < 0) == (divisor < 0) else -quotient  # towards zero


def _remainder(dividend: int, divisor: int) -> int:
    return dividend - divisor * _quotient(dividend, divisor)


_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: _quotient,
    ast.Mod: _remainder,
}


def evaluated(text: str, number_of: Callable[[str], int]) -> int:
    """The value of an expression. UnknownSumError if it is not known."""
    if not _READ_ALIKE.fullmatch(text):
        raise UnknownSumError
    try:
        tree = ast.parse(text.strip() or "0", mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UnknownSumError from None
    return _number(tree.body, number_of)


def _number(node: ast.expr, number_of: Callable[[str], int]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            value = number
        case ast.Name(id=name):
            value = number_of(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_number(operand, number_of)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            value = _OPERATORS[type(operator)](_number(left, number_of), _number(right, number_of))
        case _:
            raise UnknownSumError
    if abs(value) >= _LARGEST:
        raise UnknownSumError
    return value
