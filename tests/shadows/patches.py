"""What clients replace in the loaded module, and the swap uses too: a function for each."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist

Patch = Callable[[ModuleType], None]


def groups_with_a_timeout(stock: ModuleType) -> None:
    plain = stock.create_group

    def create_group(ranks: Any = None, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
        return plain(ranks, timeout or datetime.timedelta(days=208), *args, **kwargs)

    stock.create_group = create_group  # type: ignore[attr-defined]


def groups_for_members(stock: ModuleType) -> None:
    from compat import members_only

    plain = stock.create_group

    @members_only
    def create_group(ranks: Any, **kwargs: Any) -> Any:
        return plain(ranks, **kwargs)

    stock.create_group = create_group  # type: ignore[attr-defined]


def groups_of_any_arguments(stock: ModuleType) -> None:
    plain = stock.create_group
    stock.create_group = lambda *args, **kwargs: plain(*args, **kwargs)  # type: ignore[attr-defined]


def torchs_groups(stock: ModuleType) -> None:
    plain = dist.new_group
    dist.new_group = lambda *args, **kwargs: plain(*args, **kwargs)


def ranks_backwards(stock: ModuleType) -> None:
    class Generator(stock.RankGenerator):  # type: ignore[misc,name-defined]
        def get_ranks(self, token: str) -> Any:
            return super().get_ranks(token)[::-1]

    stock.RankGenerator = Generator  # type: ignore[attr-defined]


WRAPPED = (
    *("get_nccl_options", "get_tensor_model_parallel_group", "_set_global_memory_buffer"),
    *("default_embedding_ranks", "default_position_embedding_ranks", "initialize_model_parallel"),
    *("create_hierarchical_groups", "create_hybrid_dp_cp_groups", "create_dynamic_dp_cp_groups"),
    "generate_masked_orthogonal_rank_groups",
)


def wrappers(stock: ModuleType) -> None:
    """Each of these functions, of those that the release has, behind a function of its name."""
    for name in WRAPPED:
        if hasattr(stock, name):
            setattr(stock, name, _wrapped(getattr(stock, name)))


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


_all: tuple[Patch, ...] = (
    *(groups_with_a_timeout, groups_for_members, groups_of_any_arguments),
    *(torchs_groups, ranks_backwards, wrappers),
)
PATCHES = {patch.__name__: patch for patch in _all}
