"""As slime: torch's new_group replaced by one whose groups can be closed and made anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from tests.clients import Client, Step
from tests.parity.surface import public_functions

ASK = ("get_rank", "get_world_size", "get_process_group_ranks", "all_reduce", "get_backend")


class Reloadable(dist.ProcessGroup):
    """Stands for a group, also while there is none."""

    def __init__(self, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(rank=dist.get_rank(group), size=dist.get_world_size(group))
        self.group, self.args, self.kwargs = group, args, kwargs

    def rank(self) -> int:
        return self.group.rank()  # type: ignore[no-any-return]

    def size(self) -> int:
        return self.group.size()  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


def _inner(value: Any) -> Any:
    return value.group if isinstance(value, Reloadable) else value


def _unwrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    def unwrapped(*args: Any, **kwargs: Any) -> Any:
        keywords = {name: _inner(value) for name, value in kwargs.items()}
        return function(*map(_inner, args), **keywords)

    return unwrapped


@contextlib.contextmanager
def reloadable() -> Iterator[list[Reloadable]]:
    """torch.distributed with reloadable groups; the list of them, in the order of creation."""
    groups: list[Reloadable] = []
    originals = {name: getattr(dist, name) for name in (*ASK, "new_group")}

    def new_group(*args: Any, **kwargs: Any) -> Any:
        group = originals["new_group"](*args, **kwargs)
        groups.append(Reloadable(group, args, kwargs))
        return groups[-1]

    for name in ASK:
        setattr(dist, name, _unwrapping(originals[name]))
    dist.new_group = new_group
    try:
        yield groups
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def groups_closed_and_made_anew(client: Client) -> Iterator[Step]:
    """Initialise, close what was made to free memory, make it anew, go on."""
    original = dist.new_group
    with reloadable() as groups:
        client.initialise()
        own_groups = [group for group in groups if isinstance(group.group, dist.ProcessGroup)]
        names = public_functions(client.release)
        getters = [name for name in names if name.endswith("parallel_group")]
        yield "answers its own objects", {name: _kind(client.module, name) for name in getters}
        for group in own_groups:
            dist.destroy_process_group(group.group)
        for group in groups:
            group.group = None
        for group in groups:
            group.group = original(*group.args, **group.kwargs)
        yield "made anew", {name: _kind(client.module, name) for name in getters}
        client.module.destroy_model_parallel()
        yield "destroyed", None


def _kind(module: Any, name: str) -> Any:
    try:
        group = getattr(module, name)()
    except (AssertionError, TypeError):
        return "refused"
    if not isinstance(group, dist.ProcessGroup):
        return type(group).__name__
    return isinstance(group, Reloadable), dist.get_process_group_ranks(group), group.size()
