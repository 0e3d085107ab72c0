"""The layout of a command: from sizes, a pasted launch line, or a saved plan."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import isfile
from pathlib import Path
from typing import Any

from compat.cli.bash import LONGEST, Command, ScriptError, commands
from compat.cli.kubernetes import is_manifest, pods_of
from compat.cli.launch import job_of, rank_of
from compat.cli.world import head_of
from compat.megatron import releases
from compat.megatron.request import Request
from compat.planned.job import MOST_RANKS, RANKS_PER_HOST, Job, JobError, check_hosts
from compat.planned.layouts import SHARDS
from hypergrid.files import bytes_of, decoded, text_of
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
    network: dict[str, Any] | None = None  # of a plan that an earlier release has saved


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
    if beside.network is not None:
        raise JobError(
            f"{path} has a network of hosts of different sizes or of several levels, which is no "
            f"longer read: save the plan again, with --gpus-per-node and --nvlink-domain."
        )
    for name in re.findall(rb'"(?:[^"\\]|\\.)*"', text):
        # A name with a line break would print a line of its own, which could say anything.
        if "\n" in json.loads(name):
            raise JobError(
                f"{path} is not a valid plan: a name in it has a line break: "
                f"{shown(json.loads(name))}."
            )
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
    listed = []
    for row in plan.rows:
        listed += [(row.label, group) for group in row.explicit or ()]
    for unit, number, most in (
        ("ranks", count, MOST_RANKS),
        ("rows", len(plan.rows), 1 << 11),
        ("groups that are listed", len(listed), 1 << 17),
        ("rows times ranks", len(plan.rows) * count, 40 * MOST_RANKS),
    ):
        if number > most:
            raise JobError(f"{number:,} {unit} are too many: at most {most:,} can be planned.")
    ranks_of: list[tuple[str, Sequence[int]]] = []
    for name, layout in plan.layouts.items():
        last_rank = layout.stop - 1
        ranks_of.append((f"the layout {shown(name)}", [last_rank]))
    for label, group in listed:
        ranks_of.append((f"a group of {shown(label)}", group))
    for owner, ranks in ranks_of:
        for rank in ranks:
            if not 0 <= rank < count:
                raise JobError(
                    f"{path} is not a valid plan: {owner} has rank {rank}, and the first layout, "
                    f"which the plan is for, ends at rank {count - 1}."
                )


def of_job(job: Job) -> PlannedJob:
    """The plan of a job."""
    release = ".".join(map(str, releases.RELEASE))
    if releases.ORIGIN != "installed":
        release += f" ({releases.ORIGIN})"
    return PlannedJob(job.plan(), job.ranks_per_host, job.nvlink_domain, job, job.assumed, release)


def line_of(text: str) -> str:
    """The text of ``--from-args``: the value itself, a file's text, or that of standard input."""
    if text == "-" or isfile(text):
        return text_of(text)
    if re.fullmatch(r"[\w./~-]+\.(sh|slurm|sbatch|bash|ya?ml|txt|job)", text):
        raise JobError(f"there is no file {text}.")
    return text


def from_line(
    text: str, variables: Mapping[str, str] | None = None, defaults: bool = False, **flags: Any
) -> Job:
    """The job that a launch line or a whole script starts, with these variables and flags."""
    return started(text, variables, defaults, **flags)[0]


def started(
    text: str, variables: Mapping[str, str] | None = None, defaults: bool = False, **flags: Any
) -> tuple[Job, Command]:
    """The job that a launch line or a whole script starts, and the command that starts it."""
    if len(text) > LONGEST:
        raise JobError(f"the launch line is longer than {LONGEST:,} characters.")
    pods = pods_of(text) if is_manifest(text) else None
    if pods is not None and flags.get("gpus_per_node") is None:
        flags["gpus_per_node"] = pods.slots
    try:
        if pods is None:
            programs, assumed = commands(text, variables, head_of(text), defaults)
        else:
            programs, assumed = commands(pods.line, variables, pods.variables, defaults)
    except ScriptError as error:
        raise JobError(str(error)) from None
    candidates = _launches(programs)
    first = candidates[0]
    job = job_of(first.words, first.variables, **flags)
    for other in candidates[1:]:
        if job_of(other.words, other.variables, **flags) != job:
            raise JobError(
                f"lines {first.line} and {other.line} of the launch line start different jobs. "
                f"Paste one of them, or decide by --set NAME=VALUE which is started."
            )
    hosts = -(-job.world_size // job.ranks_per_host)
    # The line of a pod and the number of pods are written in two places.
    is_decided = flags.get("world_size") is not None
    if pods is not None and pods.pods != hosts and not is_decided:
        raise JobError(
            f"the manifest has {pods.pods} pods, and its command starts {job.world_size} ranks on "
            f"{hosts} hosts. Change one of them, or give --world-size."
        )
    sentences = list(job.assumed)
    for default in dict.fromkeys(assumed):
        name = default.partition("=")[0]
        sentences.append(f"{default}, its default; --set {name}=VALUE changes it")
    return replace(job, assumed=tuple(sentences)), first


def _launches(programs: Sequence[Command]) -> list[Command]:
    """The programs of a script that start its job: those with a launcher, or the Python programs.

    A script may run other Python programs before: ``python prepare.py`` and then ``torchrun ...``.
    """
    by_rank: dict[int, list[Command]] = {0: [], 1: [], 2: []}
    for command in programs:
        # The rest of a launch that has lost the backslash before it.
        is_flag = command.words[0].text.startswith("-")
        if is_flag and command is not programs[0]:
            raise JobError(
                f"line {command.line} of the launch line begins with a flag. Join it with the line "
                f"before by a backslash."
            )
        by_rank[rank_of(command.words)].append(command)
    if not by_rank[1] and not by_rank[2]:
        raise JobError(
            "the launch line starts no Python program: paste the line with torchrun or srun, or "
            "the script that has it."
        )
    return by_rank[2] or by_rank[1]


def read(text: str) -> PlannedJob:
    """One side of a comparison: a saved plan's path, or sizes and launch lines as text."""
    if "--" in text:
        return of_job(from_line(text))
    if not Path(text).exists():
        raise JobError(f"{text!r} is neither a file nor sizes such as '--world-size 64 --tp 4'.")
    return saved(Path(text))
