"""The commands in the shell blocks of README and docs: run, or checked to be runnable.

Run is what takes seconds here: `hypergrid`, `export`, `python -m compat.launch`. Of the rest it is
checked that it exists and takes the flags that the page gives it: scripts by their `--help`, what
torchrun starts by torchrun's own parser and then by that of what it starts, extras in pyproject.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hypergrid.policy import CHOICES
from tests.support import ROOT, warm

JUDGES = ("check", "diff", "parity", "doctor")  # whose exit status 1 is an answer
STAND_IN = "print('the script was reached')\n"


def split(text: str) -> list[str]:
    """The commands of a block: lines, joined where a quote is open or a backslash ends one."""
    commands, pending = [], ""
    for line in text.splitlines():
        pending += line + "\n"
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            continue
        if not pending.endswith("\\\n"):
            commands += [pending.strip()] if words else []
            pending = ""
    if pending.strip():
        raise AssertionError(f"a quote or a line is left open: {pending}")
    return commands


def check(command: str, home: Path, files: set[str]) -> None:
    """Run ``command`` in ``home``, or check it; ``files`` are those that the page has one save."""
    words = shlex.split(command, comments=True)
    first = words[0]
    if first == "export":
        _known_variables(command)
        _run(command, home)
    elif first == "hypergrid":
        _run(command, home, judge=words[1] in JUDGES)
    elif first == "pip":
        _extras(words)
    elif first == "torchrun":
        _torchrun(words[1:], home, files)
    elif words[:3] == ["python", "-m", "compat.launch"]:
        _launch(words[3:], home)
    elif first == "python" and words[1].endswith(".py"):
        _script(words[1], words[2:])
    elif "/" in first:
        _script(first, words[1:], executable=True)
    else:
        raise AssertionError(
            f"nothing here knows how to try {first!r}: teach {Path(__file__).name}"
        )


def _run(command: str, home: Path, judge: bool = False) -> str:
    shim = home / ".bin" / "hypergrid"
    shim.parent.mkdir(exist_ok=True)
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hypergrid "$@"\n')
    shim.chmod(0o755)
    path = os.pathsep.join([str(shim.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", command],
        cwd=home,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    output = done.stdout + done.stderr
    assert done.returncode in ((0, 1) if judge else (0,)), output
    assert "Traceback" not in output, output
    return output


def _known_variables(command: str) -> None:
    sources = [file.read_text() for package in ("hypergrid", "compat") for file in _files(package)]
    variables = {f"HYPERGRID_{choice.upper()}" for choice in CHOICES}
    for text in sources:
        variables.update(re.findall(r"HYPERGRID_[A-Z]+", text))
    used = set(re.findall(r"HYPERGRID_[A-Z]+", command))
    assert used <= variables, f"of {sorted(variables)}"


def _files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def _extras(words: list[str]) -> None:
    assert words[1] == "install", words
    declared = (ROOT / "pyproject.toml").read_text()
    for target in (word for word in words[2:] if word != "--no-deps"):
        if target in _needed_without_torch():
            continue
        name, _, extras = target.partition("[")
        assert name == ".", f"{target}: only a checkout can be installed"
        for extra in filter(None, extras.rstrip("]").split(",")):
            assert re.search(rf"^{extra} = \[", declared, re.M), f"there is no extra {extra}"


def _needed_without_torch() -> set[str]:
    """The requirements of the command line: numpy, and those of the extras ``cli`` and ``plot``."""
    declared = (ROOT / "pyproject.toml").read_text()
    requirements = {"numpy"}
    for extra in ("cli", "plot"):
        listed = re.search(rf"^{extra} = (\[.*?\])$", declared, re.M | re.S)
        assert listed is not None
        requirements.update(ast.literal_eval(listed[1]))
    return requirements


def _torchrun(words: list[str], home: Path, files: set[str]) -> None:
    from torch.distributed.run import get_args_parser

    arguments = _parsed(get_args_parser().parse_args, words)
    script = arguments.training_script
    if arguments.module or arguments.no_python:
        assert script in ("compat.launch", "hypergrid-launch"), words
        _launch(arguments.training_script_args, home)
    elif script not in files:
        _script(script, arguments.training_script_args)


def _parsed(parse: Callable[[list[str]], object], words: list[str]) -> object:
    try:
        return parse(words)
    except SystemExit:
        raise AssertionError(f"torchrun does not understand {words}") from None


def _launch(words: list[str], home: Path) -> None:
    """Start the launcher once, with a stand-in for a script of the reader's."""
    command = shlex.join([sys.executable, "-m", "compat.launch", *words])
    scripts = [word for word in words if word.endswith(".py")]
    if scripts:
        (home / scripts[0]).write_text(STAND_IN)
        assert "the script was reached" in _run(command, home)
    else:
        _run(command, home)


def _script(name: str, words: list[str], executable: bool = False) -> None:
    file = ROOT / name
    assert file.is_file(), f"there is no {name}"
    assert not executable or os.access(file, os.X_OK), f"{name} is not executable"
    flags = [word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)]
    if "python" in file.read_text().partition("\n")[0] or file.suffix == ".py":
        if flags:
            shown = _help(file)
            missing = [f for f in flags if not re.search(rf"(?<![\w-]){f}(?![\w-])", shown)]
            assert not missing, f"{name} has no {missing}: {shown}"
        else:
            compile(file.read_text(), name, "exec")
    else:
        assert not words or '"$@"' in file.read_text(), f"{name} takes no arguments"
        paths = [word for word in words if word.endswith(".py")]
        assert all((ROOT / path).is_file() for path in paths), f"not all of {paths} exist"
        subprocess.run(["bash", "-n", str(file)], check=True, timeout=10)


@functools.lru_cache
def _help(file: Path) -> str:
    done = warm.run(str(file), "--help")
    assert done.returncode == 0, done.stderr
    return done.stdout
