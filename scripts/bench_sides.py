"""The benchmark's jobs in fresh interpreters: ``bench_sides.py '{"job": NAME, ...}'``.

A job prints its result as JSON on the last line of its output.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import pickle
import sys
import tempfile
import time
import timeit
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from unittest import mock

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

    ``way`` is hypergrid's choice ``creation``. The fake backend cannot split, so a split is
    counted and then created by its members: only the number of calls is measured, not their time.
    """
    from hypergrid.groups import creation

    os.environ["HYPERGRID_CREATION"] = way
    module = load(side)
    rank = world // 2 + 3
    start_fake_world(rank, world)
    calls: Counter[str] = Counter()

    def split(label: str, groups: Any, epoch: str, **options: Any) -> Any:
        calls["split"] += 1
        members = next((ranks for ranks in groups if rank in ranks), [rank])
        return creation.by_members(label, sorted(members), epoch, **options)

    watched: Any = nullcontext()
    if way != "split":
        watched = checkout.watched_new_group(lambda: calls.update(["new_group"]))
    with (
        mock.patch.object(creation, "_can_split", lambda: True),
        mock.patch.object(creation, "by_split", split),
        watched,
    ):
        module.initialize_model_parallel(**SIZES, create_gloo_process_groups=False)
    return calls.total()


def enumerate_groups(world: int, token: str, repeats: int, seconds: float) -> Times:
    """List the groups of one token, on stock and ours in turn."""
    modules = {
        "stock": load("stock"),
        "ours": import_module("compat.megatron.rank_generator"),
    }
    sizes = {"tp": 8, "ep": 1, "dp": world // 256, "pp": 16, "cp": 2}
    ranks = {}
    times: Times = defaultdict(list)
    for side in in_turn(modules, repeats, seconds):
        generator = modules[side].RankGenerator(**sizes, order=ORDER)
        start = time.perf_counter()
        ranks[side] = generator.get_ranks(token)
        times[side].append(time.perf_counter() - start)
    if ranks["stock"] != ranks["ours"]:
        raise SystemExit(f"stock and ours list different groups for {token!r}")
    return times


def call_getters(
    release: str, calls: int, repeats: int, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """Seconds for a call of each getter, on stock and ours in turn."""
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
        raise SystemExit("stock and ours answer differently")
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for side in in_turn(modules, repeats, seconds):
        for name in TIMED:
            # Through the module, as callers do: mpu.get_tensor_model_parallel_rank().
            timer = timeit.Timer(f"mpu.{name}()", globals={"mpu": modules[side]})
            times[side][name].append(timer.timeit(calls) / calls)
    return times


def audited(calls: int, repeats: int, seconds: float) -> Times:
    """Seconds for a read of ours: never audited, while an audit records, and afterwards."""
    from compat import audit, parallel_state

    start_fake_world(37, 64)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    read = parallel_state.get_tensor_model_parallel_rank
    timer = timeit.Timer("get()", globals={"get": read})
    times: Times = {"never": timer.repeat(repeats, calls), "on": [], "off": []}
    for _ in rounds(repeats, seconds):
        with tempfile.TemporaryDirectory() as directory, audit.recording(directory):
            times["on"].append(timer.timeit(calls))
        times["off"] += timer.repeat(3, calls)
    for name, seconds_of_calls in times.items():
        times[name] = [value / calls for value in seconds_of_calls]
    return times


def import_side(side: str) -> dict[str, float]:
    """Import one side's parallel_state once torch is there; stock's the way its users do."""
    import_module("torch")
    name = "megatron.core.parallel_state"
    if side == "ours":
        name = "compat.parallel_state"
    start = time.perf_counter()
    import_module(name)
    seconds = time.perf_counter() - start
    if side == "stock":
        return {"seconds": seconds}
    from compat.swap import REPLACEMENTS, drift

    for replacement in REPLACEMENTS.values():
        import_module(replacement)
    start = time.perf_counter()
    for module in REPLACEMENTS:
        drift.refuse_drift(module)
    return {"seconds": seconds, "compared": time.perf_counter() - start}


def recordings(directory: str, ranks: int, calls: int) -> None:
    """Write what a job left in which rank ``ranks // 2 + 1`` misses a call."""
    from tests.support.recorded import Rank

    frames = [("/job/megatron/training.py", 100 + depth, f"step_{depth}") for depth in range(5)]
    for rank in range(ranks):
        tensor_first = rank // 8 * 8
        tensor_name = f"1{tensor_first:018}"
        data_name = f"2{rank % 8:018}"
        members = {
            tensor_name: ("TENSOR", list(range(tensor_first, tensor_first + 8))),
            data_name: ("DATA", list(range(rank % 8, ranks, 8))),
        }
        recorded = Rank(rank, members)
        for call in range(calls - 1):
            name = data_name if call % 4 == 3 else tensor_name
            recorded.call(name, size=(4096, 1024), frames=frames)
        if rank != ranks // 2 + 1:
            recorded.call(tensor_name, done=False, frames=frames)
        Path(directory, f"trace_{rank}").write_bytes(pickle.dumps(recorded.dump(), 2))
        groups = []
        for name, (label, group_ranks) in members.items():
            group = {"label": label, "description": label, "dims": ["tp"], "name": name}
            groups.append({**group, "ranks": group_ranks})
        job = {"schema": 1, "rank": rank, "world_size": ranks, "host": "a", "pid": 1}
        Path(directory, f"groups_{rank}.json").write_text(json.dumps({**job, "groups": groups}))


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
            raise SystemExit(f"another rank is missing; the verdict is {verdict.sentence}")
        return time.perf_counter() - start
    for path in Path(directory).iterdir():
        data = path.read_bytes()
        if path.suffix == ".json":
            json.loads(data)
        else:
            pickle.loads(data)
    return time.perf_counter() - start


def recording(pairs: int, calls: int) -> Times:
    """CPU seconds per call with and without ``record``, in pairs of blocks.

    The blocks of a pair follow each other, in turning order, so that both see the same machine;
    the pairs of "same" compare what is not recorded with itself. An all_reduce of one rank costs
    the same each time, and less than any of several ranks: what recording adds weighs most there.
    "thread": of each second, the CPU seconds of the recorder's thread; "stall": the most of them
    between two calls, with 2,000 entries in torch's recorder.
    """
    from tests.support import forked

    with tempfile.TemporaryDirectory() as directory:
        run = partial(forked.run_ranks, timeout=300)
        times: Times = run(1, _recorded_collectives, directory, pairs, calls)[0]
        times.update(run(2, _recorded_receives, directory, pairs // 10, calls // 10)[0])
        return times


def _recorded_collectives(rank: int, directory: str, pairs: int, calls: int) -> Times:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(1024)

    def call() -> None:
        dist.all_reduce(tensor)

    times: Times = defaultdict(list)
    names = ("all: with", "all: without", "same: with", "same: without")
    for name in in_turn(names, pairs, FOREVER):
        seconds = _seconds_of_call(call, calls, directory, False, name == "all: with")
        times[name].append(seconds)
    thread_seconds, longest_stall = _recorder_thread(call, directory)
    return {**times, "thread": [thread_seconds], "stall": [longest_stall]}


def _recorded_receives(rank: int, directory: str, pairs: int, calls: int) -> Times:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(1024)

    def call() -> None:
        if rank:
            dist.send(tensor, 0)
        else:
            dist.recv(tensor, 1)

    times: Times = defaultdict(list)
    for name in in_turn(("p2p: with", "p2p: without"), pairs, FOREVER):
        seconds = _seconds_of_call(call, calls, directory, True, name == "p2p: with")
        times[name].append(seconds)
    return dict(times)


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


def _recorder_thread(call: Callable[[], None], directory: str) -> tuple[float, float]:
    """CPU seconds of the recorder's thread in a second, and the most of them between two calls."""
    import hypergrid

    recorder = hypergrid.record(directory, after=600)
    clock = time.pthread_getcpuclockid(recorder.thread.ident or 0)
    longest = 0.0
    first = time.clock_gettime(clock)
    used = first
    start = time.perf_counter()
    while time.perf_counter() - start < 12:  # it looks at the calls each five seconds
        call()
        before = used
        used = time.clock_gettime(clock)
        longest = max(longest, used - before)
    return (used - first) / 12, longest


def answer(*jobs: Callable[..., Any]) -> None:
    """Do the job that the command line names and print its result."""
    arguments = json.loads(sys.argv[1])
    name = arguments.pop("job")
    (job,) = (job for job in jobs if job.__name__ == name)
    print(json.dumps(job(**arguments)))


if __name__ == "__main__":
    answer(
        initialise,
        creation_calls,
        enumerate_groups,
        call_getters,
        audited,
        import_side,
        recordings,
        diagnosis,
        recording,
    )
