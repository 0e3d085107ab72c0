"""The benchmark's real worlds: forks gloo ranks afresh for every measurement of every variant.

The result has for each variant the seconds of the slowest rank, and what one rank did.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from bench_sides import answer, digest, load, rounds
from torch.distributed import distributed_c10d as c10d

from compat import members_only
from compat.megatron.rows import PlannedRows
from compat.state import request_of
from compat.swap import shadow
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
    if variant.get("shadow"):
        shadow.watch(module)
    store = CountingStore(forked.store())
    calls: Counter[str] = Counter()
    if is_counting:
        count_new_groups(calls)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo", store=forked.store(), rank=rank, world_size=world)
    groups = groups_of(rank) if is_bare else []
    dist.barrier()
    files_before = _open_files()
    operations_before = store.counts.total()
    start = time.perf_counter()
    if is_bare:
        create_alone(groups)
    else:
        module.initialize_model_parallel(**SIZES)
    operations = store.counts.total() - operations_before
    dist.barrier()
    result: dict[str, Any] = {"seconds": time.perf_counter() - start, "digest": None}
    if not is_bare:
        result["digest"] = digest(module)
    result["counts"] = {
        "new_group calls": calls["new_group"],
        "communicators": len(set(c10d._world.pg_map) - {dist.group.WORLD}),
        "store operations": operations,
        "sockets and files": _open_files() - files_before,
    }
    return result


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


def count_new_groups(calls: Counter[str]) -> None:
    original = c10d.new_group

    @members_only
    def new_group(*args: Any, **keywords: Any) -> Any:
        calls["new_group"] += 1
        return original(*args, **keywords)

    dist.new_group = c10d.new_group = new_group


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
    outcome: dict[str, dict[str, Any]] = {}
    digests = set()
    for name, variant in variants.items():
        ranks = run(world, variant, is_counting=True)
        if variant["side"] != "bare":  # whose groups no getter answers
            digests.add(tuple(rank["digest"] for rank in ranks))
        most = {}
        for key in ranks[0]["counts"]:
            most[key] = max(rank["counts"][key] for rank in ranks)
        outcome[name] = {"seconds": [], "counts": most}
    if len(digests) > 1:
        raise SystemExit(f"the variants built different groups on {world} ranks")
    for turn in rounds(repeats, seconds):
        for name in sorted(outcome, reverse=bool(turn % 2)):
            ranks = run(world, variants[name], is_counting=False)
            outcome[name]["seconds"].append(max(rank["seconds"] for rank in ranks))
    return outcome


if __name__ == "__main__":
    # torch looks up the name of each loopback peer; without an answer that takes its seconds.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for side in ("stock", "ours"):
        load(side)  # before the fork, so that no rank has to
    answer(compare)
