"""The state of a shell at one place of a script: what is known, whichever way led there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from compat.cli.bash.values import LONGEST, OPEN, Hole, Holes, ScriptError, is_unknown, names_in

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

# A text, the words of an array, or None for a variable that is not set.
Value: TypeAlias = str | list[str] | None


@dataclass
class State:
    """Variables, functions and options. A variable that is missing is the environment's."""

    holes: Holes
    fixed: Mapping[str, str]  # values that nothing in the script changes
    variables: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)  # assigning one is an error
    functions: dict[str, Any] = field(default_factory=dict)  # None: not known
    # Of each function that is running, the variables that are restored behind it.
    frames: list[dict[str, Value]] = field(default_factory=list)
    why: str = ""  # why a variable that is missing is not simply the environment's

    def copy(self) -> State:
        """The same state, which changes for itself."""
        twin = copy(self)
        twin.variables = dict(self.variables)
        twin.exported = set(self.exported)
        twin.constants = set(self.constants)
        twin.functions = dict(self.functions)
        twin.frames = [dict(frame) for frame in self.frames]
        return twin

    def value(self, name: str) -> Value:
        """The value of a variable; a text with a mark where it is not known."""
        if name in self.fixed:
            return self.fixed[name]
        if name in self.variables and name not in _DYNAMIC:
            return self.variables[name]
        return self.unknown(name, self.why)

    def unknown(self, name: str, why: str) -> Value:
        """The value of a variable that is not known."""
        is_decidable = name == POSITIONAL or name.isidentifier() or name.isdigit()
        mark = self.holes.mark(Hole(f"${name}", name if is_decidable else "", why))
        return [mark + OPEN] if name == POSITIONAL else mark

    def values(self, name: str) -> list[str]:
        """The elements of a variable; what is not known may be any number of them."""
        value = self.value(name)
        if isinstance(value, str):
            return [value + OPEN] if is_unknown(value) else [value]
        return value or []

    def assign(self, name: str, value: Value, line: int) -> None:
        """Assign a value."""
        texts = [value] if isinstance(value, str) else value or []
        if sum(map(len, texts)) > LONGEST:
            raise ScriptError(f"{name} of the launch line is longer than {LONGEST:,} characters.")
        if name in self.constants:
            raise ScriptError(f"line {line} of the launch line assigns {name}, which is readonly.")
        if name in _OF_THE_SHELL:
            self.forget(f"line {line} assigns {name}")
        self.variables["IFS" if name in _OF_THE_SHELL else name] = value

    def lose(self, names: Iterable[str], why: str) -> None:
        """The variables may have been assigned anything."""
        for name in names:
            if name in self.constants or name in _OF_THE_SHELL:
                self.forget(why)
            self.variables[name] = self.unknown(name, why)

    def forget(self, why: str) -> None:
        """Every variable and function may have been assigned anything."""
        self.variables.clear()
        self.exported.clear()
        self.why = why
        self.functions = dict.fromkeys(self.functions)
        for frame in self.frames:
            for name in frame:
                frame[name] = self.unknown(name, why)

    def make_local(self, name: str) -> None:
        """The variable is restored when the function that is running returns."""
        self.frames[-1].setdefault(name, self.value(name))

    def leave(self) -> None:
        """Restore the variables of the function that returns."""
        restored = self.frames.pop()
        self.exported -= restored.keys()
        self.variables.update(restored)


def joined(one: State | None, other: State | None, why: str) -> State | None:
    """What is known where two ways meet; None is a way that ends before."""
    if one is None or other is None or one == other:
        return other if one is None else one
    both = one.copy()
    both.why = one.why or other.why
    both.constants |= other.constants
    both.exported &= other.exported
    for name in sorted(one.variables.keys() | other.variables.keys()):
        if one.value(name) != other.value(name):
            both.variables[name] = one.unknown(name, why)
    for name in one.functions.keys() | other.functions.keys():
        if one.functions.get(name) != other.functions.get(name):
            both.functions[name] = None
    for frame, other_frame in zip(both.frames, other.frames, strict=True):
        for name in frame.keys() | other_frame.keys():
            if frame.get(name) != other_frame.get(name):
                frame[name] = one.unknown(name, why)
    return both
