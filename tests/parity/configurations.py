"""Random configurations of ``initialize_model_parallel``, as plain data."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.parity.breaking import break_one
from tests.parity.surface import COMMUNICATORS, DEFAULT_ORDER, Config, parameters


def _strict(pick: Callable[[list[int]], Sequence[int]]) -> Callable[[list[int]], Sequence[int]]:
    """A callback that insists on what stock passes: a list of plain ints."""

    def callback(ranks: list[int]) -> Sequence[int]:
        if type(ranks) is not list or any(type(rank) is not int for rank in ranks):
            raise TypeError(f"embedding callbacks take a list of ints, not {ranks!r}")
        return pick(ranks)

    return callback


def _raise_lookup(ranks: list[int]) -> list[int]:
    raise LookupError("the callback's own error")


_SOUND_CALLBACKS: dict[str, Callable[[list[int]], Sequence[int]]] = {
    "all": _strict(list),
    "reversed": _strict(lambda r: list(reversed(r))),
    "first": _strict(lambda r: r[:1]),
    "last": _strict(lambda r: r[-1:]),
    "first+middle+last": _strict(lambda r: sorted({r[0], r[len(r) // 2], r[-1]})),
    "last+first": _strict(lambda r: list(dict.fromkeys([r[-1], r[0]]))),
    "every second": _strict(lambda r: r[::2]),
    "none": _strict(lambda r: []),
    "a tuple": _strict(tuple),
    "rank 0 of the world too": _strict(lambda r: sorted({0, r[-1]})),
}
CALLBACKS = _SOUND_CALLBACKS | {
    "twice": _strict(lambda r: [r[0], r[0]]),
    "outside": _strict(lambda r: [r[0], 10**6]),
    "raises": _raise_lookup,
}

TP = "tensor_model_parallel_size"
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "is_high_priority_stream": (True, False),
    "cga_cluster_size": (1, 2, 4),
    "min_ctas": (1, 4, 8),
    "max_ctas": (16, 32),
    "net_name": ("IB", "ib", "Socket"),
    "an_unknown_field": (1,),
}
_ODD_WORLDS = [
    *(1, 2, 3, 5, 6, 7, 9, 10, 12, 15, 18, 20, 24, 30, 36, 40, 48, 60, 96, 144, 192),
    *(240, 384, 720, 960),
]


def random_config(rng: random.Random, release: str, max_world: int) -> Config:
    """One configuration: ``world_size``, the ``ranks`` to try, and ``kwargs``.

    The keyword arguments are plain data: callbacks are named (`CALLBACKS`), a communicator
    configuration is the mapping that its file will hold. About a quarter is meant to be refused;
    ``kind`` says what was broken.
    """
    has = parameters(release)
    gtp = "gtp_remat_size" in has
    world = _world_size(rng, max_world)
    window, offset = world, 0
    kwargs: dict[str, Any] = {}
    windows = "rank_offset" in has
    if windows and world > 1 and rng.random() < 0.12:
        window = rng.randint(1, world)
        offset = rng.randint(0, world - window)
        kwargs = {"local_world_size": window, "rank_offset": offset}
    sizes, dp_cp, expert_dp = _sizes(rng, window, gtp)
    kwargs |= sizes | _options(rng, has, sizes, dp_cp, expert_dp)
    if "encoder_pipeline_model_parallel_size" in has:
        kwargs |= _encoder(rng, sizes)
        stages = kwargs.get("encoder_pipeline_model_parallel_size") or 0
        width = kwargs.get("encoder_tensor_model_parallel_size") or sizes[TP]
        offset = dp_cp * width * stages
        world += offset

    variables = {"NCCL_COLLNET_ENABLE": "1", "UCX_TLS": "tcp", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    config: Config = {
        "kind": "sound",
        "world_size": world,
        "window": window,
        "kwargs": kwargs,
        "environment": {name: v for name, v in variables.items() if rng.random() < 0.1},
        "positional": rng.choices((0, 1, 2, 3, 99), (60, 8, 8, 14, 10))[0],
    }
    if rng.random() < 0.25:
        config["kind"] = break_one(rng, config, has)
    ranks = range(world)
    few = {0, world - 1, offset, min(offset + window, world) - 1, rng.choice(ranks)}
    few |= {offset - 1, rng.randrange(offset)} if offset and not windows else set()
    config["ranks"] = list(ranks) if world <= 4 else sorted(few | {rng.choice(ranks)})
    if world > 128:
        config["ranks"] = sorted({offset, rng.choice(ranks)})
    return config


def _world_size(rng: random.Random, largest: int) -> int:
    ceiling = min(largest, rng.choices((8, 16, 32, 64, 256, 1024), (30, 30, 18, 17, 4, 1))[0])
    known = _ODD_WORLDS if rng.random() < 0.45 else [2**i for i in range(11)]
    return rng.choice([w for w in known if ceiling // 8 < w <= ceiling] or [1])


def _sizes(rng: random.Random, window: int, gtp: bool) -> tuple[dict[str, Any], int, int]:
    """Sizes and order that fit a window; the numbers of dp x cp and expert-dp ranks."""
    pp = rng.choice(_divisors(window))
    plane = window // pp
    tp = rng.choice(_divisors(plane))
    cp = rng.choice(_divisors(plane // tp))
    remat = rng.choice(_divisors(plane // tp // cp)) if gtp and rng.random() < 0.3 else 1
    dp = plane // tp // cp // remat
    order = DEFAULT_ORDER
    if rng.random() < 0.5:
        order = _random_order(rng, {"tp": tp, "cp": cp, "dp": dp, "pp": pp}, gtp)
    has_ep = "ep" in order.lower()

    # Unless pp is the slowest dim, both grids need the same dp.
    same_data_parallel = not order.lower().endswith("pp") and pp > 1 and rng.random() < 0.8
    expert_plane = plane // dp if same_data_parallel else plane
    etp = rng.choice(_divisors(expert_plane))
    if expert_plane % tp == 0 and rng.random() < 0.5:
        etp = tp
    rest = expert_plane // etp
    ep = rng.choice(_divisors(rest) if has_ep else [1])
    expert_remat = 1
    if same_data_parallel and not has_ep:
        ep, etp = 1, expert_plane
    elif gtp and rng.random() < 0.3:
        expert_remat = rest // ep if same_data_parallel else rng.choice(_divisors(rest // ep))
    elif same_data_parallel:
        ep = rest

    kwargs: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
    }
    if cp > 1 or rng.random() < 0.5:
        kwargs["context_parallel_size"] = cp
    if ep > 1 or rng.random() < 0.5:
        kwargs["expert_model_parallel_size"] = ep
    if etp != tp or rng.random() < 0.3:
        kwargs["expert_tensor_parallel_size"] = etp
    if remat > 1:
        kwargs["gtp_remat_size"] = remat
    if expert_remat > 1:
        kwargs["expert_gtp_remat_size"] = expert_remat
    if order != DEFAULT_ORDER:
        kwargs["order"] = order
    return kwargs, dp * cp, plane // (etp * ep * expert_remat)


def _options(
    rng: random.Random, has: dict[str, Any], sizes: dict[str, Any], dp_cp: int, expert_dp: int
) -> dict[str, Any]:
    """The arguments that come on top of the sizes; only those that the release `has`."""
    gtp = "gtp_remat_size" in has
    kwargs: dict[str, Any] = {}
    if sizes["pipeline_model_parallel_size"] > 1 and rng.random() < 0.3:
        kwargs["virtual_pipeline_model_parallel_size"] = rng.choice([1, 2, 3])
    instances = 1
    if not sizes.keys() & {"gtp_remat_size", "expert_gtp_remat_size"} and rng.random() < 0.35:
        instances = rng.choice(_divisors(math.gcd(dp_cp, expert_dp)))
        kwargs["num_distributed_optimizer_instances"] = instances
    if rng.random() < 0.25:
        levels = _factors(rng, sizes.get("context_parallel_size", 1))
        kwargs["hierarchical_context_parallel_sizes"] = levels
    if dp_cp % 2 == 0 and rng.random() < 0.2:
        kwargs["hybrid_context_parallel"] = kwargs["dynamic_context_parallel"] = True
    if rng.random() < 0.3:
        kwargs["min_dynamic_context_parallel_size"] = rng.choice([1, 2, 2, 3, 4, 64])
    if rng.random() < 0.4:
        kwargs["create_gloo_process_groups"] = rng.random() < 0.3
    if rng.random() < (0.05 if gtp else 0.12):
        kwargs["use_sharp"] = True
        choices = [None, "dp"] + (["dp_replica"] if instances > 1 else [])
        kwargs["sharp_enabled_group"] = rng.choice(choices)
    if rng.random() < 0.3:
        kwargs["distributed_timeout_minutes"] = rng.choice([1, 10, 45, 0.5])
    for which in ("get_embedding_ranks", "get_position_embedding_ranks"):
        if rng.random() < 0.3:
            kwargs[which] = rng.choice(list(_SOUND_CALLBACKS))
    if rng.random() < 0.15:
        kwargs["pipeline_model_parallel_comm_backend"] = rng.choice(["nccl", "ucc"])
    if rng.random() < 0.15:
        kwargs["high_priority_stream_groups"] = rng.sample(COMMUNICATORS, rng.randint(0, 6))
    if rng.random() < 0.25:
        kwargs["nccl_communicator_config_path"] = {
            key: {f: rng.choice(values) for f, values in _OPTIONS.items() if rng.random() < 0.4}
            for key in rng.sample(COMMUNICATORS, rng.randint(1, 8))
        }
    if "create_all_gather_group" in has and rng.random() < 0.3:
        kwargs["create_all_gather_group"] = rng.random() < 0.8
    return {name: value for name, value in kwargs.items() if name in has}


def _encoder(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    """An encoder in front of the decoder, and where the pipeline splits."""
    kwargs: dict[str, Any] = {}
    stages = sizes["pipeline_model_parallel_size"]
    if rng.random() < 0.25:
        kwargs["pipeline_model_parallel_split_rank"] = rng.randrange(stages)
    if rng.random() < 0.4:
        few = [1] if "pp" not in sizes.get("order", DEFAULT_ORDER).lower() else [1, 1, 2, 3]
        kwargs["encoder_pipeline_model_parallel_size"] = rng.choice(few)
    if rng.random() < (0.7 if kwargs else 0.1):
        kwargs["encoder_tensor_model_parallel_size"] = rng.randint(0, sizes[TP])
    return kwargs


def _random_order(rng: random.Random, sizes: dict[str, int], gtp: bool) -> str:
    tokens = ["tp", "cp", "ep", "dp", "pp"]
    rng.shuffle(tokens)
    if rng.random() < 0.4:
        tokens = [t for t in tokens if t != "pp"] + ["pp"]
    if rng.random() < 0.3:
        unneeded = [t for t in tokens if sizes.get(t, 1) == 1 and not (gtp and t == "tp")]
        dropped = rng.sample(unneeded, rng.randint(0, min(len(unneeded), len(tokens) - 1)))
        tokens = [t for t in tokens if t not in dropped]
    if gtp and rng.random() < 0.15:
        tokens.insert(rng.randint(0, len(tokens)), "gtp_remat")
    order = "-".join(tokens)
    return rng.choice([order.upper(), order.title()]) if rng.random() < 0.4 else order


def _factors(rng: random.Random, number: int) -> list[int]:
    factors: list[int] = []
    while number > 1 and len(factors) < 3:
        factors.append(rng.choice(_divisors(number)[1:]))
        number //= factors[-1]
    if number > 1 or not factors:
        factors.append(number)
    rng.shuffle(factors)
    return factors


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
