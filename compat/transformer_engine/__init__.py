"""Transformer Engine without Megatron: the groups that it takes, from a grid or a state.

Loads torch when one of its names is first used; ``process`` alone needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compat.transformer_engine.arguments import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module("compat.transformer_engine.arguments"), name)
