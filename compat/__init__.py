"""Interfaces of Megatron and other frameworks on hypergrid. Importing this loads no torch and no
megatron; ``compat.install()`` replaces ``megatron.core.parallel_state`` by ours.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from compat.swap import install as install
from compat.swap import uninstall as uninstall

__all__ = ["install", "members_only", "uninstall", "verify"]

F = TypeVar("F", bound=Callable[..., Any])


def verify(*args: Any, **kwargs: Any) -> Any:
    """Compare a step of each layout with the same step on one rank: ``compat.verification``."""
    from compat.verification import verify

    return verify(*args, **kwargs)


def members_only(function: F) -> F:
    """Declare that only a group's members need to call this replacement of ``create_group``.

    For functions that replace ``parallel_state.create_group`` or ``torch.distributed.new_group``.
    Without it every rank calls the replacement for every group of the world, as stock does. With
    it a rank calls it for its own groups only, and it must pass the ranks to torch's ``new_group``.
    """
    function.__hypergrid_members_only__ = True  # type: ignore[attr-defined]
    return function
