"""What was built, in words: one line per group, seen from one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from compat.state import ParallelState


def report(state: ParallelState) -> str:
    """One line for each group of this rank: name, dims, size, how many there are, its ranks."""
    request, rank = state.request, dist.get_rank()
    if request is None:
        return "hypergrid: not initialized"
    lines = [f"hypergrid: rank {rank} of {request.decoder!r}; expert grid {request.expert!r}"]
    for p in request.planned:
        layout = request.layouts[p.group.layout]
        dims = "-".join(d for d in p.group.dims if layout.dim_size(d) > 1) or "alone"
        if p.group.explicit is not None:
            dims = "chosen"
        for ranks in request.plan.mine(p.group, rank).values():
            lines.append(
                f"  {p.group.label:<56} {dims:<17} {p.group.backend or 'default':<8} "
                f"{len(ranks):>5} ranks: {_short(ranks)}"
            )
    return "\n".join(lines)


def _short(ranks: tuple[int, ...], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (", ..." if len(ranks) > most else "")
