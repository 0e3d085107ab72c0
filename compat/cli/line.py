"""The words of a command: as the user's shell has expanded them, or of a line that was pasted.

A pasted line is one simple command. What a shell would still expand in it is refused: bash is not
read here, it runs (``compat.cli.run``) or has run (``hypergrid check -- COMMAND``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compat.planned.job import JobError
from hypergrid.messages import shown

LONGEST = 1 << 17  # characters of a line
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
# The parts of a word by POSIX, "Quoting"; in double quotes $ and ` keep their meaning.
_PART = re.compile(
    r"""(?P<joined>\\\n)
    | \\(?P<escaped>.)
    | '(?P<single>[^']*)'
    | "(?P<double>(?:[^"\\$`]|\\.)*)"
    | (?P<blank>[ \t]+)
    | (?P<plain>[^ \t\n\r\\'"$`*?[~{;|&<>()#]+)""",
    re.S | re.X,
)
_WAYS = (
    "Put `hypergrid check --` before the command where your shell knows the values, or give its "
    "script to `hypergrid check --run SCRIPT`."
)


@dataclass(frozen=True)
class Command:
    """The words of a command, and the variables of its environment."""

    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


def command_of(line: str) -> Command:
    """The command of a pasted line: POSIX quotes, ``\\`` at line ends, ``NAME=value`` in front.

    JobError if a shell would still have something to do: expand ``$X``, match ``*``, start a pipe.
    """
    words: list[str] = []
    variables = {}
    for text, written in _words(line):
        # A quoted name, 'A'=1, is a command of that name; += depends on what A is.
        name = re.match(r"([A-Za-z_]\w*)(\+?)=", written)
        if name is None or words:
            words.append(text)
        elif name[2]:
            raise JobError(f"a shell would add {shown(written)} to what it knows. {_WAYS}")
        else:
            variables[name[1]] = text[name.end() :]
    return Command(words, variables)


def _words(line: str) -> list[tuple[str, str]]:
    """The words of a line, and how each is written."""
    if len(line) > LONGEST:
        raise JobError(f"the launch line is longer than {LONGEST:,} characters.")
    if "\r" in line:
        raise JobError("the launch line has carriage returns: give it lines that end as on Linux.")
    line = line.strip()
    words = []
    word: str | None = None  # None between two words; '' is a word that is empty
    start = 0
    place = 0
    while place < len(line):
        part = _PART.match(line, place)
        if part is None:
            raise _not_decided(line, place)
        if part["blank"] is not None:
            if word is not None:
                words.append((word, line[start:place]))
            word = None
            start = part.end()
        elif part["joined"] is not None:
            start = part.end() if word is None else start
        else:
            text = part[part.lastgroup or 0]
            if part["double"] is not None:
                # Before any other character the backslash stays.
                text = re.sub(r'\\(["\\$`\n])', _unescaped, text)
            word = (word or "") + text
        place = part.end()
    if word is not None:
        words.append((word, line[start:]))
    return words


def _unescaped(match: re.Match[str]) -> str:
    return "" if match[1] == "\n" else match[1]


def _not_decided(line: str, place: int) -> JobError:
    """The refusal of the word at a place, which a shell would change, or of a quote left open."""
    start = len(re.sub(r"\S+$", "", line[:place]))
    written = re.match(r"\S*", line[start:])
    assert written is not None  # it may be empty
    text = written[0] or line[place]
    if line[place] == "\n":
        return JobError(
            "the launch line has several lines. Join them by a backslash at the end of each, or "
            "give the script to `hypergrid check --run SCRIPT`."
        )
    if line[place] in "'\"\\" and "$" not in line[place:] and "`" not in line[place:]:
        return JobError(
            f"the launch line has a quote or a backslash that is left open: {shown(text)}. Close "
            f"it, or put `hypergrid check --` before the command in your shell."
        )
    return JobError(f"a shell would expand {shown(text)} in the launch line. {_WAYS}")
