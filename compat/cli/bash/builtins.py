"""Bash's builtins: what each may change. What is not listed is a program, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from compat.cli.bash.conditions import Status, holds
from compat.cli.bash.state import NAME, POSITIONAL
from compat.cli.bash.values import OPEN, ScriptError, is_unknown, names_in, plain

Script: TypeAlias = Any  # of script.py, which imports this file
Builtin: TypeAlias = Callable[[Script, list[str]], Status]
# They change no variable of the script.
_HARMLESS = names_in(
    ": true false pwd umask ulimit jobs fg bg disown times type help history caller "
    "compgen complete compopt bind suspend logout cd pushd popd dirs alias unalias echo"
)
# Variables that are set for these commands alone change nothing else.
UNCHANGED = _HARMLESS | {"read", "mapfile", "readarray", "printf", "wait", "test", "["}
# Programs that are no functions of a file that was sourced.
PROGRAMS = names_in(
    "awk basename cat chmod cp date df dirname docker du env find free grep head hostname ln ls "
    "lscpu mkdir mv nproc numactl nvidia-smi pip ps python python3 rm rsync scontrol sed seq "
    "sleep sort srun ssh sudo tail tar tee timeout touch torchrun tr uname uniq wc which whoami "
    "xargs mpirun mpiexec deepspeed accelerate bash sh squeue sinfo scancel sbatch nohup"
)
# Options that change nothing in the words of a script that goes on.
_OPTIONS = re.compile(
    r"[-+]([xvfhbmCETHPeua]*|[xvfhbmCETHPeua]*o (pipefail|xtrace|errexit|nounset|allexport))"
)
_OF_SOFTWARE = ("module", "ml", "conda", "mamba", "spack")
DECLARING = {"export", "declare", "typeset", "local"}
_NOT_READ = names_in("hash enable builtin coproc shopt readonly")


class Leaving(Exception):
    """The shell, a function or a loop is left: exit, return, break or continue."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


def refuse(script: Script, words: Sequence[str]) -> Status:
    """Refuse a command that changes how all later ones are read."""
    written = plain(" ".join(words))
    raise ScriptError(f"line {script.line} of the launch line, {written}, cannot be followed.")


def _harmless(script: Script, words: list[str]) -> Status:
    return {"true": True, ":": True, "echo": True, "false": False}.get(words[0])


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


def _reads(script: Script, words: list[str]) -> Status:
    """Builtins that assign names that they are given."""
    # printf and wait assign by options alone, -v NAME and -p NAME.
    is_by_option = words[0] in ("printf", "wait")
    if is_by_option and not re.match(r"-|[^ -~]", " ".join(words[1:])):
        return None
    why = f"line {script.line} runs {words[0]}, which may assign it"
    if any(map(is_unknown, words)):
        script.state.forget(why)
    for word in words[1:]:
        script.state.lose(NAME.findall(word), why)
    return None


def _let(script: Script, words: list[str]) -> Status:
    status: Status = None
    for word in words[1:]:
        status = script.sum_holds(word)
    return status


def _source(script: Script, words: list[str]) -> Status:
    """It may assign anything; a function of the environment, such as ``module``, too."""
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
    if words[1:2] and words[1].startswith("-"):
        return refuse(script, words)
    if len(words) == 1:  # it only redirects
        return None
    script.program(words[1:])
    raise Leaving("exit")


def _command(script: Script, words: list[str]) -> Status:
    # `command -v NAME` only looks for it.
    if words[1:2] == ["-v"]:
        return None
    return refuse(script, words)


def _leaves(script: Script, words: list[str]) -> Status:
    """``exit``, ``return``, ``break``, ``continue``."""
    how = words[0]
    # Outside of loops they are errors, and `break 2` leaves two loops.
    is_followed = script.loops > 0 and len(words) == 1
    if how in ("break", "continue") and not is_followed:
        return refuse(script, words)
    # Outside of functions it is an error, behind which bash goes on.
    if how == "return" and script.level == 0:
        return refuse(script, words)
    raise Leaving(how)


def _shift(script: Script, words: list[str]) -> Status:
    state = script.state
    arguments = state.elements(POSITIONAL)
    count = "".join(words[1:]) or "1"
    is_open = any(OPEN in argument for argument in arguments)
    if is_open or not count.isdigit():
        state.lose([POSITIONAL], f"line {script.line} runs shift, which changes it")
    # With fewer arguments nothing is shifted.
    elif int(count) <= len(arguments):
        state.values[POSITIONAL] = arguments[int(count) :]
    return None


def _set(script: Script, words: list[str]) -> Status:
    text = " ".join(words[1:])
    if _OPTIONS.fullmatch(text):
        return True
    arguments = words[1:]
    # Alone it prints all variables; an unknown word may be an option.
    if not arguments or is_unknown(arguments[0]):
        return refuse(script, words)
    if text.startswith(("-", "+")) and arguments[0] != "--":
        return refuse(script, words)
    if arguments[0] == "--":
        del arguments[0]
    script.state.values[POSITIONAL] = arguments
    return True


def _trap(script: Script, words: list[str]) -> Status:
    # DEBUG, ERR and RETURN run between the commands that follow.
    if set(words[2:]) - {"EXIT", "INT", "TERM"}:
        return refuse(script, words)
    if len(words) > 2 and words[1] != "-":  # the programs that it may start
        script.apart(lambda: script.evaluate(words[1], script.line))
    return None


def _unset(script: Script, words: list[str]) -> Status:
    state = script.state
    why = f"line {script.line} unsets it"
    if any(map(is_unknown, words)):
        state.forget(why)
    is_of_functions = words[1:2] == ["-f"]
    for name in words[1:]:
        if f"{name}()" in state.values:
            state.values[f"{name}()"] = None
        if is_of_functions or name.startswith("-"):
            continue
        state.values.pop(f"export {name}", None)
        # In a function a variable of the caller may come back.
        if name.isidentifier() and script.level == 0:
            state.assign(name, None, script.line)
        else:
            state.lose(NAME.findall(name), why)
    return None


def declare(script: Script, command: str, written: Sequence[str]) -> Status:
    """``export``, ``declare``, ``local``: names, values and attributes."""
    state = script.state
    flags = {word for word in written if word.startswith(("-", "+"))}
    # References, integers and the like change what every later assignment means.
    if flags - {"-a", "-x"}:
        return refuse(script, [command, *written])
    # Outside of functions it is an error.
    if command == "local" and script.level == 0:
        return refuse(script, [command, *written])
    names: set[str] = set()
    for word in written:
        if word in flags:
            continue
        match = re.match(r"([A-Za-z_]\w*)(=.*)?\Z", word, re.S)
        if match is None:  # export "$NAME=8", export PATH+=:/x
            state.forget(f"line {script.line} runs {command} {word}")
            continue
        name, assigned = match.groups()
        # All words are expanded before the first is assigned.
        if assigned and names.intersection(NAME.findall(assigned)):
            return refuse(script, [command, *written])
        names.add(name)
        local = f"{script.level} {name}"
        if command != "export" and script.level and local not in state.values:
            state.values[local] = state.value(name)
            if not assigned:
                state.assign(name, None, script.line)
        if assigned:
            script.assign(word)
        if command == "export" or "-x" in flags:
            state.values[f"export {name}"] = True
    return True


BUILTINS: Mapping[str, Builtin] = {
    **dict.fromkeys(_HARMLESS, _harmless),
    **dict.fromkeys(("test", "["), _test),
    **dict.fromkeys(("read", "mapfile", "readarray", "getopts", "printf", "wait"), _reads),
    **dict.fromkeys(("source", ".", "kill", *_OF_SOFTWARE), _source),
    **dict.fromkeys(("exit", "return", "break", "continue"), _leaves),
    **dict.fromkeys(_NOT_READ, refuse),
    "let": _let,
    "eval": _eval,
    "command": _command,
    "exec": _exec,
    "shift": _shift,
    "set": _set,
    "trap": _trap,
    "unset": _unset,
}
