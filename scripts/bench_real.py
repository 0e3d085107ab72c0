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


def one_rank(rank: int, world: int, variant: dict[str, Any], counting: bool) -> dict[str, Any]:
    """Initialise between two barriers and say how long that took, or what it did."""
    os.environ.update(variant["environment"])
    bare = variant["side"] == "bare"
    module = load("ours" if bare else variant["side"])
    if variant.get("shadow"):
        shadow.watch(module)
    store: Any = forked.store()
    calls: Counter[str] = Counter()
    if counting:
        store = CountingStore(store)
        count_new_groups(calls)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    groups = groups_of(rank) if bare else []
    dist.barrier()
    files = _open_files()
    operations = store.counts.total() if counting else 0
    start = time.perf_counter()
    if bare:
        create_alone(groups)
    else:
        module.initialize_model_parallel(**SIZES)
    operations = store.counts.total() - operations if counting else 0
    new_groups = calls.total()
    dist.barrier()
    result: dict[str, Any] = {"seconds": time.perf_counter() - start}
    if counting:
        result |= {
            "new_group calls": new_groups,
            "communicators": len(set(c10d._world.pg_map) - {dist.group.WORLD}),
            "store operations": operations,
            "sockets and files": _open_files() - files,
            "digest": None if bare else digest(module),
        }
    return result


def groups_of(rank: int) -> list[tuple[str, tuple[int, ...], str | None]]:
    """Label, ranks and backend of each group that Megatron has on this rank."""
    plan = PlannedRows(request_of(SIZES)).plan
    return [
        (label, ranks, row.backend)
        for row in plan.rows
        for label, ranks in plan.mine(row, rank).items()
    ]


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


def run(world: int, variant: dict[str, Any], counting: bool) -> list[dict[str, Any]]:
    """One measurement on ``world`` fresh ranks."""
    given = (world, variant, counting)
    found: list[dict[str, Any]] = forked.run_ranks(world, one_rank, *given, backend="", timeout=120)
    return found


def compare(
    world: int, variants: dict[str, Any], repeats: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """Count what each variant does; then time all in turn, so that each meets the same weather.

    A variant that has ``fewer_than`` is left out unless it needs fewer store operations than that
    other one: then what it switches off cannot be switched off.
    """
    outcome: dict[str, dict[str, Any]] = {}
    digests = set()
    for name, variant in variants.items():
        ranks = run(world, variant, counting=True)
        digests.add(tuple(rank.pop("digest") for rank in ranks))
        digests.discard((None,) * world)  # calls without getters
        counts = {key: max(rank[key] for rank in ranks) for key in ranks[0] if key != "seconds"}
        other = outcome.get(variant.get("fewer_than", ""))
        if other is None or counts["store operations"] < other["counts"]["store operations"]:
            outcome[name] = {"seconds": [], "counts": counts}
    if len(digests) > 1:
        raise SystemExit(f"the variants built different groups on {world} ranks")
    for i in rounds(repeats, seconds):
        for name in reversed(outcome) if i % 2 else outcome:
            ranks = run(world, variants[name], counting=False)
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
