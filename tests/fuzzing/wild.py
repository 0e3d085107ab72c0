"""Sets of arguments for ``initialize_model_parallel`` in small worlds, most of them wrong."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.parity.breaking import is_nonsense
from tests.parity.comparing import UNKNOWN, Snapshot
from tests.parity.configurations import initialisation, random_config
from tests.parity.recording import Recorder, observed, raised
from tests.parity.running import View
from tests.parity.surface import DEFAULT_ORDER, Config, parameters
from tests.support import OURS, table
from tests.support.forked import open_groups

CODE = "dp_cp: !!python/object/apply:os.system ['exit']"
FILE = "nccl_communicator_config_path"
KINDS: dict[str, str] = dict(table("fuzzing/kinds.txt"))
CHOICES = tuple(name for name, kind in KINDS.items() if kind == "choice")  # ours alone
# What a message may name besides an argument.
NAMED = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL configuration", "net_name", *CHOICES)
LONGEST_MESSAGE = 1000
PATIENCE = 20.0  # seconds, for ours
STOCKS_PATIENCE = 2.0


class Hang(BaseException):
    """Time is up. Nothing that catches Exception catches it."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `Hang` after so many seconds; only in the main thread."""

    def ring(*_: Any) -> None:
        raise Hang(f"not done after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def bomb(depth: int) -> str:
    """Some hundred bytes of aliases that stand for ``9 ** depth`` merged keys."""
    lines = ["a0: &a0 {max_ctas: 1}"]
    for i in range(1, depth):
        lines.append(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Value:
    """A value as ``values.txt`` has it: in Python, so that every run makes it anew."""

    text: str
    is_odd: bool = False
    is_alone: bool = False

    def make(self, folder: Path = Path()) -> Any:
        """The value; files of it are written into `folder`."""

        def file(content: str | bytes) -> str:
            path = folder / "options.yaml"
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            return str(path)

        def pipe() -> str:
            path = folder / "pipe"
            if not path.exists():
                os.mkfifo(path)
            return str(path)

        names = {
            "np": np,
            "torch": torch,
            "inf": inf,
            "nan": nan,
            "ORDER": DEFAULT_ORDER,
            "CODE": CODE,
            "bomb": bomb,
            "folder": folder,
            "Path": Path,
            "file": file,
            "pipe": pipe,
        }
        return eval(compile(self.text, __file__, "eval"), names)

    def __str__(self) -> str:
        return self.text[:120]


VALUES: dict[str, list[Value]] = {}
for _kind, _text, *_remarks in table("fuzzing/values.txt"):
    _value = Value(_text, "odd" in _remarks, "alone" in _remarks)
    VALUES.setdefault(_kind, []).append(_value)


@dataclass(frozen=True)
class ArgumentSet:
    """One call as one rank: a configuration of ``tests.parity`` with ``wild`` put over it."""

    release: str
    config: Config
    rank: int
    wild: dict[str, Value]

    def arguments(self, folder: Path) -> dict[str, Any]:
        """The keyword arguments, files and functions made."""
        _, kwargs = initialisation(self.config, self.release, str(folder))
        return kwargs | {name: value.make(folder) for name, value in self.wild.items()}

    def may_be_refused(self) -> bool:
        """Whether any refusal is right: a value of a wrong kind or of ours alone, or nonsense."""
        if any(value.is_odd for value in self.wild.values()) or self.wild.keys() & {*CHOICES}:
            return True
        keywords = dict(self.config["kwargs"])
        for name, value in self.wild.items():
            if KINDS.get(name, name) in ("number", "order", "hierarchical_context_parallel_sizes"):
                keywords[name] = value.make()
        levels = keywords.get("hierarchical_context_parallel_sizes") or []
        return min([*levels, 1]) < 1 or is_nonsense({"kwargs": keywords})

    def __str__(self) -> str:
        wild = ", ".join(f"{name}={value}" for name, value in self.wild.items())
        world = f"rank {self.rank} of {self.config['world_size']}"
        shown = f"{world}, {self.config['kwargs']} with {wild or 'nothing wild'}"
        return shown.encode("ascii", "backslashreplace").decode()


def wild_sets(rng: random.Random, release: str, max_world: int) -> Iterator[View]:
    """One set in a world of up to 16 ranks; most have a fault, many have several."""
    config = random_config(rng, release, min(max_world, 16)) | {"positional": 0}
    names = [*parameters(release), rng.choice(CHOICES)]
    count = rng.choices((0, 1, 2, 3, 5), (6, 52, 26, 12, 4))[0]
    wild = {name: _draw_value(rng, name) for name in rng.sample(names, count)}
    arguments = ArgumentSet(release, config, rng.choice(config["ranks"]), wild)
    show = functools.partial(attempt, arguments=arguments)
    yield View(str(arguments), show, arguments.may_be_refused())


def _draw_value(rng: random.Random, name: str) -> Value:
    """A value for the argument ``name``: of its own kind, or of another."""
    if rng.random() < 0.2:
        foreign = rng.choice(VALUES[rng.choice(("number", "other", "order"))])
        # As a path, stock would read from a number: the terminal, for one.
        is_alone = name == FILE or foreign.is_alone
        return Value(foreign.text, is_odd=True, is_alone=is_alone)
    return rng.choice(VALUES[KINDS.get(name, name)])


def attempt(module: ModuleType, arguments: ArgumentSet) -> Snapshot:
    """What one call gives, and what is wrong about ours besides: nothing is wrong about stock."""
    is_ours = hasattr(module, "current_state")
    recorder = Recorder(module, arguments.config, arguments.rank, arguments.release)
    outcome: Any = "ok"
    complaints: list[str] = []
    with tempfile.TemporaryDirectory() as folder, observed(recorder):
        keywords = arguments.arguments(Path(folder))
        if not is_ours:
            keywords = _for_stock(keywords)
        try:
            with limited(PATIENCE if is_ours else STOCKS_PATIENCE):
                if not is_ours and any(value.is_alone for value in arguments.wild.values()):
                    raise Hang("stock would wait for ever")
                module.initialize_model_parallel(**keywords)
        except (Exception, Hang) as error:
            outcome = raised(error) | {"message": str(error)}
            # Of several faults ours may report another one.
            is_one_fault = len(arguments.wild) < 2 and arguments.config["kind"] == "sound"
            outcome["deliberate"] &= is_one_fault
            if is_ours:
                complaints += words_missing(error, [*parameters(arguments.release), *NAMED])
            elif isinstance(error, Hang | MemoryError):
                outcome = UNKNOWN
        if is_ours:
            complaints += left_behind(module, outcome != "ok")
        with contextlib.suppress(Exception):
            module.destroy_model_parallel()
    # With share="all" ours creates fewer groups, and stock has no such argument.
    share = arguments.wild.get("share")
    is_compared = outcome == "ok" and not (share and share.text == '"all"')
    created = recorder.created if is_compared else []
    answers = {"before": {}, "afterwards": {"complaints": complaints}}
    return {
        "outcome": outcome,
        "answers": answers,
        "created": Counter(created),
        "groups": {},
    }


def left_behind(module: ModuleType, is_refused: bool) -> Iterator[str]:
    """What a refused call has left, and what is still there after a destroy."""
    if is_refused:
        if len(open_groups()) > 1:
            yield "a group is left"
        try:
            module.initialize_model_parallel(create_gloo_process_groups=False)
        except Exception as error:
            yield f"a correct initialisation afterwards fails: {error!r}"
    module.destroy_model_parallel()
    if len(open_groups()) > 1:
        yield "a group is left after a destroy"


def words_missing(error: BaseException, names: Sequence[str]) -> list[str]:
    """What keeps a message from being a sentence of ours that names what is wrong."""
    text = str(error)
    shown = repr(text[:200])
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    if file.endswith(("tests/fuzzing/wild.py", "tests/parity/configurations.py")):
        return []  # the caller's own function fails
    complaints = []
    if not file.startswith(OURS):
        complaints.append(f"not our own words: {type(error).__name__} from {file}")
    if len(text.split()) < 4 or not re.search(r"[.!?]$", text):
        complaints.append(f"no sentence: {shown}")
    if len(text) > LONGEST_MESSAGE:
        complaints.append(f"a message of {len(text)} characters")
    if not any(name in text for name in names):
        complaints.append(f"names no argument: {shown}")
    if not text.isprintable():
        complaints.append(f"unprintable: {shown}")
    return complaints


def _for_stock(keywords: dict[str, Any]) -> dict[str, Any]:
    """The arguments without ours alone; flags and numbers as Python's own."""
    plain_keywords = {}
    for name, value in keywords.items():
        if KINDS.get(name) == "flag":
            with contextlib.suppress(Exception):
                value = bool(value)
        if name not in CHOICES:
            plain_keywords[name] = _plain(value)
    return plain_keywords


def _plain(value: Any) -> Any:
    """Numbers and lists of numpy and torch as Python's own."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple | range):
        return [_plain(part) for part in value]
    return value
