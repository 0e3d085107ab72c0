"""Megatron's modules that lay out ranks by themselves: they get the order that was asked for.

If they cannot follow it, there is a warning. The list comes from the wheels and the repository of
all releases that hypergrid supports; docs/limits.md names what was found and not changed.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from compat.swap.order import DIMS, resolve_order

Wrap = Callable[[Any, str], Any]


def watched(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Megatron's own spec of such a module, with a loader that wraps; None for other modules."""
    spec = PathFinder.find_spec(fullname, path) if fullname in MODULES else None
    if spec is not None and spec.origin is not None:
        spec.loader = _Watching(fullname, spec.origin)
    return spec


class _Watching(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name, wrap in MODULES[module.__name__].items():
            if hasattr(module, name):  # a later release may have moved it
                setattr(module, name, wrap(getattr(module, name), f"{module.__name__}.{name}"))


def _laid_out_as_asked(make: Callable[..., Any], where: str) -> Callable[..., Any]:
    """Make a grid in the order of the launcher or the environment, if they give one."""

    @functools.wraps(make, updated=())
    def ordered(shape: Sequence[int], dim_names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        order, source = resolve_order()
        if order is not None:
            from compat.megatron import rank_generator  # here: it needs megatron's release

            given = dict(zip(dim_names, shape, strict=True))
            try:
                layout = rank_generator.lay_out(order, {**dict.fromkeys(DIMS, 1), **given})
            except (ValueError, RuntimeError) as error:
                raise type(error)(
                    f"{error} The order comes from {source}, which also lays out the grids of "
                    f"{where}."
                ) from None
            dim_names = [name for name in layout.dims if name in given]
            shape = [given[name] for name in dim_names]
        return make(shape, dim_names, *args, **kwargs)

    return ordered


def _warned_of(over: str, remedy: str) -> Wrap:
    """Wrap a class that assumes that the ranks of its ``tp_group`` are consecutive.

    In its group ``over``, or in the world if that is empty.
    """

    def wrap(kind: Any, where: str) -> Any:
        build = kind.__init__

        @functools.wraps(build)
        def check(self: Any, *args: Any, **kwargs: Any) -> None:
            from torch.distributed import get_process_group_ranks as ranks_of

            build(self, *args, **kwargs)
            places = ranks = ranks_of(self.tp_group)
            if over:
                places = list(map(ranks_of(getattr(self, over)).index, ranks))
            if places != list(range(places[0], places[0] + len(places))):
                warnings.warn(
                    f"{where} assumes that tensor-parallel ranks are consecutive, and here they "
                    f"are {ranks}: it will send data to wrong ranks. {remedy}",
                    stacklevel=2,
                )

        kind.__init__ = check
        return kind

    return wrap


_tp_before_ep = _warned_of("tp_ep_group", "Put tp before ep in the order.")

# Module: names in it, and how each is wrapped.
MODULES: dict[str, dict[str, Wrap]] = {
    "megatron.core.inference.shards": {"HyperCommGrid": _laid_out_as_asked},  # since 0.19
    "megatron.rl.parallel_utils": {"HyperCommGrid": _laid_out_as_asked},  # 0.16 to 0.18
    "megatron.core.datasets.data_schedule": {
        "HybridCPDataLoaderWrapper": _warned_of("", "Put tp first in the order."),
    },
    "megatron.core.transformer.moe.token_dispatcher": {
        "MoEAlltoAllTokenDispatcher": _tp_before_ep,
        "MoEFlexTokenDispatcher": _tp_before_ep,
    },
}
