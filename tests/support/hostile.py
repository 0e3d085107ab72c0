"""Files and texts that are cut, garbled or absurd, handed to each reader of the command line.

A case is a number: ``case(7)`` is the same files and the same command wherever it runs.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import random
import re
import resource
import shlex
import signal
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from click.testing import CliRunner

from compat.cli.app import app

SECONDS = 5  # of the processor
BYTES = 1 << 30  # of memory more than the interpreter has
SIZES = "--world-size 64 --tp 4 --pp 2 --ep 2"
SITE = {"module": "m.a", "file": "m/a.py", "line": 3, "function": "f", "count": 7}
SITE |= {"name": "get_x", "writes": False, "state": "s", "group": "g"}
PROBLEM = {"kind": "stale", "text": "of a state", "count": 2, "example": "x"}
READS = {"schema": 1, "rank": 0, "release": "0.16"}
READS |= {"sites": [SITE], "problems": [PROBLEM]}


@functools.cache
def _seeds() -> list[tuple[Any, str]]:
    """What is written to FILE, as data or text, and the command that reads it."""
    plan = json.loads(CliRunner().invoke(app, ["plan", *SIZES.split(), "--json"]).stdout)
    seeds: list[tuple[Any, str]] = [
        (plan, "plan --plan FILE"),
        (plan, "check --suggest --plan FILE"),
        (plan, "show --plan FILE"),
        (plan, "plan --json --plan FILE"),
        (plan, "plan --rank 3 --plan FILE"),
        (plan, "show --html FILE.html --plan FILE"),
        (plan, f"diff FILE '{SIZES}'"),
        (READS, "audit DIRECTORY"),
        ("tp-cp-ep-dp-pp", "plan --world-size 64 --order TEXT"),
        ("3-5", f"show {SIZES} --hosts TEXT"),
        ("--world-size 64 --tp 4", f"diff '{SIZES}' TEXT"),
        ("torchrun --nnodes 8 --nproc-per-node 8 x.py --tp 4", "plan --from-args TEXT"),
    ]
    return seeds


def _odd_values() -> list[Any]:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    numbers = [None, True, -1, 0, 7, 2**63, 10**400, 1e308, 0.5, 1 << 20, float("nan")]
    texts = ["", "8", "1->9", "|", "\x1b[31m\x07\nred", "\ud800", "a" * 100_000]
    lists = [[], {}, {"name": "x", "gpus": 8}, [[]] * 10_000, [4, 60, 4], deep]
    return [*numbers, *texts, *lists]


ODD_VALUES = _odd_values()
ODD_BYTES = (
    b"\x1b[2J \x00 \xff\xfe \xed\xa0\x80 \n { - $( ${A ` \" ' (( = , \\\n \xe2\x80\xae <<E\n 1e999 "
    b"&a[*a,*a] [1-999999]"
).split(b" ")
ODD_BYTES += [b": ", b"<<: *a\n", b"[" * 3000, b"9" * 401, b"A=$A$A\n" * 12, b"x" * 120_000]


def _places(data: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Each container in the data with each key of it."""
    for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
        yield data, key
        if isinstance(value, dict | list) and depth < 9:
            yield from _places(value, depth + 1)


def changed(data: Any, rng: random.Random) -> Any:
    """Data with some values replaced, removed, exchanged or repeated."""
    # As JSON has it, without tuples.
    data = json.loads(json.dumps(data))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = [*_places(data)]
        if not places:
            break
        container, key = rng.choice(places)
        match rng.choice(("replace", "replace", "remove", "exchange", "repeat")):
            case "replace":
                container[key] = copy.deepcopy(rng.choice(ODD_VALUES))
            case "remove":
                del container[key]
            case "exchange":
                container[key] = copy.deepcopy(rng.choice(places)[0])
            case "repeat" if isinstance(container, list):
                times = rng.choice((1, 2, 400))
                # What is large already would fill the memory.
                container += container * (times if len(json.dumps(container)) < 10_000 else 1)
            case "repeat":
                suffix = rng.choice(("x", " x", "\x1bx", "\u202ex"))
                container[f"{key}{suffix}"] = container[key]
    return data


def garbled(raw: bytes, rng: random.Random) -> bytes:
    """Bytes cut, doubled, moved, flipped, or with others between them."""
    for _ in range(rng.choice((1, 1, 2, 8))):
        start, stop = sorted(rng.choices(range(len(raw) + 1), k=2))
        before = raw[:start]
        after = raw[stop:]
        match rng.choice(("cut", "repeat", "flip", "end", "insert", "insert")):
            case "cut":
                raw = before + after
            case "repeat":
                raw = raw[:stop] + raw[start:stop] * rng.choice((1, 2, 50)) + after
            case "flip":
                raw = before + bytes([rng.randrange(256)]) + raw[start + 1 :]
            case "end":
                raw = before
            case "insert":
                raw = before + rng.choice(ODD_BYTES) + raw[start:]
        raw = raw[: 1 << 20]
    return raw


@dataclass(frozen=True)
class Case:
    """One command, and what it reads."""

    command: str
    raw: bytes

    def run(self, directory: Path) -> str:
        """The fault of the outcome; "" if there is none."""
        file = directory / "file"
        file.write_bytes(self.raw)
        reads = directory / "reads"
        reads.mkdir(exist_ok=True)
        is_recording = self.command == "audit DIRECTORY"
        (reads / "reads.0.1.1.json").write_bytes(self.raw if is_recording else _written(READS))
        names = {"FILE.html": f"{file}.html", "FILE": str(file), "DIRECTORY": str(reads)}
        names["TEXT"] = self.raw.replace(b"\0", b"").decode(errors="surrogateescape")
        words = [names.get(word, word) for word in shlex.split(self.command)]
        with mock.patch.dict(os.environ, {"NO_COLOR": "1", "COLUMNS": "80"}):
            done = CliRunner().invoke(app, words, prog_name="hypergrid")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            last = traceback.extract_tb(done.exception.__traceback__)[-1]
            error = f"{type(done.exception).__name__}: {str(done.exception)[:200]}"
            return f"{error} in {Path(last.filename).name}:{last.lineno}"
        return _fault(done.exit_code, done.output)


def _fault(status: int, output: str) -> str:
    if status not in (0, 1, 2):
        return f"status {status}"
    if re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", output):
        return f"control characters: {ascii(output)[:300]}"
    is_sentence = output.startswith("hypergrid: ") and output.count("\n") == 1
    is_usage = output.startswith("Usage: ")  # click's own, of a word that looks like a flag
    if status == 2 and not is_sentence and not is_usage:
        return f"not one sentence: {output[:300]!r}"
    if is_sentence and len(output) > 2000:
        return f"a sentence of {len(output)} characters: {output[:100]}"
    return ""


def _written(data: Any) -> bytes:
    return data.encode() if isinstance(data, str) else json.dumps(data).encode()


def case(number: int, seed: int = 1) -> Case:
    """The case of that number."""
    rng = random.Random(f"{seed}/{number}")
    data, command = rng.choice(_seeds())
    if isinstance(data, str) or rng.random() < 0.3:
        return Case(command, garbled(_written(data), rng))
    return Case(command, _written(changed(data, rng)))


def findings(numbers: Iterable[int], seed: int = 1) -> Iterator[tuple[int, str]]:
    """Run these cases in this process, whose memory is limited from then on; those with findings.

    A case that takes too long in C is a finding when it is back in Python.
    """
    _seeds()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGPROF, _end_late)
    with tempfile.TemporaryDirectory() as directory:
        for number in numbers:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                finding = case(number, seed).run(Path(directory))
            except (TimeoutError, MemoryError) as error:
                finding = f"{type(error).__name__}: {error}"
            signal.setitimer(signal.ITIMER_PROF, 0)
            if finding:
                yield number, finding


def _end_late(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s of CPU")
