"""The state of a shell at one place of a script: what is known, whichever way led there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from compat.cli.bash.values import LONGEST, OPEN, Hole, Holes, ScriptError, names_in

POSITIONAL = "@"  # the name under which $1, $2, ... are kept
NAME = re.compile(r"[A-Za-z_]\w*")
# Bash changes these by itself, so what a script assigns to them says nothing.
_DYNAMIC = names_in(
    "RANDOM SRANDOM SECONDS LINENO UID EUID PPID BASHPID BASH_REMATCH BASH_COMMAND "
    "BASH_SUBSHELL BASH_ARGV0 BASH_SOURCE BASH_LINENO FUNCNAME GROUPS DIRSTACK EPOCHSECONDS "
    "EPOCHREALTIME PIPESTATUS HISTCMD COMP_WORDBREAKS OPTIND OPTARG REPLY MAPFILE PWD OLDPWD _"
)
# Assigning these changes how all later words are read, or what a substitution prints.
_OF_THE_SHELL = names_in(
    "IFS GLOBIGNORE POSIXLY_CORRECT SHELLOPTS BASHOPTS BASH_COMPAT BASH_XTRACEFD"
)

# The elements of an array; one of a text, none of a variable that is not set.
Value: TypeAlias = list[str]


@dataclass
class State:
    """Variables and functions. A variable that is missing is the environment's.

    Beside the variables ``values`` has more kinds of keys, so that all of them are copied,
    forgotten and compared alike:

    - ``f()``: a function; None where it is not known
    - ``export X``: whether X is for certain in the environment of programs
    - ``readonly X``: X cannot be assigned any more
    - ``2 X``: what X becomes again when the function at the second level returns
    """

    holes: Holes
    fixed: Mapping[str, str]  # values that nothing in the script changes
    values: dict[str, Any] = field(default_factory=dict)
    why: str = ""  # why a variable that is missing is not simply the environment's

    def copy(self) -> State:
        """The same state, which changes for itself."""
        return replace(self, values=dict(self.values))

    def value(self, name: str) -> Value:
        """The value of a variable."""
        if name in self.fixed:
            return [self.fixed[name]]
        if name in self.values and name not in _DYNAMIC:
            value: Value = self.values[name]
            return value
        return self.unknown(name, self.why)

    def unknown(self, name: str, why: str) -> Value:
        """The value of a variable that is not known, which may be an array."""
        is_decidable = name == POSITIONAL or name.isidentifier() or name.isdigit()
        hole = Hole(f"${name}", name if is_decidable else "", why)
        return [self.holes.mark(hole) + OPEN]

    def assign(self, name: str, value: Value, line: int) -> None:
        """Assign a value."""
        if len("".join(value)) > LONGEST:
            raise ScriptError(f"{name} of the launch line is longer than {LONGEST:,} characters.")
        _check_name(name, f"line {line} assigns it")
        if f"readonly {name}" in self.values:
            raise ScriptError(f"line {line} of the launch line assigns {name}, which is readonly.")
        self.values[name] = value

    def lose(self, names: Iterable[str], why: str) -> None:
        """The variables may have been assigned anything."""
        for name in names:
            _check_name(name, why)
            self.values[name] = self.unknown(name, why)

    def forget(self, why: str) -> None:
        """Every variable and function may have been assigned anything."""
        kept = {}
        for key in self.values:
            if not _is_variable(key) and not key.startswith("export "):
                kept[key] = self._unknown_at(key, why)
        self.values = kept
        self.why = why

    def _unknown_at(self, key: str, why: str) -> Any:
        """The value at a key that is not known: an unknown text, or no function, no export."""
        level, _, name = key.rpartition(" ")
        if _is_variable(name) and level != "export":
            return self.unknown(name, why)
        return None


def _check_name(name: str, why: str) -> None:
    if name in _OF_THE_SHELL:
        raise ScriptError(
            f"{name} changes how all later words of the launch line are read, and {why}. "
            f"Leave that out."
        )


def _is_variable(key: str) -> bool:
    return key == POSITIONAL or key.isidentifier()


def joined(first: State, second: State, why: str) -> State:
    """The state where two ways meet: values that differ are unknown."""
    merged = first.copy()
    merged.why = first.why or second.why
    for key in sorted(first.values.keys() | second.values.keys()):
        if _is_variable(key):
            is_same = first.value(key) == second.value(key)
        else:
            is_same = first.values.get(key) == second.values.get(key)
        if not is_same:
            merged.values[key] = merged._unknown_at(key, why)
    return merged
