"""What was built, in words: one line per group, seen from one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from compat.state import ParallelState


def report(state: ParallelState) -> str:
    """How groups were made, and one line for each of this rank's: name, dims, ranks, sharing."""
    request, pool = state.request, state.pool
    if request is None or pool is None:
        return "hypergrid: no groups on this rank"
    made, live = pool.agreement, [pooled for pooled in pool.groups if pooled.shares is None]
    lines = [
        f"hypergrid: rank {dist.get_rank()} of {request.decoder!r}; expert grid {request.expert!r}"
        + (f"; in front the encoder {request.encoder!r}" if request.encoder else ""),
        f"hypergrid: {len(pool.groups)} groups on {len(live)} communicators, created by {made.way}"
        + (f" ({made.why})" if made.why else "")
        + (", connected on first use" if made.lazy else "")
        + (", each connected at creation" if request.policy.connect == "eager" else ""),
    ]
    if request.policy.connect == "lazy" and not made.lazy:
        lines[-1] += ", connected at once: not every rank's torch can wait"
    rows = {p.group.label: p.group for p in request.planned}
    for pooled in pool.groups:
        row = rows.get(pooled.label)
        dims, backend = "", "default"
        if row is not None:
            layout = request.layouts[row.layout]
            dims = "-".join(d for d in row.dims if layout.dim_size(d) > 1) or "alone"
            dims = dims if row.explicit is None or request.encoder else "chosen"
            backend = row.backend or backend
        lines.append(
            f"  {pooled.label:<56} {dims:<17} {backend:<8} {len(pooled.ranks):>5} ranks: "
            f"{_short(pooled.ranks)}" + (f"  = {pooled.shares}" if pooled.shares else "")
        )
    return "\n".join(lines)


def _short(ranks: tuple[int, ...], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (", ..." if len(ranks) > most else "")
