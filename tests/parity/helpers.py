"""The functions of ``parallel_state`` that make groups and ranks for whoever calls them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.parity.recording import Recorder
from tests.parity.surface import DEFAULT_ORDER
from tests.support import table

Shown = dict[str, Any]
CALLS = [text for (text,) in table("parity/helper_calls.txt")]
ALL_GATHER_CALLS = (
    "create_all_gather_groups()",
    "create_all_gather_groups(True)",
    "create_all_gather_groups(for_expert_parallelism=True, timeout=limit, nccl_comm_cfgs=cfgs)",
)


def helpers(recorder: Recorder) -> Shown:
    """Answers of every helper; none in large worlds, where they would take long."""
    if recorder.world > 64:
        return {}
    everyone = list(range(recorder.world))
    before = len(recorder.created)
    recorder.barriers.clear()
    options = {"tp": {"max_ctas": 8, "net_name": "IB"}, "dp": {"net_name": "eth"}}
    shown = recorder.ask(
        CALLS,
        rank=recorder.rank,
        everyone=everyone,
        other_ranks=[rank for rank in everyone if rank != recorder.rank],
        halves=[2, recorder.world // 2] if recorder.world % 2 == 0 else [recorder.world],
        options=options,
        minutes=lambda number: timedelta(minutes=number),
        default_group=dist.group.WORLD,
    )
    return shown | {
        "options afterwards": recorder.show(options, "options"),
        "groups made by helpers": sorted(map(repr, recorder.created[before:])),
        "timeouts set": sorted(map(repr, recorder.timeouts)),
        "waited for": sorted(map(repr, recorder.barriers)),
    }


def all_gather_groups(recorder: Recorder) -> Shown:
    """Answers of ``create_all_gather_groups``, where stock's own are right."""
    kwargs = recorder.config["kwargs"]
    if (
        kwargs.get("order", DEFAULT_ORDER) != DEFAULT_ORDER
        or kwargs.get("rank_offset", 0)
        or kwargs.get("local_world_size", recorder.world) != recorder.world
    ):
        return {}
    before = len(recorder.created)
    cfgs = {"dp_cp": {"max_ctas": 4}, "ep_dp": {"min_ctas": 1}}
    shown = recorder.ask(ALL_GATHER_CALLS, limit=timedelta(minutes=5), cfgs=cfgs)
    return shown | {"groups made for all-gather": sorted(map(repr, recorder.created[before:]))}
