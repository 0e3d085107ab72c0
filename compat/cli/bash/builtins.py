"""Bash's builtins: what each may change. What is not listed is a program, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from compat.cli.bash.conditions import Status, holds
from compat.cli.bash.state import NAME, POSITIONAL
from compat.cli.bash.tree import Node, literal_of, texts_in
from compat.cli.bash.values import OPEN, is_unknown, names_in, plain

Script: TypeAlias = Any  # of script.py, which imports this file
Builtin: TypeAlias = Callable[[Script, list[str]], Status]
# They change no variable of the script.
_HARMLESS = names_in(
    ": true false pwd umask ulimit jobs fg bg disown times type help history caller "
    "compgen complete compopt bind suspend logout cd pushd popd dirs alias unalias"
)
# They assign variables that they are given, or unset them; printf and wait only with an option.
_ASSIGNING = names_in("read mapfile readarray getopts wait")
# Variables that are set for these commands alone change nothing else.
UNCHANGED = _HARMLESS | names_in("echo read mapfile readarray printf wait test [")
# They print nothing, or what they print is followed.
SILENT = names_in(
    ": true false test [ echo printf eval exit return break continue shift unset read mapfile "
    "getopts"
)
# Programs that are no functions of a file that was sourced.
PROGRAMS = names_in(
    "awk basename cat chmod cp date df dirname docker du env find free grep head hostname ln ls "
    "lscpu mkdir mv nproc numactl nvidia-smi pip ps python python3 rm rsync scontrol sed seq "
    "sleep sort srun ssh sudo tail tar tee timeout touch torchrun tr uname uniq wc which whoami "
    "xargs mpirun mpiexec deepspeed accelerate bash sh squeue sinfo scancel sbatch nohup"
)
# Options that change nothing in the words of a script that goes on.
_OPTIONS = re.compile(r"([-+][xvfhbmCETHPeu]*(o (pipefail|xtrace|errexit|nounset))? ?)+")
_OF_SOFTWARE = ("module", "ml", "conda", "mamba", "spack")
# Read where their names are written without quotes, and refused elsewhere.
DECLARING = {"export", "local", "declare", "typeset", "readonly"}
_NOT_READ = names_in("hash enable builtin coproc shopt let command") | DECLARING


class Leaving(Exception):
    """The shell, a function or a loop is left: exit, return, break or continue."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


def _refuse(script: Script, words: list[str]) -> Status:
    script.refuse(" ".join(words))
    return None


def _harmless(script: Script, words: list[str]) -> Status:
    return {"true": True, ":": True, "false": False}.get(words[0])


def _echo(script: Script, words: list[str]) -> Status:
    """``echo``, which prints its words unless an option or a backslash changes them."""
    texts = words[1:]
    end = "\n"
    if texts[:1] == ["-n"]:
        texts = texts[1:]
        end = ""
    text = " ".join(texts)
    # After `source` it may be a function.
    if script.state.why or "\\" in text or text.startswith("-") or is_unknown(text[:1]):
        script.prints(None)
    else:
        script.prints(text + end)
    return True


def _printf(script: Script, words: list[str]) -> Status:
    """``printf FORMAT ARGUMENTS``, ``printf -v NAME FORMAT ARGUMENTS``."""
    operands = words[1:]
    if operands[:1] != ["-v"]:
        script.prints(None if script.state.why else _formatted(operands))
        return _assigns(script, words)
    name = "".join(operands[1:2])
    text = _formatted(operands[2:])
    if text is None or not NAME.fullmatch(name) or len(script.state.value(name)) > 1:
        return _assigns(script, words)
    script.state.assign(name, [text], script.line)
    return None


def _formatted(operands: list[str]) -> str | None:
    """The text that printf makes of a format and as many arguments; None if not followed."""
    template, *arguments = operands or [""]
    pieces = re.findall(r"%[sd]|\\n|[^%\\]", template)
    is_read = "".join(pieces) == template and not is_unknown(template)
    if not is_read or template.startswith("-"):
        return None
    if OPEN in "".join(arguments) or template.count("%") != len(arguments):
        return None
    text = ""
    for piece in pieces:
        if piece == "%d" and not re.fullmatch(r"0|-?[1-9]\d{0,17}", arguments[0]):
            return None
        if piece.startswith("%"):
            text += arguments.pop(0)
        else:
            text += piece.replace(r"\n", "\n")
    return text


def _unset(script: Script, words: list[str]) -> Status:
    """``unset NAME``, ``unset -f NAME``: outside of functions, where no local is behind it."""
    option = words[1] if words[1:] and words[1].startswith("-") else ""
    names = words[2:] if option else words[1:]
    is_read = option in ("", "-v", "-f") and all(NAME.fullmatch(name) for name in names)
    if not is_read or script.level:
        return _assigns(script, words)
    values = script.state.values
    for name in names:
        # Without an option it takes the function where there is no such variable.
        if option == "-f" or (not option and f"{name}()" in values):
            return _unset_function(script, option, words)
        script.state.assign(name, [], script.line)
        values.pop(f"export {name}", None)
    return None


def _unset_function(script: Script, option: str, words: list[str]) -> Status:
    if option != "-f" or script.state.why:
        return _assigns(script, words)
    for name in words[2:]:
        script.state.values.pop(f"{name}()", None)
    return None


def _test(script: Script, words: list[str]) -> Status:
    operands = words[1:]
    if words[0] == "[":
        # Without its bracket it is an error.
        if words[-1] != "]":
            return None
        operands.pop()
    # An unquoted $X may be several words.
    if any(OPEN in word for word in operands):
        return None
    return holds(operands)


def _assigns(script: Script, words: list[str]) -> Status:
    text = " ".join(words[1:])
    if words[0] in ("printf", "wait") and not re.match(r"-|[^ -~]", text):
        return None
    why = f"line {script.line} runs {words[0]}, which may assign it"
    if is_unknown(text):
        script.state.forget(why)
    for name in NAME.findall(plain(text)):
        script.state.lose([name], why)
        # unset takes the attribute too.
        script.state.values.pop(f"export {name}", None)
        if f"{name}()" in script.state.values:
            script.state.values[f"{name}()"] = None
    return None


def _source(script: Script, words: list[str]) -> Status:
    """A sourced file may assign anything, and so may a function such as ``module``."""
    state = script.state
    of_job = {key: value for key, value in state.values.items() if "SLURM_" in key}
    written = plain(" ".join(words))
    state.forget(f"line {script.line} runs {written}, which may assign it")
    # These set variables of software, and none of the job.
    if words[0] in _OF_SOFTWARE:
        state.values.update(of_job)
    return None


def _eval(script: Script, words: list[str]) -> Status:
    status: Status = script.evaluate(" ".join(words[1:]), script.line)
    return status


def _exec(script: Script, words: list[str]) -> Status:
    if len(words) == 1:  # it only redirects
        return None
    if words[1].startswith("-"):
        return _refuse(script, words)
    script.program(words[1:])
    raise Leaving("exit")


def _leaves(script: Script, words: list[str]) -> Status:
    """``exit``, ``return``, ``break``, ``continue``."""
    how = words[0]
    # Outside of loops and functions they are errors, behind which bash goes on; `break 2` leaves
    # two loops.
    if how in ("break", "continue") and (not script.loops or len(words) > 1):
        return _refuse(script, words)
    if how == "return" and not script.level:
        return _refuse(script, words)
    raise Leaving(how)


def _shift(script: Script, words: list[str]) -> Status:
    state = script.state
    arguments = state.value(POSITIONAL)
    count = words[1] if len(words) == 2 else "1"
    if OPEN in "".join(arguments) or not count.isdigit():
        state.lose([POSITIONAL], f"line {script.line} runs shift, which changes it")
    # With fewer arguments nothing is shifted.
    elif int(count) <= len(arguments):
        state.values[POSITIONAL] = arguments[int(count) :]
    return None


def _set(script: Script, words: list[str]) -> Status:
    if words[1:2] == ["--"]:
        script.state.values[POSITIONAL] = words[2:]
        return True
    # Alone it prints all variables.
    if _OPTIONS.fullmatch(" ".join(words[1:])):
        return True
    return _refuse(script, words)


def _trap(script: Script, words: list[str]) -> Status:
    # DEBUG, ERR and RETURN run between the commands that follow.
    if set(words[2:]) - {"EXIT", "INT", "TERM"}:
        return _refuse(script, words)
    if len(words) > 2 and words[1] != "-":  # the programs that it may start
        script.apart(lambda: script.evaluate(words[1], script.line))
    return None


def declare(script: Script, command: Node) -> Status:
    """``export``, ``local``, ``declare`` and ``typeset`` of names and values."""
    state = script.state
    variant = command["Variant"]["Value"]
    names: set[str] = set()
    arguments = list(command.get("Args", []))
    options = ""
    while arguments and literal_of(arguments[0].get("Value", {})) in ("-a", "-r", "-x"):
        options += literal_of(arguments.pop(0)["Value"])
    # Without names it prints all variables.
    if not arguments:
        script.prints(None)
    # Outside of functions local is an error. In them, an array or a constant may hide another.
    is_outside = variant == "local" and not script.level
    is_hidden = script.level and (options or variant == "readonly")
    if is_outside or is_hidden or variant not in DECLARING:
        script.refuse(variant)
    for assignment in arguments:
        # Flags change what later assignments mean; export "$NAME=8" and export PATH+=:/x. All words
        # are expanded before the first is assigned.
        is_plain = "Name" in assignment and not assignment.keys() & {"Append", "Index"}
        values = [assignment.get("Value"), assignment.get("Array")]
        if not is_plain or names & texts_in(values):
            script.refuse(variant)
        name = assignment["Name"]["Value"]
        names.add(name)
        if variant == "export" or "x" in options:
            state.values[f"export {name}"] = True
        elif script.level:
            # What it becomes again; of two declarations the first counts.
            local = f"{script.level} {name}"
            if local not in state.values:
                state.values[local] = state.value(name)
                if "Naked" in assignment:
                    state.assign(name, [], script.line)
        if "Naked" not in assignment:
            script.assign(assignment)
        if variant == "readonly" or "r" in options:
            state.values[f"readonly {name}"] = True
    return True


BUILTINS: Mapping[str, Builtin] = {
    **dict.fromkeys(_HARMLESS, _harmless),
    **dict.fromkeys(("test", "["), _test),
    **dict.fromkeys(_ASSIGNING, _assigns),
    **dict.fromkeys(("source", ".", "kill", *_OF_SOFTWARE), _source),
    **dict.fromkeys(("exit", "return", "break", "continue"), _leaves),
    **dict.fromkeys(_NOT_READ, _refuse),
    "echo": _echo,
    "printf": _printf,
    "unset": _unset,
    "eval": _eval,
    "exec": _exec,
    "shift": _shift,
    "set": _set,
    "trap": _trap,
}
