"""What megatron-core keeps over process groups, besides its parallel state; imports no megatron.

A buffer that was built once over a group is used again without a look at the group that a caller
passes. So each belongs to a state: it is put aside with the state, and freed before its group
closes.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid.messages import in_words, shown


class Cache(NamedTuple):
    """A global of a module, or an attribute of one of its classes.

    ``empty`` makes what it begins with. With ``waits``, to free what it holds waits for other
    ranks.
    """

    module: str
    path: str
    empty: Callable[[], Any] = lambda: None
    waits: bool = False

    def place(self) -> tuple[Any, str] | None:
        """The module or class that has it, and its name there; None while it is not loaded."""
        holder: Any = sys.modules.get(self.module)
        owner, _, name = self.path.rpartition(".")
        if owner:
            holder = getattr(holder, owner, None)
        # A release that lacks the name, and a class that only inherits it, have no such cache.
        if holder is None or name not in vars(holder):
            return None
        return holder, name


_MOE = "megatron.core.transformer.moe"
_ROPE = "megatron.core.models.common.embeddings"
# Found by reading 0.14 to 0.19, main and dev; tests/megatron/test_caches.py finds further ones.
CACHES = (
    Cache(f"{_MOE}.fused_a2a", "_buffer", waits=True),  # DeepEP: built anew for another group
    Cache(f"{_MOE}.fused_a2a", "_elastic_buffer", waits=True),  # DeepEP 2: so too
    Cache(f"{_MOE}.fused_a2a", "_hybrid_ep_buffer", waits=True),  # used whatever group is passed
    Cache("megatron.core.inference.symmetric_memory", "SymmetricMemoryManager._buffers", dict),
    *(
        Cache(f"{_MOE}.token_dispatcher_inference", f"NVLSAllGatherVDispatcher.{name}")
        for name in (
            "_symm_agv_hidden",
            "_symm_agv_routing",
            "_symm_agv_probs",
            "_symm_rsv",
            "_symm_metadata",
        )
    ),
    Cache("megatron.core.resharding.refit", "_service_cache", dict, waits=True),
    Cache(f"{_MOE}.moe_utils", "_MOE_LAYER_WISE_LOGGING_TRACKER", dict),  # groups of each loss
    Cache(f"{_MOE}.moe_logging", "_MOE_METRICS_TRACKER"),
)
# Methods under lru_cache that take a group. They keep it, and never take one for another.
CACHED_METHODS = (
    Cache(f"{_ROPE}.rotary_pos_embedding", "RotaryEmbedding.forward"),
    Cache(f"{_ROPE}.yarn_rotary_pos_embedding", "YarnRotaryEmbedding.forward"),
)
Values = dict[Cache, Any]


def take() -> Values:
    """Take what is in the caches out of them: they begin anew."""
    taken = {}
    for cache in CACHES:
        place = cache.place()
        if place is None:
            continue
        holder, name = place
        value = vars(holder)[name]
        is_empty = value is None or (isinstance(value, dict) and not value)
        if not is_empty:
            taken[cache] = value
            setattr(holder, name, cache.empty())
    return taken


def put(values: Values) -> None:
    """Put back what ``take`` gave."""
    for cache, value in values.items():
        place = cache.place()
        if place is not None:
            setattr(*place, value)


def free(values: Values, abort: bool) -> None:
    """Free all of what ``take`` gave. It may wait for other ranks, unless with ``abort``."""
    for cache, value in values.items():
        parts = [*value.values()] if isinstance(value, dict) else [value]
        for part in parts:
            _free(cache, part, abort)
    values.clear()


def free_over(groups: Sequence[ProcessGroup], kept: Iterable[Values], abort: bool) -> None:
    """Free what is built over ``groups``, in the caches themselves and in what was taken."""
    closing = set(groups)
    loaded = take()
    for values in (loaded, *kept):
        for cache, value in [*values.items()]:
            if isinstance(value, dict):
                for key, part in [*value.items()]:
                    if not closing.isdisjoint(_groups_of(part)):
                        _free(cache, value.pop(key), abort)
            elif not closing.isdisjoint(_groups_of(value)):
                _free(cache, values.pop(cache), abort)
    put(loaded)
    for method in CACHED_METHODS:
        place = method.place()
        if place is not None:
            holder, name = place
            clear = getattr(vars(holder)[name], "cache_clear", lambda: None)
            clear()


def _groups_of(value: Any, depth: int = 4) -> Iterator[ProcessGroup]:
    """The groups that ``value`` holds: itself, its items, its attributes and theirs."""
    if isinstance(value, ProcessGroup):
        yield value
    elif depth:
        inner: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        elif hasattr(value, "__dict__"):
            inner = vars(value).values()
        for each in [*inner]:
            yield from _groups_of(each, depth - 1)


def _free(cache: Cache, value: Any, abort: bool) -> None:
    if not cache.waits:
        return
    if abort:
        # The destructor of a DeepEP buffer waits for the other ranks: it must never run.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        return
    try:
        if getattr(value, "explicitly_destroy", False):  # else the destructor of DeepEP does it
            value.destroy()
        elif hasattr(value, "close"):
            value.close()
    except Exception as error:  # the groups are closed all the same
        warnings.warn(
            f"{shown(value)} in {cache.module}.{cache.path} could not be freed before its group "
            f"closes: {in_words(error)}",
            RuntimeWarning,
            stacklevel=2,
        )


def check_expert_parallelism(own_group: Any, state: str) -> None:
    """Refuse to make a state current that would dispatch tokens over another state's ranks.

    Transformer Engine has one expert parallelism for the process, which no state can take along.
    ``own_group`` is the state's group of tp x ep, over which megatron-core would begin it.

    Raises
    ------
    RuntimeError
        Transformer Engine's is over other ranks, and those of ``own_group`` are more than one.
    """
    module = sys.modules.get("transformer_engine.pytorch.ep")
    begun_over = getattr(module, "_EP_GROUP", None)
    if begun_over is None or not isinstance(own_group, ProcessGroup) or own_group.size() == 1:
        return
    ranks = dist.get_process_group_ranks(begun_over)
    own_ranks = dist.get_process_group_ranks(own_group)
    if ranks != own_ranks:
        raise RuntimeError(
            f"rank {dist.get_rank()} cannot activate {state}: Transformer Engine's expert "
            f"parallelism (--moe-flex-dispatcher-backend ncclep) has begun over ranks {ranks}, and "
            f"would dispatch tokens there instead of {own_ranks}. There is one for each process: "
            f"call transformer_engine.pytorch.ep.ep_finalize() on all ranks first, or use another "
            f"dispatcher."
        )
