"""Files and texts that are cut, garbled or absurd, handed to each reader of the command line.

A case is a number: ``case(7)`` is the same files and the same command wherever it runs.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import resource
import select
import shlex
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from compat.cli.app import app

SECONDS, BYTES = 5, 1 << 30  # of CPU, and of memory more than the interpreter has
ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "tests" / "cli" / "launch"
SIZES = "--world-size 64 --tp 4 --pp 2 --ep 2"
SITE = {
    **{"module": "m.a", "file": "m/a.py", "line": 3, "function": "f"},
    **{"name": "get_x", "writes": False, "state": "s", "group": "g"},
    "count": 7,
}
READS = {
    **{"schema": 1, "rank": 0, "process": 12, "release": "0.16", "sites": [SITE]},
    "problems": [{"kind": "stale", "text": "of a state", "count": 2, "example": "x"}],
}
DUMP = {
    **{"schema": 1, "rank": 5, "world_size": 64, "host": "a", "pid": 77},
    "groups": [{"owner": None, "label": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [4, 5, 6, 7]}],
}


def _seeds() -> list[tuple[Any, str]]:
    """What is written to FILE, as data or text, and the command that reads it."""
    plan = json.loads(CliRunner().invoke(app, ["plan", *SIZES.split(), "--json"]).stdout)
    scripts = [(path.read_text(), "plan --from-args FILE") for path in sorted(LAUNCH.glob("*.sh"))]
    return [
        *((plan, f"{name} --plan FILE") for name in ("plan", "check --suggest", "show")),
        (plan, "plan --json --plan FILE"),
        (plan, "plan --rank 3 --plan FILE"),
        (plan, "show --html FILE.html --plan FILE"),
        (plan, f"diff FILE '{SIZES}'"),
        (DUMP, f"diff '{SIZES}' FILE"),
        (READS, "audit DIRECTORY"),
        ({"sites": [SITE]}, "audit DIRECTORY --against FILE"),
        *scripts,
        *scripts,
        ("tp-cp-ep-dp-pp", "plan --world-size 64 --order TEXT"),
        ("3-5", f"show {SIZES} --hosts TEXT"),
        ("--world-size 64 --tp 4", f"diff '{SIZES}' TEXT"),
        ("torchrun --nnodes 8 --nproc-per-node 8 x.py --tp 4", "plan --from-args TEXT"),
    ]  # fmt: skip


def _deep(value: Any, times: int) -> Any:
    for _ in range(times):
        value = [value]
    return value


ODD: tuple[Callable[[random.Random], Any], ...] = (
    lambda _: None,
    lambda _: True,
    lambda _: -1,
    lambda _: 0,
    lambda _: 2**63,
    lambda _: 10**400,
    lambda _: 1e308,
    lambda _: 0.5,
    lambda _: 1 << 20,
    lambda _: "",
    lambda _: "8",
    lambda _: "\x1b[31m\x07\nred",
    lambda _: "\ud800",
    lambda _: "a" * 100_000,
    lambda _: [],
    lambda _: {},
    lambda _: {"name": "x", "gpus": 8},
    lambda _: [[]] * 10_000,
    lambda _: _deep(1, 300),
    lambda drawn: drawn.randrange(-8, 4096),
    lambda drawn: [drawn.randrange(64) for _ in range(drawn.randrange(9))],
)


def _places(data: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Each container in the data with each key of it."""
    for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
        yield data, key
        if isinstance(value, dict | list) and depth < 9:
            yield from _places(value, depth + 1)


def _changed(data: Any, drawn: random.Random) -> Any:
    """Data with some values replaced, removed, exchanged or repeated."""
    data = copy.deepcopy(data)
    for _ in range(drawn.choice((1, 1, 1, 2, 4))):
        places = list(_places(data))
        if not places:
            break
        at, key = drawn.choice(places)
        way = drawn.randrange(6)
        if key not in range(len(at)) and key not in at:
            continue  # it went with another change
        if way < 3:
            at[key] = drawn.choice(ODD)(drawn)
        elif way == 3:
            del at[key]
        elif way == 4:
            at[key] = copy.deepcopy(drawn.choice(places)[0])
        elif isinstance(at, list):
            at *= drawn.choice((2, 3, 400)) if len(json.dumps(at)) < 10_000 else 1
        else:
            at[f"{key}{drawn.choice(('', ' ', chr(27), chr(0x202E)))}x"] = at[key]
    return data


BYTES_IN = (
    *(b"\x1b[2J", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b"{", b"[" * 3000, b"&a [*a,*a]"),
    *(b"9" * 401, b"-", b"$(", b"${A", b"`", b'"', b"'", b"((", b"<<: *a\n", b"A=$A$A\n" * 12),
    *(
        b"x" * 120_000,
        b"=",
        b",",
        b"[1-999999]",
        b"1e999",
        b": ",
        b"\\\n",
        b"\xe2\x80\xae",
        b"<<E\n",
    ),
)


def _garbled(raw: bytes, drawn: random.Random) -> bytes:
    """Bytes cut, doubled, moved, flipped, or with others between them."""
    for _ in range(drawn.choice((1, 1, 2, 8))):
        i, j = sorted(drawn.randrange(len(raw) + 1) for _ in range(2))
        way = drawn.randrange(6)
        if way == 0:
            raw = raw[:i] + raw[j:]
        elif way == 1:
            raw = raw[:j] + (raw[i:j] * drawn.choice((1, 2, 50)))[: 1 << 20] + raw[j:]
        elif way == 2 and i < len(raw):
            raw = raw[:i] + bytes([drawn.randrange(256)]) + raw[i + 1 :]
        elif way == 3:
            raw = raw[:i]
        else:
            raw = raw[:i] + drawn.choice(BYTES_IN) + raw[i:]
    return raw[: 1 << 20]


def _written(data: Any) -> bytes:
    return data.encode() if isinstance(data, str) else json.dumps(data).encode()


@dataclass(frozen=True)
class Case:
    """One command, and what it reads."""

    command: str
    raw: bytes

    def run(self, directory: Path) -> str:
        """The fault of the outcome; "" if there is none."""
        file, reads = directory / "file", directory / "reads"
        reads.mkdir(exist_ok=True)
        file.write_bytes(self.raw)
        recording = self.raw if self.command == "audit DIRECTORY" else _written(READS)
        (reads / "reads.0.1.1.json").write_bytes(recording)
        names = {"FILE.html": f"{file}.html", "FILE": str(file), "DIRECTORY": str(reads)}
        names["TEXT"] = self.raw.replace(b"\0", b"").decode(errors="surrogateescape")
        words = [names.get(word, word) for word in shlex.split(self.command)]
        with mock.patch.dict(os.environ, {"NO_COLOR": "1", "COLUMNS": "80"}):
            done = CliRunner().invoke(app, words, prog_name="hypergrid")
        error, output = done.exception, done.output
        if error is not None and not isinstance(error, SystemExit):
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            return f"{type(error).__name__} in {place}: {str(error)[:200]}"
        if done.exit_code not in (0, 1, 2):
            return f"status {done.exit_code}"
        if re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", output):
            return f"control characters: {ascii(output)[:300]}"
        is_sentence = output.startswith("hypergrid: ") and output.count("\n") == 1
        usage = output.startswith("Usage: ")  # typer's own, of a word that looks like a flag
        if done.exit_code == 2 and not is_sentence and not usage:
            return f"not one sentence: {output[:300]!r}"
        if is_sentence and len(output) > 2000:
            return f"a sentence of {len(output)} characters: {output[:100]}"
        return ""


_cached: list[tuple[Any, str]] = []


def case(number: int, seed: int = 1) -> Case:
    """The case of that number."""
    if not _cached:
        _cached.extend(_seeds())
    drawn = random.Random(f"{seed}/{number}")
    data, command = drawn.choice(_cached)
    by_value = not isinstance(data, str) and drawn.random() < 0.7
    raw = _written(_changed(data, drawn)) if by_value else _garbled(_written(data), drawn)
    return Case(command, raw)


def findings(numbers: Iterable[int], seed: int = 1) -> Iterator[tuple[int, str]]:
    """Run these cases in forked processes of bounded time and memory; which have findings."""
    remaining = list(numbers)
    case(0, seed)
    while remaining:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _work(remaining, seed, write)
        os.close(write)
        with os.fdopen(read) as answers:
            for line in iter(lambda: _line(answers), ""):
                number, complaint = line.rstrip("\n").partition(" ")[::2]
                assert remaining[0] == int(number)
                remaining.pop(0)
                if complaint:
                    yield int(number), complaint
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if remaining:
            ended = f"signal {status}" if status != signal.SIGKILL else "no answer"
            number = remaining.pop(0)
            yield number, f"{ended}: more than {SECONDS} s of CPU, or of memory, or a wait"


def _line(answers: Any) -> str:
    ready = select.select([answers], [], [], 60)[0]
    return str(answers.readline()) if ready else ""


def _work(numbers: list[int], seed: int, write: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with tempfile.TemporaryDirectory() as directory:
        for number in numbers:
            absurd = case(number, seed)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process
            try:
                complaint = absurd.run(Path(directory))
            except BaseException as error:
                complaint = f"{type(error).__name__}: {error}"
            signal.setitimer(signal.ITIMER_PROF, 0)
            os.write(write, f"{number} {ascii(complaint)[1:-1]}\n".encode())
    os._exit(0)
