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
from pathlib import Path
from typing import Any

from tests.support import ROOT, warm

JUDGES = ("check", "diff", "doctor")  # whose exit status 1 is an answer
STAND_IN = "print('the script was reached')\n"


def split(text: str) -> list[str]:
    """The commands of a block: lines, joined where a quote is open or a backslash ends one."""
    commands = []
    pending = ""
    for line in text.splitlines():
        pending += line + "\n"
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            continue
        if not pending.endswith("\\\n"):
            if words:
                commands.append(pending.strip())
            pending = ""
    assert not pending.strip(), f"a quote or a line is left open: {pending}"
    return commands


def check(command: str, home: Path, files: set[str]) -> None:
    """Run ``command`` in ``home``, or check it; ``files`` are those that the page has one save."""
    program, *words = shlex.split(command, comments=True)
    if program == "export":
        documented = (ROOT / "docs" / "variables.md").read_text()
        for variable in re.findall(r"HYPERGRID_\w+", command):
            assert f"`{variable}`" in documented, f"docs/variables.md has no {variable}"
        _run(command, home)
    elif program == "hypergrid":
        _run(command, home, statuses=(0, 1) if words[0] in JUDGES else (0,))
    elif program == "pip":
        _check_installed(words)
    elif program == "torchrun":
        _check_torchrun(words, home, files)
    elif program == "python" and words[:2] == ["-m", "compat.launch"]:
        _launch(words[2:], home)
    elif program == "python" and words[0].endswith(".py"):
        _check_script(*words)
    elif program == "pre-commit":
        assert (ROOT / ".pre-commit-config.yaml").is_file()
    elif "/" in program:
        assert os.access(ROOT / program, os.X_OK), f"{program} is not executable"
        _check_script(program, *words)
    else:
        raise AssertionError(f"{Path(__file__).name} does not know how to try {program!r}")


def _run(command: str, home: Path, statuses: tuple[int, ...] = (0,)) -> str:
    """What the command prints, where `hypergrid` is that of this checkout."""
    shim = home / ".bin" / "hypergrid"
    shim.parent.mkdir(exist_ok=True)
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hypergrid "$@"\n')
    shim.chmod(0o755)
    path = os.pathsep.join([str(shim.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", command],
        cwd=home,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode in statuses and "Traceback" not in done.stdout, done.stdout
    return done.stdout


def _check_installed(words: list[str]) -> None:
    """Only a checkout can be installed, with its extras, and what it needs without torch."""
    declared = (ROOT / "pyproject.toml").read_text()
    _, _, declared = declared.partition("[project.optional-dependencies]")
    lists = re.findall(r"^(\w+) = (\[.*?\])$", declared, re.M | re.S)
    extras = {name: ast.literal_eval(requirements) for name, requirements in lists}
    needed = {"numpy", *extras["cli"], *extras["plot"]}
    assert words[0] == "install", words
    for target in set(words[1:]) - {"--no-deps"} - needed:
        checkout = re.fullmatch(r"\.(?:\[([\w,]+)\])?", target)
        assert checkout, f"{target}: only a checkout can be installed"
        assert {*(checkout[1] or "cli").split(",")} <= extras.keys(), f"{target}: no such extra"


def _check_torchrun(words: list[str], home: Path, files: set[str]) -> None:
    """Check the line by torchrun's own parser, and then what it starts."""
    from torch.distributed.run import get_args_parser

    try:
        arguments: Any = get_args_parser().parse_args(words)
    except SystemExit:
        raise AssertionError(f"torchrun does not understand {words}") from None
    script = arguments.training_script
    if arguments.module or arguments.no_python:
        assert script in ("compat.launch", "hypergrid-launch"), words
        _launch(arguments.training_script_args, home)
    elif script not in files:
        _check_script(script, *arguments.training_script_args)


def _launch(words: list[str], home: Path) -> None:
    """Start the launcher once, with a stand-in for a script of the reader's."""
    scripts = [word for word in words if word.endswith(".py")]
    for script in scripts:
        (home / script).write_text(STAND_IN)
    printed = _run(shlex.join([sys.executable, "-m", "compat.launch", *words]), home)
    assert not scripts or "the script was reached" in printed


def _check_script(name: str, *words: str) -> None:
    """Check that the script exists and takes the flags, or that it can be compiled."""
    file = ROOT / name
    text = file.read_text()
    flags = [word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)]
    if "python" not in text.partition("\n")[0] and file.suffix != ".py":
        assert not words or '"$@"' in text, f"{name} takes no arguments"
        for word in words:
            assert not word.endswith(".py") or (ROOT / word).is_file(), f"there is no {word}"
        subprocess.run(["bash", "-n", str(file)], check=True, timeout=10)
    elif flags:
        shown = _help(file)
        missing = [flag for flag in flags if not re.search(rf"(?<![\w-]){flag}(?![\w-])", shown)]
        assert not missing, f"{name} has no {missing}: {shown}"
    else:
        compile(text, name, "exec")


@functools.lru_cache
def _help(file: Path) -> str:
    done = warm.run(str(file), "--help")
    assert done.returncode == 0, done.stderr
    return done.stdout
