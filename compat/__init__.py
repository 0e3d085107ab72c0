"""The faces that others' code expects, on hypergrid's core. Importing it loads neither torch nor
megatron; ``compat.install()`` puts ``compat.parallel_state`` in megatron's place.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from compat.swap import install as install
from compat.swap import uninstall as uninstall

__all__ = ["install", "members_only", "uninstall"]

F = TypeVar("F", bound=Callable[..., Any])


def members_only(function: F) -> F:
    """Declare that a replacement of ``create_group`` needs to be called by a group's members alone.

    For functions put into the place of ``parallel_state.create_group`` or
    ``torch.distributed.new_group``. Without it every rank calls the replacement for every group of
    the world, as on stock; with it a rank calls it for the groups that it is in, and it must hand
    the ranks on to torch's own ``new_group``.
    """
    function.__hypergrid_members_only__ = True  # type: ignore[attr-defined]
    return function
