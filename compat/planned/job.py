"""A job that is planned without running it, from its settings: sizes, ranks and hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from compat.megatron.request import Request
from compat.megatron.rows import PlannedRows
from compat.planned.flags import flags_of
from compat.swap import order
from hypergrid.messages import shown
from hypergrid.plan import GroupPlan

TP_PP_DP = "tp-cp-ep-pp-dp"  # what Megatron's --use-tp-pp-dp-mapping means
RANKS_PER_HOST = 8  # where nothing says it
MOST_RANKS = 1 << 20
SIZES = flags_of("sizes")
# How a flag was read. Megatron's parser refuses the last two: "'True' behind --bf16", "--load".
USED = "used"
WITHOUT_EFFECT = "without effect"
NOT_READ = "not read"
STRAY = "stray"
WITHOUT_VALUE = "without value"
_ARGUMENTS = {field.name for field in fields(Request)}
# The settings that divide ranks into groups.
PARALLEL = {name for name in _ARGUMENTS if re.search("_sizes?$|_instances$", name)}


class JobError(ValueError):
    """A job that cannot be read or planned; the message says what to write instead."""


@dataclass(frozen=True)
class Job:
    """A job as planned: its arguments of ``initialize_model_parallel``, and where its ranks are."""

    arguments: Mapping[str, Any]  # of initialize_model_parallel, those that were given
    settings: Mapping[str, Any]  # all, by the meanings of sizes.txt: also of the model
    world_size: int
    ranks_per_host: int
    nvlink_domain: int | None = None  # GPUs; None: no more than a host
    assumed: tuple[str, ...] = field(default=(), compare=False)  # in sentences
    # The flags of a command by how they were read.
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)

    def request(self) -> Request:
        """The request of ``initialize_model_parallel``; where that would raise, a JobError."""
        return self._planned().request

    def plan(self) -> GroupPlan:
        """The groups that the job would create."""
        return self._planned().plan

    def _planned(self) -> PlannedRows:
        try:
            return PlannedRows(Request(**self.arguments, job_size=self.world_size))
        except Exception as error:
            raise JobError(str(error)) from error


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
    arguments = {name: value for name, value in settings.items() if name in _ARGUMENTS}
    assumed = []
    if settings.get("no_gloo"):
        arguments["create_gloo_process_groups"] = False
    if "order" not in arguments:
        requested_order = TP_PP_DP if settings.get("tp_pp_dp") else None
        resolved, source = order.resolve_order(requested_order)
        if resolved is not None:
            arguments["order"] = resolved
            if "argument" not in source:
                assumed.append(f"the order {resolved}, from {source}")
    if "world" not in settings:
        raise JobError(
            "the number of ranks is missing. Give --world-size, or the command with torchrun or "
            "srun."
        )
    world_size = settings["world"]
    nvlink_domain = settings.get("nvlink_domain")
    ranks_per_host, of_hosts = checked_hosts(world_size, settings.get("per_host"), nvlink_domain)
    assumed += of_hosts
    virtual_stages = _virtual_stages(settings)
    if virtual_stages is not None:
        arguments["virtual_pipeline_model_parallel_size"] = virtual_stages
    if arguments.get("virtual_pipeline_model_parallel_size") == 1:
        del arguments["virtual_pipeline_model_parallel_size"]  # 1 is none
    return Job(arguments, settings, world_size, ranks_per_host, nvlink_domain, tuple(assumed))


def _virtual_stages(settings: Mapping[str, Any]) -> int | None:
    """The virtual stages of a pipeline rank, where the layers of each are given.

    None where they are not, or where the layers do not divide: `check` says that.
    """
    layers_each = settings.get("layers_per_stage", 0)
    layers = settings.get("num-layers", 0)
    # The embedding and the loss may count as a layer each.
    layers += settings.get("with_embedding", 0) + settings.get("with_loss", 0)
    pipeline_size = settings.get("pipeline_model_parallel_size", 1)
    if min(layers, layers_each, pipeline_size) < 1 or layers % (pipeline_size * layers_each):
        return None
    return int(layers // (pipeline_size * layers_each))


def checked_hosts(
    world_size: int, ranks_per_host: int | None, nvlink_domain: int | None
) -> tuple[int, list[str]]:
    """The ranks of each host, and in sentences what is assumed of them where they are not known.

    Refuses numbers of ranks that no job has, or that take more memory than a laptop has.
    """
    assumed = []
    if ranks_per_host is None:
        ranks_per_host = min(RANKS_PER_HOST, world_size)
        assumed.append(f"{ranks_per_host} ranks on each host; --gpus-per-node changes it")
    for flag, ranks in (
        ("world-size", world_size),
        ("gpus-per-node", ranks_per_host),
        ("nvlink-domain", nvlink_domain),
    ):
        if ranks is not None and not 0 < ranks <= MOST_RANKS:
            raise JobError(f"--{flag} must be from 1 to {MOST_RANKS:,}, got {shown(ranks)}.")
    if nvlink_domain is not None and nvlink_domain % ranks_per_host:
        raise JobError(
            f"an NVLink domain of {nvlink_domain} GPUs does not hold whole hosts of "
            f"{ranks_per_host}. Give a multiple of the GPUs of a host."
        )
    return ranks_per_host, assumed
