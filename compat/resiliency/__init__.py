"""Restart inside the process with NVIDIA's nvidia-resiliency-ext: Abort, Initialize, WholeReplicas.

They are arguments of its ``inprocess.Wrapper``, in ``restart``, which needs that package.
``replicas`` is arithmetic: which ranks go on after losses.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compat.resiliency.restart import Abort, Initialize, RankLayout, WholeReplicas

__all__ = ["Abort", "Initialize", "RankLayout", "WholeReplicas"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("compat.resiliency.restart"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
