"""Bash's arithmetic, as far as Python's grammar reads it alike; all else is not known."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from operator import add, eq, ge, gt, le, lt, mul, ne, sub

from compat.cli.bash.values import ScriptError

# Not: leading zeros, hexadecimal numbers, //, **, ++, --, !, bits, commas and strings.
_READ_ALIKE = re.compile(r"(?!.*(//|\*\*|\+\+|--|\d_|0[bBoO]))[\w\s+*/%()<>=&|!-]*", re.S)
_LARGEST = 1 << 63


class UnknownSumError(ValueError):
    """The value is not known, or bash refuses the expression."""


def _quotient(dividend: int, divisor: int) -> int:
    if divisor == 0:
        raise ScriptError("the launch line divides by zero.")
    # Bash rounds towards zero, Python down: -7 / 2 is -3.
    quotient = abs(dividend) // abs(divisor)
    if (dividend < 0) != (divisor < 0):
        quotient = -quotient
    return quotient


def _remainder(dividend: int, divisor: int) -> int:
    return dividend - divisor * _quotient(dividend, divisor)


OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: _quotient,
    ast.Mod: _remainder,
    ast.Eq: eq,
    ast.NotEq: ne,
    ast.Lt: lt,
    ast.LtE: le,
    ast.Gt: gt,
    ast.GtE: ge,
}


def evaluated(text: str, number_of: Callable[[str], int]) -> int:
    """The value of an expression. UnknownSumError if it is not known."""
    expression = text.replace("&&", " and ").replace("||", " or ")
    # A single & or | is an operation on bits.
    if not _READ_ALIKE.fullmatch(text) or re.search(r"[&|!](?!=)", expression):
        raise UnknownSumError
    try:
        tree = ast.parse(expression.strip() or "0", mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UnknownSumError from None
    return _number(tree.body, number_of)


def _number(node: ast.expr, number_of: Callable[[str], int]) -> int:
    match node:
        case ast.Constant(value=int(number)) if type(number) is int:
            value = number
        case ast.Name(id=name):
            value = number_of(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_number(operand, number_of)
        case ast.BoolOp(op=operator, values=operands):
            numbers = [_number(operand, number_of) for operand in operands]
            is_or = isinstance(operator, ast.Or)
            value = any(numbers) if is_or else all(numbers)
        case (
            ast.BinOp(left=first, op=operator, right=second)
            | ast.Compare(left=first, ops=[operator], comparators=[second])
        ) if type(operator) in OPERATORS:
            operation = OPERATORS[type(operator)]
            value = operation(_number(first, number_of), _number(second, number_of))
        case _:
            raise UnknownSumError
    if abs(value) >= _LARGEST:
        raise UnknownSumError
    return int(value)
