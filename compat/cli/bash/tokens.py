"""The tokens of a simple command: quotes, expansions, redirections, words. It knows no values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from compat.cli.bash.values import ScriptError

_EXPANSIONS = r"""
    (?P<sum>\$\(\() | (?P<substitution>\$\(|`) | (?P<braces>\$\{)
    | (?P<variable>\$(?:[A-Za-z_]\w*|[0-9@*\#?$!-]))
"""
_OUTSIDE = re.compile(
    rf"""(?P<escape>\\.?) | (?P<single>'[^']*') | (?P<ansi>\$'(?:[^'\\]|\\.)*'|\$") | (?P<empty>"")
    | (?P<quote>") | {_EXPANSIONS} | (?P<process>[<>]\()
    | (?P<redirect>&>>?|>>|>&|<&|<<<|<>|>\||>|<)
    | (?P<comment>(?<![^\s;(])\#[^\n]*) | (?P<newline>\n) | (?P<blank>[ \t]+) | (?P<list>\()
    | (?P<plain>[\w./:=,+@%^-]+|\$\[|.)""",
    re.S | re.X,
)
_IN_QUOTES = re.compile(
    rf"""(?P<escape>\\[$`"\\\n]) | (?P<quote>") | {_EXPANSIONS} | (?P<plain>[^$`"\\]+|\$\[|.)""",
    re.S | re.X,
)
_CLOSING = {"sum": ")", "substitution": ")", "process": ")", "list": ")", "braces": "}"}


class Token(NamedTuple):
    """A piece of a command's text; ``content`` is what stands between its brackets or quotes."""

    kind: str
    content: str
    in_quotes: bool
    start: int
    end: int


def tokens(text: str, start: int = 0, in_quotes: bool = False) -> Iterator[Token]:
    """The tokens of a text, from a place on.

    Quotes that open and close are tokens of their own. With ``in_quotes`` the whole text stands in
    quotes, such as a sum, where quotes mean nothing.
    """
    place = start
    is_quoted = in_quotes
    while place < len(text):
        pattern = _IN_QUOTES if is_quoted else _OUTSIDE
        match = pattern.match(text, place)
        assert match is not None and match.lastgroup is not None
        kind = match.lastgroup
        content = match[0]
        end = match.end()
        # A lone backslash, and a sum as it was once written.
        _check(content not in ("\\", "$["), text, place)
        if kind == "quote" and in_quotes:
            kind = "plain"
        elif kind == "quote":
            is_quoted = not is_quoted
        elif content == "`":
            close = _closing_backquote(text, end)
            content = text[end:close]
            end = close + 1
        elif kind in _CLOSING:
            close = _closing_bracket(text, end, _CLOSING[kind])
            content = text[end:close]
            end = close + 1
            if kind == "sum":
                # `$( (` with a blank starts a subshell in a substitution.
                _check(text[end : end + 1] == ")", text, place)
                end += 1
            # In "${X:-it's}" a quote means nothing, and in ${X:-'}'} it does.
            _check(not (kind == "braces" and is_quoted and "'" in content), text, place)
        yield Token(kind, content, is_quoted, place, end)
        place = end
    _check(is_quoted == in_quotes, text, start)


def _closing_bracket(text: str, start: int, bracket: str) -> int:
    for token in tokens(text, start):
        if token.kind == "plain" and token.content == bracket and not token.in_quotes:
            return token.start
    _check(False, text, start)
    return -1


def _closing_backquote(text: str, start: int) -> int:
    end = text.find("`", start)
    # A backslash in backquotes has rules of its own.
    _check(end >= 0 and "\\" not in text[start:end], text, start)
    return end


def _check(holds: bool, text: str, start: int) -> None:
    if not holds:
        near = text[max(start - 2, 0) : start + 40]
        raise ScriptError(
            f"the launch line cannot be read as bash, at {near!r}. Close its quotes and brackets, "
            f"or write it simpler."
        )


class Commands(NamedTuple):
    """The words of each command of a text, as they are written, and where redirections lead."""

    words: list[list[str]]
    targets: list[str]


def commands_in(text: str) -> Commands:
    """Takes the text of simple commands apart: one a line.

    >>> commands_in('A=(1 2) run "$A b" 2> log').words
    [['A=(1 2)', 'run', '"$A b"']]
    """
    lines: list[list[str]] = [[]]
    targets: list[str] = []
    word = ""
    is_target = False
    for token in [*tokens(text), Token("newline", "", False, 0, 0)]:
        written = text[token.start : token.end]
        if token.kind == "escape" and token.content == "\\\n":
            continue
        # A substitution that seems to end at the bracket of a `case`.
        _check(token.in_quotes or token.content != ")", text, token.start)
        if token.in_quotes or token.kind not in ("blank", "comment", "newline", "redirect"):
            word += written
            continue
        is_descriptor = token.kind == "redirect" and word.isdigit()
        # The number of a file goes to a variable.
        _check(not (token.kind == "redirect" and word.startswith("{")), text, token.start)
        if word and not is_descriptor:
            (targets if is_target else lines[-1]).append(word)
        if word or token.kind == "redirect":
            is_target = token.kind == "redirect"
        word = ""
        if token.kind == "newline":
            lines.append([])
    return Commands([words for words in lines if words], targets)
