"""Output of ``--report``: the groups of one rank, a line each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict

import torch.distributed as dist

from compat.megatron.request import Request, in_words
from compat.megatron.rows import PlannedRows
from compat.state import ParallelState
from hypergrid import logs, messages, of_torch
from hypergrid.groups.pool import GroupPool
from hypergrid.messages import few
from hypergrid.summary import dims_in_words, long_dims

_log = logging.getLogger("hypergrid.report")


def print_report(state: ParallelState) -> None:
    """Print the report; a warning if that fails, as the other ranks have their groups by now."""
    try:
        print(report(state), flush=True)
    except (OSError, ValueError) as error:  # closed, full, or without a character of the text
        logs.warn(f"the report cannot be printed: {messages.in_words(error)}", _log)


def report(state: ParallelState) -> str:
    """How groups were made, and one line for each of this rank's: name, dims, ranks, sharing."""
    planned_rows = state.planned
    pool = state.pool
    if planned_rows is None or pool is None:
        return "hypergrid: no groups on this rank"
    request = planned_rows.request
    lines = [
        f"rank {dist.get_rank()} of {request.decoder}; expert grid {request.expert}",
        _creation(pool),
        _choices(request),
        _timeouts(planned_rows),
    ]
    if request.helpers:
        lines.append(f"outside code has replaced {in_words(request.helpers)}")
    lines += of_torch.lacking()
    lines = [f"hypergrid: {line}" for line in lines]
    return "\n".join([*lines, *_groups(planned_rows, pool)])


def _creation(pool: GroupPool) -> str:
    sizes = [len(pooled.ranks) for pooled in pool.groups if pooled.shares is None]
    agreement = pool.agreement
    parts = [
        f"{len(pool.groups)} groups on {len(sizes)} communicators",
        f"{sizes.count(1)} of one rank",
        f"created by {agreement.way}",
    ]
    if agreement.why:
        parts[-1] += f" ({agreement.why})"
    if pool.policy.connect == "eager":
        parts.append("each connected at creation")
    elif pool.policy.connect == "lazy" and agreement.lazy:
        parts.append("connected on first use")
    elif pool.policy.connect == "lazy":
        parts.append("connected at once: not every rank's torch can connect on first use")
    return ", ".join(parts)


def _choices(request: Request) -> str:
    choices = {"order": request.order, **asdict(request.policy)}
    texts = []
    for name, value in choices.items():
        texts.append(f"{name}={value} ({request.sources[name]})")
    return ", ".join(texts)


def _timeouts(planned_rows: PlannedRows) -> str:
    request = planned_rows.request
    line = f"timeout {request.timeout} of groups"
    if request.timeout_of_all is not None:
        return f"{line}, the default group included"
    for row in planned_rows.plan.rows:
        if row.timeout is not None:  # upstream leaves that of the others to torch
            continue
        torchs = of_torch.default_timeout(row.backend or dist.get_backend())
        if torchs != request.timeout:
            line += f"; torch's own {torchs} of {row.label} (--timeout gives all groups one)"
    return line


def _groups(planned_rows: PlannedRows, pool: GroupPool) -> Iterator[str]:
    rows = {planned.plan_row.label: planned for planned in planned_rows.rows}
    for pooled in pool.groups:
        dims = ""
        backend = None
        # create_group() and its like create groups that are not planned.
        planned = rows.get(pooled.label)
        if planned is not None:
            backend = planned.plan_row.backend
            long = long_dims(planned_rows.plan, planned.plan_row)
            dims = dims_in_words(long, planned.table_row.pick)
            if planned.chosen is not None:
                dims = "chosen"
        shares = f"  = {pooled.shares}" if pooled.shares else ""
        yield (
            f"  {pooled.label:<56} {dims:<17} {backend or 'default':<8} {len(pooled.ranks):>5} "
            f"ranks: {few(pooled.ranks)}{shares}"
        )
