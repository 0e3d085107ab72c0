"""Shared by the scripts: this checkout, its own Python, commands in it, and tables.

Imported, it starts a script again under ``.venv`` where the Python has no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
PYTHON = ROOT / ".venv" / "bin" / "python"
if find_spec("torch") is None and PYTHON.exists() and Path(sys.prefix) != ROOT / ".venv":
    os.execv(PYTHON, [str(PYTHON), *sys.argv])
sys.path.insert(0, str(ROOT))


def variables(*places: Path | str, **more: str) -> dict[str, str]:
    """The environment of a process on one core that imports from ``places``, then from here."""
    path = os.pathsep.join(map(str, (*places, ROOT, ROOT / "scripts")))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def child(
    *command: Path | str,
    places: Sequence[Path] = (),
    timeout: float | None = None,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout; its outcome with all that it printed."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables(*places, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # ranks that it has forked too
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def of_each_release(
    module: str, releases: Sequence[str], *arguments: str
) -> dict[str, subprocess.Popen[bytes]]:
    """Start ``python -m MODULE --release RELEASE ARGUMENTS`` for all releases, side by side."""
    from tests.support.stock import following

    processes = {}
    for release in releases:
        command = [sys.executable, "-m", module, "--release", release, *arguments]
        environment = variables(**following(release))
        processes[release] = subprocess.Popen(command, cwd=ROOT, env=environment)
    return processes


def table(rows: Sequence[Sequence[str]], markdown: bool = False, right: Sequence[int] = ()) -> str:
    """Rows under their header, aligned for a terminal or as Markdown; ``right``: these columns."""
    header = rows[0]
    if markdown:
        rule = ["---"] * len(header)
        for column in right:
            rule[column] = "--:"
        return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows[1:]))
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = []
        for column, width in enumerate(widths):
            align = str.rjust if column in right else str.ljust
            padded.append(align(row[column], width))
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
