"""The functions of ``parallel_state`` that make groups and ranks for whoever calls them."""

from __future__ import annotations

import contextlib
import math
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.parity.recording import Recorder
from tests.parity.surface import DEFAULT_ORDER, call, named, parameters, public_functions

Shown = dict[str, Any]


def helpers(recorder: Recorder) -> Shown:
    """Answers of every helper; none in large worlds, where they would take long."""
    if recorder.world > 64:
        return {}
    return _rank_groups(recorder) | _options(recorder) | _groups(recorder) | _timeouts(recorder)


def _rank_groups(recorder: Recorder) -> Shown:
    kwargs = recorder.config["kwargs"]
    order = kwargs.get("order", DEFAULT_ORDER)
    sizes = {
        "tp": kwargs.get("tensor_model_parallel_size", 1),
        "ep": 1,
        "pp": kwargs.get("pipeline_model_parallel_size", 1),
        "cp": kwargs.get("context_parallel_size", 1),
    }
    stages = kwargs.get("encoder_pipeline_model_parallel_size") or 0
    width = kwargs.get("encoder_tensor_model_parallel_size") or sizes["tp"]
    model = math.prod(sizes.values()) + stages * width * sizes["cp"]
    sizes["dp"] = max(1, recorder.world // max(1, model))
    shown: Shown = {}
    for label, more in {
        "RankGenerator": {},
        "a window's RankGenerator": {"rank_offset": 3},
    }.items():
        generator = None
        with contextlib.suppress(Exception):
            generator = recorder.module.RankGenerator(order=order, **sizes, **more)
        shown[label] = recorder.call(named(label, "RankGenerator", order=order, **sizes, **more))
        for name in ("order", "ordered_size", "world_size", "rank_offset", "name_to_size"):
            shown[f"{label}.{name}"] = recorder.show(getattr(generator, name, None), name)
        for token in ("tp", "dp", "pp-tp", "tp-dp-cp", "ep", "zz"):
            ranks_call = call("get_ranks", token)
            shown[f"{label}.{ranks_call[0]}"] = recorder.call(ranks_call, generator)
    splits = "split_rank" in parameters(recorder.release, "default_embedding_ranks")
    shape = [sizes[name] for name in ("tp", "cp", "dp", "pp")]
    masked = "generate_masked_orthogonal_rank_groups"
    return shown | recorder.ask(
        [
            named("RankGenerator of ep and cp", "RankGenerator", 1, 2, 1, 1, 2, order),
            *[
                named(f"{masked}({mask})", masked, math.prod(shape), shape, mask)
                for mask in ([True, False, True, False], [False] * 4, [True] * 4)
            ],
            *[
                call(name, ranks)
                for name in ("default_embedding_ranks", "default_position_embedding_ranks")
                for ranks in ([4], [4, 9], [7, 5, 3])
            ],
            *[
                call(name, ranks, at)
                for name in ("default_embedding_ranks", "default_position_embedding_ranks")
                for ranks in ([4], [4, 9], [7, 5, 3])
                for at in ((0, 1, 2, -1) if splits else ())
            ],
        ]
    )


def _options(recorder: Recorder) -> Shown:
    options: dict[str, Any] = {"tp": {"max_ctas": 8, "net_name": "IB"}, "dp": {"net_name": "eth"}}
    set_, get = "overwrite_nccl_comm_cfgs", "get_nccl_options"
    shown = recorder.ask(
        [
            named(f"{set_} of tp", set_, options, "tp", ("min_ctas", 2)),
            named(f"{set_} of pp", set_, options, "pp", ("is_high_priority_stream", True)),
            *[named(f"{get}({key!r})", get, key, options) for key in ("tp", "dp", "pp", "none")],
        ]
    )
    return shown | {f"{set_} gives": recorder.show(options, set_)}


def _groups(recorder: Recorder) -> Shown:
    rank, world = recorder.rank, recorder.world
    everyone = list(range(world))
    other_ranks = [r for r in everyone if r != rank]
    halves = [2, world // 2] if world % 2 == 0 else [world]
    before = len(recorder.created)
    options = {
        "timeout": timedelta(minutes=7),
        "backend": "gloo",
        "pg_options": recorder.module.get_nccl_options("tp", {"tp": {"max_ctas": 8}}),
        "group_desc": "EXTRA_GLOO",
    }
    group, levels = "create_group", "create_hierarchical_groups"
    hybrid, former = "create_hybrid_dp_cp_groups", "create_hierarchical_parallel_groups"
    dynamic = "create_dynamic_dp_cp_groups"
    calls = [
        named(f"{group} of all", group, everyone, group_desc="EXTRA"),
        named(f"{group} with options", group, ranks=[rank], **options),
        named(f"{group} of others", group, other_ranks, group_desc="EXTRA"),
        named(levels, levels, rank, everyone, halves, group_desc="EXTRA"),
        named(
            f"{levels} with gloo",
            *(levels, rank, everyone, halves),
            create_gloo_process_groups=True,
            group_desc="EXTRA",
        ),
        named(f"{levels} of a wrong product", levels, rank, everyone, [world + 1]),
        named(hybrid, hybrid, rank, everyone, None),
        named(dynamic, dynamic, rank, everyone, None),
        named(f"{dynamic} from 4 on", dynamic, rank, everyone, None, min_cp_size=4),
        named(former, former, rank, everyone, world, halves, options["pg_options"]),
    ]
    return recorder.ask(calls) | {
        "groups made by helpers": sorted(map(repr, recorder.created[before:]))
    }


def _timeouts(recorder: Recorder) -> Shown:
    recorder.barriers.clear()
    name = "update_pg_timeout"
    calls = [
        named(name, name, timedelta(minutes=3)),
        named(f"{name} of the world", name, timedelta(minutes=4), dist.group.WORLD),
    ]
    return recorder.ask(calls) | {
        "update_pg_timeout sets": sorted(map(repr, recorder.timeouts)),
        "update_pg_timeout waits for": sorted(map(repr, recorder.barriers)),
    }


def all_gather_groups(recorder: Recorder) -> Shown:
    """Answers of ``create_all_gather_groups``, where stock's own are right."""
    kwargs, name = recorder.config["kwargs"], "create_all_gather_groups"
    if (
        name not in public_functions(recorder.release)
        or kwargs.get("order", DEFAULT_ORDER) != DEFAULT_ORDER
        or kwargs.get("rank_offset", 0)
        or kwargs.get("local_world_size", recorder.world) != recorder.world
    ):
        return {}
    before = len(recorder.created)
    options = {"dp_cp": {"max_ctas": 4}, "ep_dp": {"min_ctas": 1}}
    minutes = timedelta(minutes=5)
    calls = [
        call(name),
        call(name, True),
        call(name, for_expert_parallelism=True, timeout=minutes, nccl_comm_cfgs=options),
    ]
    return recorder.ask(calls) | {
        "groups made for all-gather": sorted(map(repr, recorder.created[before:]))
    }
