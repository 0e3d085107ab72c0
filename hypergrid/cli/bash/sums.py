"""Bash's arithmetic, as far as Python's grammar reads it alike; all else is not known."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from operator import add, eq, ge, gt, le, lt, mul, ne, sub

_READ_ALIKE = re.compile(r"(?!.*(//|\*\*|\d_|0[bBoO]))[\w\s+*/%()<>=!-]*")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", re.S)
_STEP = re.compile(r"\s*([A-Za-z_]\w*)\s*(\+\+|--)\s*|\s*(\+\+|--)\s*([A-Za-z_]\w*)\s*")
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
    ast.Eq: eq,
    ast.NotEq: ne,
    ast.Lt: lt,
    ast.LtE: le,
    ast.Gt: gt,
    ast.GtE: ge,
}


def evaluated(
    text: str, number_of: Callable[[str], int], assign: Callable[[str, int], None]
) -> int:
    """The value of an expression, after its assignment. UnknownSumError if it is not known."""
    assignment = _ASSIGNMENT.fullmatch(text)
    if assignment is not None:
        name, operator, rest = assignment.groups()
        expression = f"{name} {operator} ({rest})" if operator else rest
        value = evaluated(expression, number_of, assign)
        assign(name, value)
        return value
    step = _STEP.fullmatch(text)
    if step is not None:
        name = step[1] or step[4]
        before = number_of(name)
        after = before + (1 if "++" in text else -1)
        assign(name, after)
        return before if step[1] else after
    if not _READ_ALIKE.fullmatch(text) or "++" in text or "--" in text:
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
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            # Python compares a < b == c in another way, so only one comparison is read.
            if type(operator) not in _OPERATORS or isinstance(right, ast.Compare):
                raise UnknownSumError
            compared = _OPERATORS[type(operator)](
                _number(left, number_of), _number(right, number_of)
            )
            value = int(compared)
        case _:
            raise UnknownSumError
    if abs(value) >= _LARGEST:
        raise UnknownSumError
    return value
