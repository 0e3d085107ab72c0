"""Bash's builtins: what each may change. What is not listed is a program, and changes nothing."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from compat.cli.bash.conditions import Status, holds
from compat.cli.bash.state import NAME, POSITIONAL
from compat.cli.bash.tree import Node, literal_of
from compat.cli.bash.values import OPEN, is_unknown, names_in, plain

Script: TypeAlias = Any  # of script.py, which imports this file
# They change no variable of the script.
_HARMLESS = names_in(
    ": true false echo test [ pwd umask ulimit jobs fg bg disown times type help history caller "
    "compgen complete compopt bind suspend logout cd pushd popd dirs alias unalias"
)
# They assign variables that they are given, or unset them.
_ASSIGNING = names_in("read mapfile readarray printf wait getopts unset")
_OF_SOFTWARE = names_in("module ml conda mamba spack")
_SOURCING = names_in("source . kill") | _OF_SOFTWARE
# Read where their names are written without quotes, and refused elsewhere.
DECLARING = names_in("export local declare typeset readonly")
# Variables that are set for these commands alone change nothing else.
UNCHANGED = _HARMLESS | _ASSIGNING - {"getopts", "unset"}
_READ_ELSEWHERE = names_in(
    "set shift eval exec exit return break continue trap command hash enable builtin coproc "
    "shopt let else elif"
)
BUILTINS = _HARMLESS | _ASSIGNING | _SOURCING | DECLARING | _READ_ELSEWHERE
# Programs that are no functions of a file that was sourced.
PROGRAMS = names_in(
    "awk basename cat chmod cp date df dirname docker du env find free grep head hostname ln ls "
    "lscpu mkdir mv nproc numactl nvidia-smi pip ps python python3 rm rsync scontrol sed seq "
    "sleep sort srun ssh sudo tail tar tee timeout touch torchrun tr uname uniq wc which whoami "
    "xargs mpirun mpiexec deepspeed accelerate bash sh squeue sinfo scancel sbatch nohup"
)
# Options that change nothing in the words of a script that goes on.
_OPTIONS = re.compile(r"([-+][xvfhbmCETHPeu]*(o (pipefail|xtrace|errexit|nounset))? ?)+")
# Signals that no command of the script sends; DEBUG, ERR and CHLD run between commands.
_SIGNALS = re.compile(r"((SIG)?(EXIT|INT|TERM|HUP|QUIT|USR1|USR2) ?)*|0")


def run(script: Script, words: list[str]) -> Status:
    """Change what a builtin changes; its status."""
    state = script.state
    operands = words[1:]
    text = " ".join(operands)
    match words:
        case ["true" | ":", *_]:
            return True
        case ["false", *_]:
            return False
        case ["test", *condition] | ["[", *condition, "]"]:
            return holds(condition)
        # Alone, exec opens files for the rest of the script.
        case ["exec"] | ["command", "-v", *_]:
            return None
        case ["printf" | "wait", *_] if not re.match(r"-|[^ -~]", text):
            return None
        case ["set", "--", *arguments]:
            state.values[POSITIONAL] = arguments
        case ["set", _, *_] if _OPTIONS.fullmatch(text):
            return True
        case ["shift"] if OPEN not in "".join(state.value(POSITIONAL)[:1]):
            state.values[POSITIONAL] = state.value(POSITIONAL)[1:]
        case ["shift", *_]:
            state.lose([POSITIONAL])
        case ["eval", *_]:
            status: Status = script.evaluate(text)
            return status
        case ["exec", program, *_] if not program.startswith("-"):
            script.program(operands)
            script.leave("exit")
        case ["exit", *_]:
            script.leave("exit")
        # Outside of functions and loops they are errors; `break 2` leaves two loops.
        case ["return" as how, *_] | ["break" | "continue" as how] if how in script.left:
            script.leave(how)
        case ["trap", code, *signals] if _SIGNALS.fullmatch(" ".join(signals)):
            script.traps.append((code, state.line))
        case [name, *_] if name in _SOURCING:
            of_job = {key: value for key, value in state.values.items() if "SLURM_" in key}
            state.forget()
            # Modules set variables of software, and none of the job.
            if name in _OF_SOFTWARE:
                state.values.update(of_job)
        case [name, *_] if name in _ASSIGNING:
            if is_unknown(text):
                state.forget()
            state.lose(NAME.findall(plain(text)))
        case [name, *_] if name not in _HARMLESS:
            script.refuse(" ".join(words))
    return None


def declare(script: Script, command: Node) -> Status:
    """``export``, ``local``, ``declare`` and ``typeset`` of names and values."""
    state = script.state
    variant = command["Variant"]["Value"]
    is_global = variant in ("export", "readonly")
    is_local = not is_global and "local" in script.left
    # Outside of functions local is an error.
    if variant == "local" and not is_local:
        script.refuse(variant)
    values: dict[str, list[str]] = {}
    for argument in command.get("Args", []):
        option = literal_of(argument.get("Value", {}))
        if "Name" in argument and not argument.keys() & {"Append", "Index"}:
            name = argument["Name"]["Value"]
            is_new = is_local and name not in script.left["local"]
            values[name] = [] if is_new else state.value(name)
            if "Naked" not in argument:
                values[name] = script.value_of(argument)
        elif is_global and not option.startswith("-"):  # export $(cat .env)
            state.forget()
        # Other options change what later assignments mean.
        elif option != "-a":
            script.refuse(variant)
    # All words are expanded before the first is assigned.
    for name, value in values.items():
        state.assign(name, value)
        if is_global:
            state.values[f"{variant} {name}"] = True
        elif is_local:
            script.left["local"].append(name)
    return True
