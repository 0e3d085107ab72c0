"""Ways to break a configuration, usually so that stock refuses it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.parity.surface import COMMUNICATORS, DEFAULT_ORDER, Config


def break_one(rng: random.Random, config: Config, has: dict[str, Any]) -> str:
    """Break `config` in one way, sometimes in two, with arguments that `has` names; says which."""
    ways = _ways(rng, config, has)
    kinds = [rng.choice(list(ways))]
    if rng.random() < 0.2:
        kinds.append(rng.choice(list(ways)))
    for kind in kinds:
        config["kwargs"] |= {name: v for name, v in ways[kind]().items() if name in has}
    return ", ".join(kinds)


def _ways(
    rng: random.Random, config: Config, has: dict[str, Any]
) -> dict[str, Callable[[], dict[str, Any]]]:
    """What each way changes of the keyword arguments."""
    gtp = "gtp_remat_size" in has
    world, kwargs = config["world_size"], config["kwargs"]
    cp = kwargs.get("context_parallel_size", 1)
    order = kwargs.get("order", DEFAULT_ORDER)
    tokens = order.split("-")
    default_tokens = DEFAULT_ORDER.split("-")
    sizes = [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "num_distributed_optimizer_instances",
    ]
    sizes += ["gtp_remat_size", "expert_gtp_remat_size"] if gtp else []

    def one_of(name: str, *values: Any) -> Callable[[], dict[str, Any]]:
        return lambda: {name: rng.choice(values)}

    def any_size(*values: int) -> Callable[[], dict[str, Any]]:
        return lambda: {rng.choice(sizes): rng.choice(values)}

    def any_of_encoder() -> dict[str, Any]:
        which = rng.choice(("tensor", "pipeline"))
        return {f"encoder_{which}_model_parallel_size": rng.choice((0, 1, 2, 3, 7, -1))}

    def one_connection() -> dict[str, Any]:
        config["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        return {"pipeline_model_parallel_comm_backend": "ucc"}

    def lacks_a_token() -> dict[str, Any]:
        lost = rng.choice(tokens)
        return {"order": "-".join(token for token in tokens if token != lost)}

    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "indivisible size": any_size(world + 1, 7, 2, 3, 5),
        "another size": any_size(2, 3, 4, 6, 8),
        "size below one": any_size(0, 0, -1, -2),
        "virtual stages": lambda: {
            "pipeline_model_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": 2,
        },
        "order lacks a token": lacks_a_token,
        "another order": lambda: {"order": "-".join(rng.sample(default_tokens, 5))},
        "another case": lambda: {"order": order.upper()},
        "unknown token": one_of(
            "order", order + "-zz", "xpp-" + order, order.replace("-", " "), "", "-"
        ),
        "repeated token": lambda: {"order": f"{order}-{rng.choice(tokens).lower()}"},
        "instances": one_of("num_distributed_optimizer_instances", 2, 3, 4, 5, 8),
        "hierarchy": one_of("hierarchical_context_parallel_sizes", [cp, 2], [cp + 1], [2, 2], []),
        "hybrid": lambda: dict.fromkeys(
            ("hybrid_context_parallel", "dynamic_context_parallel"), True
        ),
        "sharp group without sharp": lambda: {
            "use_sharp": False,
            "sharp_enabled_group": rng.choice(["dp", "dp_replica", "x"]),
        },
        "unknown sharp group": lambda: {"use_sharp": True, "sharp_enabled_group": "tp"},
        "sharp replica of one": lambda: {
            "use_sharp": True,
            "sharp_enabled_group": "dp_replica",
            "num_distributed_optimizer_instances": 1,
        },
        "pipeline backend": one_of("pipeline_model_parallel_comm_backend", "gloo", "UCC", "x", ""),
        "one connection": one_connection,
        "callback": one_of("get_embedding_ranks", "twice", "outside", "raises"),
        "position callback": one_of("get_position_embedding_ranks", "twice", "outside", "raises"),
        "bad net": lambda: {
            "nccl_communicator_config_path": {rng.choice(COMMUNICATORS): {"net_name": "eth"}}
        },
        "no such file": lambda: {"nccl_communicator_config_path": "absent"},
    }
    if "encoder_pipeline_model_parallel_size" in has:
        ways["another split"] = one_of("pipeline_model_parallel_split_rank", 0, 1, 2, 5, -1, -9)
        ways["another encoder"] = any_of_encoder
    if gtp:
        ways["window"] = lambda: {
            "local_world_size": config["window"],
            "rank_offset": world - config["window"] + 1,
        }
        ways["window too large"] = one_of("local_world_size", 2 * world, 2 * world, 0)
        ways["negative offset"] = one_of("rank_offset", -1, -world)
    return ways


def is_nonsense(config: Config) -> bool:
    """Whether refusing is right whatever stock does.

    A size below one, a negative offset, or a token twice in the order; so it is with gtp_remat in
    capitals, which stock does not recognise and puts in a second time.
    """
    kwargs = config["kwargs"]
    written = kwargs.get("order", "").split("-")
    tokens = [token.lower() for token in written]
    remat = max(kwargs.get(f"{grid}gtp_remat_size") or 1 for grid in ("", "expert_"))
    if remat > 1 and "gtp_remat" in tokens and "gtp_remat" not in written:
        return True
    sizes = {name: value for name, value in kwargs.items() if name.endswith("_size")}
    sizes["instances"] = kwargs.get("num_distributed_optimizer_instances", 1)
    least = {name: 0 if name.startswith("encoder_") else 1 for name in sizes}
    return (
        len(set(tokens)) != len(tokens)
        or any(size is not None and size < least[name] for name, size in sizes.items())
        or kwargs.get("rank_offset", 0) < 0
    )
