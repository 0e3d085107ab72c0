"""The layout of a command: from sizes, a launch, or a saved plan."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from compat.cli.launch import job_of
from compat.cli.line import Command, command_of
from compat.cli.run import launches
from compat.megatron import releases
from compat.planned.job import (
    MOST_RANKS,
    Job,
    JobError,
    checked_hosts,
    from_sizes,
)
from hypergrid.files import bytes_of, decoded
from hypergrid.layout import RankLayout
from hypergrid.messages import shown
from hypergrid.plan import GroupPlan
from hypergrid.topology import Topology

_MOST_SECONDS = 60  # that a script may run, if --timeout says nothing else


@dataclass(frozen=True)
class PlannedJob:
    """A plan, and where its ranks are."""

    plan: GroupPlan
    ranks_per_host: int
    nvlink_domain: int | None = None  # GPUs; None: not known, or no more than a host
    job: Job | None = None  # None: it was saved
    assumed: Sequence[str] = ()
    release: str = ""  # of megatron-core, and where it comes from if none is installed

    @property
    def layouts(self) -> dict[str, RankLayout]:
        """The plan's; without a "decoder", the first is used as that."""
        return {**self.plan.layouts, "decoder": self.plan.layouts.get("decoder", self.plan.layout)}

    @property
    def order(self) -> str:
        """The order as it was asked for, or the dims of the dense layout."""
        if self.job is None:
            return self.layouts["decoder"].order
        return self.job.request().order

    @cached_property
    def hosts(self) -> Topology:
        """The hosts of all ranks."""
        return Topology(self._all_ranks, self.ranks_per_host)

    @cached_property
    def domains(self) -> Topology | None:
        """The NVLink domains of all ranks, where they are known."""
        if self.nvlink_domain is None:
            return None
        return Topology(self._all_ranks, self.nvlink_domain)

    @property
    def _all_ranks(self) -> RankLayout:
        """Also those in front of the plan's window."""
        return RankLayout(("rank",), (self.plan.window.stop,))


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
    if ranks_per_host is None:
        ranks_per_host = beside.ranks_per_host
    if nvlink_domain is None:
        nvlink_domain = beside.nvlink_domain
    ranks_per_host, assumed = checked_hosts(plan.window.stop, ranks_per_host, nvlink_domain)
    return PlannedJob(plan, ranks_per_host, nvlink_domain, None, assumed, beside.megatron)


def _check_ranks(path: Path, plan: GroupPlan) -> None:
    """Refuse a plan that would take minutes to print, or that has ranks outside its window."""
    count = plan.window.stop
    listed_groups = [group for row in plan.rows for group in row.explicit or ()]
    cost = len(plan.rows) * max(count, 1 << 14) + len(listed_groups) * 256
    if count > MOST_RANKS or cost > 40 * MOST_RANKS:
        raise JobError(
            f"{path} is too large to be planned: at most {MOST_RANKS:,} ranks in 40 rows are."
        )
    last_ranks = [layout.stop - 1 for layout in plan.layouts.values()]
    for rank in chain(last_ranks, *listed_groups):
        if not 0 <= rank < count:
            raise JobError(
                f"{path} is not a valid plan: a layout or a group has rank {rank}, and the first "
                f"layout, which the plan is for, ends at rank {count - 1}."
            )


def of_job(job: Job) -> PlannedJob:
    """The plan of a job."""
    release = ".".join(map(str, releases.RELEASE))
    if releases.ORIGIN != "installed":
        release += f" ({releases.ORIGIN})"
    return PlannedJob(job.plan(), job.ranks_per_host, job.nvlink_domain, job, job.assumed, release)


def planned_jobs(plan: str | None, megatron: str | None, **flags: Any) -> list[PlannedJob]:
    """The layouts that a command line names: of a saved plan, or of each job that is started."""
    releases.follow(megatron)
    if plan is None:
        return [of_job(job) for job, _ in started(**flags)]
    ranks_per_host = flags.pop("gpus_per_node")
    nvlink_domain = flags.pop("nvlink_domain")
    if megatron is not None or any(flags.values()):
        raise JobError("--plan holds the whole layout: give it alone, or sizes instead.")
    return [saved(Path(plan), ranks_per_host, nvlink_domain)]


def started(
    words: Sequence[str],
    run: bool,
    timeout: float | None,
    chdir: Path | None,
    from_args: str | None,
    **flags: Any,
) -> list[tuple[Job, Command]]:
    """The jobs that a command line starts, each with the first command that starts it.

    ``words`` are a command, with ``run`` a script of bash and its arguments. ``flags`` win over
    those of the commands; without a command they are the whole job.
    """
    if words and from_args is not None:
        raise JobError("give a command or --from-args, and not both.")
    if run and not words:
        raise JobError("--run needs a script behind it: hypergrid check --run job.sh ARGUMENTS.")
    if run:
        script, *arguments = words
        commands = _recorded(Path(script), arguments, timeout or _MOST_SECONDS, chdir)
    elif from_args is not None:
        commands = [command_of(from_args)]
    elif words:
        commands = [Command(words, dict(os.environ))]
    else:
        return [(from_sizes(**flags), Command(()))]
    jobs: list[tuple[Job, Command]] = []
    for command in commands:
        job = job_of(command, **flags)
        # A script that starts each host's part by ssh starts the same job several times.
        if job not in [other for other, _ in jobs]:
            jobs.append((job, command))
    return jobs


def _recorded(
    script: Path, arguments: Sequence[str], timeout: float, directory: Path | None
) -> Sequence[Command]:
    """The launches of a script, which bash runs; what is done and how it ended goes to stderr."""
    if not script.is_file():
        raise JobError(f"there is no file {script}.")
    name = shown(script.name)
    _say(f"runs {name} here, without its launchers; all other commands run")
    recording = launches(script, arguments, timeout, directory)
    ending = f"{name} ended with status {recording.status}"
    if recording.status is None:
        ending = f"{name} had not ended after {timeout:g} s and was stopped"
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
