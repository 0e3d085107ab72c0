"""Pickles of flight recorders: checked before they are loaded. No torch.

A pickle is a program. It can run code; and a short one can stand for endlessly many values: forty
times "a pair of twice the last value" is 2**40 of them. So a pickle is read once without executing
it, and is loaded only if it has nothing but what recorders write.
"""

from __future__ import annotations

import pickle
from typing import Any, TypeAlias

# Of the bytes of a file: how many values and characters it may stand for. Torch writes a stack
# frame once and refers to it in each call: 30 times, with C++ frames 150 times.
_MOST = 512
_SMALL = 1 << 20
# The opcodes that torch and ``hypergrid.record`` write.
_GET, _LONG_GET, _PUT, _LONG_PUT, _TEXT, _LONG, _MARK, _STOP = b"hjqrX\x8a(."
_LIST, _DICT = b"]}"
_TUPLES = b"t)\x85\x86\x87"
_OF_DICTS = b"su"
# Numbers, True, False and None, with the bytes of their arguments.
_NUMBERS = {
    **dict.fromkeys(b"N\x88\x89", 0),
    **dict(zip(b"KMJG", (1, 2, 4, 8), strict=True)),
}
# How many values an opcode puts into a container; None: those since the mark.
_MEMBERS = dict(zip(b"aseut)\x85\x86\x87", (1, 2, None, None, None, 0, 1, 2, 3), strict=True))


class Refused(ValueError):
    """The pickle has more than the plain data that a recorder writes."""


class _Container:
    """A list, dict or tuple on the stack of the unpickler."""

    __slots__ = ("is_shared", "size")

    def __init__(self) -> None:
        self.size = 1  # it and all values in it, each as often as it is referred to
        self.is_shared = False  # it was referred to again


# A value on the stack. Of the millions of numbers and texts only the size is kept: 1 of a number,
# of a text minus its length and one more.
_Value: TypeAlias = "int | _Container"


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
    stack: list[_Value] = []
    marks: list[int] = []  # places in the stack
    memo: dict[int, _Value] = {}
    most = _MOST * len(data) + _SMALL
    # A file has millions of opcodes: the most frequent ones come first.
    while True:
        opcode = data[position]
        position += 1
        if opcode in (_GET, _LONG_GET):
            if opcode == _GET:
                value = memo[data[position]]
                position += 1
            else:
                value = memo[int.from_bytes(data[position : position + 4], "little")]
                position += 4
            if isinstance(value, _Container):
                value.is_shared = True
            stack.append(value)
        elif opcode in _NUMBERS:
            position += _NUMBERS[opcode]
            stack.append(1)
        elif opcode == _LONG:
            position += 1 + data[position]
            stack.append(1)
        elif opcode == _PUT:
            memo[data[position]] = stack[-1]
            position += 1
        elif opcode == _LONG_PUT:
            index = int.from_bytes(data[position : position + 4], "little")
            # The unpickler makes room for all indices below the largest.
            if index > len(data):
                raise Refused(f"it holds the index {index}, and has {len(data)} bytes")
            memo[index] = stack[-1]
            position += 4
        elif opcode == _TEXT:
            length = int.from_bytes(data[position : position + 4], "little")
            position += 4 + length
            stack.append(-1 - length)
        elif opcode == _MARK:
            marks.append(len(stack))
        elif opcode in (_LIST, _DICT):
            stack.append(_Container())
        elif opcode in _MEMBERS:
            if _put_together(opcode, stack, marks) > most:
                raise Refused("it holds the same values again and again")
        elif opcode == _STOP:
            return
        else:
            raise Refused(f"it holds the opcode {opcode:#x}, and only plain data is read")


def _put_together(opcode: int, stack: list[_Value], marks: list[int]) -> int:
    """Take members from the stack into a list or dict below them, or a new tuple; its size."""
    count = _MEMBERS[opcode]
    start = marks.pop() if count is None else len(stack) - count
    members = stack[start:]
    del stack[start:]
    if opcode in _OF_DICTS:
        for key in members[::2]:
            # Numbers can all have the same hash, and a tuple can take years to hash.
            if isinstance(key, _Container) or key > 0:
                raise Refused("it holds a key that is no text, and only plain data is read")
    if opcode in _TUPLES:
        container = _Container()
        stack.append(container)
    else:
        below = stack[-1]
        if not isinstance(below, _Container):
            raise Refused("it puts values into what holds none")
        container = below
        if container.is_shared:
            # Its size was counted already where it was referred to.
            raise Refused("it holds a value that changes after it was used, or that is in itself")
    for member in members:
        container.size += member.size if isinstance(member, _Container) else abs(member)
    return container.size
