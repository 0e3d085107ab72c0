"""Megatron's modules that lay ranks out by themselves: the order asked for reaches them.

Where it cannot, there is a warning. Searched for in the wheels and the repository of all releases
that hypergrid knows; docs/limits.md lists what was found and left alone.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from compat.megatron.order import DIMS, asked

Wrap = Callable[[Any, str], Any]


def watched(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Megatron's own spec of such a module, whose names are wrapped; None for other modules."""
    spec = PathFinder.find_spec(fullname, path) if fullname in MODULES else None
    if spec is not None and spec.origin is not None:
        spec.loader = _Watching(fullname, spec.origin)
    return spec


class _Watching(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name, wrap in MODULES[module.__name__].items():
            if hasattr(module, name):  # a release that comes may have moved it
                setattr(module, name, wrap(getattr(module, name), f"{module.__name__}.{name}"))


def _laid_out_as_asked(make: Callable[..., Any], where: str) -> Callable[..., Any]:
    """A grid whose dims are in the order that wins over the script's, where there is one."""

    @functools.wraps(make, updated=())
    def lay_out(shape: Sequence[int], dim_names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        order, source = asked()
        if order is not None:
            shape, dim_names = _in_order(order, source, where, shape, dim_names)
        return make(shape, dim_names, *args, **kwargs)

    return lay_out


def _in_order(
    order: str, source: str, where: str, shape: Sequence[int], dim_names: Sequence[str]
) -> tuple[list[int], list[str]]:
    from compat.megatron.rank_generator import lay_out  # here: it asks for megatron's release
    from hypergrid.layout import LayoutError

    try:
        given = dict(zip(dim_names, shape, strict=True))
        layout = lay_out(order, {**dict.fromkeys(DIMS, 1), **given})
    except (LayoutError, RuntimeError) as error:
        raise type(error)(
            f"{error} The order comes from {source}, which also lays out the grids of {where}."
        ) from None
    names = [name for name in layout.dims if name in given]
    return [given[name] for name in names], names


def _warned_of(over: str, remedy: str) -> Wrap:
    """Wrap a class that takes consecutive places for the ranks of its ``tp_group``.

    The places are those in its group ``over``, or the ranks' numbers if that is empty.
    """

    def wrap(kind: Any, where: str) -> Any:
        build = kind.__init__

        @functools.wraps(build)
        def check(self: Any, *args: Any, **kwargs: Any) -> None:
            build(self, *args, **kwargs)
            places = ranks = _ranks(self.tp_group)
            if over:
                places = list(map(_ranks(getattr(self, over)).index, ranks))
            if places != list(range(places[0], places[0] + len(places))):
                warnings.warn(
                    f"{where} counts on tensor-parallel ranks side by side, and here they are "
                    f"{ranks}: what it sends goes to other ranks than it means. {remedy}",
                    stacklevel=2,
                )

        kind.__init__ = check
        return kind

    return wrap


def _ranks(group: Any) -> list[int]:
    import torch.distributed as dist

    return dist.get_process_group_ranks(group)


_tp_before_ep = _warned_of("tp_ep_group", "Put tp before ep in the order.")

# Module: names in it, and what becomes of them.
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
