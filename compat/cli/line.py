"""The words of a command: as the user's shell has expanded them, or of a line that was pasted.

A pasted line is one simple command. What a shell would still expand in it is refused: bash is not
read here, it runs (``compat.cli.run``) or has run (``hypergrid check -- COMMAND``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compat.planned.job import JobError
from hypergrid.messages import shown

LONGEST = 1 << 17  # characters of a line
# NAME=value in front, as it is written: a quoted name, 'A'=1, is a command of that name. Of a line
# in which every quote is closed.
_ASSIGNMENTS = re.compile(
    r"""\A ( [ \t\n]* [A-Za-z_][A-Za-z0-9_]* =
      ( [^\\'" \t\n] | \\[\s\S] | '[^']*' | "([^\\"]|\\[\s\S])*" )*
    )*""",
    re.X,
)
# Words that every POSIX shell and Python's shlex split alike, and leave as they are.
_DECIDED = re.compile(
    r"""( (?! (?<![^ \t\n]) [A-Za-z_]\w* \+= )  # A+=1 appends to what only the shell knows
      [^\\'"$`*?[~{;|&<>()#\r\n]  # also blanks
    | \\[\s\S]  # any character, and the end of a line
    | '[^'\n]*'
    | "([^"\\$`\n] | \\[^$`])*"
    )*""",
    re.X,
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
    if len(line) > LONGEST:
        raise JobError(f"the launch line is longer than {LONGEST:,} characters.")
    line = line.strip(" \t\n")
    decided = _DECIDED.match(line)
    assert decided is not None  # it may be empty
    place = decided.end()
    if place < len(line):
        # The word that the shell would change: 'a'$X"b", of which the place is that of $. Of a
        # second line it is the first word.
        start = max(line.rfind(blank, 0, place + 1) for blank in " \t\n") + 1
        word = re.split("[ \t\n]", line[start:], maxsplit=1)[0]
        raise JobError(
            f"a shell would not leave {shown(word)} of the launch line as it is: it expands it, or "
            f"reads on. Close quotes, join lines by a backslash at their ends, put `hypergrid "
            f"check --` before the command where your shell knows the values, or give its script "
            f"to `hypergrid check --run SCRIPT`."
        )
    joined = line.replace("\\\n", "")
    words = shlex.split(joined)
    command = shlex.split(_ASSIGNMENTS.sub("", joined))
    assignments = words[: len(words) - len(command)]
    return Command(command, dict(word.split("=", 1) for word in assignments))
