"""Shared by the scripts: this checkout, its own Python, commands and ranks in it, and tables.

Imported, it starts a script again under ``.venv`` where the Python has no torch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
PYTHON = ROOT / ".venv" / "bin" / "python"
if find_spec("torch") is None and PYTHON.exists() and Path(sys.prefix) != ROOT / ".venv":
    os.execv(PYTHON, [str(PYTHON), *sys.argv])
sys.path.insert(0, str(ROOT))
T = TypeVar("T")
VERDICTS = {0: "verified", 1: "differs", 2: "refused"}


def parser(page: str | None) -> argparse.ArgumentParser:
    """A parser that describes the script by the first line of its docstring."""
    return argparse.ArgumentParser(description=(page or "").splitlines()[0])


def forget_choices() -> None:
    """Forget the choices of hypergrid that the caller's shell has set."""
    for name in list(os.environ):
        if name.startswith("HYPERGRID_"):
            del os.environ[name]


def variables(*places: Path | str, **more: str) -> dict[str, str]:
    """The environment of a process on one core that imports from ``places``, then from here."""
    path = os.pathsep.join(map(str, (*places, ROOT, ROOT / "scripts")))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def child(
    *command: Path | str, places: Sequence[Path] = (), timeout: float | None = None, **more: str
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
        # Whatever ends the waiting, a timeout or an interrupt, ends the command too.
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # ranks that it has forked too
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def in_fresh_process(function: Callable[..., T], *arguments: Any) -> T:
    """What a function of a module gives in a fresh interpreter, which has this one's path."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawning) as pool:
        return pool.submit(function, *arguments).result()


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


class Outcome(NamedTuple):
    """What was tried, the verdict (`FAILED` where a promise is broken), and what was seen."""

    tried: str
    verdict: str
    seen: str


def report(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Print outcomes as they come, and how many there are of each verdict."""
    counts = Counter[str]()
    for outcome in outcomes:
        print(f"{outcome.verdict:10} {outcome.tried:50} {outcome.seen}", flush=True)
        counts[outcome.verdict] += 1
    print(f"\n{in_words(counts)}")
    return counts


def in_words(counts: Counter[str]) -> str:
    """``3 ok, 1 FAILED``."""
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def fork_ranks(
    body: Callable[[int], object],
    ranks: Sequence[int],
    folder: Path,
    address: str,
    port: int,
    world: int,
) -> dict[int, int]:
    """Fork ranks as torchrun's agent does, which serves their store: process id -> rank.

    Rank 3 prints to ``log.3`` in the folder.
    """
    from tests.support import forked

    environment = {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "WORLD_SIZE": world,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    rank_of_process = {}
    for rank in ranks:
        process = forked.fork_logged(
            partial(body, rank), folder / f"log.{rank}", RANK=rank, LOCAL_RANK=rank, **environment
        )
        rank_of_process[process] = rank
    return rank_of_process


@contextmanager
def watched_new_group(before: Callable[[], None]) -> Iterator[None]:
    """Call ``before`` ahead of each ``torch.distributed.new_group``, which only members call."""
    import torch.distributed as dist

    from compat import members_only

    original = dist.new_group

    @members_only
    def new_group(*args: Any, **keywords: Any) -> Any:
        before()
        return original(*args, **keywords)

    with mock.patch.object(dist, "new_group", new_group):
        yield


def write_whole(path: Path, value: Any) -> None:
    """Write JSON whole or not at all, for whoever reads it meanwhile."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value))
    part.rename(path)


class Verdict(NamedTuple):
    """What ``hypergrid verify`` says of a launch line."""

    outcome: str  # verified, differs, refused, or the status of a process that failed
    report: dict[str, Any]  # as --json prints it; {} where it did not come to one
    errors: str

    def reason(self) -> str:
        """Why it is refused, or the layout and what differs; a cell of a table."""
        if not self.report:
            parts = self.errors.strip().splitlines()[-1:]
        elif self.report["refused"]:
            parts = [self.report["refused"]]
        else:
            parts = [self.report["layout"]]
            for finding in self.report["findings"]:
                parts.append(f"{finding['quantity']} {finding['name']}")
        text = "; ".join(parts).replace("|", "/").replace("\n", " ")
        return text[:160]


def verify(line: str, megatron: Path, timeout: float, *options: str) -> Verdict:
    """Give a launch line to ``hypergrid verify``."""
    # What megatron.training imports may lie beside the environment.
    places = [Path(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    command = [sys.executable, "-m", "hypergrid", "verify", "--json", *options]
    command += ["--checkout", str(megatron), "--", *shlex.split(line)]
    try:
        done = child(*command, places=places, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Verdict("refused", {}, f"no verdict in {timeout:.0f} s")
    # A line that is refused before it runs has no report, only a sentence among the errors.
    try:
        report = json.loads(done.stdout)
    except ValueError:
        report = {}
    outcome = VERDICTS.get(done.returncode, f"status {done.returncode}")
    return Verdict(outcome, report, done.stderr)


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
