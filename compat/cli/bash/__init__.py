"""Reads bash scripts without running them: which programs they start, as far as the text decides.

``commands`` is the entry. ``tree`` has the statements of a text, ``script`` follows them over a
``state``. ``words`` makes the words of a command and ``sums`` its numbers, ``builtins`` says what
each builtin changes, ``values`` carries what is not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from compat.cli.bash.script import Command, Script
from compat.cli.bash.state import POSITIONAL, State
from compat.cli.bash.tree import statements_of
from compat.cli.bash.values import LONGEST, MARK, Hole, Holes, ScriptError, Word

__all__ = ["LONGEST", "Command", "Hole", "ScriptError", "Word", "commands"]


def commands(
    text: str,
    fixed: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    takes_defaults: bool = False,
) -> tuple[list[Command], list[str]]:
    """The programs that a script starts, and the defaults ``NAME=VALUE`` that were taken.

    ``fixed`` are variables that nothing in the script changes (``@``: the script's arguments),
    ``environment`` those with which it begins. ScriptError if the text is not bash, or cannot be
    followed.
    """
    if MARK.search(text):
        raise ScriptError("the launch line has characters of Unicode's private use area.")
    fixed = dict(fixed or {})
    state = State(Holes(), fixed)
    for name, value in (environment or {}).items():
        state.values |= {name: [value], f"export {name}": True}
    if POSITIONAL in fixed:
        state.values[POSITIONAL] = fixed.pop(POSITIONAL).split()
    script = Script(state, takes_defaults)
    try:
        # A pasted line may end in the backslash before the next one.
        pasted = re.sub(r"\\\n*\Z", "", text)
        script.apart(lambda: script.follow(statements_of(pasted)))
    except RecursionError:
        raise ScriptError("the launch line is nested too deeply.") from None
    return script.commands, script.assumed
