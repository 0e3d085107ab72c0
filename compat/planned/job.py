"""A job that is planned without running it, from its settings: sizes, ranks and hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from compat.megatron.planning import Request
from compat.planned.flags import flags_of
from compat.swap import order
from hypergrid.layout import RankLayout
from hypergrid.plan import GroupPlan

TP_PP_DP = "tp-cp-ep-pp-dp"  # what Megatron's --use-tp-pp-dp-mapping means
RANKS_PER_HOST = 8
SIZES = flags_of("sizes")
OF_MODEL = ("num-layers", "num-experts", "micro-batch-size", "global-batch-size",
            "num-attention-heads", "with_embedding", "with_loss")  # fmt: skip
_NO_ARGUMENTS = {
    *OF_MODEL, "world", "hosts", "per_host", "nvlink_domain", "tp_pp_dp", "user_buffers",
    "layers_per_stage", "no_gloo",
}  # fmt: skip


class JobError(ValueError):
    """A job that cannot be read or planned; the message says what to write instead."""


@dataclass(frozen=True)
class Job:
    """A job as planned: its arguments of ``initialize_model_parallel``, and where its ranks are."""

    arguments: Mapping[str, Any]  # of initialize_model_parallel, those that were given
    world_size: int
    ranks_per_host: int = RANKS_PER_HOST
    nvlink_domain: int | None = None  # GPUs; None: no more than a host
    # Of the model and the batch, by Megatron's flag: {"num-experts": 8}.
    model: Mapping[str, int] = field(default_factory=dict)
    user_buffers: bool = False  # whether Transformer Engine's are on (--tp-comm-overlap)
    assumed: tuple[str, ...] = field(default=(), compare=False)  # in sentences
    # The flags of a launch line, by "used", "without effect" and "not read".
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)

    def request(self) -> Request:
        """The request of ``initialize_model_parallel``; where that would raise, a JobError."""
        request = Request(**self.arguments, job_size=self.world_size)
        try:
            request.check()
            _ = request.plan
        except Exception as error:
            raise JobError(str(error)) from error
        return request

    def plan(self) -> GroupPlan:
        """The groups that the job would create."""
        return self.request().plan

    def layouts(self, order: str) -> Mapping[str, RankLayout] | None:
        """The job's layouts under another order, or None where Megatron refuses that order."""
        try:
            return replace(self, arguments={**self.arguments, "order": order}).request().layouts
        except JobError:
            return None


def from_sizes(**flags: Any) -> Job:
    """The job with these flags, named with ``_`` for ``-``: ``tp=4, world_size=64``."""
    return of_settings(settings_of(flags))


def settings_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of flags; None or False is a flag that was not given."""
    settings = {}
    for name, value in flags.items():
        if value is not None and value is not False:
            settings[SIZES[name.replace("_", "-")].meaning] = value
    return settings


def of_settings(settings: Mapping[str, Any]) -> Job:
    """The job of all settings. JobError if they do not decide it."""
    arguments = {name: value for name, value in settings.items() if name not in _NO_ARGUMENTS}
    assumed = []
    if settings.get("no_gloo"):
        arguments["create_gloo_process_groups"] = False
    if "order" not in arguments:
        resolved, source = order.resolve_order(TP_PP_DP if settings.get("tp_pp_dp") else None)
        if resolved is not None:
            arguments["order"] = resolved
            if "argument" not in source:
                assumed.append(f"the order {resolved}, from {source}")
    world = settings.get("world")
    hosts = settings.get("hosts")
    per_host = settings.get("per_host")
    if world is None and per_host is not None:
        world = per_host * (hosts or 1)
        if hosts is None:
            assumed.append(f"the {world} ranks of one host are the whole job")
    if world is None:
        sizes = ("tensor_model", "pipeline_model", "context")
        least = prod(arguments.get(f"{size}_parallel_size", 1) for size in sizes)
        multiple = f" (a multiple of {least}, the product of the sizes)" if least > 1 else ""
        raise JobError(
            f"the number of ranks is missing. Give --world-size{multiple}, or torchrun's --nnodes "
            f"and --nproc-per-node."
        )
    if per_host is None and hosts:
        per_host = -(-world // hosts)
    elif per_host is None:
        per_host = min(RANKS_PER_HOST, world)
        assumed.append(f"{per_host} ranks on each host; --gpus-per-node changes it")
    for name, value in (("world-size", world), ("gpus-per-node", per_host)):
        if value < 1:
            raise JobError(f"--{name} must be at least 1, got {value}.")
    if hosts is not None and world > per_host * hosts:
        raise JobError(
            f"{world} ranks do not fit on {hosts} hosts of {per_host}, which are "
            f"{per_host * hosts}. Change one of the three numbers."
        )
    _add_virtual_stages(arguments, settings)
    model = {name: settings[name] for name in OF_MODEL if name in settings}
    buffers = bool(settings.get("user_buffers"))
    domain = settings.get("nvlink_domain")
    return Job(arguments, world, per_host, domain, model, buffers, tuple(assumed))


def _add_virtual_stages(arguments: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Count virtual stages from their layers, as Megatron's parser does; 1 is none."""
    name = "virtual_pipeline_model_parallel_size"
    each = settings.get("layers_per_stage")
    stages = arguments.get("pipeline_model_parallel_size", 1)
    if each is not None and name not in arguments:
        layers = settings.get("num-layers")
        more = sum(bool(settings.get(key)) for key in ("with_embedding", "with_loss"))
        if layers is None or each < 1 or (layers + more) % (stages * each):
            counted = f"{layers} + {more} for the embedding and the loss" if more else layers
            raise JobError(
                f"--num-layers-per-virtual-pipeline-stage {each} needs a --num-layers that is a "
                f"multiple of {stages} stages x {each}, got {counted}."
            )
        arguments[name] = (layers + more) // stages // each
    if arguments.get(name) == 1:
        del arguments[name]
