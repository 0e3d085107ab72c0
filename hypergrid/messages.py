"""Values, ranks and errors as they appear in messages."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence

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


# Characters that move a cursor, colour text, turn its direction, or cannot be encoded.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text with control characters written out, as ``\\x1b``; lines and tabs stay."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """The text of somebody else inside a sentence: line breaks and tabs are written out too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def shown_apart(one: object, other: object) -> tuple[str, str]:
    """Both as ``shown``; cut around their first difference where those are equal."""
    short = shown(one), shown(other)
    if short[0] != short[1]:
        return short
    first, second = repr(one), repr(other)
    pairs = enumerate(zip(first, second, strict=False))
    at = max(0, next((i for i, (a, b) in pairs if a != b), 0) - 30)
    return f"...{first[at : at + 80]}...", f"...{second[at : at + 80]}..."


def install_command(extra: str) -> str:
    """How to install an extra: the distribution, ``hypergrid-comm``, is in no package index yet."""
    return f"pip install '.[{extra}]' in a checkout of hypergrid"


def in_words(error: BaseException) -> str:
    """The type and the first line of the text: what torch appends to it is a C++ traceback."""
    text = f"{type(error).__name__}: {shortened(str(error).partition(chr(10))[0])}"
    return text if text.endswith((".", "!", "?")) else f"{text}."


def shortened(text: str, most: int = 160) -> str:
    """The text, without its middle if it has more than ``most`` characters: torch lists keys."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def few(ranks: Sequence[object]) -> str:
    """The first ten."""
    return ", ".join(map(str, ranks[:10])) + (", ..." if len(ranks) > 10 else "")


def some_of(which: Sequence[int], ranks: Sequence[int]) -> str:
    """How many of how many, and the first ten."""
    return f"{len(which)} of {len(ranks)} ranks ({few(which)})"


def span_of(ranks: Sequence[int]) -> str:
    """Ascending ranks as runs: "0..3,8"."""
    if isinstance(ranks, range):
        return f"{ranks.start}..{ranks.stop - 1}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ",".join("..".join(map(str, run)) for run in runs)
