"""Megatron's modules that order ranks by themselves: a warning where ours is told another order."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

# Module: the argument by which it chooses, and the orders without and with it.
MODULES = {
    "megatron.core.inference.shards": (
        *("use_tp_pp_dp_mapping", "tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"),
    ),
}


def watched(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Megatron's own spec of such a module, whose grids are looked at; None for other modules."""
    spec = PathFinder.find_spec(fullname, path) if fullname in MODULES else None
    if spec is not None and spec.origin is not None:
        spec.loader = _Watching(fullname, spec.origin)
    return spec


class _Watching(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        names: Any = module
        names.HyperCommGrid = _looked_at(names.HyperCommGrid, module.__name__)


def _looked_at(make: Callable[..., Any], module: str) -> Callable[..., Any]:
    warned = False

    @functools.wraps(make, updated=())
    def look(shape: Sequence[int], dim_names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        order = os.environ.get("HYPERGRID_ORDER", "")
        dims = [name for name, size in zip(dim_names, shape, strict=True) if size > 1]
        asked = [name for name in order.lower().split("-") if name in dims]
        if order and asked != [name for name in dims if name in asked] and not warned:
            warned = True
            argument, without, with_it = MODULES[module]
            warnings.warn(
                f"HYPERGRID_ORDER={order} does not reach {module}, which lays ranks out as "
                f"{'-'.join(dims)}: its groups are others than those of parallel_state. Its order "
                f"is {with_it} with {argument} and {without} without; use that one, or leave "
                f"HYPERGRID_ORDER (--order) out and pass the order where {argument} is passed.",
                stacklevel=2,
            )
        return make(shape, dim_names, *args, **kwargs)

    return look
