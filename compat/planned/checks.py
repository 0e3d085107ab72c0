"""The checks of Megatron's layouts: which placements are expensive, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from compat.megatron import communicators
from compat.megatron.rows import run_sizes
from compat.megatron.table import EXTRA_ALL_GATHER, ROWS
from compat.planned.job import STRAY, WITHOUT_VALUE, Job, JobError
from compat.planned.layouts import Layouts, groups_by_kind
from compat.planned.orders import RankedOrder
from hypergrid.messages import shown
from hypergrid.topology import Topology

SEVERITIES = ("error", "warning", "note")  # in the order in which findings are printed

# Kind of groups that should stay inside a host, and severity; and what it costs if they do not.
_ACROSS = {
    ("tp", "error"): "Every layer waits for the network, forward and backward, several times.",
    ("expert tp", "error"): (
        "Every expert layer waits for the network, forward and backward, several times."
    ),
    ("ep", "warning"): (
        "The tokens of every expert layer leave the host and come back, forward and backward."
    ),
    ("cp", "warning"): "Keys and values of every attention layer go round over the network.",
}


@dataclass(frozen=True)
class Finding:
    """The finding of one rule.

    An "error" will not run as asked, or runs many times slower; a "warning" costs time; a "note"
    may be intended.
    """

    rule: str
    severity: str
    what: str
    cost: str  # what is expensive about it
    remedy: str
    order: str | None = None  # one that avoids it


def expensive(
    layouts: Layouts, place: str, places: Topology, better: Sequence[RankedOrder]
) -> Iterator[Finding]:
    """A finding for each kind of groups that has ranks in several ``places``: hosts, or domains.

    ``better`` are other orders, the best first. The first of them that avoids a finding is its
    remedy.
    """
    groups = groups_by_kind(layouts)
    for (kind, severity), cost in _ACROSS.items():
        if kind not in groups:
            continue
        touched = places.touched(groups[kind])
        crossing = int((touched > 1).sum())
        if not crossing:
            continue
        # The finding about tp covers the tensor-parallel groups of experts.
        if kind == "tp":
            groups.pop("expert tp", None)
        remedy = (
            f"No order avoids it without a more expensive fault. A smaller {kind} would stay "
            f"inside."
        )
        order = next((ranked.order for ranked in better if ranked.hosts[kind] == 1), None)
        if order is not None:
            remedy = f"order={order} avoids it."
        yield Finding(
            f"{kind}-across-{place}s".replace(" ", "-").lower(),
            severity,
            f"{kind} leaves the {place}: {crossing} of {len(touched)} groups of "
            f"{groups[kind].shape[1]} ranks have ranks on up to {touched.max()} {place}s.",
            cost,
            remedy,
            order,
        )


# Flags with which Megatron splits the layers, or the batch, in another way.
_UNEVEN = {"--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
           "--hybrid-layer-pattern", "--encoder-num-layers",
           "--pipeline-model-parallel-layout"}  # fmt: skip
_VIRTUAL_STAGES = {"--num-layers-per-virtual-pipeline-stage",
                   "--num-virtual-stages-per-pipeline-rank",
                   "--pipeline-model-parallel-layout"}  # fmt: skip
_OTHER_BATCHES = {"--rampup-batch-size", "--step-batch-size-schedule"}


def refusals(job: Job) -> Iterator[Finding]:
    """Findings: what Megatron's parser, and its check of what it has parsed, refuse."""
    flags = set[str]()
    for written in job.flags.values():
        # "--num-layers 32" is used with its value.
        flags.update(flag.partition(" ")[0] for flag in written)
    stray_words = job.flags.get(STRAY)
    if stray_words:
        yield _refused(
            "stray-word",
            f"{' and '.join(stray_words)}: the flag takes no value.",
            "unrecognized arguments",
            "Leave the word out, or the flag where it should be off.",
        )
    flags_without_value = job.flags.get(WITHOUT_VALUE)
    if flags_without_value:
        yield _refused(
            "no-value",
            f"{' and '.join(flags_without_value)} has no value, as of a variable that is not set.",
            "expected one argument",
            "Set the variable, or leave the flag out.",
        )
    settings = job.settings
    request = job.request()
    expert_size = request.expert_model_parallel_size
    # From a checkpoint the number of experts may come.
    has_experts = "--use-checkpoint-args" in flags or "num-experts" in settings
    if "--expert-model-parallel-size" in flags and expert_size > 1 and not has_experts:
        yield _refused(
            "no-experts",
            f"--expert-model-parallel-size is {expert_size}, and the model has no --num-experts.",
            "num_experts must not be None",
            "Give --num-experts, or leave the size out.",
        )
    has_levels = "hierarchical_context_parallel_sizes" in job.arguments
    if "a2a+p2p" in settings.get("cp_comm_type", "").split() and not has_levels:
        yield _refused(
            "cp-comm-type",
            "--cp-comm-type a2a+p2p has no --hierarchical-context-parallel-sizes.",
            "both levels must have a size; megatron-core alone gives attention no such groups",
            "Give the sizes of both levels, such as --hierarchical-context-parallel-sizes 2 4.",
        )
    yield from _indivisible("num-experts", settings, "the expert-parallel size", expert_size)
    tensor_size = request.tensor_model_parallel_size
    yield from _indivisible(
        "num-attention-heads", settings, "the tensor-parallel size", tensor_size
    )
    yield from _refused_stages(job, flags)
    if not flags & _OTHER_BATCHES:
        batch = settings.get("micro-batch-size", 1) * request.decoder.dim_size("dp")
        batch_name = "--micro-batch-size x the data-parallel size"
        yield from _indivisible("global-batch-size", settings, batch_name, batch)


def _refused_stages(job: Job, flags: Set[str]) -> Iterator[Finding]:
    """Findings: stages of the pipeline that Megatron refuses, virtual ones and their layers."""
    stage_flags = sorted(flags & _VIRTUAL_STAGES)
    if len(stage_flags) > 1:
        yield _refused(
            "virtual-stages",
            f"{' and '.join(stage_flags)} both decide the number of virtual stages.",
            "at most one of them can be set",
            f"Leave {stage_flags[0]} out.",
        )
    settings = job.settings
    request = job.request()
    pipeline_size = request.pipeline_model_parallel_size
    layers_each = settings.get("layers_per_stage", 1)
    # The embedding and the loss may count as a layer each.
    layers = settings.get("num-layers", 0)
    layers += settings.get("with_embedding", 0) + settings.get("with_loss", 0)
    # From a checkpoint their number may come.
    lacks_layers = "layers_per_stage" in settings and "--use-checkpoint-args" not in flags
    if ("num-layers" in settings or lacks_layers) and not flags & _UNEVEN:
        yield from _indivisible(
            "num-layers",
            {"num-layers": layers},
            "stages x virtual stages, or x the layers of each",
            pipeline_size * (request.virtual_pipeline_model_parallel_size or layers_each),
        )
    stages = pipeline_size
    stage_layout = settings.get("stage_layout")
    if stage_layout is not None:
        stages = stages_of(stage_layout)
        if stages % pipeline_size:
            yield _refused(
                "stage-layout",
                f"--pipeline-model-parallel-layout {shown(stage_layout)} has {stages} stages, and "
                f"{pipeline_size} pipeline ranks do not divide them.",
                "the stages must be a multiple of the pipeline ranks",
                "Change the number of | in it, or --pipeline-model-parallel-size.",
            )
    if pipeline_size == 1 and stages > 1:
        yield _refused(
            "no-pipeline",
            f"{stages} stages are asked for, and the pipeline has one rank.",
            "virtual stages need several",
            "Give --pipeline-model-parallel-size, or leave the stages out.",
        )


# A layer, or | between stages, or several in brackets; perhaps n times: t*3, (tt|)*29
_REPEATED = r"(?:([EtmL|])|\(([EtmL|*\d]+)\)(?=\*))(?:\*(\d{1,6}))?"


def stages_of(stage_layout: str) -> int:
    """The number of stages in Megatron's layout of a pipeline: ``Et*3|(tt|)*2,L`` has four."""
    text = stage_layout.replace(",", "")
    if re.fullmatch(f"(?:{_REPEATED})*", text) is None:
        raise JobError(
            f"--pipeline-model-parallel-layout {shown(stage_layout)} is not read: layers are E, t, "
            f"m and L, stages end with |, and t*3 or (tt|)*3 repeats."
        )
    stages = 1
    for letter, repeated, times in re.findall(_REPEATED, text):
        bars = 1 if letter == "|" else stages_of(repeated) - 1
        stages += bars * int(times or 1)
    return stages


def _refused(rule: str, what: str, reason: str, remedy: str) -> Finding:
    return Finding(rule, "error", what, f"Megatron refuses its arguments: {reason}.", remedy)


def _indivisible(
    flag: str, settings: Mapping[str, int], divisor_name: str, divisor: int
) -> Iterator[Finding]:
    # A flag that was not given is not known here: Megatron has a default, or reads a checkpoint.
    number = settings.get(flag)
    if number is not None and (number < 1 or divisor < 1 or number % divisor):
        yield _refused(
            flag,
            f"--{flag} is {number}, which {divisor_name}, {divisor}, does not divide.",
            f"--{flag} must be a multiple of {divisor}",
            f"Change --{flag}, or {divisor_name}.",
        )


def silent_losses(job: Job) -> Iterator[Finding]:
    """Findings: what Megatron's functions accept, and do otherwise than asked without a word."""
    decoder = job.request().decoder
    tensor_stride = decoder.stride("tp")
    if "user_buffers" in job.settings and tensor_stride > 1:
        yield Finding(
            "user-buffers",
            "error",
            f"tp is not innermost: neighbours on tp are {tensor_stride} ranks apart.",
            "Transformer Engine's user buffers (--tp-comm-overlap) take consecutive ranks for the "
            "tensor-parallel groups, whatever the groups are, and exchange with the wrong ones.",
            "Put tp first in the order, or leave out --tp-comm-overlap.",
        )
    yield from _unread_options(job)
    own = [row.label for row in job.plan().rows if row.timeout is None]
    has_timeout = "distributed_timeout_minutes" in job.arguments
    if own and has_timeout and "one_timeout" not in job.settings:
        yield Finding(
            "own-timeout",
            "note",
            f"{', '.join(own)}: torch's own timeout, and not --distributed-timeout-minutes.",
            "Megatron leaves it to torch: 10 minutes with NCCL and 30 with gloo. A hang in these "
            "ends later, or earlier, than in the others.",
            "Start with compat.launch --timeout MINUTES, or HYPERGRID_TIMEOUT: one for all groups.",
        )
    if not {"hybrid_context_parallel", "dynamic_context_parallel"} & set(job.arguments):
        return
    members = decoder.dim_size(("dp", "cp"))
    # Of 10 ranks there are runs of 2, and of 4 ranks 4, 4 and 2: the last one is shorter.
    short = [size for size in run_sizes(members) if members % size]
    if short:
        size = short[-1]
        yield Finding(
            "hybrid-cp-size",
            "error",
            f"dp x cp is {members} ranks, which {size} does not divide: for size {size} the last "
            f"group has {members % size}.",
            f"Sequences are cut for {size} ranks and exchanged among fewer. Megatron asks for an "
            f"even number only (create_hybrid_dp_cp_groups in parallel_state.py).",
            "Make dp x cp a power of two.",
        )


def _unread_options(job: Job) -> Iterator[Finding]:
    """Sections and options of the NCCL configuration that nobody reads."""
    nccl_config = job.settings.get("nccl_config", "")
    if not Path(nccl_config).is_file():
        return
    groups = {row.options for row in (*ROWS, *EXTRA_ALL_GATHER)}
    try:
        configs = communicators.read_configs(nccl_config, None)
        unread = list(communicators.unread(configs, groups))
    except RuntimeError as error:
        raise JobError(str(error)) from error
    if unread:
        yield Finding(
            "nccl-config",
            "warning",
            f"{nccl_config} has {' and '.join(unread)}: no group reads that.",
            "Megatron's get_nccl_options (parallel_state.py) ignores it without a word.",
            f"Options are {', '.join(communicators.OPTIONS)}; groups are "
            f"{', '.join(sorted(groups))}.",
        )
