"""What refusals say: values cut short, and what others raise retold in a sentence."""

from __future__ import annotations

import reprlib

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 8
_short.maxlevel = 3


def shown(value: object) -> str:
    """``repr(value)`` cut short, so that no value from outside can flood or break a message."""
    try:
        return _short.repr(value)
    except Exception:  # such as a number of more digits than Python writes down
        return f"<{type(value).__name__}>"


def retold(error: Exception, sentence: str) -> Exception:
    """An error that is caught wherever ``error`` would be, and says ``sentence``."""
    kind = type(error)
    body = {"__str__": lambda _: sentence, "__module__": kind.__module__}
    told: Exception = type(kind.__name__, (kind,), body)(*error.args)
    return told
