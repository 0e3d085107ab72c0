"""The state of a shell at one place of a script: what is known there, whichever way led to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compat.cli.bash.values import LONGEST, OPEN, Hole, Holes, ScriptError, names_in

POSITIONAL = "@"  # the name under which $1, $2, ... are kept
NAME = re.compile(r"[A-Za-z_]\w*")
# Bash changes these by itself, so what a script assigns to them says nothing.
_DYNAMIC = names_in(
    "RANDOM SRANDOM SECONDS LINENO UID EUID PPID BASHPID BASH_REMATCH BASH_COMMAND "
    "BASH_SUBSHELL BASH_ARGV0 BASH_SOURCE BASH_LINENO FUNCNAME GROUPS DIRSTACK EPOCHSECONDS "
    "EPOCHREALTIME PIPESTATUS HISTCMD COMP_WORDBREAKS OPTIND OPTARG REPLY MAPFILE PWD OLDPWD _"
)
# Assigning these changes how all later words are read.
_OF_THE_SHELL = names_in("IFS GLOBIGNORE POSIXLY_CORRECT SHELLOPTS BASHOPTS BASH_COMPAT")


@dataclass
class State:
    """Variables and functions. A variable that is missing is the environment's.

    Beside the variables ``values`` has more kinds of keys, so that all of them are copied,
    forgotten and compared alike:

    - ``f()``: a function; None where it is not known
    - ``export X``: whether X is for certain in the environment of programs
    - ``readonly X``: X cannot be assigned any more
    """

    holes: Holes
    fixed: dict[str, str]  # values that nothing in the script changes
    values: dict[str, Any] = field(default_factory=dict)
    why: str = ""  # why a variable that is missing is not simply the environment's
    line: int = field(default=0, compare=False)  # of the command that is followed

    def copy(self) -> State:
        """The same state, which changes for itself."""
        return replace(self, values=dict(self.values))

    def value(self, key: str) -> Any:
        """The elements of a variable, one of a text; or what is at another key."""
        # --set
        if key in self.fixed:
            return [self.fixed[key]]
        if key in self.values and key not in _DYNAMIC:
            return self.values[key]
        # $1 and so on; $0 is the script's name.
        if re.fullmatch(r"[1-9]\d*", key):
            count = int(key)
            arguments = self.value(POSITIONAL)[:count]
            # Behind an unquoted $X that is not known, $1 may be anything.
            if OPEN not in "".join(arguments):
                return arguments[count - 1 :]
        return self._unknown_at(key, self.why)

    def unknown(self, name: str, why: str) -> list[str]:
        """The value of a variable that is not known, which may be an array."""
        # No --set gives $?.
        is_decidable = name == POSITIONAL or name.isidentifier() or name.isdigit()
        decided_by = name if is_decidable else ""
        hole = Hole(f"${name}", decided_by, why)
        return [self.holes.mark(hole) + OPEN]

    @property
    def here(self) -> str:
        """Why a variable is not known that the command may assign which is followed."""
        return f"line {self.line} may assign it"

    def assign(self, name: str, value: list[str]) -> None:
        """Assign a value."""
        if len("".join(value)) > LONGEST:
            raise ScriptError(f"{name} of the launch line is longer than {LONGEST:,} characters.")
        if name in _OF_THE_SHELL:
            raise ScriptError(
                f"{name} changes how all later words of the launch line are read, and {self.here}. "
                f"Leave that out."
            )
        if f"readonly {name}" in self.values:
            raise ScriptError(f"{name} of the launch line is readonly, and {self.here}.")
        self.values[name] = value

    def lose(self, names: Iterable[str]) -> None:
        """Variables or functions of these names may be anything, and may be exported or not."""
        for name in names:
            self.assign(name, self.unknown(name, f"line {self.line} may assign it"))
            self.values.pop(f"export {name}", None)
            function = f"{name}()"
            if function in self.values:
                self.values[function] = None

    def forget(self) -> None:
        """Every variable and function may have been assigned anything."""
        kept: dict[str, Any] = {}
        for key in self.values:
            # A name that is a function now is one later, or another function.
            if key.endswith("()") or key.startswith("readonly "):
                kept[key] = None
        self.values = kept
        self.why = self.here

    def exported(self) -> State:
        """The state in which a program begins: with the variables that are exported."""
        values: dict[str, Any] = {}
        for name in filter(str.isidentifier, self.values):
            values[name] = self.values[name]
            values[f"export {name}"] = True
            # It may have been exported before the script began.
            if not self.values.get(f"export {name}"):
                values[name] = self.unknown(name, "it is assigned, and perhaps not exported")
        return replace(self, values=values)

    def _unknown_at(self, key: str, why: str) -> Any:
        """The value at a key that is not known."""
        if not _is_variable(key):
            return None
        return self.unknown(key, why)


def joined(states: Sequence[State], line: int) -> State:
    """The state where several ways meet: values that differ are unknown."""
    merged = states[0].copy()
    merged.line = line
    for state in states[1:]:
        merged.why = merged.why or state.why
        for key in sorted(merged.values.keys() | state.values.keys()):
            value = merged.value(key)
            other_value = state.value(key)
            if value == other_value:
                continue
            merged.values[key] = merged._unknown_at(key, merged.here)
            # To an array X=8 assigns one element: it remains an array, which is not known.
            if _is_variable(key) and max(len(value), len(other_value)) > 1:
                merged.values[key] *= 2
    return merged


def _is_variable(key: str) -> bool:
    return not key.endswith("()") and " " not in key
