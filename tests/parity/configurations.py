"""Random configurations of ``initialize_model_parallel``, as plain data."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.parity.breaking import break_one
from tests.parity.surface import COMMUNICATORS, DEFAULT_ORDER, Config, parameters
from tests.support import table

TP = "tensor_model_parallel_size"
# What a callback returns of the ranks of a pipeline, in Python.
CALLBACKS = (
    "ranks[:]",
    "ranks[::-1]",
    "ranks[:1]",
    "ranks[-1:]",
    "ranks[::2]",
    "[]",
    "tuple(ranks)",
    "sorted({ranks[0], ranks[len(ranks) // 2], ranks[-1]})",
    "sorted({0, ranks[-1]})",
    "list(dict.fromkeys([ranks[-1], ranks[0]]))",
)
OPTIONS = table("parity/options.txt")
VARIABLES = {
    "NCCL_COLLNET_ENABLE": "1",
    "UCX_TLS": "tcp",
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
}
POWERS_OF_TWO = [2**exponent for exponent in range(11)]
WORLDS = [
    *(1, 2, 3, 5, 6, 7, 9, 10, 12, 15, 18, 20, 24, 30, 36, 40, 48, 60, 96, 144, 192),
    *(240, 384, 720, 960),
]


def callback(text: str) -> Callable[[list[int]], Any]:
    """A function that returns what `text` says of a pipeline's ranks, as plain ints in a list."""
    code = compile(text, __file__, "eval")

    def choose(ranks: list[int]) -> Any:
        if type(ranks) is not list or any(type(rank) is not int for rank in ranks):
            raise TypeError(f"embedding callbacks take a list of ints, not {ranks!r}")
        return eval(code, {"ranks": ranks})

    return choose


def random_config(rng: random.Random, release: str, max_world: int) -> Config:
    """One configuration: ``world_size``, the ``ranks`` to try, and ``kwargs``.

    The keyword arguments are plain data: callbacks are texts (see `callback`), a communicator
    configuration is the mapping that its file will hold. About a quarter is meant to be refused;
    ``kind`` says what was broken.
    """
    has = parameters(release)
    world = _world_size(rng, max_world)
    window = world
    offset = 0
    kwargs: dict[str, Any] = {}
    if "rank_offset" in has and world > 1 and rng.random() < 0.12:
        window = rng.randint(1, world)
        offset = rng.randint(0, world - window)
        kwargs = {"local_world_size": window, "rank_offset": offset}
    kwargs |= _arguments(rng, window, has)
    config: Config = {
        "kind": "sound",
        "world_size": world,
        "window": window,
        "kwargs": kwargs,
        "environment": {name: v for name, v in VARIABLES.items() if rng.random() < 0.1},
        "positional": rng.choices((0, 1, 2, 3, 99), (60, 8, 8, 14, 10))[0],
    }
    if rng.random() < 0.25:
        config["kind"] = break_one(rng, config, has, words(rng))
    ranks = range(world)
    # The ends of the world and of the window, and any two.
    few = {
        0,
        world - 1,
        offset,
        min(offset + window, world) - 1,
        *rng.choices(ranks, k=2),
    }
    if world > 128:
        few = {offset, rng.choice(ranks)}
    config["ranks"] = list(ranks) if world <= 4 else sorted(few)
    return config


def initialisation(config: Config, release: str, folder: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of ``initialize_model_parallel``: callbacks and files in place of texts."""
    kwargs = dict(config["kwargs"])
    for which in ("get_embedding_ranks", "get_position_embedding_ranks"):
        if which in kwargs:
            kwargs[which] = callback(kwargs[which])
    options = kwargs.get("nccl_communicator_config_path")
    if options is not None:
        path = Path(folder) / "communicators.yaml"
        kwargs["nccl_communicator_config_path"] = str(path)
        if not isinstance(options, str):
            path.write_text(json.dumps(options))
    leading = list(parameters(release).items())[: config["positional"]]
    args = [kwargs.pop(name, default) for name, default in leading]
    return args, kwargs


def _world_size(rng: random.Random, largest: int) -> int:
    ceiling = min(largest, rng.choices((8, 16, 32, 64, 256, 1024), (30, 30, 18, 17, 4, 1))[0])
    worlds = rng.choice((WORLDS, POWERS_OF_TWO))
    return rng.choice([world for world in worlds if ceiling // 8 < world <= ceiling] or [1])


def _arguments(rng: random.Random, window: int, has: dict[str, Any]) -> dict[str, Any]:
    """Sizes and order that fit a window, and what ``options.txt`` passes with them."""
    gtp = "gtp_remat_size" in has
    pp, tp, cp, remat, dp = _factors(rng, window, 5)
    if not gtp or rng.random() < 0.7:
        dp *= remat
        remat = 1
    tokens = DEFAULT_ORDER.split("-")
    if rng.random() < 0.4:
        rng.shuffle(tokens)
    expert_plane = tp * cp * remat * dp
    # Unless pp is the slowest dim, both grids need the same dp.
    same_dp = tokens[-1] != "pp" and pp > 1 and rng.random() < 0.8
    if same_dp:
        expert_plane //= dp
    etp, rest = _factors(rng, expert_plane, 2)
    if expert_plane % tp == 0 and rng.random() < 0.5:
        etp = tp
        rest = expert_plane // tp
    ep, expert_remat, expert_dp = _factors(rng, rest, 3)
    if not gtp or rng.random() < 0.7:
        expert_dp *= expert_remat
        expert_remat = 1
    if same_dp:
        ep *= expert_dp
        expert_dp = dp
    kwargs: dict[str, Any] = {TP: tp, "pipeline_model_parallel_size": pp}
    for name, size, default in (
        ("context_parallel_size", cp, 1),
        ("expert_model_parallel_size", ep, 1),
        ("expert_tensor_parallel_size", etp, tp),
        ("gtp_remat_size", remat, 1),
        ("expert_gtp_remat_size", expert_remat, 1),
    ):
        if size != default or rng.random() < 0.4:
            kwargs[name] = size
    if gtp and rng.random() < 0.15:
        tokens.insert(rng.randint(0, len(tokens)), "gtp_remat")
    grid = {
        "tp": tp,
        "cp": cp,
        "ep": ep,
        "dp": dp,
        "pp": pp,
        "gtp_remat": remat,
    }
    order = random_order(rng, tokens, grid, gtp)
    if order != DEFAULT_ORDER:
        kwargs["order"] = order
    names = words(rng) | {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "remat": remat * expert_remat,
        "dp_cp": dp * cp,
        "expert_dp": expert_dp,
        "order": order,
        "kwargs": kwargs,
    }
    for share, name, value in OPTIONS:
        if name in has and rng.random() < eval(share, names):
            kwargs[name] = eval(value, names)
    return {name: value for name, value in kwargs.items() if name in has}


def words(rng: random.Random) -> dict[str, Any]:
    """The names that the tables of arguments use, whatever the configuration."""

    def some(**options: Any) -> dict[str, Any]:
        return {name: value for name, value in options.items() if rng.random() < 0.4}

    return {
        "pick": lambda *values: rng.choice(values),
        "sample": rng.sample,
        "some": some,
        "factors": functools.partial(_factors, rng),
        "gcd": math.gcd,
        "CALLBACKS": CALLBACKS,
        "COMMUNICATORS": COMMUNICATORS,
    }


def random_order(rng: random.Random, tokens: list[str], sizes: dict[str, int], gtp: bool) -> str:
    """The tokens, some of size 1 left out, in any case."""
    if rng.random() < 0.15:
        idle = [token for token in tokens if sizes[token] == 1 and not (gtp and token == "tp")]
        dropped = rng.sample(idle, rng.randint(0, min(len(idle), len(tokens) - 1)))
        tokens = [token for token in tokens if token not in dropped]
    order = "-".join(tokens)
    return rng.choice([order.upper(), order.title()]) if rng.random() < 0.2 else order


def _factors(rng: random.Random, number: int, count: int) -> list[int]:
    """`count` random factors whose product is `number`."""
    factors = []
    for _ in range(count - 1):
        divisors = [size for size in range(1, number + 1) if number % size == 0]
        factors.append(rng.choice(divisors))
        number //= factors[-1]
    return [*factors, number]
