"""What docs/transformer-engine.md is given on a machine without CUDA: Transformer Engine's setters.

Our calls are the real ones, over real groups. Transformer Engine's own classes are tried in
``test_te_processes.py``; what a layer computes is tried nowhere without a GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


class TransformerLayer(torch.nn.Module):
    """Takes groups as Transformer Engine's does, refuses what is none, and computes nothing."""

    def __init__(self, *sizes: int, tp_group: Any = None, tp_size: int = 1, **_: Any) -> None:
        super().__init__()
        self.tp_size = tp_size
        self.set_tensor_parallel_group(tp_group)

    def set_tensor_parallel_group(self, group: Any) -> None:
        assert group is None or isinstance(group, dist.ProcessGroup)

    def set_context_parallel_group(
        self,
        cp_group: list[Any],
        cp_global_ranks: list[int],
        cp_stream: Any,
        cp_comm_type: str,
    ) -> None:
        a2a, p2p = cp_group
        assert cp_comm_type == "a2a+p2p" and a2a.size() * p2p.size() == len(cp_global_ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@contextlib.contextmanager
def autocast(recipe: Any = None, amax_reduction_group: Any = None) -> Iterator[None]:
    assert isinstance(amax_reduction_group, dist.ProcessGroup)
    yield


def stand_in() -> None:
    """Answer `import transformer_engine.pytorch` in this process."""
    package, module = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    module.TransformerLayer, module.autocast = TransformerLayer, autocast  # type: ignore[attr-defined]
    package.pytorch = module  # type: ignore[attr-defined]
    torch.cuda.Stream = lambda: None  # type: ignore[assignment, misc]  # there is no GPU
    sys.modules.update({"transformer_engine": package, "transformer_engine.pytorch": module})
