"""Pickles of flight recorders: checked before they are loaded. No torch.

A pickle is a program. It can run code; and a short one can need years for one key of a dict: forty
times "a pair of twice the last value" is a value with 2**40 members, which are hashed. So a pickle
is read once without executing it, and is loaded only if it has nothing but what recorders write.
"""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

_DEEPEST = 32  # lists in lists; torch writes 5
# The opcodes that torch and ``hypergrid.record`` write, but for those of texts and long numbers:
# the bytes of their arguments.
_WIDTHS = {
    **dict.fromkeys(b"(.N\x88\x89]}aseut)\x85\x86\x87", 0),
    **dict(zip(b"KqhMJrjG", (1, 1, 1, 2, 4, 4, 4, 8), strict=True)),
}
_PUTS, _GETS, _EMPTY, _TUPLES, _OF_DICTS = b"qr", b"hj", b"]}", b"t)\x85\x86\x87", b"su"
_TEXT, _LONG, _MARK, _STOP = b"X\x8a(."
# How many values an opcode puts into a container; None: those since the mark.
_MEMBERS = dict(zip(b"aseut)\x85\x86\x87", (1, 2, None, None, None, 0, 1, 2, 3), strict=True))
_OF_TEXT, _OF_NUMBER, _OF_EMPTY = 0, 1, 2  # the depth of a value


class Refused(ValueError):
    """The pickle has more than the plain data that a recorder writes."""


def load(data: bytes) -> Any:
    """The value of a pickle of torch's flight recorder or of ``hypergrid.record``.

    Raises
    ------
    Refused
        It has another opcode, a key that is no text, or values nested more than 30 deep.
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
    position, opcode = 2, 0
    depths: list[int] = []  # of the values on the stack
    marks: list[int] = []  # places in the stack
    memo: dict[int, int] = {}
    while opcode != _STOP:
        opcode = data[position]
        position += 1
        if opcode == _TEXT:
            width = 4 + int.from_bytes(data[position : position + 4], "little")
            depths.append(_OF_TEXT)
        elif opcode == _LONG:
            width = 1 + data[position]
            depths.append(_OF_NUMBER)
        elif opcode not in _WIDTHS:
            raise Refused(f"it holds {_name(opcode)}, and only plain data is read")
        else:
            width = _WIDTHS[opcode]
            index = int.from_bytes(data[position : position + width], "little")
            if opcode in _GETS:
                depths.append(memo[index])
            elif opcode in _PUTS:
                # The unpickler makes room for all indices below the largest.
                if index > len(data):
                    raise Refused(f"it holds the index {index}, and has {len(data)} bytes")
                memo[index] = depths[-1]
            elif opcode == _MARK:
                marks.append(len(depths))
            elif opcode in _EMPTY:
                depths.append(_OF_EMPTY)
            elif opcode in _MEMBERS:
                _put_together(opcode, depths, marks)
            else:
                depths.append(_OF_NUMBER)
        position += width


def _put_together(opcode: int, depths: list[int], marks: list[int]) -> None:
    """Take members from the stack into a list or dict below them, or into a new tuple."""
    count = _MEMBERS[opcode]
    start = marks.pop() if count is None else len(depths) - count
    members = depths[start:]
    if opcode in _OF_DICTS and any(members[::2]):
        # Tuples hold as many values as they like; numbers can all have the same hash.
        raise Refused("it holds a key that is no text, and only plain data is read")
    depths[start:] = [_OF_EMPTY] if opcode in _TUPLES else []
    depths[-1] = max(depths[-1], 1 + max(members, default=_OF_TEXT))
    if depths[-1] > _DEEPEST:
        raise Refused(f"it holds values that are nested more than {_DEEPEST - 2} deep")


def _name(opcode: int) -> str:
    """The name of an opcode, for messages."""
    known = next((info for info in pickletools.opcodes if info.code == chr(opcode)), None)
    return f"the opcode {known.name}" if known else f"the byte {opcode:#x}, which is no opcode"
