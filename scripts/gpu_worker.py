"""What each rank of scripts/gpu_check does: one check on its GPU or, to rehearse, over gloo.

    RANK=0 WORLD_SIZE=1 ... python scripts/gpu_worker.py {cuda|cpu} FOLDER CHECK [ARGUMENT ...]

What was seen goes to FOLDER/RANK.json: rows of the table, or a training's results.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from compat import transformer_engine as te  # noqa: E402
from compat.megatron.planning import Request  # noqa: E402
from compat.state import ParallelState  # noqa: E402

PATIENCE = timedelta(seconds=90)  # of one collective; the caller bounds the whole
NCCL_FILE = """\
tp: {max_ctas: 8, min_ctas: 2, cga_cluster_size: 2}
dp_cp: {max_ctas: 4, is_high_priority_stream: true}
"""
HIGH_PRIORITY = "is_high_priority_stream"
NUMBERS = ("max_ctas", "min_ctas", "cga_cluster_size")
# What follows from the file and high_priority_stream_groups=["ep"]; nothing for other groups.
EXPECTED: dict[str, dict[str, Any]] = {
    "TENSOR_MODEL_PARALLEL_GROUP": {"max_ctas": 8, "min_ctas": 2, "cga_cluster_size": 2},
    "DATA_PARALLEL_GROUP_WITH_CP": {"max_ctas": 4, HIGH_PRIORITY: True},
    "EXPERT_MODEL_PARALLEL_GROUP": {HIGH_PRIORITY: True},
}


class Row(NamedTuple):
    """A line of the table. A fault makes it FAILED, else a reason makes it skipped."""

    check: str
    seen: str
    faults: list[str] = []  # noqa: RUF012 - never changed
    skipped: str = ""


def sizes(world: int) -> dict[str, int]:
    """A layout with groups of two, as far as the world has them; eight ranks: the demo's."""
    tp = 1 if world % 2 else 2
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": 1 if world % 8 else 2,
        "expert_model_parallel_size": tp,
        "expert_tensor_parallel_size": 1,
    }


def machine(device: torch.device, folder: Path) -> dict[str, Any]:
    """What is here; asked of a process of its own, for the caller must not start CUDA."""
    count, nccl = torch.cuda.device_count(), dist.is_nccl_available()
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    parts = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)] or ["no GPU"]
    parts += [f"torch {torch.__version__}", f"CUDA {torch.version.cuda or 'not built in'}"]
    parts += [f"NCCL {'.'.join(map(str, torch.cuda.nccl.version())) if nccl else 'not built in'}"]
    found = util.find_spec("transformer_engine") is not None
    parts += [f"TE {metadata.version('transformer-engine') if found else 'not installed'}"]
    why = "no CUDA device" if not count else "" if nccl else "this torch has no NCCL"
    return {"devices": count, "why": why, "row": Row("machine", ", ".join(parts))}


def join(device: torch.device, bound: bool = False) -> None:
    """The default group of all ranks; ``bound`` to the device, its groups can be split off."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=PATIENCE,
        device_id=device if bound else None,
    )


def meet(state: ParallelState, device: torch.device) -> list[str]:
    """One all_reduce on each group of ``state``, which tells who took part; what was wrong."""
    assert state.pool is not None
    faults = []
    for pooled in state.pool.groups:
        where = device if dist.get_backend(pooled.group) == "nccl" else "cpu"
        total = torch.tensor([1 << dist.get_rank()], device=where)
        dist.all_reduce(total, group=pooled.group)
        if total.item() != sum(1 << rank for rank in pooled.ranks):
            met = [rank for rank in range(62) if total.item() >> rank & 1]
            faults.append(f"{pooled.label} of ranks {list(pooled.ranks)} summed over {met}")
    return faults


def creation(device: torch.device, folder: Path, way: str) -> list[Row]:
    """Groups made in one ``way``: used, and given back."""
    on_gpu = device.type == "cuda"
    join(device, bound=on_gpu and way == "split")  # gloo can be bound to nothing
    insisted = {"creation": "everyone"} if way == "everyone" else {}
    state = ParallelState.create(**sizes(dist.get_world_size()), **insisted)
    assert state.pool is not None
    used, groups = state.pool.agreement.way, state.pool.groups
    seen = f"way {used!r}; {len(groups)} groups of up to {max(len(p.ranks) for p in groups)}, an "
    faults = meet(state, device)
    state.destroy()
    left = [group.group_desc for group in c10d._world.pg_map]
    seen += f"all_reduce on each; destroy leaves {len(left)}, the default one"
    faults += [f"destroy left {left}"] if len(left) != 1 else []
    skipped = "gloo cannot split" if way == "split" and not on_gpu else ""
    faults += [f"the ranks agreed on {used!r}"] if used != way and not skipped else []
    rows = [Row(f"creation: {way}", seen, faults, skipped)]
    if on_gpu and way == "members" and dist.get_world_size() == 1:
        why = "one GPU: no communicator of two"
        rows.append(Row("creation: two ranks", "groups of one rank alone", skipped=why))
    return rows


def memory(device: torch.device, folder: Path) -> list[Row]:
    """Device memory that the communicators of a state take, none shared and all shared."""
    join(device)
    on_gpu, rows, counts = device.type == "cuda", list[Row](), {}
    for share in ("all", "none", "all"):  # first to load what is no communicator's
        before = used(device)
        state = ParallelState.create(
            **sizes(dist.get_world_size()), create_gloo_process_groups=False, share=share
        )
        assert state.pool is not None
        faults = [f"share={share}: {fault}" for fault in meet(state, device)]
        taken = used(device) - before
        counts[share] = count = sum(pooled.shares is None for pooled in state.pool.groups)
        state.destroy()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (taken, taken / count, taken - used(device) + before))
        each = [f"{min(c) / 2**20:.1f}..{max(c) / 2**20:.1f}" for c in zip(*ranks, strict=True)]
        told = "MiB per rank {}, per communicator {}, given back by destroy {}".format(*each)
        seen = f"{count} communicators on rank 0; "
        seen += told if on_gpu else "their memory is not on the CPU"
        rows.append(Row(f"memory: share={share}", seen, faults))
    if counts["all"] >= counts["none"]:
        rows[-1].faults.append(f"{counts['none']} communicators without sharing")
    return rows[1:]


def used(device: torch.device) -> int:
    """Bytes of the GPU's memory that are taken, by whomever."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def options(device: torch.device, folder: Path) -> list[Row]:
    """NCCL's options as each live group has them; in a rehearsal, as they would be asked for."""
    log = folder / f"nccl-{os.environ['RANK']}"
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="ENV", NCCL_DEBUG_FILE=str(log))
    join(device)
    path = log.with_suffix(".yaml")
    path.write_text(NCCL_FILE)
    asked: dict[str, Any] = {
        **sizes(dist.get_world_size()),
        "nccl_communicator_config_path": str(path),
        "high_priority_stream_groups": ["ep"],
    }
    if device.type == "cuda":
        state = ParallelState.create(**asked)
        assert state.pool is not None
        faults = meet(state, device)
        live = [p for p in state.pool.groups if dist.get_backend(p.group) == "nccl"]
        found = {pooled.label: reached(pooled.group, device) for pooled in live}
        state.destroy()
    else:
        plan, faults = Request(**asked).plan, []
        found = {row.label: dict(row.options or ()) for row in plan.rows if row.backend is None}
    faults += misread(found)
    said = "; ".join(f"{name}: {words(found[name])}" for name in EXPECTED if name in found)
    others = len(found.keys() - EXPECTED.keys())
    where = "in the live backends" if device.type == "cuda" else "in the plan, not in NCCL"
    rows = [Row("options", f"{where}: {said}; {others} other groups have none", faults)]
    if device.type == "cuda":
        text = log.read_text("utf-8", "replace") if log.exists() else ""
        told = Counter(re.findall(r"Comm config (CGA cluster size|M.. CTAs) set to (\d+)", text))
        seen = "; ".join(f"{what} {n} x {k}" for (what, n), k in sorted(told.items()))
        why = "" if told else "NCCL's log says nothing of options in words that are known here"
        rows.append(Row("options in NCCL's log", seen or "nothing", skipped=why))
    return rows


def reached(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """The options of a live group that are not NCCL's defaults."""
    live, fresh = group._get_backend(device).options, dist.ProcessGroupNCCL.Options()
    numbers = {key: getattr(live.config, key) for key in NUMBERS}
    found = {k: n for k, n in numbers.items() if n != getattr(fresh.config, k)}
    return found | ({HIGH_PRIORITY: True} if live.is_high_priority_stream else {})


def misread(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which groups have other options than were asked for, in words."""
    pairs = {label: (found.get(label), EXPECTED.get(label, {})) for label in {**EXPECTED, **found}}
    return [
        f"{label} has {'no group' if has is None else words(has)}, asked for {words(asked)}"
        for label, (has, asked) in pairs.items()
        if has != asked
    ]


def words(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" if v is not True else k for k, v in options.items()) or "none"


def training(device: torch.device, folder: Path, side: str, *arguments: str) -> Any:
    """The demo's training in this rank, on stock or swapped; the results on rank 0."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else its sums differ from run to run
    torch.use_deterministic_algorithms(True, warn_only=True)
    if side == "hypergrid":
        import compat

        compat.install()
    import train_gpt

    from compat.swap import stray_bindings

    assert side == "stock" or not stray_bindings(), stray_bindings()
    return train_gpt.main([*arguments])


def transformer_engine(device: torch.device, folder: Path) -> list[Row]:
    """Transformer Engine's modules over our groups; in a rehearsal with stand-ins for its core."""
    on_gpu = device.type == "cuda"
    if not on_gpu and util.find_spec("transformer_engine") is None:
        from tests.support import te_on_cpu

        if te_on_cpu.SOURCE.exists():
            te_on_cpu.load()
    installed = te.probe()
    if not installed.importable:
        return [Row("TE modules", "nothing", skipped=installed.why)]
    join(device)
    pytorch = import_module("transformer_engine.pytorch")
    state = ParallelState.create(**sizes(dist.get_world_size()))
    tp = state.get_tensor_model_parallel_group()
    torch.manual_seed(1 + dist.get_rank())
    build = {"device": device, "params_dtype": torch.float32}
    column, row = (
        pytorch.Linear(*shape, bias=False, parallel_mode=mode, **te.tp_kwargs(state), **build)
        for mode, shape in (("column", (64, 128)), ("row", (128, 64)))
    )
    layer = pytorch.TransformerLayer(
        128, 256, 8, hidden_dropout=0.0, attention_dropout=0.0, set_parallel_mode=True,
        tp_size=tp.size(), device=device, params_dtype=torch.bfloat16 if on_gpu else torch.float32,
    )  # fmt: skip
    te.apply(layer, state)
    holders = [m for m in layer.modules() if "tp_group" in vars(m) and m is not layer]
    faults = [f"apply() left {type(m).__name__}" for m in holders if m.tp_group is not tp]
    seen = f"Linear by columns and rows over tp={tp.size()}; apply() to {len(holders)} modules"
    rows = [Row("TE modules", seen, faults)]
    if on_gpu:
        rows.append(Row("TE products", *products(column, row, layer, tp, device)))
    else:
        why = (
            "its core is stood in for here"
            if "tests.support.te_on_cpu" in sys.modules
            else "no GPU"
        )
        rows.append(Row("TE products", "no product", skipped=why))
    able, why = pytorch.is_fp8_available(return_reason=True)
    greatest = maxima(pytorch, state, device) if able else None
    if greatest is None:
        return [*rows, Row("TE FP8 maxima", "none", skipped=why)]
    members = dist.get_process_group_ranks(te.amax_group(state))
    seen = f"greatest amax {greatest:.0f} after autocast over ranks {members}"
    fault = [] if greatest == max(members) + 1 else [f"{seen}, {max(members) + 1} is right"]
    return [*rows, Row("TE FP8 maxima", seen, fault)]


def products(
    column: Any, row: Any, layer: Any, tp: dist.ProcessGroup, device: torch.device
) -> tuple[str, list[str]]:
    """Forward and backward of the modules beside the same products without parallelism."""

    def whole(weight: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(weight) for _ in range(tp.size())]
        dist.all_gather(parts, weight.detach().contiguous(), group=tp)
        return torch.cat(parts, dim)

    # Equal inputs on every rank of tp, whatever a rank drew before.
    generator = torch.Generator().manual_seed(7)
    given, target = (torch.randn(16, 64, generator=generator).to(device) for _ in range(2))
    theirs, plain = given.clone().requires_grad_(), given.clone().requires_grad_()
    ours = row(column(theirs))
    right = plain @ whole(column.weight, 0).T @ whole(row.weight, 1).T
    (ours * target).sum().backward()
    (right * target).sum().backward()
    assert theirs.grad is not None and plain.grad is not None
    far = [float((a - b).norm() / b.norm()) for a, b in ((ours, right), (theirs.grad, plain.grad))]
    faults = [f"the products are off by {max(far):.2g}"] if not max(far) < 1e-2 else []
    hidden = torch.randn(32, 2, 128, generator=generator).to(device, torch.bfloat16)
    hidden = hidden.requires_grad_()
    out = layer(hidden)
    out.float().square().mean().backward()
    highest = out.detach().float().clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=tp)
    grads = [p.grad for p in (hidden, *layer.parameters()) if p.grad is not None]
    if not torch.allclose(out.detach().float(), highest, atol=1e-2):
        faults.append("the ranks of tp disagree on the output of TransformerLayer")
    if not all(bool(torch.isfinite(value).all()) for value in (out, *grads)):
        faults.append("TransformerLayer gives values that are not finite")
    seen = f"Linear forward and backward off by {far[0]:.1g} and {far[1]:.1g} from plain products"
    return f"{seen}; TransformerLayer finite, equal on tp", faults


def maxima(pytorch: Any, state: ParallelState, device: torch.device) -> float:
    """The input's maximum that a module keeps when each rank's input was its rank + 1."""
    quantization = import_module("transformer_engine.pytorch.quantization")
    recipe = import_module("transformer_engine.common.recipe").DelayedScaling()
    linear = pytorch.Linear(32, 32, bias=False, device=device, params_dtype=torch.float32)
    mine = dist.get_rank() + 1.0
    with pytorch.autocast(enabled=True, recipe=recipe, **te.autocast_kwargs(state)):
        if device.type == "cuda":
            linear(torch.full((16, 32), mine, device=device))
        else:  # nothing multiplies here: as a forward would leave it
            linear.init_fp8_metadata()
            manager = quantization.FP8GlobalStateManager
            manager.add_fp8_tensors_to_global_buffer(linear.fp8_meta)
            linear.fp8_meta["scaling_fwd"].amax_history[0].fill_(mine)
    return float(linear.fp8_meta["scaling_fwd"].amax_history[:, 0].max())


CHECKS = {
    "machine": machine,
    "creation": creation,
    "memory": memory,
    "options": options,
    "training": training,
    "te": transformer_engine,
}


def main() -> None:
    kind, folder, check, *arguments = sys.argv[1:]
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    outcome = CHECKS[check](device, Path(folder), *arguments)  # type: ignore[operator]
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(outcome))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # closing communicators whose other members wait could take for ever
