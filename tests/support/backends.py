"""Backends over gloo, as outside code registers them: one suspends as NCCL does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from hypergrid import of_torch

SPLITS = pytest.mark.skipif(not of_torch.has("splits"), reason="this torch's split takes no name")


def register(
    name: str, parts: list[Any], devices: Sequence[str] = ("cpu",), **methods: Callable[..., Any]
) -> None:
    """Register a backend with further methods; its instances are listed in ``parts``."""
    kind = type(name, (dist.ProcessGroupGloo,), methods)

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        parts.append(kind(store, rank, size, timeout))
        return parts[-1]

    dist.Backend.register_backend(name, create, devices=[*devices])


def splitting(name: str, parts: list[Any]) -> None:
    """Register a backend for "cuda" off which torch splits new groups, as it does with NCCL's."""

    def perform_nocolor_split(self: Any, device: Any) -> None:
        self.without_a_color = getattr(self, "without_a_color", 0) + 1

    register(name, parts, devices=["cuda"], perform_nocolor_split=perform_nocolor_split)


def native(
    calls: list[tuple[str, int]],
    parts: list[Any],
    fails: Callable[[int], object] = lambda number: None,
) -> None:
    """Register "native", which suspends 1000 bytes; the n-th instance writes into ``calls``.

    What ``fails(n)`` returns is its error.
    """

    def note(operation: str) -> Callable[[Any], None]:
        def call(self: Any) -> None:
            if operation == "suspend" and (why := fails(parts.index(self))):
                raise RuntimeError(why)
            calls.append((operation, parts.index(self)))

        return call

    stats = {"suspend": 1000, "suspended": 0, "persist": 5, "total": 1005}
    methods = {"suspend": note("suspend"), "resume": note("resume")}
    register("native", parts, **methods, memory_stats=lambda self: stats)
