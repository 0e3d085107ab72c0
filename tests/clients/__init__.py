"""Small programs that do to ``parallel_state`` what others' code does, each in our own words.

A program is a generator that takes a `Client` and yields a step's name, with a value of its own to
compare, if it has one. After each step the module is asked everything. Run on stock and on
``compat.parallel_state``, a program has to see the same.

``python -m tests.clients RELEASE`` prints what differs, as JSON; `--real` does so on gloo ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from tests.support.stock import RELEASES

Step = tuple[str, Any]
Sizes = dict[str, int]


@dataclass
class Client:
    """What a program works with: the module, and a world in which sizes have been chosen."""

    module: ModuleType
    release: str
    sizes: Sizes
    restart: Callable[[], None]  # ends the default group and makes a new one

    def initialise(self, **more: Any) -> None:
        """Call ``initialize_model_parallel`` with this world's sizes by keyword."""
        self.module.initialize_model_parallel(**self.sizes, **more)


@dataclass(frozen=True)
class Program:
    """One behaviour of one client: where it is to be tried, and the code."""

    run: Callable[[Client], Iterator[Step]]
    releases: tuple[str, ...] = RELEASES
    world: int = 16  # 0: torch.distributed is not initialised
    meet: bool = True  # on real ranks: all members of a group hold it, and communicate
    sizes: Sizes = field(
        default_factory=lambda: {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "context_parallel_size": 2,
            "expert_model_parallel_size": 2,
        }
    )
