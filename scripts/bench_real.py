"""The benchmark's real worlds: forks gloo ranks afresh for every measurement of every variant.

The result has for each variant the seconds of the slowest rank, and what one rank did.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from bench_sides import digest, in_turn, load
from checkout import watched_new_group
from torch.distributed import distributed_c10d as c10d

from compat.megatron.rows import PlannedRows
from compat.state import request_of
from hypergrid import of_torch
from hypergrid.groups import creation
from tests.support import forked
from tests.support.counting import CountingStore

SIZES = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 2,
}


def one_rank(rank: int, world: int, variant: dict[str, Any], is_counting: bool) -> dict[str, Any]:
    """Initialise between two barriers and say how long that took, or what it did."""
    os.environ.update(variant.get("environment", {}))
    is_bare = variant["side"] == "bare"
    module = load("ours" if is_bare else variant["side"])
    counting_store = CountingStore(forked.store())
    dist.init_process_group(
        "gloo", store=counting_store if is_counting else forked.store(), rank=rank, world_size=world
    )
    initialize = partial(module.initialize_model_parallel, **SIZES)
    if is_bare:
        initialize = partial(create_alone, groups_of(rank))
    if not is_counting:
        return {"seconds": seconds_between_barriers(initialize)}
    calls: Counter[str] = Counter()
    dist.barrier()
    files_before = _open_files()
    operations_before = counting_store.counts.total()
    with watched_new_group(lambda: calls.update(["new_group"])):
        initialize()
    counts = {
        "new_group calls": calls.total(),
        "communicators": len(c10d._world.pg_map) - 1,
        "store operations": counting_store.counts.total() - operations_before,
    }
    dist.barrier()
    counts["sockets and files"] = _open_files() - files_before
    # No getter answers for bare groups.
    return {"counts": counts, "digest": None if is_bare else digest(module)}


def seconds_between_barriers(initialize: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    initialize()
    dist.barrier()
    return time.perf_counter() - start


def groups_of(rank: int) -> list[tuple[str, tuple[int, ...], str | None]]:
    """Label, ranks and backend of each group that Megatron has on this rank."""
    plan = PlannedRows(request_of(SIZES)).plan
    groups = []
    for row in plan.rows:
        for label, ranks in plan.mine(row, rank).items():
            groups.append((label, ranks, row.backend))
    return groups


def create_alone(groups: list[tuple[str, tuple[int, ...], str | None]]) -> None:
    """Create groups by named calls of ``new_group``, without any agreement of the ranks."""
    for label, ranks, backend in groups:
        with of_torch.numbered(creation.group_name(label, ranks, "bench")):
            dist.new_group(list(ranks), backend=backend, group_desc=label)


def _open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def run(world: int, variant: dict[str, Any], is_counting: bool) -> list[dict[str, Any]]:
    """One measurement on ``world`` fresh ranks."""
    arguments = (world, variant, is_counting)
    return forked.run_ranks(world, one_rank, *arguments, backend="", timeout=120)


def compare(
    world: int, variants: dict[str, Any], repeats: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """Count what each variant does; then time all in turn, so that each meets the same weather."""
    # torch looks up the name of each loopback peer; without an answer that takes its seconds.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for side in ("stock", "ours"):
        load(side)  # before the fork, so that no rank has to
    outcome: dict[str, dict[str, Any]] = {}
    digests = set()
    for name, variant in variants.items():
        ranks = run(world, variant, is_counting=True)
        if variant["side"] != "bare":
            digests.add(tuple(rank["digest"] for rank in ranks))
        most = {}
        for key in ranks[0]["counts"]:
            most[key] = max(rank["counts"][key] for rank in ranks)
        outcome[name] = {"seconds": [], "counts": most}
    if len(digests) > 1:
        raise RuntimeError(f"the variants built different groups on {world} ranks")
    for name in in_turn(variants, repeats, seconds):
        ranks = run(world, variants[name], is_counting=False)
        outcome[name]["seconds"].append(max(rank["seconds"] for rank in ranks))
    return outcome
