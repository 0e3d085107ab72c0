"""The tokens of bash: quotes, expansions, operators, blanks. They have no values yet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from compat.cli.bash.values import ScriptError

_EXPANSIONS = r"""
    (?P<sum>\$\(\() | (?P<substitution>\$\() | (?P<backquotes>`) | (?P<braces>\$\{)
    | (?P<variable>\$(?:[A-Za-z_]\w*|[0-9@*\#?$!-]))
"""
_OUTSIDE = re.compile(
    rf"""(?P<continuation>\\\n) | (?P<escape>\\.?) | (?P<single>'[^']*') | (?P<ansi>\$['"])
    | (?P<quotes>") | {_EXPANSIONS} | (?P<process>[<>]\()
    | (?P<comment>(?<![^\s;()&|<>])\#[^\n]*) | (?P<newline>\n) | (?P<blank>[ \t]+)
    | (?P<redirect>&>>?|>>|>&|<&|<<<|<<-?|<>|>\||>|<) | (?P<operator>&&|\|\||;;?&|;;|\|&|[;&|()])
    | (?P<plain>[\w./:=,@+%^-]+|\$\[|.)""",
    re.S | re.X,
)
_IN_QUOTES = re.compile(
    rf"""(?P<continuation>\\\n) | (?P<escape>\\[$`"\\]) | {_EXPANSIONS}
    | (?P<plain>[^$`"\\]+|\$\[|.)""",
    re.S | re.X,
)
_CLOSING = {"quotes": '"', "sum": ")", "substitution": ")", "process": ")", "braces": "}"}


class Token(NamedTuple):
    """A piece of a script; ``content`` is what stands between its brackets or quotes."""

    kind: str
    content: str
    start: int
    end: int


def token_at(text: str, start: int, in_quotes: bool = False) -> Token:
    """The token that begins at a place.

    >>> token_at('echo "$(nproc) GPUs" > log', 5)
    Token(kind='quotes', content='$(nproc) GPUs', start=5, end=20)
    """
    pattern = _IN_QUOTES if in_quotes else _OUTSIDE
    match = pattern.match(text, start)
    assert match is not None and match.lastgroup is not None
    kind = match.lastgroup
    content = match[0]
    end = match.end()
    # A quote or backslash without an end, a sum as it was once written, and $'\x41'.
    if content == "$[":
        refuse(text, start)
    if not in_quotes and content in ("\\", "'", "$'", '$"'):
        refuse(text, start)
    if kind == "backquotes":
        closing = text.find("`", end)
        content = text[end:closing]
        # A backslash in backquotes has rules of its own.
        if closing < 0 or "\\" in content:
            refuse(text, start)
        end = closing + 1
    elif kind in _CLOSING:
        closing = closing_of(text, end, _CLOSING[kind])
        content = text[end:closing]
        end = closing + 1
        # In "${X:-it's}" a quote means nothing, and in ${X:-'}'} it does.
        if kind == "braces" and in_quotes and "'" in content:
            refuse(text, start)
        if kind == "sum":
            # `$( (` with a blank starts a subshell in a substitution.
            if text[end : end + 1] != ")":
                refuse(text, start)
            end += 1
    return Token(kind, content, start, end)


def closing_of(text: str, start: int, bracket: str) -> int:
    """The place of the bracket or quote that closes the one before ``start``."""
    in_quotes = bracket == '"'
    place = start
    while place < len(text):
        token = token_at(text, place, in_quotes)
        if token.content == bracket and token.kind in ("plain", "operator"):
            return place
        place = token.end
        if token.content == "(" and token.kind == "operator":
            place = closing_of(text, place, ")") + 1
    refuse(text, start)


def tokens(text: str, in_quotes: bool = False) -> Iterator[Token]:
    """The tokens of a text; with ``in_quotes`` as in quotes, where blanks mean nothing."""
    place = 0
    while place < len(text):
        token = token_at(text, place, in_quotes)
        yield token
        place = token.end


def refuse(text: str, place: int) -> NoReturn:
    """Refuse a text that is not bash, or that is written in a way which is not read."""
    near = text[max(place - 2, 0) : place + 40]
    raise ScriptError(
        f"the launch line cannot be read as bash, at {near!r}. Close its quotes and brackets, or "
        f"write it simpler."
    )
