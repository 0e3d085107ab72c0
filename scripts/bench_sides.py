"""The benchmark's jobs in fresh interpreters: ``bench_sides.py '{"job": NAME, ...}'``.

A job prints its result as JSON on the last line of its output.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import pickle
import re
import resource
import sys
import tempfile
import time
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

SIZES = {
    "tensor_model_parallel_size": 8,
    "context_parallel_size": 2,
    "pipeline_model_parallel_size": 16,
    "expert_model_parallel_size": 8,
}
ORDER = "tp-cp-ep-dp-pp"
_DIMS = ("tensor_model", "pipeline_model", "data", "context", "expert_model")
NUMBERS = (
    *(f"get_{dim}_parallel_{what}" for dim in _DIMS for what in ("rank", "world_size")),
    *("is_pipeline_first_stage", "is_pipeline_last_stage"),
)
GROUPS = tuple(
    f"get_{dims}_group"
    for dims in (
        *("tensor_model_parallel", "data_parallel", "model_parallel", "pipeline_model_parallel"),
        *("context_parallel", "tensor_and_data_parallel", "tensor_and_context_parallel"),
        *("expert_model_parallel", "expert_tensor_parallel", "expert_tensor_and_model_parallel"),
        *("expert_tensor_model_pipeline_parallel", "expert_data_parallel"),
    )
)
TIMED = (
    *(*NUMBERS, *GROUPS, "get_amax_reduction_group", "get_global_memory_buffer"),
    *("get_data_parallel_src_rank", "get_tensor_model_parallel_src_rank"),
    *("get_expert_data_parallel_rank", "get_expert_data_parallel_world_size"),
    *("get_expert_tensor_parallel_rank", "get_expert_tensor_parallel_world_size"),
    *(f"get_pipeline_model_parallel_{which}_rank" for which in ("next", "prev", "first", "last")),
    *("get_virtual_pipeline_model_parallel_rank", "is_rank_in_embedding_group", "get_all_ranks"),
    *("is_initialized", "model_parallel_is_initialized"),
)
RELEASES = ("0.16.1", "0.19.2")


def rounds(most: int, seconds: float) -> Iterator[int]:
    """Count to ``most``, but stop after ``seconds``; at least one."""
    start = time.monotonic()
    for i in count():
        if i and (i >= most or time.monotonic() - start > seconds):
            return
        yield i


def load(side: str, release: str | None = None) -> Any:
    """The parallel_state module of one side. Stock's is run from its source, by itself."""
    if side == "ours":
        return importlib.import_module("compat.parallel_state")
    return importlib.import_module("tests.support.stock").load_stock(
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


def initialise(side: str, world: int, repeats: int, seconds: float) -> dict[str, Any]:
    """Initialise one rank in the middle of a fake world, several times.

    The side ``mesh`` is torch's ``init_device_mesh`` over the same dims: one group for each.
    """
    from torch.distributed.device_mesh import init_device_mesh

    module: Any = None if side == "mesh" else load(side)
    start_fake_world(world // 2 + 3, world)
    tp, cp, pp, _ = SIZES.values()
    mesh = {"pp": pp, "dp": world // (tp * cp * pp), "cp": cp, "tp": tp}
    times, grown, built = [], 0, ""
    for i in rounds(repeats if module else 1, seconds):
        if i:
            module.destroy_model_parallel()
        before = _reset_peak()
        start = time.perf_counter()
        if module:
            module.initialize_model_parallel(**SIZES, create_gloo_process_groups=False)
        else:
            init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        times.append(time.perf_counter() - start)
        if i == 0:
            grown = _peak() - before
            built = digest(module) if module else ""
    return {"seconds": times, "bytes": grown, "digest": built}


def enumerate_groups(world: int, token: str, repeats: int, seconds: float) -> dict[str, Any]:
    """List the groups of one token, on stock and ours in turn."""
    stock = load("stock").RankGenerator
    ours = importlib.import_module("compat.megatron.rank_generator").RankGenerator
    sizes = {"tp": 8, "ep": 1, "dp": world // 256, "pp": 16, "cp": 2}
    sides = {"stock": stock(**sizes, order=ORDER), "ours": ours(**sizes, order=ORDER)}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for i in rounds(repeats, seconds):
        ranks = {}
        for side in sorted(sides, reverse=bool(i % 2)):
            start = time.perf_counter()
            ranks[side] = sides[side].get_ranks(token)
            times[side].append(time.perf_counter() - start)
        if ranks["stock"] != ranks["ours"]:
            raise SystemExit(f"stock and ours list different groups for {token!r}")
    return times


def call_getters(
    release: str, calls: int, repeats: int, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """Seconds for a call of each getter, on stock and ours in turn."""
    os.environ["HYPERGRID_MEGATRON_RELEASE"] = release
    sides = {side: load(side, release) for side in ("stock", "ours")}
    start_fake_world(37, 64)
    for module in sides.values():
        sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}
        sizes |= {"context_parallel_size": 2, "expert_model_parallel_size": 4}
        module.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    if digest(sides["stock"]) != digest(sides["ours"]):
        raise SystemExit("stock and ours answer differently")
    times: dict[str, dict[str, list[float]]] = {name: {} for name in TIMED}
    for i in rounds(repeats, seconds):
        for name in TIMED:
            for side in sorted(sides, reverse=bool(i % 2)):
                # Through the module, as callers do: mpu.get_tensor_model_parallel_rank().
                timer = timeit.Timer(f"mpu.{name}()", globals={"mpu": sides[side]})
                times[name].setdefault(side, []).append(timer.timeit(calls) / calls)
    return times


def audited(calls: int, repeats: int, seconds: float) -> dict[str, list[float]]:
    """Seconds for a read of ours: never audited, while an audit records, and afterwards."""
    from compat import audit, parallel_state

    start_fake_world(37, 64)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    read = parallel_state.get_tensor_model_parallel_rank
    timers = {side: timeit.Timer("get()", globals={"get": read}) for side in ("never", "on", "off")}
    times: dict[str, list[float]] = {side: [] for side in timers}
    times["never"] = [timers["never"].timeit(calls) / calls for _ in range(repeats)]
    for _ in rounds(repeats, seconds):
        with tempfile.TemporaryDirectory() as directory, audit.recording(directory):
            times["on"].append(timers["on"].timeit(calls) / calls)
        times["off"] += [timers["off"].timeit(calls) / calls for _ in range(3)]
    return times


def import_side(side: str) -> dict[str, Any]:
    """Import one side's parallel_state once torch is there; stock's the way its users do."""
    import torch

    start = time.perf_counter()
    importlib.import_module(
        "compat.parallel_state" if side == "ours" else "megatron.core.parallel_state"
    )
    seconds = time.perf_counter() - start
    compared = 0.0
    if side == "ours":
        from compat.swap import REPLACEMENTS, drift

        for replacement in REPLACEMENTS.values():
            importlib.import_module(replacement)
        start = time.perf_counter()
        for module in REPLACEMENTS:
            drift.refuse_drift(module)
        compared = time.perf_counter() - start
    return {
        "seconds": seconds,
        "compared": compared,
        "megatron": sum(name.split(".")[0] == "megatron" for name in sys.modules),
        "cuda": torch.cuda.is_initialized(),
    }


def recordings(directory: str, ranks: int, calls: int) -> None:
    """Write what a job left in which rank ``ranks // 2 + 1`` misses a call."""
    from tests.support.recorded import Rank

    groups = {f"1{i:018}": ("TENSOR", range(i, i + 8)) for i in range(0, ranks, 8)}
    groups |= {f"2{i:018}": ("DATA", range(i, ranks, 8)) for i in range(8)}
    frames = [("/job/megatron/training.py", 100 + i, f"step_{i}") for i in range(5)]
    for rank in range(ranks):
        one = Rank(rank, {name: (d, list(of)) for name, (d, of) in groups.items() if rank in of})
        names = [*one.groups]
        for i in range(calls - 1):
            one.call(names[i % 4 == 3], size=(4096, 1024), frames=frames)
        if rank != ranks // 2 + 1:
            one.call(names[0], done=False, frames=frames)
        Path(directory, f"trace_{rank}").write_bytes(pickle.dumps(one.dump(), 2))
        mine = [
            {"label": d, "description": d, "dims": ["tp"], "name": name, "ranks": [*of]}
            for name, (d, of) in one.groups.items()
        ]
        said = {"schema": 1, "rank": rank, "world_size": ranks, "host": "a", "pid": 1}
        Path(directory, f"groups_{rank}.json").write_text(json.dumps({**said, "groups": mine}))


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
        found = diagnose(read(directory, os.cpu_count() or 1))
        if found.ranks != (ranks // 2 + 1,):
            raise SystemExit(f"another rank is missing; the verdict is {found.sentence}")
    else:
        for path in Path(directory).iterdir():
            data = path.read_bytes()
            (json if path.suffix == ".json" else pickle).loads(data)
    return time.perf_counter() - start


def recording(pairs: int, calls: int) -> dict[str, list[float]]:
    """CPU seconds per call with and without ``record``, in pairs of blocks.

    The blocks of a pair follow each other, in turning order, so that both see the same machine;
    the pairs of "same" compare what is not recorded with itself. An all_reduce of one rank costs
    the same each time, and less than any of several ranks: what recording adds weighs most there.
    "thread": of each second, the CPU seconds of the recorder's thread; "stall": the most of them
    between two calls, with 2,000 entries in torch's recorder.
    """
    import torch
    import torch.distributed as dist

    import hypergrid
    from tests.support import forked

    def rank(number: int, directory: str, p2p: bool) -> dict[str, list[float]]:
        tensor = torch.ones(1024)
        times = defaultdict[str, list[float]](list)

        def call() -> None:
            if p2p:
                (dist.send if number else dist.recv)(tensor, 1 - number)
            else:
                dist.all_reduce(tensor)

        def block(recorded: bool) -> float:
            # Calls are a tenth faster after a recorder has closed, so one closes before each block.
            hypergrid.record(directory, p2p=p2p).close()
            recorder = hypergrid.record(directory, p2p=p2p) if recorded else None
            many = calls // 10 if p2p else calls
            for _ in range(200):  # what opening it has displaced from the caches comes back
                call()
            start = time.process_time()  # of all threads; a machine may be busy otherwise
            for _ in range(many):
                call()
            used = time.process_time() - start
            if recorder:
                recorder.close()
            return used / many

        for turn in range(pairs // 10 if p2p else pairs):
            for side in ("p2p",) if p2p else ("same", "recorded"):
                order = [("without", False), ("with", side != "same")][:: -1 if turn % 2 else 1]
                for name, recorded in order:
                    times[f"{side}: {name}"].append(block(recorded))
        if not p2p:
            recorder = hypergrid.record(directory, after=600)
            clock, stall = time.pthread_getcpuclockid(recorder.thread.ident or 0), 0.0
            start, first = time.perf_counter(), time.clock_gettime(clock)
            used = first
            while time.perf_counter() - start < 12:  # it looks at the calls each five seconds
                call()
                before, used = used, time.clock_gettime(clock)
                stall = max(stall, used - before)
            times["thread"], times["stall"] = [(used - first) / 12], [stall]
        return times

    with tempfile.TemporaryDirectory() as directory:
        alone: dict[str, list[float]] = forked.run_ranks(1, rank, directory, False, timeout=300)[0]
        return alone | forked.run_ranks(2, rank, directory, True, timeout=300)[0]


def _reset_peak() -> int:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    # Linux hands a parent's ru_maxrss down to its children; this process's own is in /proc.
    with suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def answer(*jobs: Callable[..., Any]) -> None:
    """Do the job that the command line names and print its result."""
    given = json.loads(sys.argv[1])
    named = {job.__name__: job for job in jobs}
    print(json.dumps(named[given.pop("job")](**given)))


if __name__ == "__main__":
    answer(
        *(initialise, enumerate_groups, call_getters, audited, import_side),
        *(recordings, diagnosis, recording),
    )
