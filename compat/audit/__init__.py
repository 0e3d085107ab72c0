"""The audit: reads of parallel_state, with which state, and whether it is the right one.

``HYPERGRID_AUDIT=DIR`` or ``with recording(DIR):`` counts each read at each line; ``strict()``
raises where a module reads another state than its own; ``forbid()`` takes the globals away, module
by module. Off, none of this exists: getters are the functions that they were. ``recordings`` merges
what the ranks have left, without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compat.audit.watch import (
        ForbiddenReadError,
        WrongStateError,
        begin,
        forbid,
        recording,
        strict,
    )

__all__ = ["ForbiddenReadError", "WrongStateError", "begin", "forbid", "recording", "strict"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("compat.audit.watch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
