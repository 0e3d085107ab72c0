"""Ways to break a configuration, usually so that stock refuses it."""

from __future__ import annotations

import random
from typing import Any

from tests.parity.surface import DEFAULT_ORDER, Config
from tests.support import table

WAYS = table("parity/breaks.txt")
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances",
    "gtp_remat_size",
    "expert_gtp_remat_size",
)


def break_one(
    rng: random.Random, config: Config, has: dict[str, Any], words: dict[str, Any]
) -> str:
    """Break `config` in one way, sometimes in two, with arguments that `has` names; says which."""
    kwargs = config["kwargs"]
    kinds: list[str] = []
    while not kinds or rng.random() < 0.2:
        kind, arguments = rng.choice(WAYS)
        order = kwargs.get("order", DEFAULT_ORDER)
        names = {
            "size": rng.choice([name for name in SIZES if name in has]),
            "order": order,
            "token": rng.choice(order.split("-")),
            "world": config["world_size"],
            "window": config["window"],
            "cp": kwargs.get("context_parallel_size", 1),
        }
        changes: dict[str, Any] = eval(arguments, words | names)
        passed = {name: value for name, value in changes.items() if name in has}
        if passed:
            kwargs |= passed
            variables = {name: value for name, value in changes.items() if name.isupper()}
            config["environment"] |= variables
            kinds.append(kind)
    return ", ".join(kinds)


def is_nonsense(config: Config) -> bool:
    """Whether refusing is right whatever stock does.

    A size below one, a negative offset, or a token twice in the order; so it is with gtp_remat in
    capitals, which stock does not recognise and puts in a second time.
    """
    kwargs = config["kwargs"]
    written = kwargs.get("order", "").split("-")
    tokens = [token.lower() for token in written]
    remat = max(kwargs.get(name) or 1 for name in ("gtp_remat_size", "expert_gtp_remat_size"))
    if remat > 1 and "gtp_remat" in tokens and "gtp_remat" not in written:
        return True
    if len(set(tokens)) != len(tokens) or kwargs.get("rank_offset", 0) < 0:
        return True
    for name, size in kwargs.items():
        if name.endswith(("_size", "_instances")) and size is not None and size < 1:
            return True
    return False
