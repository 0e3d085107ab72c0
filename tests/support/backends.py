"""Backends over gloo, as outside code registers them: one suspends as NCCL does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def register(name: str, made: list[Any], **methods: Callable[..., Any]) -> None:
    """Register a backend with further methods; its instances are listed in ``made``."""
    kind = type(name, (dist.ProcessGroupGloo,), methods)

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append(kind(store, rank, size, timeout))
        return made[-1]

    dist.Backend.register_backend(name, create, devices=["cpu"])


def native(
    calls: list[tuple[str, int]],
    made: list[Any],
    fails: Callable[[int], object] = lambda number: None,
) -> None:
    """Register "native", which suspends 1000 bytes; the n-th instance writes into ``calls``.

    What ``fails(n)`` returns is its error.
    """

    def note(what: str) -> Callable[[Any], None]:
        def call(self: Any) -> None:
            if what == "suspend" and (why := fails(made.index(self))):
                raise RuntimeError(why)
            calls.append((what, made.index(self)))

        return call

    stats = {"suspend": 1000, "suspended": 0, "persist": 5, "total": 1005}
    both = {what: note(what) for what in ("suspend", "resume")}
    register("native", made, **both, memory_stats=lambda self: stats)
