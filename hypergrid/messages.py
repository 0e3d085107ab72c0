"""Values, ranks and errors as they appear in messages."""

from __future__ import annotations

import os.path
import re
import reprlib
from collections.abc import Sequence

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 8
_short.maxlevel = 3


class Sentence(str):
    """The text of a KeyError, which shows others as Python writes strings: in quotes."""

    def __repr__(self) -> str:
        return str(self)


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
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def one_line(text: str) -> str:
    """The text of somebody else inside a sentence: line breaks and tabs are written out too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def shown_apart(first: object, second: object) -> tuple[str, str]:
    """Both as ``shown``; cut around their first difference where those are equal."""
    if shown(first) != shown(second):
        return shown(first), shown(second)
    first_text = repr(first)
    second_text = repr(second)
    equal_text = os.path.commonprefix([first_text, second_text])  # noqa: RUF071
    # Thirty characters before the difference and fifty behind it.
    start = max(0, len(equal_text) - 30)
    end = start + 80
    first_part = first_text[start:end]
    second_part = second_text[start:end]
    return f"...{first_part}...", f"...{second_part}..."


def install_command(extra: str) -> str:
    """How to install an extra: the distribution, ``hypergrid-comm``, is in no package index yet."""
    return f"pip install '.[{extra}]' in a checkout of hypergrid"


def in_words(error: BaseException) -> str:
    """The type and the first line of the text: what torch appends to it is a C++ traceback."""
    first_line = str(error).partition("\n")[0]
    text = f"{type(error).__name__}: {shortened(first_line)}"
    if not text.endswith((".", "!", "?")):
        text += "."
    return text


def shortened(text: str, most: int = 160) -> str:
    """The text, without its middle if it has more than ``most`` characters: torch lists keys."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... {text[-half:]}"


def few(ranks: Sequence[object]) -> str:
    """The first ten."""
    text = ", ".join(map(str, ranks[:10]))
    if len(ranks) > 10:
        text += ", ..."
    return text
