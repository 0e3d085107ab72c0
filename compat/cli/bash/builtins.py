"""Bash's builtins: what each may change. What is not listed is a program, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from compat.cli.bash.state import NAME, POSITIONAL
from compat.cli.bash.values import OPEN, ScriptError, is_unknown, names_in, plain

Script: TypeAlias = Any  # of script.py, which imports this file
Builtin: TypeAlias = Callable[[Script, list[str]], "bool | None"]
# They change no variable of the script.
HARMLESS = names_in(
    ": true false pwd umask ulimit jobs fg bg disown times type help history caller "
    "compgen complete compopt bind suspend logout cd pushd popd dirs alias unalias echo"
)
# Variables that are set for these commands alone change nothing else.
UNCHANGED = HARMLESS | {"read", "mapfile", "readarray", "printf"}
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
_PATTERN_OPTIONS = re.compile(r"-[su]( (nullglob|globstar|dotglob|extglob|failglob|nocaseglob))+")
_SIGNALS = {"EXIT", "INT", "TERM", "HUP", "USR1", "USR2", "0"}
_OF_SOFTWARE = ("module", "ml", "conda", "mamba", "spack")
DECLARING = {"export", "declare", "typeset", "local", "readonly"}


def _refuse(script: Script, words: Sequence[str]) -> bool | None:
    written = plain(" ".join(words))
    raise ScriptError(f"line {script.line} of the launch line, {written}, cannot be followed.")


def _known_words(script: Script, words: Sequence[str]) -> bool:
    """Whether all words are known; if not, all variables are not."""
    if any(map(is_unknown, words)):
        why = f"line {script.line} runs {plain(words[0])} with words that are not known"
        script.state.forget(why)
        return False
    return True


def _harmless(script: Script, words: list[str]) -> bool | None:
    if words[0] not in (":", "true", "false", "cd"):
        script.output = None
    return {"true": True, ":": True, "false": False}.get(words[0])


def _echo(script: Script, words: list[str]) -> bool | None:
    text = " ".join(words[1:])
    if text.startswith("-") or "\\" in text:
        script.output = None
    if script.output is not None:
        script.output.append(text)
    return True


def _reads(script: Script, words: list[str]) -> bool | None:
    """Builtins that assign names that they are given."""
    script.output = None
    if _known_words(script, words):
        names = [name for word in words[1:] for name in NAME.findall(word)]
        script.state.lose(names, f"line {script.line} runs {words[0]}, which may assign it")
    return None


def _printf(script: Script, words: list[str]) -> bool | None:
    script.output = None
    has_variable = len(words) > 1 and (words[1].startswith("-") or is_unknown(words[1]))
    return _reads(script, words) if has_variable else None


def _let(script: Script, words: list[str]) -> bool | None:
    statuses = [script.sum_holds(word) for word in words[1:]]
    return statuses[-1] if statuses else None


def _source(script: Script, words: list[str]) -> bool | None:
    """It may assign anything; a function of the environment, such as ``module``, too."""
    state = script.state
    of_job = {name: value for name, value in state.variables.items() if name.startswith("SLURM_")}
    script.output = None
    state.forget(f"line {script.line} runs {plain(' '.join(words))}, which may assign it")
    if words[0] in _OF_SOFTWARE:  # they set variables of software, and none of the job
        state.variables.update(of_job)
        state.exported.update(of_job)
    return None


def _eval(script: Script, words: list[str]) -> bool | None:
    status: bool | None = script.evaluate(" ".join(words[1:]), script.line)
    return status


def _exec(script: Script, words: list[str]) -> bool | None:
    if words[1:2] and words[1].startswith("-"):
        return _refuse(script, words)
    if len(words) > 1:
        script.program(words[1:])
        script.state = None
    return None


def _command(script: Script, words: list[str]) -> bool | None:
    script.output = None
    return None if words[1:2] == ["-v"] else _refuse(script, words)


def _exit(script: Script, words: list[str]) -> bool | None:
    script.state = None
    return None


def _return(script: Script, words: list[str]) -> bool | None:
    if not script.state.frames:  # an error, behind which bash goes on
        return False
    script.left["return"].append(script.state)
    script.state = None
    return None


def _leaves_loop(script: Script, words: list[str]) -> bool | None:
    if not script.is_in_loop or len(words) > 1:
        return _refuse(script, words)
    script.left[words[0]].append(script.state)
    script.state = None
    return None


def _shift(script: Script, words: list[str]) -> bool | None:
    arguments = script.state.values(POSITIONAL)
    count = words[1] if len(words) > 1 else "1"
    if any(OPEN in argument for argument in arguments) or not count.isdigit():
        script.state.lose([POSITIONAL], f"line {script.line} runs shift, which changes it")
    elif int(count) <= len(arguments):
        script.state.variables[POSITIONAL] = arguments[int(count) :]
    return None


def _set(script: Script, words: list[str]) -> bool | None:
    text = " ".join(words[1:])
    if _OPTIONS.fullmatch(text):
        return True
    if (
        len(words) == 1
        or (text.startswith(("-", "+")) and words[1] != "--")
        or is_unknown(words[1])
    ):
        return _refuse(script, words)
    script.state.variables[POSITIONAL] = words[2:] if words[1] == "--" else words[1:]
    return True


def _shopt(script: Script, words: list[str]) -> bool | None:
    return None if _PATTERN_OPTIONS.fullmatch(" ".join(words[1:])) else _refuse(script, words)


def _trap(script: Script, words: list[str]) -> bool | None:
    if set(words[2:]) - _SIGNALS:
        return _refuse(script, words)
    if len(words) > 2 and words[1] != "-":  # the programs that it may start
        script.apart(lambda: script.evaluate(words[1], script.line))
    return None


def _unset(script: Script, words: list[str]) -> bool | None:
    state = script.state
    if not _known_words(script, words):
        return None
    is_of_functions = words[1:2] == ["-f"]
    for word in words[1:]:
        name = word.partition("[")[0]
        if word.startswith("-"):
            continue
        if "[" in word or name in state.constants or state.frames:
            state.lose([name], f"line {script.line} unsets it")
        elif not is_of_functions:
            state.assign(name, None, script.line)
        state.exported.discard(name)
        if name in state.functions:
            state.functions[name] = None
    return None


def declare(script: Script, command: str, written: Sequence[str]) -> bool | None:
    """``export``, ``declare``, ``local``, ``readonly``: names, values and attributes."""
    state = script.state
    flags = {word for word in written if word.startswith(("-", "+"))}
    # References, integers and the like change what every later assignment means.
    if flags - {"-a", "-x", "-r"}:
        return _refuse(script, [command, *written])
    names: set[str] = set()
    for word in written:
        if word in flags:
            continue
        match = NAME.match(word)
        rest = word[match.end() :] if match else word
        if match is None or not re.match(r"=|\+=|\Z", rest):
            state.forget(f"line {script.line} runs {command} {word}")
            continue
        name = match[0]
        # All words are expanded before the first is assigned.
        if names.intersection(NAME.findall(rest)):
            return _refuse(script, [command, *written])
        names.add(name)
        is_new = command in ("local", "declare", "typeset") and bool(state.frames)
        if is_new and name not in state.frames[-1]:
            if rest.startswith("+="):
                return _refuse(script, [command, *written])
            state.make_local(name)
            if not rest:
                state.assign(name, None, script.line)
        if rest:
            script.assign(word)
        if command == "export" or "-x" in flags:
            state.exported.add(name)
        if command == "readonly" or "-r" in flags:
            state.constants.add(name)
    return True


BUILTINS: Mapping[str, Builtin] = {
    **dict.fromkeys(HARMLESS, _harmless),
    **dict.fromkeys(("read", "mapfile", "readarray", "getopts"), _reads),
    **dict.fromkeys(("source", ".", "kill", *_OF_SOFTWARE), _source),
    **dict.fromkeys(("break", "continue"), _leaves_loop),
    **dict.fromkeys(("hash", "enable", "builtin", "coproc"), _refuse),
    "echo": _echo,
    "printf": _printf,
    "wait": _printf,
    "let": _let,
    "eval": _eval,
    "command": _command,
    "exec": _exec,
    "exit": _exit,
    "return": _return,
    "shift": _shift,
    "set": _set,
    "shopt": _shopt,
    "trap": _trap,
    "unset": _unset,
}
