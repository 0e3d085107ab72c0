"""Reads bash scripts without running them: which programs they start, as far as the text decides.

``commands`` is the entry. ``tree`` has the statements of a text, ``script`` follows them over a
``state``. ``words`` makes the words of a command and its numbers, ``builtins`` says what each
builtin changes, ``conditions`` what a test decides, ``values`` carries what is not known.
"""

from compat.cli.bash.script import Command, commands
from compat.cli.bash.values import LONGEST, Hole, ScriptError, Word

__all__ = ["LONGEST", "Command", "Hole", "ScriptError", "Word", "commands"]
