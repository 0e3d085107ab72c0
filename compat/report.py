"""Output of ``--report``: the groups of one rank, a line each, and how ranks lie on hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby

import torch.distributed as dist

from compat.megatron.hosts import hosts_of
from compat.megatron.request import Request, in_words
from compat.megatron.rows import PlannedRows, with_torchs_timeout
from compat.state import ParallelState
from hypergrid import of_torch
from hypergrid.groups.pool import GroupPool
from hypergrid.messages import few
from hypergrid.summary import dims_in_words, long_dims


def report(state: ParallelState) -> str:
    """How groups were made, and one line for each of this rank's: name, dims, ranks, sharing."""
    planned_rows = state.planned
    pool = state.pool
    if planned_rows is None or pool is None:
        return "hypergrid: no groups on this rank"
    request = planned_rows.request
    lines = [
        _layouts(request),
        _creation(pool),
        _choices(request),
        _timeouts(planned_rows),
    ]
    if request.helpers:
        lines.append(f"outside code has replaced {in_words(request.helpers)}")
    lines += of_torch.lacking()
    lines += _on_hosts(planned_rows.plan.window.stop)
    lines = [f"hypergrid: {line}" for line in lines]
    return "\n".join([*lines, *_groups(planned_rows, pool)])


def _layouts(request: Request) -> str:
    line = f"rank {dist.get_rank()} of {request.decoder.trimmed}"
    line += f"; expert grid {request.expert.trimmed}"
    return line


def _creation(pool: GroupPool) -> str:
    sizes = [len(pooled.ranks) for pooled in pool.groups if pooled.shares is None]
    agreement = pool.agreement
    line = f"{len(pool.groups)} groups on {len(sizes)} communicators, {sizes.count(1)} of one rank"
    line += f", created by {agreement.way}"
    if agreement.why:
        line += f" ({agreement.why})"
    if pool.policy.connect == "eager":
        line += ", each connected at creation"
    elif pool.policy.connect == "lazy" and agreement.lazy:
        line += ", connected on first use"
    elif pool.policy.connect == "lazy":
        line += ", connected at once: not every rank's torch can connect on first use"
    return line


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
    for label, backend in with_torchs_timeout(planned_rows).items():
        torchs = of_torch.default_timeout(backend or dist.get_backend())
        if torchs != request.timeout:
            line += f"; torch's own {torchs} of {label} (--timeout gives all groups one)"
    return line


def _groups(planned_rows: PlannedRows, pool: GroupPool) -> Iterator[str]:
    rows = {planned.plan_row.label: planned for planned in planned_rows.rows}
    for pooled in pool.groups:
        dims = ""
        backend = "default"
        planned = rows.get(pooled.label)
        # create_group() and its like create groups that are not planned.
        if planned is not None:
            plan_row = planned.plan_row
            backend = plan_row.backend or "default"
            dims = dims_in_words(long_dims(planned_rows.plan, plan_row), planned.table_row.pick)
            if planned.chosen is not None:
                dims = "chosen"
        line = f"  {pooled.label:<56} {dims:<17} {backend:<8} {len(pooled.ranks):>5} ranks: "
        line += few(pooled.ranks)
        if pooled.shares:
            line += f"  = {pooled.shares}"
        yield line


def _on_hosts(world_size: int) -> Iterator[str]:
    """A sentence if ranks are interleaved over hosts, and all ranks have reported their hosts."""
    ranks = range(world_size)
    hosts = hosts_of(ranks)
    # The hosts a, b, a, b have two runs each, and a, a, b, b one.
    runs_of_host = Counter(host for host, _ in groupby(hosts))
    interleaved = [host for host, runs in runs_of_host.items() if runs > 1]
    if not interleaved:
        return
    host = interleaved[0]
    ranks_of_host = [rank for rank in ranks if hosts[rank] == host]
    yield (
        f"ranks are interleaved over hosts: {host} has ranks {few(ranks_of_host)}, so that groups "
        f"of neighbouring ranks cross hosts. Start with srun --distribution=block, or a host file "
        f"that lists each host once"
    )
