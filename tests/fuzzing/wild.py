"""Sets of arguments for ``initialize_model_parallel`` in small worlds, most of them wrong."""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.parity.configurations import random_config
from tests.parity.snapshots import initialisation
from tests.parity.surface import COMMUNICATORS, DEFAULT_ORDER, Config, parameters

MARKER = Path(tempfile.gettempdir()) / f"hypergrid-fuzz-{os.getpid()}"
CHOICES = ("share", "connect", "creation")  # ours alone
NUMBERS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_split_rank"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "gtp_remat_size"),
    *("expert_gtp_remat_size", "num_distributed_optimizer_instances", "rank_offset"),
    *("encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size"),
    "local_world_size",
)
FLAGS = (
    *("use_sharp", "hybrid_context_parallel", "create_gloo_process_groups"),
    "create_all_gather_group",
)


@dataclass(frozen=True)
class Made:
    """A value that every run makes anew, in a folder of its own.

    ``comparable`` is False where stock would wait for ever; ``refusable`` where it accepts
    something that ours may refuse.
    """

    label: str
    make: Callable[[Path], Any]
    comparable: bool = True
    refusable: bool = False

    def __repr__(self) -> str:
        return f"<{self.label}>"


class Hang(BaseException):
    """Time is up. Nothing that catches Exception catches it."""


_NUMBERS = (
    *(None, 0, -1, -2, 1, 2, 4, 3, 7, 10**6, 2**63, -(10**30), 2.0, 0.5, math.nan, math.inf, True),
    *(np.int64(2), np.uint8(2), np.float64(2), np.bool_(True), np.array(2), torch.tensor(2)),
)
_OTHERS = (
    *("", "2", "two", "x" * 100_000, "\0", "\u202etp", "\ud800", "{0.__class__}", "%s%n", "\n"),
    *([], [2], [2, 2], {}, {"tp": 2}, {2}, b"2", object(), len, np.array([2, 2]), torch.ones(2)),
)
_ORDERS = (
    *(DEFAULT_ORDER.upper(), f"{DEFAULT_ORDER} ", f"-{DEFAULT_ORDER}", "pp-dp-ep-cp-tp", "dp", ""),
    *(DEFAULT_ORDER.replace("-", mark) for mark in ("--", " ", "\u2010", "_")),
    *(DEFAULT_ORDER.replace("tp", token) for token in ("\uff54\uff50", "tP", "tpx", "gtp")),
    *(f"{DEFAULT_ORDER}-{token}" for token in ("tp", "PP", "gtp_remat", "zz", "{0}")),
    *("tp-" * 2_000 + "tp", "-" * 100_000, "tp-cp-dp-ep-pp-gtp_remat", DEFAULT_ORDER.split("-")),
)


def _chooses(label: str, choose: Any, comparable: bool = True, refusable: bool = False) -> Made:
    return Made(f"a function that returns {label}", lambda _: choose, comparable, refusable)


def _fail(ranks: list[int]) -> list[int]:
    raise LookupError("the callback's own error")


_CALLBACKS: tuple[Any, ...] = (
    _chooses("foreign ranks", lambda ranks: [10**6]),
    _chooses("the first rank of the world", lambda ranks: [0]),
    _chooses("a negative rank", lambda ranks: [-1]),
    _chooses("a rank twice", lambda ranks: [ranks[0], ranks[0]]),
    _chooses("text", lambda ranks: "01"),
    _chooses("None", lambda ranks: None),
    _chooses("a None among ranks", lambda ranks: [*ranks, None]),
    _chooses("a number", lambda ranks: ranks[0]),
    _chooses("floats", lambda ranks: [float(rank) for rank in ranks], refusable=True),
    _chooses("nothing", lambda ranks: []),
    _chooses("lists of lists", lambda ranks: [ranks]),
    _chooses("a set", set),
    _chooses("a tuple", tuple),
    _chooses("an array", np.array),
    _chooses("a tensor", torch.tensor, comparable=False),  # sorting gives tensors, equal to none
    _chooses("nothing, as it raises", _fail),
    _chooses("nothing, as it takes no ranks", lambda: []),
    *(5, [0], None),
)


def _file(label: str, content: str | bytes, **how: bool) -> Made:
    def make(folder: Path) -> str:
        path = folder / "options.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return Made(label, make, **how)


def _pipe(folder: Path) -> str:
    path = folder / "pipe"
    if not path.exists():
        os.mkfifo(path)
    return str(path)


def bomb(depth: int) -> str:
    """Some hundred bytes of aliases that stand for ``9 ** depth`` merged keys."""
    lines = ["a0: &a0 {max_ctas: 1}"]
    for i in range(1, depth):
        lines.append(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}")
    return "\n".join(lines)


CODE = f"dp_cp: !!python/object/apply:os.system ['touch {MARKER}']"
_PATHS: tuple[Any, ...] = (
    Made("a missing file", lambda folder: str(folder / "absent.yaml")),
    Made("a folder", str),
    Made("a path object", lambda folder: Path(_file("", "dp: {max_ctas: 8}").make(folder))),
    Made("a path in bytes", lambda folder: os.fsencode(folder / "absent.yaml")),
    Made("a pipe", _pipe, comparable=False),
    Made("/dev/zero", lambda _: "/dev/zero", comparable=False),
    Made("an open file's number", lambda _: 0, comparable=False),
    *(2.5, [], {}, object()),
    _file("an empty file", ""),
    _file("a list", "- dp_cp\n- dp\n", refusable=True),
    _file("a word", "hello", refusable=True),
    _file("no YAML", "dp_cp: [unclosed"),
    _file("an impossible date", "dp: 2024-99-99"),
    _file("two documents", "dp: {}\n---\ncp: {}\n"),
    _file("bytes that are no text", b"\xff\xfe\x00\xd8\x80"),
    _file("a key that is a list", "? [a]\n: b"),
    _file("a section twice", "dp_cp: {max_ctas: 1}\ndp_cp: {max_ctas: 2}"),
    _file("a section by alias", "dp: &x {max_ctas: 8}\ncp: *x\ntp: {<<: *x, min_ctas: 2}"),
    _file("a list in itself", "dp: &x [*x]"),
    _file("a bomb of merged keys", bomb(9), comparable=False),
    _file("code", CODE),
    _file("a file that is too long", "# " + "x" * (1 << 20), refusable=True),
    _file("a deep nest", "[" * 5_000),
    _file("a long number", "dp_cp: {max_ctas: " + "9" * 5_000 + "}"),
)
_SCALARS = ("8", "8.5", "eight", "'8'", "null", "true", "[8]", "{a: 1}", "99999999999", "-1")
_SCALARS = (*_SCALARS, "IB", "ib", "Socket", "eth", "''", ".nan", "2024-01-01")
_KEYS = (
    *("is_high_priority_stream", "cga_cluster_size", "max_ctas", "min_ctas", "net_name"),
    *("unknown", "1", "null"),
)

TABLE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(FLAGS, (True, False, None, 0, 1, "no", "", [], math.nan, np.bool_(True))),
    **dict.fromkeys(("get_embedding_ranks", "get_position_embedding_ranks"), _CALLBACKS),
    **dict.fromkeys(CHOICES, ("none", "all", "lazy", "eager", "auto", "ALL", 5, ["all"], None)),
    "pipeline_model_parallel_comm_backend": (None, "nccl", "ucc", "gloo", "NCCL", 5, ["nccl"]),
    "sharp_enabled_group": (None, "dp", "dp_replica", "DP", "tp", 5, ["dp"]),
    "hierarchical_context_parallel_sizes": (
        *((2, 2), [1], [1, 1], [2], [2, 1], ["2", "2"], "22", [0, 4], [-1, -1], [[2]], [2.0]),
        *([None], range(1, 3), np.array([2, 1]), [np.int64(2)], torch.tensor([2]), 2, {1}),
    ),
    "nccl_communicator_config_path": _PATHS,
    "distributed_timeout_minutes": (
        *(1, 30, 0.5, 0, -1, math.nan, math.inf, "30", 1e-9, 1e12, 10**400, None),
        *(np.int64(3), np.float64(3), torch.tensor(3)),
    ),
    "order": (*_ORDERS, None, DEFAULT_ORDER.encode(), 5),
    "high_priority_stream_groups": (
        *(["dp_cp"], ["nobody"], "dp", [1], [None], [["dp"]], ("tp", "pp"), {"tp": 1}, 5, [""]),
        Made("a generator", lambda _: (name for name in ("dp_cp", "tp"))),
    ),
}


@dataclass(frozen=True)
class ArgumentSet:
    """One call as one rank: a configuration of ``tests.parity`` with ``wild`` put over it."""

    release: str
    config: Config
    rank: int
    wild: dict[str, Any]

    def arguments(self, folder: Path) -> dict[str, Any]:
        """The keyword arguments, files and functions made."""
        *_, kwargs = initialisation(self.config, self.release, str(folder))
        made = {
            name: value.make(folder) if isinstance(value, Made) else value
            for name, value in self.wild.items()
        }
        return {**kwargs, **made}

    def __str__(self) -> str:
        wild = ", ".join(f"{name}={repr(value)[:120]}" for name, value in self.wild.items())
        world = f"rank {self.rank} of {self.config['world_size']}"
        return f"{world}, {self.config['kwargs']} with {wild or 'nothing wild'}"


def draw(rng: random.Random, release: str) -> ArgumentSet:
    """One set in a world of up to 16 ranks; most have a fault, many have several."""
    config = random_config(rng, release, 16) | {"positional": 0}
    names = [*parameters(release), rng.choice(CHOICES)]
    count = rng.choices((0, 1, 2, 3, 5), (6, 52, 26, 12, 4))[0]
    wild = {name: _value(rng, name) for name in rng.sample(names, count)}
    return ArgumentSet(release, config, rng.choice(config["ranks"]), wild)


def _value(rng: random.Random, name: str) -> Any:
    """A value for the argument ``name``: of its own kind, drawn freely, or of another kind."""
    way = rng.random()
    if way < 0.6:
        return rng.choice(TABLE.get(name, _NUMBERS))
    if way < 0.8:
        return _free(rng, name)
    return rng.choice(rng.choice((_NUMBERS, _OTHERS, _ORDERS)))


def _free(rng: random.Random, name: str) -> Any:
    if name == "nccl_communicator_config_path":
        return _file("a drawn file", _yaml(rng))
    if name == "hierarchical_context_parallel_sizes":
        return [_number(rng) for _ in range(rng.randint(0, 4))]
    if name == "high_priority_stream_groups":
        return [rng.choice((*COMMUNICATORS, _text(rng), 1)) for _ in range(rng.randint(0, 4))]
    if name in ("order", "pipeline_model_parallel_comm_backend", "sharp_enabled_group", *CHOICES):
        return _text(rng)
    if name in ("get_embedding_ranks", "get_position_embedding_ranks"):
        ranks = [rng.randint(-2, 17) for _ in range(rng.randint(0, 4))]
        return Made(f"a function that returns {ranks}", lambda _: lambda pipeline: list(ranks))
    return _number(rng)


def _number(rng: random.Random) -> Any:
    return rng.choice((rng.randint(-3, 20), np.int64(rng.randint(0, 8)), rng.uniform(-3, 20)))


PIECES = (
    *("tp", "cp", "ep", "dp", "pp", "gtp_remat", "TP", "-", "-", "-", "--", " ", "_", "{", "%s"),
    *("\0", "\u2010", "\u202e", "\u0130", "\n", "'", '"', "\ud800", "\U0001f600", "a", "b"),
)


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 12)))


def _yaml(rng: random.Random) -> str:
    def section() -> str:
        if rng.random() < 0.2:
            return rng.choice(_SCALARS)
        options = {rng.choice(_KEYS): rng.choice(_SCALARS) for _ in range(rng.randint(0, 3))}
        return "{" + ", ".join(f"{key}: {value}" for key, value in options.items()) + "}"

    names = {
        rng.choice((*COMMUNICATORS, "dp_cp", "tp", "1")): None for _ in range(rng.randint(1, 5))
    }
    return "\n".join(f"{name}: {section()}" for name in names)
