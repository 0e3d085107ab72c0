"""Bash's builtins: what each may change. One that is not listed may change everything."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from hypergrid.cli.bash.state import POSITIONAL
from hypergrid.cli.bash.values import Hole, ScriptError, is_unknown, names_in, plain

Script: TypeAlias = Any  # of script.py, which imports this file
Builtin: TypeAlias = Callable[[Script, list[str], int], "bool | None"]
_NAME = re.compile(r"[A-Za-z_]\w*")
# They change no variable of the script.
_HARMLESS = (
    "test [ pwd umask ulimit jobs kill fg bg disown times type help history caller "
    "compgen complete compopt bind suspend logout cd pushd popd dirs alias unalias echo"
)
# Programs that are no functions of a file that was sourced.
PROGRAMS = names_in(
    "awk basename cat chmod cp date df dirname docker du env find free grep head hostname ln "
    "ls lscpu mkdir mv nproc numactl nvidia-smi pip ps python python3 rm rsync scontrol sed "
    "seq sleep sort srun ssh sudo tail tar tee timeout touch torchrun tr uname uniq wc "
    "which whoami xargs mpirun mpiexec deepspeed accelerate bash sh squeue sinfo scancel "
    "sbatch nohup"
)
# Options that change nothing in the words of a script that goes on.
_OPTIONS = re.compile(
    r"[-+]([xvfhbmCETHPeua]*|[xvfhbmCETHPeua]*o (pipefail|xtrace|errexit|nounset|allexport))"
)
_OF_SOFTWARE = ("module", "ml", "conda", "mamba", "spack")


def _known_words(script: Script, words: list[str], line: int) -> bool:
    """Whether all words are known; if not, all variables are not."""
    if any(map(is_unknown, words)):
        script.state.forget(f"line {line} runs {plain(words[0])} with words that are not known")
        return False
    return True


def _nothing(script: Script, words: list[str], line: int) -> bool | None:
    return {"true": True, ":": True, "false": False}.get(words[0])


def _printf(script: Script, words: list[str], line: int) -> bool | None:
    has_variable = len(words) > 1 and (words[1].startswith("-") or is_unknown(words[1]))
    return _reads(script, words, line) if has_variable else None


def _reads(script: Script, words: list[str], line: int) -> bool | None:
    """Builtins that assign names that they are given, or evaluate a text."""
    if _known_words(script, words, line):
        names = [name for word in words[1:] for name in _NAME.findall(word)]
        script.state.lose(names, f"line {line} runs {words[0]}, which may assign it")
    return None


def _forgets(script: Script, words: list[str], line: int) -> bool | None:
    state = script.state
    of_job = {name: value for name, value in state.variables.items() if name.startswith("SLURM_")}
    state.forget(f"line {line} runs {plain(' '.join(words))}, which may assign it")
    if words[0] in _OF_SOFTWARE:  # they set variables of software, and none of the job
        state.variables |= of_job
        state.exported |= of_job.keys()
    return None


def _eval(script: Script, words: list[str], line: int) -> bool | None:
    status: bool | None = script.nested(lambda: script.evaluate(" ".join(words[1:]), line))
    return status


def _exec(script: Script, words: list[str], line: int) -> bool | None:
    if len(words) > 1:
        script.program(words[1:], [], line)
        script.state = None
    return None


def _command(script: Script, words: list[str], line: int) -> bool | None:
    """``command NAME``: never a function."""
    if words[1:2] == ["-v"]:
        return None
    if len(words) == 1 or words[1].startswith("-") or words[1] in BUILTINS:
        return _refused(script, words, line)
    script.program(words[1:], [], line)
    return None


def _time(script: Script, words: list[str], line: int) -> bool | None:
    """A word of the shell: what follows is run in it."""
    rest = words[2:] if words[1:2] == ["-p"] else words[1:]
    if not rest or "=" in rest[0]:
        return _refused(script, words, line)
    script.start(rest, [], line)
    return None


def _exit(script: Script, words: list[str], line: int) -> bool | None:
    script.state = None
    return None


def _return(script: Script, words: list[str], line: int) -> bool | None:
    if script.state.frames:
        script.returned.append(script.state)
    script.state = None
    return None


def _leaves_loop(script: Script, words: list[str], line: int) -> bool | None:
    if not script.loops or len(words) > 1:
        return _refused(script, words, line)
    script.left.append(script.state)
    script.state = None
    return None


def _refused(script: Script, words: list[str], line: int) -> bool | None:
    written = plain(" ".join(words))
    raise ScriptError(f"line {line} of the launch line, {written}, cannot be followed.")


def _shift(script: Script, words: list[str], line: int) -> bool | None:
    hole = Hole("$@", POSITIONAL, f"line {line} runs {words[0]}, which changes it")
    script.state.variables[POSITIONAL] = [script.state.holes.words(hole)]
    return None


def _set(script: Script, words: list[str], line: int) -> bool | None:
    text = " ".join(words[1:])
    if _OPTIONS.fullmatch(text):
        return True
    if re.match(r"--( |\Z)|[^-+]", text) and not is_unknown(words[1]):
        return _shift(script, words, line)
    return _refused(script, words, line)


def _trap(script: Script, words: list[str], line: int) -> bool | None:
    if set(words[2:]) - {"EXIT", "INT", "TERM", "HUP", "USR1", "USR2", "0"}:
        return _refused(script, words, line)
    return None


def is_local(command: str) -> bool:
    """Whether a declaration in a function is about a variable of its own."""
    return command in ("local", "declare", "typeset")


def _declares(script: Script, words: list[str], line: int) -> bool | None:
    """``export``, ``declare``, ``local``, ``readonly``: names and attributes."""
    state = script.state
    command, *rest = words
    flags = [word for word in rest if word.startswith(("-", "+"))]
    # References, integers and the like change what every later assignment means.
    if set(flags) - {"-a", "-x", "-r"}:
        return _refused(script, words, line)
    if not _known_words(script, [word.partition("=")[0] for word in rest], line):
        return None
    for word in rest:
        name, equals, value = word.partition("=")
        if word in flags:
            continue
        if not _NAME.fullmatch(name):
            state.forget(f"line {line} runs {plain(' '.join(words))}")
            continue
        if is_local(command) and state.frames and name not in state.frames[-1]:
            state.make_local(name)
            state.lose([name], f"line {line} declares it")
        if equals:
            state.assign(name, value, line)
        if command == "export" or "-x" in flags:
            state.exported.add(name)
        if command == "readonly" or "-r" in flags:
            state.constants.add(name)
    return True


def _unset(script: Script, words: list[str], line: int) -> bool | None:
    state = script.state
    if _known_words(script, words, line):
        names = [name for word in words[1:] for name in _NAME.findall(word)]
        state.functions.update(dict.fromkeys(state.functions.keys() & set(names)))
        state.lose(names, f"line {line} unsets it")
    return None


BUILTINS: Mapping[str, Builtin] = {
    **dict.fromkeys((": true false " + _HARMLESS).split(), _nothing),
    **dict.fromkeys(["read", "mapfile", "readarray", "getopts", "let"], _reads),
    **dict.fromkeys(("source", ".", "enable", "builtin", *_OF_SOFTWARE), _forgets),
    **dict.fromkeys(["export", "declare", "typeset", "local", "readonly"], _declares),
    **dict.fromkeys(("break", "continue"), _leaves_loop),
    "printf": _printf,
    "wait": _printf,
    "hash": _refused,
    "time": _time,
    "eval": _eval,
    "command": _command,
    "exec": _exec,
    "exit": _exit,
    "return": _return,
    "shift": _shift,
    "set": _set,
    "shopt": _refused,
    "trap": _trap,
    "unset": _unset,
}
# Variables that are set for these commands alone change nothing else.
UNCHANGED = set(f"{_HARMLESS} read mapfile readarray printf : true false".split())
