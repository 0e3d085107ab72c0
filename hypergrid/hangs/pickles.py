"""Pickles of flight recorders: only plain data is loaded. No torch.

A pickle is a program. It can run code; a short one can stand for endlessly many values, as forty
times "a pair of twice the last value" is 2**40 of them; and some keys of a dict take years to hash.
So the unpickler knows no opcode but those that recorders write, and no key but text. What it loads
is written again without references, up to a limit, before anything else looks at it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any, ClassVar

# The opcodes that torch and ``hypergrid.record`` write: numbers, text, lists, tuples, dicts, and
# references to values before.
_OPCODES = b"\x80(.NKMJGX\x8a\x88\x89hjqr]}t)\x85\x86\x87aesu"
_HANDLERS: dict[int, Any] = pickle._Unpickler.dispatch  # by opcode
# How many bytes of values each byte of a file may stand for. Torch writes a stack frame once and
# refers to it in each call: 30 times, with C++ frames 150 times.
_MOST = 512
_SMALL = 1 << 20
# Of any file: to count so many bytes takes seconds. 20,000 calls with 100 frames each have fewer.
_MOST_OF_ALL = 1 << 30


class Refused(Exception):
    """The pickle has more than the plain data that a recorder writes."""


def load(data: bytes) -> Any:
    """The value of a pickle of torch's flight recorder or of ``hypergrid.record``.

    Raises
    ------
    Refused
        It has another opcode, a key that is no text, or stands for too many values.
    Exception
        Any other: it is cut or damaged.
    """
    unpickler = _Unpickler(io.BytesIO(data))
    try:
        value = unpickler.load()
    except KeyError as error:
        (opcode,) = error.args
        raise Refused(f"it holds the opcode {opcode:#x}, and only plain data is read") from None
    most = min(_MOST * len(data) + _SMALL, _MOST_OF_ALL)
    # The pickler writes what it has once it has 64 KiB.
    pickler = pickle.Pickler(_Limit(most), protocol=4)
    pickler.fast = True  # no references
    try:
        pickler.dump(value)
    except (RecursionError, ValueError):
        raise Refused("it holds a value that is in itself, or that is nested too deeply") from None
    return value


class _Unpickler(pickle._Unpickler):
    """Pickle's own, with few opcodes. A byte that is none of them is a KeyError."""

    dispatch: ClassVar[dict[int, Any]] = {opcode: _HANDLERS[opcode] for opcode in _OPCODES}
    stack: list[Any]  # of values, the last on top

    def put_value(self) -> None:
        """Put a value under a key into a dict."""
        _check_keys(self.stack[-2:-1])
        _HANDLERS[pickle.SETITEM[0]](self)

    def put_values(self) -> None:
        """Put values, each after its key, into a dict."""
        _check_keys(self.stack[::2])
        _HANDLERS[pickle.SETITEMS[0]](self)

    dispatch[pickle.SETITEM[0]] = put_value
    dispatch[pickle.SETITEMS[0]] = put_values


def _check_keys(keys: Iterable[Any]) -> None:
    for key in keys:
        # Numbers can all have the same hash, and a tuple can take years to hash.
        if type(key) is not str:
            raise Refused("it holds a key that is no text, and only plain data is read")


class _Limit:
    """A file that takes so many bytes, and keeps none."""

    def __init__(self, most: int) -> None:
        self.left = most

    def write(self, data: Any) -> int:
        """Count the bytes."""
        self.left -= len(data)
        if self.left < 0:
            raise Refused("it holds the same values again and again")
        return len(data)
