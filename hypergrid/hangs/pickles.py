"""Pickles of flight recorders: checked before they are loaded. No torch.

A pickle is a program. It can run code; and a short one can stand for endlessly many values: forty
times "a pair of twice the last value" is 2**40 of them. So a pickle is read once without executing
it, and is loaded only if it has nothing but what recorders write.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

# Of the bytes of a file: how many values and characters it may stand for. Torch writes a stack
# frame once and refers to it in each call: 30 times, with C++ frames 150 times.
_MOST = 512
_SMALL = 1 << 20
# The opcodes that torch and ``hypergrid.record`` write, but for those of texts and long numbers:
# the bytes of their arguments.
_WIDTHS = {
    **dict.fromkeys(b"(.N\x88\x89]}aseut)\x85\x86\x87", 0),
    **dict(zip(b"KqhMJrjG", (1, 1, 1, 2, 4, 4, 4, 8), strict=True)),
}
# Opcodes by what they do.
_PUTS = b"qr"
_GETS = b"hj"
_EMPTY = b"]}"
_TUPLES = b"t)\x85\x86\x87"
_OF_DICTS = b"su"
_TEXT, _LONG, _MARK, _STOP = b"X\x8a(."
# How many values an opcode puts into a container; None: those since the mark.
_MEMBERS = dict(zip(b"aseut)\x85\x86\x87", (1, 2, None, None, None, 0, 1, 2, 3), strict=True))


class Refused(ValueError):
    """The pickle has more than the plain data that a recorder writes."""


@dataclass
class _Value:
    """A value on the stack of the unpickler."""

    size: int = 1  # it and all values in it, each as often as it is referred to
    is_text: bool = False
    is_shared: bool = False  # it was referred to again


_NUMBER = _Value()


def load(data: bytes) -> Any:
    """The value of a pickle of torch's flight recorder or of ``hypergrid.record``.

    Raises
    ------
    Refused
        It has another opcode, a key that is no text, or stands for too many values.
    ValueError
        It is cut or damaged.
    """
    try:
        _check(data)
    except (IndexError, KeyError):
        raise ValueError("the pickle ends too early, or is damaged") from None
    return pickle.loads(data)


def _check(data: bytes) -> None:
    if data[:2] != b"\x80\x02":
        raise Refused("it holds a pickle of another protocol than 2, and only plain data is read")
    position = 2
    opcode = 0
    stack: list[_Value] = []
    marks: list[int] = []  # places in the stack
    memo: dict[int, _Value] = {}
    while opcode != _STOP:
        opcode = data[position]
        position += 1
        if opcode == _TEXT:
            length = int.from_bytes(data[position : position + 4], "little")
            width = 4 + length
            stack.append(_Value(1 + length, is_text=True))
        elif opcode == _LONG:
            width = 1 + data[position]
            stack.append(_NUMBER)
        elif opcode not in _WIDTHS:
            raise Refused(f"it holds the opcode {opcode:#x}, and only plain data is read")
        else:
            width = _WIDTHS[opcode]
            index = int.from_bytes(data[position : position + width], "little")
            if opcode in _GETS:
                memo[index].is_shared = True
                stack.append(memo[index])
            elif opcode in _PUTS:
                # The unpickler makes room for all indices below the largest.
                if index > len(data):
                    raise Refused(f"it holds the index {index}, and has {len(data)} bytes")
                memo[index] = stack[-1]
            elif opcode == _MARK:
                marks.append(len(stack))
            elif opcode in _EMPTY:
                stack.append(_Value())
            elif opcode in _MEMBERS:
                _put_together(opcode, stack, marks)
                if stack[-1].size > _MOST * len(data) + _SMALL:
                    raise Refused("it holds the same values again and again")
            else:
                stack.append(_NUMBER)
        position += width


def _put_together(opcode: int, stack: list[_Value], marks: list[int]) -> None:
    """Take members from the stack into a list or dict below them, or into a new tuple."""
    count = _MEMBERS[opcode]
    start = marks.pop() if count is None else len(stack) - count
    members = stack[start:]
    del stack[start:]
    if opcode in _OF_DICTS and not all(key.is_text for key in members[::2]):
        # Numbers can all have the same hash.
        raise Refused("it holds a key that is no text, and only plain data is read")
    if opcode in _TUPLES:
        stack.append(_Value())
    elif stack[-1].is_shared:
        # Its size was counted already where it was referred to.
        raise Refused("it holds a value that changes after it was used, or that is in itself")
    stack[-1].size += sum(member.size for member in members)
