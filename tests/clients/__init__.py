"""Small programs that do to ``parallel_state`` what others' code does, each in our own words.

A program is a generator that takes a `Client` and yields a step's name, with a value of its own to
compare, if it has one. After each step the module is asked everything. Run on stock and on
``compat.parallel_state``, a program has to see the same.

``python -m tests.clients RELEASE`` prints what differs, as JSON; `--real` does so on gloo ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from tests.parity.surface import Config
from tests.parity.watching import Client, Step

__all__ = ["Client", "Program", "Step", "generated_groups"]

Sizes = dict[str, int]


@dataclass(frozen=True)
class Program:
    """One behaviour of one client: where it is to be tried, and the code."""

    run: Callable[[Client], Iterator[Step]]
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

    def config(self) -> Config:
        """The world in which it is tried, as ``tests.parity`` has it."""
        return {
            "world_size": self.world,
            "kwargs": dict(self.sizes),
            "environment": {},
            "positional": 0,
        }


def generated_groups(
    client: Client, token: str, create: Callable[[list[int]], Any]
) -> Iterator[Step]:
    """Groups of its own from Megatron's RankGenerator: every rank makes every one."""
    client.initialise()
    generator = client.module.RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=2, order="tp-cp-ep-dp-pp")
    ranks_of_groups = []
    for ranks in generator.get_ranks(token):
        group = create(ranks)
        if dist.get_rank() in ranks:
            ranks_of_groups.append(dist.get_process_group_ranks(group))
    yield "its groups", ranks_of_groups
