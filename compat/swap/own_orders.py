"""Megatron's modules that compute ranks by themselves: they are named if another order is wanted.

The list comes from the wheels and the repository of all releases that hypergrid supports.
"""

from __future__ import annotations

import warnings
from itertools import combinations

from compat.swap.order import DIMS, resolve_order

_MEGATRONS_ORDER = tuple(combinations(("tp", "cp", "ep", "dp", "pp"), 2))

# Module: pairs of dims. Its ranks are right if the first of each pair is faster than the second.
MODULES: dict[str, tuple[tuple[str, str], ...]] = {
    "megatron.core.inference.shards": _MEGATRONS_ORDER,  # since 0.19
    "megatron.rl.parallel_utils": _MEGATRONS_ORDER,  # 0.16 to 0.18
    "megatron.core.datasets.data_schedule": tuple(("tp", dim) for dim in DIMS if dim != "tp"),
    "megatron.core.transformer.moe.token_dispatcher": (("tp", "ep"),),
}


def warn_of_own_order(module: str) -> None:
    """Warn, before ``module`` is imported, if it cannot follow the order from outside."""
    order, source = resolve_order()
    dims = (order or "").lower().split("-")
    # Of tp-cp-pp: pp before cp, pp before tp, cp before tp. An order may leave out a dim of size 1.
    against_the_order = {*combinations(reversed(dims), 2)}
    for faster, slower in MODULES[module]:
        if (faster, slower) in against_the_order:
            warnings.warn(
                f"{module} computes ranks by itself, as if {faster} came before {slower}. The "
                f"order {order!r}, from {source}, does not reach it: if this job uses it, it will "
                f"communicate with other ranks than the groups have.",
                stacklevel=3,
            )
            return
