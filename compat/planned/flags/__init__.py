"""The flags of each program that takes part in a launch, one a line: name, values, meaning, kind.

The values are a number, ``?``, ``*`` or ``+``, as in argparse. The meaning is a setting of a job,
or "refused" where the flag decides sizes in a way that is not read, if it has a kind only where the
value has this pattern; a flag without one changes no group. The kind is "text" where the
value is no number, "model" where it changes no group, and "starts" where it says what a program
starts. A name with ``$`` before it is a variable.
``programs.txt`` has the programs: how many words each takes before the program that it
starts, the file of its flags, and "script" where a script follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Flag(NamedTuple):
    """How many values a flag takes, and what it means for a layout."""

    values: str
    meaning: str = ""
    kind: str = ""


@cache
def flags_of(program: str) -> Mapping[str, Flag]:
    """The flags of a program, by their names without the dashes before them."""
    flags = {}
    # Also where the package is in a zip.
    text = files(__name__).joinpath(f"{program}.txt").read_text()
    for line in text.splitlines():
        name, *fields = line.split()
        flags[name] = Flag(*fields)
    return flags
