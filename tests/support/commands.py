"""The commands in the shell blocks of README and docs: run, or checked to be runnable.

Run is what takes seconds here: `hypergrid` and `export`. A launch line is planned, by the rules of
its launchers. Of scripts it is checked that they exist and name the flags that the page gives them.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT, warm

JUDGES = ("check", "diff", "doctor")  # whose exit status 1 is an answer


def split(text: str) -> list[str]:
    """The commands of a block: lines, joined where a backslash ends one."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if shlex.split(line, comments=True)]


def check(command: str, home: Path) -> None:
    """Run ``command`` in ``home``, or check it."""
    program, *words = shlex.split(command, comments=True)
    if program == "export":
        documented = (ROOT / "docs" / "variables.md").read_text()
        for variable in re.findall(r"HYPERGRID_\w+", command):
            assert f"`{variable}`" in documented, f"docs/variables.md has no {variable}"
        _run(command, home)
    elif program == "hypergrid":
        _run(command, home, (0, 1) if words[0] in JUDGES else (0,))
    elif program == "torchrun":
        _run(f"hypergrid plan -- {command}", home)
    elif program == "pip":
        declared = (ROOT / "pyproject.toml").read_text()
        for extra in re.findall(r"\.\[(\w+)\]", command):
            assert f"\n{extra} = [" in declared, f"{extra}: no such extra"
    elif program == "pre-commit":
        assert (ROOT / ".pre-commit-config.yaml").is_file()
    else:
        _check_script(words[0] if program == "python" else program, words)


def _run(command: str, home: Path, statuses: tuple[int, ...] = (0,)) -> None:
    """Run a command where `hypergrid` is that of this checkout."""
    shim = f'hypergrid() {{ "{sys.executable}" -m hypergrid "$@"; }}\n'
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", shim + command],
        cwd=home,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode in statuses and "Traceback" not in done.stdout, done.stdout


def _check_script(name: str, words: list[str]) -> None:
    shown = _help(ROOT / name)
    flags = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
    missing = [flag for flag in flags if not re.search(rf"(?<![\w-]){flag}(?![\w-])", shown)]
    assert not missing, f"{name} has no {missing}: {shown}"
    for word in words:
        assert not word.endswith(".py") or (ROOT / word).is_file(), f"there is no {word}"


@functools.lru_cache
def _help(file: Path) -> str:
    """What a script of Python prints with --help; the text of another."""
    text = file.read_text()
    if "python" not in text.partition("\n")[0] and file.suffix != ".py":
        assert os.access(file, os.X_OK), f"{file} is not executable"
        return text
    done = warm.run(str(file), "--help")
    assert done.returncode == 0, done.stderr
    return done.stdout
