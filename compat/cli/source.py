"""The layout of a command: from sizes, a launch, or a saved plan."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compat.cli.launch import job_of
from compat.cli.line import Command, command_of
from compat.cli.run import launches
from compat.megatron import releases
from compat.megatron.request import Request
from compat.planned.job import MOST_RANKS, RANKS_PER_HOST, Job, JobError, check_hosts
from compat.planned.layouts import SHARDS
from hypergrid.files import bytes_of, decoded
from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import shown
from hypergrid.plan import GroupPlan
from hypergrid.topology import Topology


@dataclass(frozen=True)
class PlannedJob:
    """A plan, where its ranks are, and how it would look in another order."""

    plan: GroupPlan
    ranks_per_host: int
    nvlink_domain: int | None = None  # GPUs; None: not known, or no more than a host
    job: Job | None = None  # None: it was saved
    assumed: tuple[str, ...] = ()
    release: str = ""  # of megatron-core, and where it comes from if none is installed

    @property
    def layouts(self) -> dict[str, RankLayout]:
        """The plan's; without a "decoder", the first is used as that."""
        layouts = dict(self.plan.layouts)
        layouts.setdefault("decoder", next(iter(layouts.values())))
        return layouts

    @property
    def order(self) -> str:
        """The order as it was asked for, or the dims of the dense layout."""
        if self.job is None:
            return self.layouts["decoder"].order
        order: str = self.job.arguments.get("order", Request.order)
        return order

    def layouts_in(self, order: str) -> Mapping[str, RankLayout] | None:
        """The layouts under an order; None where it is not allowed."""
        if self.job is not None:
            return self.job.layouts(order)
        layouts = {name: layout for name, layout in self.layouts.items() if name in SHARDS}
        if order == self.order:
            return layouts
        turned = {}
        for name, layout in layouts.items():
            sizes = dict(zip(layout.dims, layout.sizes, strict=True))
            dims = [dim for dim in order.split("-") if dim in sizes]
            try:
                turned[name] = RankLayout.from_order("-".join(dims), sizes, layout.offset)
            except LayoutError:
                return None
        # A pipeline's stages are the same ranks in all layouts.
        strides = {layout.stride("pp") for layout in turned.values() if "pp" in layout.dims}
        if len(strides) > 1:
            return None
        return turned

    def refusal_of(self, order: str) -> str:
        """Why an order is not allowed."""
        if self.job is not None:
            return self.job.refusal(order)
        return "the stages of a pipeline would be other ranks in the layout of experts."

    @property
    def hosts(self) -> Topology:
        """The hosts of all ranks."""
        return _topology(self.plan.window.stop, self.ranks_per_host)

    @property
    def domains(self) -> Topology | None:
        """The NVLink domains of all ranks, where they are known."""
        if self.nvlink_domain is None:
            return None
        return _topology(self.plan.window.stop, self.nvlink_domain)

    @property
    def within(self) -> dict[str, str]:
        """By host its NVLink domain, in words; empty where domains are not known."""
        if self.nvlink_domain is None:
            return {}
        hosts_of_domain = self.nvlink_domain // self.ranks_per_host
        domain_of = {}
        for number, host in enumerate(self.hosts.names):
            domain_of[host] = f"NVLink domain {number // hosts_of_domain}"
        return domain_of


def _topology(ranks: int, ranks_per_place: int) -> Topology:
    return Topology(RankLayout(("rank",), (ranks,)), ranks_per_place)


@dataclass
class _Beside:
    """The fields that ``plan --json`` writes beside the plan itself."""

    ranks_per_host: int | None = None
    nvlink_domain: int | None = None
    megatron: str = ""


def saved(
    path: Path, ranks_per_host: int | None = None, nvlink_domain: int | None = None
) -> PlannedJob:
    """The plan in a file: what ``plan --json`` printed, or a ``GroupPlan.to_json()``."""
    text = bytes_of(path)
    try:
        plan = GroupPlan.from_json(text)
        beside = decoded(text, _Beside, "the plan")
    except ValueError as error:
        raise JobError(f"{path}: {error}") from None
    # A name with a line break would print a line of its own, which could say anything.
    if re.search(rb"\\n|\\u000a", text, re.I) is not None:
        raise JobError(f"{path} is not a valid plan: a name in it has a line break.")
    _check_ranks(path, plan)
    assumed: tuple[str, ...] = ()
    if ranks_per_host is None:
        ranks_per_host = beside.ranks_per_host
    if nvlink_domain is None:
        nvlink_domain = beside.nvlink_domain
    if ranks_per_host is None:
        ranks_per_host = min(RANKS_PER_HOST, len(plan.window))
        assumed = (f"{ranks_per_host} ranks on each host; --gpus-per-node says otherwise",)
    check_hosts(plan.window.stop, ranks_per_host, nvlink_domain)
    return PlannedJob(plan, ranks_per_host, nvlink_domain, None, assumed, beside.megatron)


def _check_ranks(path: Path, plan: GroupPlan) -> None:
    """Refuse a plan with ranks outside its window, or one that would take minutes to print."""
    count = plan.window.stop
    listed_groups = [group for row in plan.rows for group in row.explicit or ()]
    cost = len(plan.rows) * max(count, 1 << 14) + len(listed_groups) * 256
    if count > MOST_RANKS or cost > 40 * MOST_RANKS:
        raise JobError(
            f"{path} is too large to be planned: {count:,} ranks, {len(plan.rows):,} rows, "
            f"{len(listed_groups):,} groups that are listed. At most {MOST_RANKS:,} ranks and 40 "
            f"rows are."
        )
    last_ranks = [layout.stop - 1 for layout in plan.layouts.values()]
    for ranks in [last_ranks, *listed_groups]:
        for rank in ranks:
            if not 0 <= rank < count:
                raise JobError(
                    f"{path} is not a valid plan: a layout or a group has rank {rank}, and the "
                    f"first layout, which the plan is for, ends at rank {count - 1}."
                )


def of_job(job: Job) -> PlannedJob:
    """The plan of a job."""
    release = ".".join(map(str, releases.RELEASE))
    if releases.ORIGIN != "installed":
        release += f" ({releases.ORIGIN})"
    return PlannedJob(job.plan(), job.ranks_per_host, job.nvlink_domain, job, job.assumed, release)


@dataclass(frozen=True)
class Source:
    """The launch that a command line names: at most one of a command, a script and a line."""

    words: Sequence[str] = ()  # the command, or with ``is_script`` the script and its arguments
    is_script: bool = False
    line: str | None = None
    timeout: float = 60  # seconds that the script may run
    directory: str | None = None  # where it runs
    prefix: str | None = None  # of the overrides that hold sizes


def started(source: Source, **flags: Any) -> list[tuple[Job, Command]]:
    """The jobs that are started, each with the first command that starts it.

    ``flags`` win over those of the commands; without a command they are the whole job.
    """
    if source.is_script:
        commands = _recorded(source)
    elif source.line is not None:
        commands = [command_of(source.line)]
    else:
        commands = [Command(source.words, dict(os.environ))]
    jobs: list[tuple[Job, Command]] = []
    for command in commands:
        job = job_of(command, source.prefix, **flags)
        # A script that starts each host's part by ssh starts the same job several times.
        if job not in [other for other, _ in jobs]:
            jobs.append((job, command))
    return jobs


def _recorded(source: Source) -> Sequence[Command]:
    """The launches of a script, which bash runs; what is done and how it ended goes to stderr."""
    script = Path(source.words[0])
    if not script.is_file():
        raise JobError(f"there is no file {script}.")
    name = shown(script.name)
    _say(f"runs {name} here, without its launchers; all other commands run")
    directory = None if source.directory is None else Path(source.directory)
    recording = launches(script, source.words[1:], source.timeout, directory)
    ending = f"{name} ended with status {recording.status}"
    if recording.status is None:
        ending = f"{name} had not ended after {source.timeout:g} s and was stopped"
    if not recording.launches:
        raise JobError(
            f"{ending} and started no job. Its output above says why; --timeout gives it longer, "
            f"and a launcher that is called by its path is not seen."
        )
    _say(f"{ending}; launches: {len(recording.launches)}")
    return recording.launches


def _say(text: str) -> None:
    print(f"hypergrid: {text}", file=sys.stderr, flush=True)


def read(text: str) -> PlannedJob:
    """One side of a comparison: a saved plan's path, or sizes and launch lines as text."""
    if "--" in text:
        return of_job(job_of(command_of(text)))
    if not Path(text).exists():
        raise JobError(f"{text!r} is neither a file nor sizes such as '--world-size 64 --tp 4'.")
    return saved(Path(text))
