"""Functions of parallel_state that outside code has replaced.

Stock's ``initialize_model_parallel`` calls its helpers through its module, so frameworks hook into
it by replacing them there: a longer timeout, other options, other ranks, a communicator of their
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
Helpers = Mapping[str, Callable[..., Any]]  # by name, those that were replaced

MEMBERS_ONLY = "__hypergrid_members_only__"  # as compat.members_only() sets it
NEW_GROUP = "torch.distributed.new_group"
WORLD = ("get_rank", "get_world_size", "is_initialized")  # of torch.distributed
GENERATORS = ("RankGenerator", "generate_masked_orthogonal_rank_groups")
LEVELS = ("create_hierarchical_groups", "create_hierarchical_parallel_groups")
SIZES = ("create_hybrid_dp_cp_groups", "create_dynamic_dp_cp_groups")
CREATORS = ("create_group", *LEVELS, *SIZES, NEW_GROUP)
HELPERS = (
    *(*CREATORS, *GENERATORS, "get_nccl_options", "overwrite_nccl_comm_cfgs"),
    *("default_embedding_ranks", "default_position_embedding_ranks", "_set_global_memory_buffer"),
)

_namespace: Mapping[str, Any] = {}
_own: dict[str, Callable[..., Any]] = {}


def watch(namespace: Mapping[str, Any]) -> None:
    """Look for replaced functions in ``namespace``, where those of now are the module's own."""
    global _namespace
    _namespace = namespace
    _own.update({name: namespace[name] for name in HELPERS if name in namespace})


def replaced_functions() -> dict[str, Callable[..., Any]]:
    """The functions that initialisation calls and that outside code has replaced, by name."""
    import torch.distributed as dist

    from hypergrid.groups import creation  # here, for plans on machines without torch

    replaced = {name: _namespace[name] for name in _own if _namespace[name] is not _own[name]}
    if creation.is_replaced(dist.new_group) and not hasattr(dist.new_group, MEMBERS_ONLY):
        replaced[NEW_GROUP] = dist.new_group
    return replaced


def pretended_world() -> int | None:
    """The ranks of a world that outside code only says is there; None if the world is real."""
    import torch.distributed as dist

    from hypergrid.groups import creation  # here, for plans on machines without torch

    told = any(map(creation.is_replaced, [getattr(dist, name) for name in WORLD]))
    if not told or not dist.is_initialized():
        return None
    real = dist.group.WORLD
    said = dist.get_world_size()
    return said if real is None or said > real.size() else None


def now(function: F) -> F:
    """The function that is called for ``function`` now: itself, or what has replaced it."""
    current: F = _namespace.get(function.__name__, function)
    return current


def creates(helpers: Helpers) -> bool:
    """Whether outside code takes part in creating groups."""
    return any(name in helpers for name in CREATORS)


def by_members(helpers: Helpers) -> bool:
    """Whether all functions that create groups were declared to need members only."""
    creators = [helpers[name] for name in CREATORS if name in helpers]
    return bool(creators) and all(hasattr(each, MEMBERS_ONLY) for each in creators)


def in_words(helpers: Helpers) -> str:
    """The names of what was replaced, for messages; empty if nothing was."""
    return ", ".join(name for name in HELPERS if name in helpers)


def check(helpers: Helpers, share: str, creation: str) -> None:
    """Refuse choices that do not work with the functions that were replaced: ValueError."""
    seen = [name for name in (*CREATORS, "get_nccl_options") if name in helpers]
    if seen and share != "none":
        raise ValueError(
            f"share={share!r} is not possible here: this process has replaced "
            f"{' and '.join(seen)}, which must be called for every group. Do not set share, "
            f"restore the functions, or declare a new_group with compat.members_only()."
        )
    lockstep = creates(helpers) and not by_members(helpers)
    if lockstep and creation not in ("auto", "everyone"):
        raise ValueError(
            f"creation={creation!r} is not possible here: this process has replaced "
            f"{' and '.join(name for name in seen if name in CREATORS)}, which every rank calls "
            f"for every group. Use 'auto', or declare them with compat.members_only(): then only "
            f"the members of a group call them."
        )
