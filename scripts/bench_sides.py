"""The benchmark's jobs, each in a fresh interpreter."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import pickle
import tempfile
import time
import timeit
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import checkout

SIZES = {
    "tensor_model_parallel_size": 8,
    "context_parallel_size": 2,
    "pipeline_model_parallel_size": 16,
    "expert_model_parallel_size": 8,
}
ORDER = "tp-cp-ep-dp-pp"
RELEASES = ("0.16.1", "0.19.2")
_NUMBERS = """
    get_tensor_model_parallel_rank get_tensor_model_parallel_world_size
    get_pipeline_model_parallel_rank get_pipeline_model_parallel_world_size
    get_data_parallel_rank get_data_parallel_world_size
    get_context_parallel_rank get_context_parallel_world_size
    get_expert_model_parallel_rank get_expert_model_parallel_world_size
    is_pipeline_first_stage is_pipeline_last_stage
"""
_GROUPS = """
    get_tensor_model_parallel_group get_data_parallel_group get_model_parallel_group
    get_pipeline_model_parallel_group get_context_parallel_group
    get_tensor_and_data_parallel_group get_tensor_and_context_parallel_group
    get_expert_model_parallel_group get_expert_tensor_parallel_group
    get_expert_tensor_and_model_parallel_group get_expert_tensor_model_pipeline_parallel_group
    get_expert_data_parallel_group
"""
_OTHERS = """
    get_amax_reduction_group get_global_memory_buffer
    get_data_parallel_src_rank get_tensor_model_parallel_src_rank
    get_expert_data_parallel_rank get_expert_data_parallel_world_size
    get_expert_tensor_parallel_rank get_expert_tensor_parallel_world_size
    get_pipeline_model_parallel_next_rank get_pipeline_model_parallel_prev_rank
    get_pipeline_model_parallel_first_rank get_pipeline_model_parallel_last_rank
    get_virtual_pipeline_model_parallel_rank is_rank_in_embedding_group get_all_ranks
    is_initialized model_parallel_is_initialized
"""
NUMBERS = _NUMBERS.split()
GROUPS = _GROUPS.split()
TIMED = (*NUMBERS, *GROUPS, *_OTHERS.split())
Times = dict[str, list[float]]
FOREVER = float("inf")  # seconds


def rounds(most: int, seconds: float) -> Iterator[int]:
    """Count to ``most``, but stop after ``seconds``; at least one."""
    start = time.monotonic()
    yield 0
    for turn in range(1, most):
        if time.monotonic() - start > seconds:
            return
        yield turn


def in_turn(names: Iterable[str], most: int, seconds: float) -> Iterator[str]:
    """Each name in each round, in the other order every second time."""
    for turn in rounds(most, seconds):
        yield from sorted(names, reverse=bool(turn % 2))


def load(side: str, release: str | None = None) -> Any:
    """The parallel_state module of one side. Stock's is run from its source, by itself."""
    if side == "ours":
        return import_module("compat.parallel_state")
    return import_module("tests.support.stock").load_stock(
        release or metadata.version("megatron-core")
    )


def start_fake_world(rank: int, world: int) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def digest(module: Any) -> str:
    """A hash of what the getters answer; equal on both sides when both built the same."""
    import torch.distributed as dist

    answers = {name: getattr(module, name)() for name in NUMBERS}
    for name in GROUPS:
        answers[name] = dist.get_process_group_ranks(getattr(module, name)())
    return hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()


def initialise(side: str, world: int) -> dict[str, Any]:
    """Seconds of initialising one rank in the middle of a fake world.

    The side ``mesh`` is torch's ``init_device_mesh`` over the same dims: one group for each.
    """
    start_fake_world(world // 2 + 3, world)
    if side == "mesh":
        return {"seconds": seconds_of_a_mesh(world)}
    module = load(side)
    start = time.perf_counter()
    module.initialize_model_parallel(**SIZES, create_gloo_process_groups=False)
    return {"seconds": time.perf_counter() - start, "digest": digest(module)}


def seconds_of_a_mesh(world: int) -> float:
    from torch.distributed.device_mesh import init_device_mesh

    tp, cp, pp, _ = SIZES.values()
    sizes = (pp, world // (tp * cp * pp), cp, tp)
    start = time.perf_counter()
    init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "cp", "tp"))
    return time.perf_counter() - start


def creation_calls(side: str, way: str, world: int) -> int:
    """How often a rank in the middle of a fake world asks torch for groups.

    ``way`` is hypergrid's choice ``creation``. The fake backend splits nothing: only the number of
    calls is measured, not their time.
    """
    os.environ["HYPERGRID_CREATION"] = way
    module = load(side)
    start_fake_world(world // 2 + 3, world)
    calls: Counter[str] = Counter()
    with checkout.watched_new_group(lambda: calls.update(["new_group"])):
        module.initialize_model_parallel(**SIZES, create_gloo_process_groups=False)
    return calls.total()


def enumerate_groups(world: int, token: str, repeats: int, seconds: float) -> Times:
    """List the groups of one token, on stock and ours in turn."""
    modules = {"stock": load("stock"), "ours": import_module("compat.megatron.rank_generator")}
    sizes = {"tp": 8, "ep": 1, "dp": world // 256, "pp": 16, "cp": 2}
    ranks = {}
    times: Times = defaultdict(list)
    for side in in_turn(modules, repeats, seconds):
        generator = modules[side].RankGenerator(**sizes, order=ORDER)
        start = time.perf_counter()
        ranks[side] = generator.get_ranks(token)
        times[side].append(time.perf_counter() - start)
    if ranks["stock"] != ranks["ours"]:
        raise RuntimeError(f"stock and ours list different groups for {token!r}")
    return times


def call_getters(
    release: str, calls: int, repeats: int, seconds: float
) -> dict[tuple[str, str], list[float]]:
    """Seconds for a call of each getter, on stock and ours in turn; by side and name."""
    os.environ["HYPERGRID_MEGATRON_RELEASE"] = release
    modules = {side: load(side, release) for side in ("stock", "ours")}
    start_fake_world(37, 64)
    for module in modules.values():
        module.initialize_model_parallel(
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=4,
            context_parallel_size=2,
            expert_model_parallel_size=4,
            create_gloo_process_groups=False,
        )
    if digest(modules["stock"]) != digest(modules["ours"]):
        raise RuntimeError("stock and ours answer differently")
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for side in in_turn(modules, repeats, seconds):
        for name in TIMED:
            # Through the module, as callers do: mpu.get_tensor_model_parallel_rank().
            timer = timeit.Timer(f"mpu.{name}()", globals={"mpu": modules[side]})
            times[side, name].append(timer.timeit(calls) / calls)
    return times


def audited(calls: int, repeats: int, seconds: float) -> list[float]:
    """Seconds for a read of ours while an audit records."""
    from compat import audit, parallel_state

    start_fake_world(37, 64)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    read = parallel_state.get_tensor_model_parallel_rank
    timer = timeit.Timer("get()", globals={"get": read})
    times = []
    for _ in rounds(repeats, seconds):
        with tempfile.TemporaryDirectory() as directory, audit.recording(directory):
            times.append(timer.timeit(calls) / calls)
    return times


def import_side(side: str) -> tuple[float, int]:
    """Import one side's parallel_state once torch is there; stock's the way its users do.

    Gives the seconds, and the number of garbage collections over all that torch has loaded.
    """
    import_module("torch")
    name = "megatron.core.parallel_state"
    if side == "ours":
        name = "compat.parallel_state"
    collections_before = gc.get_stats()[2]["collections"]
    start = time.perf_counter()
    import_module(name)
    seconds = time.perf_counter() - start
    return seconds, gc.get_stats()[2]["collections"] - collections_before


def recordings(directory: str, ranks: int, calls: int) -> None:
    """Write what a job left in which rank ``ranks // 2 + 1`` misses a call."""
    from tests.support.recorded import Rank, write

    frames = [("/job/megatron/training.py", 100 + depth, f"step_{depth}") for depth in range(5)]
    for rank in range(ranks):
        tensor_first = rank // 8 * 8
        tensor_name = f"1{tensor_first:018}"
        data_name = f"2{rank % 8:018}"
        groups = {
            tensor_name: ("TENSOR", list(range(tensor_first, tensor_first + 8))),
            data_name: ("DATA", list(range(rank % 8, ranks, 8))),
        }
        recorded = Rank(rank, groups)
        for call in range(calls - 1):
            name = data_name if call % 4 == 3 else tensor_name
            recorded.call(name, size=(4096, 1024), frames=frames)
        if rank != ranks // 2 + 1:
            recorded.call(tensor_name, done=False, frames=frames)
        write(Path(directory), [recorded])


def diagnosis(side: str, directory: str, ranks: int) -> float:
    """Seconds of reading and judging these recordings, or only of loading the same files.

    The command reads with every core; what only loads has one, and no collector of cycles, which
    would hurt it more.
    """
    from hypergrid.hangs.reading import read
    from hypergrid.hangs.verdict import diagnose

    gc.disable()
    start = time.perf_counter()
    if side == "ours":
        verdict = diagnose(read(directory, os.cpu_count() or 1))
        if verdict.ranks != (ranks // 2 + 1,):
            raise RuntimeError(f"another rank is missing; the verdict is {verdict.sentence}")
        return time.perf_counter() - start
    for path in Path(directory).iterdir():
        pickle.loads(path.read_bytes())
    return time.perf_counter() - start


def recording(pairs: int, calls: int) -> Times:
    """CPU seconds per call with and without ``record``, in pairs of blocks.

    The blocks of a pair follow each other, in turning order, so that both see the same machine;
    the pairs of "same" compare what is not recorded with itself. An all_reduce of one rank costs
    the same each time, and less than any of several ranks: what recording adds weighs most there.
    """
    from tests.support import forked

    names = ("all: with", "all: without", "same: with", "same: without")
    names_of_receives = ("p2p: with", "p2p: without")
    with tempfile.TemporaryDirectory() as directory:
        run = partial(forked.run_ranks, timeout=300)
        times: Times = run(1, _recorded, names, directory, pairs, calls)[0]
        receives = run(2, _recorded, names_of_receives, directory, pairs // 10, calls // 10)
        return {**times, **receives[0]}


def _recorded(rank: int, names: Sequence[str], directory: str, pairs: int, calls: int) -> Times:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(1024)
    p2p = dist.get_world_size() == 2

    def call() -> None:
        if not p2p:
            dist.all_reduce(tensor)
        elif rank == 0:
            dist.recv(tensor, 1)
        else:
            dist.send(tensor, 0)

    times: Times = defaultdict(list)
    for name in in_turn(names, pairs, FOREVER):
        is_recorded = name in ("all: with", "p2p: with")
        times[name].append(_seconds_of_call(call, calls, directory, p2p, is_recorded))
    return times


def _seconds_of_call(
    call: Callable[[], None], calls: int, directory: str, p2p: bool, is_recorded: bool
) -> float:
    """CPU seconds of a call, in a block of calls."""
    import hypergrid

    # Calls are a tenth faster after a recorder has closed, so one closes before each block.
    hypergrid.record(directory, p2p=p2p).close()
    recorder = hypergrid.record(directory, p2p=p2p) if is_recorded else None
    for _ in range(200):  # what opening it has displaced from the caches comes back
        call()
    start = time.process_time()  # of all threads; a machine may be busy otherwise
    for _ in range(calls):
        call()
    used = time.process_time() - start
    if recorder:
        recorder.close()
    return used / calls
