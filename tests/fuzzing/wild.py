"""Sets of arguments for ``initialize_model_parallel`` in small worlds, most of them wrong."""

from __future__ import annotations

import os
import random
import tempfile
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.parity.configurations import initialisation, random_config
from tests.parity.surface import COMMUNICATORS, DEFAULT_ORDER, Config, parameters
from tests.support import table

MARKER = Path(tempfile.gettempdir()) / f"hypergrid-fuzz-{os.getpid()}"
CODE = f"dp_cp: !!python/object/apply:os.system ['touch {MARKER}']"
FILE = "nccl_communicator_config_path"
KINDS: dict[str, str] = dict(table("fuzzing/kinds.txt"))


def _of_kind(kind: str) -> tuple[str, ...]:
    return tuple(name for name in KINDS if KINDS[name] == kind)


CHOICES = _of_kind("choice")  # ours alone
FLAGS = _of_kind("flag")
NUMBERS = _of_kind("number")


class Hang(BaseException):
    """Time is up. Nothing that catches Exception catches it."""


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

        names = {"np": np, "torch": torch, "inf": inf, "nan": nan, "ORDER": DEFAULT_ORDER}
        names |= {"folder": folder, "Path": Path, "file": file, "pipe": pipe}
        names |= {"CODE": CODE, "bomb": bomb}
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

    def __str__(self) -> str:
        wild = ", ".join(f"{name}={value}" for name, value in self.wild.items())
        world = f"rank {self.rank} of {self.config['world_size']}"
        return f"{world}, {self.config['kwargs']} with {wild or 'nothing wild'}"


def draw(rng: random.Random, release: str) -> ArgumentSet:
    """One set in a world of up to 16 ranks; most have a fault, many have several."""
    config = random_config(rng, release, 16) | {"positional": 0}
    names = [*parameters(release), rng.choice(CHOICES)]
    count = rng.choices((0, 1, 2, 3, 5), (6, 52, 26, 12, 4))[0]
    wild = {name: _draw_value(rng, name) for name in rng.sample(names, count)}
    return ArgumentSet(release, config, rng.choice(config["ranks"]), wild)


def _draw_value(rng: random.Random, name: str) -> Value:
    """A value for the argument ``name``: of its own kind, drawn freely, or of another kind."""
    way = rng.random()
    if way < 0.2:
        foreign = rng.choice(VALUES[rng.choice(("number", "other", "order"))])
        return Value(foreign.text, is_odd=True, is_alone=name == FILE)
    if way < 0.4:
        return Value(_free(rng, name))
    return rng.choice(VALUES[KINDS.get(name, name)])


def _free(rng: random.Random, name: str) -> str:
    """A value for the argument ``name`` that no table has, in Python."""
    count = rng.randint(0, 4)
    if name == FILE:
        return f"file({_yaml(rng)!r})"
    if name == "distributed_timeout_minutes":
        return repr(rng.uniform(-3, 20))
    if name == "hierarchical_context_parallel_sizes":
        return repr([rng.randint(-3, 20) for _ in range(count)])
    if name == "high_priority_stream_groups":
        return repr([rng.choice((*COMMUNICATORS, _text(rng), 1)) for _ in range(count)])
    if name in ("order", "pipeline_model_parallel_comm_backend", "sharp_enabled_group", *CHOICES):
        return repr(_text(rng))
    if KINDS.get(name) == "callback":
        return f"lambda ranks: {[rng.randint(-2, 17) for _ in range(count)]}"
    return rng.choice((f"{rng.randint(-3, 20)}", f"np.int64({rng.randint(0, 8)})"))


def _text(rng: random.Random) -> str:
    pieces = [_word(rng, "piece") for _ in range(rng.randint(0, 12))]
    return "".join(pieces)


def _word(rng: random.Random, kind: str) -> Any:
    return rng.choice(VALUES[kind]).make()


def _yaml(rng: random.Random) -> str:
    """A file of some sections, most of them with options."""
    lines = []
    for name in rng.sample((*COMMUNICATORS, "1"), rng.randint(1, 5)):
        options = {_word(rng, "option"): _word(rng, "scalar") for _ in range(rng.randint(0, 3))}
        section = ", ".join(f"{option}: {value}" for option, value in options.items())
        text = f"{{{section}}}"
        if rng.random() < 0.2:
            text = _word(rng, "scalar")
        lines.append(f"{name}: {text}")
    return "\n".join(lines)
