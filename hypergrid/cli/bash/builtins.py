"""Bash's builtins: what each may change. One that is not listed may change everything."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from hypergrid.cli.bash.state import POSITIONAL
from hypergrid.cli.bash.values import Hole, ScriptError, has_open_words, is_unknown, names_in, plain

Script: TypeAlias = Any  # of script.py, which imports this file
Builtin: TypeAlias = Callable[[Script, list[str], int], "bool | None"]
_NAME = re.compile(r"[A-Za-z_]\w*")
# They change no variable of the script; of some the status is known.
_HARMLESS = (
    "test [ pwd umask ulimit wait jobs kill fg bg disown times type hash help history caller "
    "compgen complete compopt bind suspend logout cd pushd popd dirs alias unalias"
)
# Programs that are no functions of a file that was sourced.
PROGRAMS = names_in(
    "awk basename cat chmod cp date df dirname docker du env find free grep head hostname ln "
    "ls lscpu mkdir mv nproc numactl nvidia-smi pip ps python python3 rm rsync scontrol sed "
    "seq sleep sort srun ssh sudo tail tar tee time timeout touch torchrun tr uname uniq wc "
    "which whoami xargs mpirun mpiexec deepspeed accelerate bash sh squeue sinfo scancel "
    "sbatch nohup"
)
# Options whose effect on the reading of a script is none, or is followed.
_OPTIONS = {"e": "errexit", "u": "nounset", "a": "allexport"}
_OTHER_OPTIONS = set("xvfhmbCETHP") | names_in(
    "pipefail xtrace verbose noglob hashall monitor notify noclobber errtrace functrace "
    "errexit nounset allexport"
)
_SHOPT = names_in(
    "nullglob globstar dotglob nocaseglob failglob checkwinsize cmdhist histappend "
    "inherit_errexit huponexit lithist xpg_echo"
)


_OF_SOFTWARE = ("module", "ml", "conda", "mamba", "spack")


def _known_words(script: Script, words: list[str], line: int) -> bool:
    """Whether all words are known; if not, all variables are not."""
    if any(map(is_unknown, words)):
        script.state.forget(f"line {line} runs {words[0]} with words that are not known")
        return False
    return True


def _nothing(script: Script, words: list[str], line: int) -> bool | None:
    return {"true": True, ":": True, "false": False}.get(words[0])


def _echo(script: Script, words: list[str], line: int) -> bool | None:
    rest = words[1:]
    end = "\n"
    if rest and rest[0] == "-n":
        rest = rest[1:]
        end = ""
    if has_open_words(rest) or (rest and rest[0].startswith("-")):
        script.print_unknown(plain(" ".join(words)))
    else:
        script.print(" ".join(rest) + end)
    return True


def _printf(script: Script, words: list[str], line: int) -> bool | None:
    variable = words[2:3] if words[1:2] == ["-v"] else []
    texts = words[3:] if variable else words[1:]
    if (
        has_open_words(words)
        or texts[:1] not in (["%s"], ["%d"], ["%s\\n"], ["%d\\n"])
        or len(texts) != 2
    ):
        script.print_unknown(plain(" ".join(words)))
        return _reads(script, words, line) if variable or is_unknown(words[1]) else None
    text = texts[1] + "\n" * texts[0].endswith("n")
    if not variable:
        script.print(text)
    elif _NAME.fullmatch(variable[0]):
        script.state.assign(variable[0], text, line)
    else:
        return _reads(script, words, line)
    return None


def _reads(script: Script, words: list[str], line: int) -> bool | None:
    """Builtins that assign names that they are given."""
    if _known_words(script, words, line):
        names = [found for word in words[1:] for found in _NAME.findall(word)]
        script.state.lose(names, f"line {line} runs {words[0]}, which may assign it")
    return None


def _let(script: Script, words: list[str], line: int) -> bool | None:
    numbers = [script.number(word) for word in words[1:]]
    return numbers[-1] != 0 if numbers and isinstance(numbers[-1], int) else None


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
    if len(words) == 1:
        if script.output is not None:
            script.print_unknown("exec")
        return True
    script.program(words[1:], [], line)
    script.state = None
    return None


def _command(script: Script, words: list[str], line: int) -> bool | None:
    """``command NAME``: a builtin or a program, and never a function."""
    if len(words) == 1 or words[1] in ("-v", "-V"):
        script.print_unknown(plain(" ".join(words)))
        return None
    builtin = BUILTINS.get(words[1])
    if builtin is not None:
        return builtin(script, words[1:], line)
    script.program(words[1:], [], line)
    return None


def _exit(script: Script, words: list[str], line: int) -> bool | None:
    script.state = None
    return None


def _return(script: Script, words: list[str], line: int) -> bool | None:
    if not script.state.frames:
        return _exit(script, words, line)
    status = words[1] == "0" if words[1:] and words[1].isdigit() else None
    script.returned.append((script.state, status))
    script.state = None
    return None


def _leaves_loop(script: Script, words: list[str], line: int) -> bool | None:
    depth = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
    if len(words) > 1 and (not words[1].isdigit() or not 1 <= depth <= len(script.loops)):
        raise ScriptError(f"line {line} of the launch line, {' '.join(words)}, cannot be followed.")
    if not script.loops:
        return True
    loop = script.loops[-depth]
    (loop.broken if words[0] == "break" else loop.continued).append(script.state)
    script.state = None
    return None


def _shift(script: Script, words: list[str], line: int) -> bool | None:
    values = script.state.value(POSITIONAL)
    count = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
    if has_open_words(values) or (len(words) > 1 and not words[1].isdigit()):
        hole = script.state.holes.words(Hole("$@", POSITIONAL, f"line {line} shifts it"))
        script.state.variables[POSITIONAL] = [hole]
        return None
    if count > len(values):
        return False
    script.state.assign(POSITIONAL, values[count:], line)
    return True


def _set(script: Script, words: list[str], line: int) -> bool | None:
    state = script.state
    rest = words[1:]
    while rest and re.fullmatch(r"[-+][A-Za-z]+", rest[0]) and not is_unknown(rest[0]):
        word = rest.pop(0)
        is_on = word.startswith("-")
        letters = list(word[1:])
        if "o" in letters:
            letters.remove("o")
            letters += rest[:1]
            rest = rest[1:]
        for letter in letters:
            option = _OPTIONS.get(letter, letter)
            if option not in _OTHER_OPTIONS:
                raise ScriptError(f"line {line} of the launch line: set {word} cannot be followed.")
            (state.options.add if is_on else state.options.discard)(option)
    if rest:
        state.assign(POSITIONAL, rest[1:] if rest[0] in ("--", "-") else rest, line)
    return True


def _shopt(script: Script, words: list[str], line: int) -> bool | None:
    names = [word for word in words[1:] if not re.fullmatch(r"-[supq]+", word)]
    unknown = [name for name in names if name not in _SHOPT]
    if unknown:
        name = plain(unknown[0])
        raise ScriptError(f"line {line} of the launch line: shopt {name} cannot be followed.")
    return None


def _trap(script: Script, words: list[str], line: int) -> bool | None:
    signals = set(words[2:])
    if words[1:2] != ["-"] and signals & {"DEBUG", "ERR", "RETURN"}:
        raise ScriptError(f"line {line} of the launch line: a trap cannot be followed.")
    if len(words) > 2 and words[1] not in ("-", ""):
        script.apart(lambda: script.evaluate(words[1], line))
    return True


def is_local(command: str, flags: str) -> bool:
    """Whether a declaration in a function is about a variable of its own."""
    return command == "local" or (command in ("declare", "typeset") and "g" not in flags)


def _declares(script: Script, words: list[str], line: int) -> bool | None:
    """``export``, ``declare``, ``local``, ``readonly``: names and attributes."""
    state = script.state
    command, *rest = words
    if not _known_words(script, [word.partition("=")[0] for word in rest], line):
        return None
    flags = "".join(word[1:] for word in rest if re.fullmatch(r"[-+]\w+", word))
    for word in rest:
        name, equals, value = word.partition("=")
        if not _NAME.fullmatch(name):
            if not re.fullmatch(r"[-+]\w+", word):
                state.forget(f"line {line} runs {plain(' '.join(words))}")
            continue
        if "f" in flags:
            continue
        if is_local(command, flags) and state.frames:
            known = name in state.frames[-1]
            state.make_local(name)
            if not equals and not known:
                state.variables[name] = None
        if equals:
            state.assign(name, value, line)
        elif command != "export" and set(flags) & set("aA") and name not in state.variables:
            state.variables[name] = []
        if command == "export" or "x" in flags:
            state.exported.add(name)
        if "A" in flags and name not in state.maps:
            state.make_map(name)
        if set(flags) & set("nilu"):
            state.variables[name] = state.unknown(name, f"line {line} changes what it means")
        if (
            set(flags) & set("nilur") - set("n" if command == "export" else "")
            or command == "readonly"
        ):
            state.special.add(name)
    return True


def _unset(script: Script, words: list[str], line: int) -> bool | None:
    state = script.state
    if not _known_words(script, words, line):
        return None
    for word in words[1:]:
        if word.startswith("-"):
            continue
        if words[1] == "-f" or (word in state.functions and word not in state.variables):
            state.functions.pop(word, None)
            continue
        if _NAME.fullmatch(word) and not any(word in frame for frame in state.frames):
            state.assign(word, None, line)
        else:
            state.lose(_NAME.findall(word)[:1], f"line {line} unsets it")
    return True


BUILTINS: Mapping[str, Builtin] = {
    **dict.fromkeys((": true false " + _HARMLESS).split(), _nothing),
    **dict.fromkeys(["read", "mapfile", "readarray", "getopts"], _reads),
    **dict.fromkeys(("source", ".", "enable", "builtin", *_OF_SOFTWARE), _forgets),
    **dict.fromkeys(["export", "declare", "typeset", "local", "readonly"], _declares),
    **dict.fromkeys(("break", "continue"), _leaves_loop),
    "echo": _echo,
    "printf": _printf,
    "let": _let,
    "eval": _eval,
    "exec": _exec,
    "command": _command,
    "exit": _exit,
    "return": _return,
    "shift": _shift,
    "set": _set,
    "shopt": _shopt,
    "trap": _trap,
    "unset": _unset,
}
# Variables that are set for these commands alone change nothing else.
UNCHANGED = set(f"{_HARMLESS} read mapfile readarray echo printf : true false".split())
