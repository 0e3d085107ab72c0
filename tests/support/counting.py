"""A store that counts what a rank does in it, and what that would cost with a TCPStore.

Looks at the outcome of a phase are counted apart: a rank that waits longer looks more often.
What C++ asks comes through it too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_TRIPS = {"add": 1, "wait": 1, "check": 1, "compare_set": 1, "delete_key": 1, "get": 2}


class CountingStore(dist.Store):
    """``store``, and the operations on it, their round trips and the characters sent."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.underlying_store, self.counts, self.characters = store, Counter[str](), 0
        self.looks = 0

    @property
    def trips(self) -> int:
        return sum(_TRIPS.get(name, 0) * many for name, many in self.counts.items())

    def has_extended_api(self) -> bool:
        return self.underlying_store.has_extended_api()

    def clone(self) -> CountingStore:
        """The same store: a clone's operations count as well."""
        return self


def _counted(name: str) -> Callable[..., Any]:
    def call(self: CountingStore, *arguments: Any, **keywords: Any) -> Any:
        if name == "compare_set" and arguments[1] == arguments[2]:  # reads in one round trip
            self.looks += 1
        else:
            self.counts[name] += 1
        self.characters += sum(len(text) for text in arguments if isinstance(text, str))
        return getattr(self.underlying_store, name)(*arguments, **keywords)

    return call


for _name in (
    *("set", "append", *_TRIPS),
    *("num_keys", "list_keys", "multi_get", "multi_set", "queue_push", "queue_pop", "queue_len"),
):
    setattr(CountingStore, _name, _counted(_name))
