"""The layout of a command: from sizes, a pasted launch line, or a saved plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import isfile
from pathlib import Path
from typing import Any

from compat.megatron import releases
from compat.megatron.planning import Request
from compat.planned.job import RANKS_PER_HOST, Job, JobError, by_default, from_words, weight
from compat.planned.layouts import SHARDS
from compat.planned.orders import ranked_orders
from hypergrid.cli.shell import Command, commands
from hypergrid.files import bytes_of, decoded, text_of
from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import shown
from hypergrid.plan import GroupPlan, GroupRow
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
        both = {n: each for n, each in self.layouts.items() if n in SHARDS}
        if order == self.order:
            return both
        try:
            turned = {name: _turned(layout, order) for name, layout in both.items()}
        except LayoutError:
            return None
        pipelines = {each.stride("pp") for each in turned.values() if "pp" in each.dims}
        return turned if len(pipelines) < 2 else None

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
        hosts = self.nvlink_domain // self.ranks_per_host
        return {name: f"NVLink domain {i // hosts}" for i, name in enumerate(self.hosts.names)}


def _topology(ranks: int, in_each: int) -> Topology:
    return Topology(RankLayout(("rank",), (ranks,)), in_each)


def _turned(layout: RankLayout, order: str) -> RankLayout:
    sizes = dict(zip(layout.dims, layout.sizes, strict=True))
    tokens = [token for token in order.split("-") if token in sizes]
    return RankLayout.from_order("-".join(tokens), sizes, layout.offset)


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
        plan, beside = GroupPlan.from_json(text), decoded(text, _Beside, "the plan")
    except ValueError as error:
        raise JobError(f"{path}: {error}") from None
    if beside.network is not None:
        raise JobError(
            f"{path} has a network of hosts of different sizes or of several levels, which is no "
            f"longer read: save the plan again, with --gpus-per-node and --nvlink-domain."
        )
    for name in (beside.megatron, *_names(plan)):
        # It would print a line of its own, which could say anything.
        if "\n" in name:
            raise JobError(
                f"{path} is not a valid plan: a name in it has a line break: {shown(name)}."
            )
    _refuse_large(plan.window.stop, plan.rows)
    known = range(plan.window.stop)  # an encoder's ranks are in front of the window
    for what, ranks in _ranks_named(plan):
        outside = next((rank for rank in ranks if rank not in known), None)
        if outside is not None:
            raise JobError(
                f"{path} is not a valid plan: {what} has rank {outside}, and the first layout, "
                f"which the plan is for, ends at rank {known[-1]}."
            )
    per_host = beside.ranks_per_host if ranks_per_host is None else ranks_per_host
    domain = beside.nvlink_domain if nvlink_domain is None else nvlink_domain
    assumed: tuple[str, ...] = ()
    if per_host is None:
        per_host = min(RANKS_PER_HOST, len(plan.window))
        assumed = (f"{per_host} ranks on each host; --gpus-per-node says otherwise",)
    _check_hosts(per_host, domain)
    return PlannedJob(plan, per_host, domain, None, assumed, beside.megatron)


def _release() -> str:
    text = ".".join(map(str, releases.RELEASE))
    return text if releases.ORIGIN == "installed" else f"{text} ({releases.ORIGIN})"


_MOST_RANKS, _MOST_ROWS, _MOST_GROUPS = 1 << 20, 1 << 11, 1 << 17


def _refuse_large(ranks: int, rows: Sequence[GroupRow] = ()) -> None:
    """More than this takes more than seconds, or more memory than a laptop has."""
    counts = (
        ("ranks", ranks, _MOST_RANKS),
        ("rows", len(rows), _MOST_ROWS),
        ("groups that are listed", sum(len(row.explicit or ()) for row in rows), _MOST_GROUPS),
        ("rows times ranks", len(rows) * ranks, 40 * _MOST_RANKS),
    )
    for what, count, most in counts:
        if count > most:
            raise JobError(f"{count:,} {what} are too many: at most {most:,} can be planned.")


def _check_hosts(ranks_per_host: int, nvlink_domain: int | None) -> None:
    for flag, ranks in (("gpus-per-node", ranks_per_host), ("nvlink-domain", nvlink_domain)):
        if ranks is not None and not 0 < ranks <= _MOST_RANKS:
            raise JobError(f"--{flag} must be from 1 to {_MOST_RANKS:,}, got {shown(ranks)}.")
    if nvlink_domain is not None and nvlink_domain % ranks_per_host:
        raise JobError(
            f"an NVLink domain of {nvlink_domain} GPUs does not hold whole hosts of "
            f"{ranks_per_host}. Give a multiple of the GPUs of a host."
        )


def _names(plan: GroupPlan) -> Iterator[str]:
    for name, layout in plan.layouts.items():
        yield from (name, *layout.dims)
    for row in plan.rows:
        yield from (row.label, row.backend or "", row.traffic)


def _ranks_named(plan: GroupPlan) -> Iterator[tuple[str, Sequence[int]]]:
    for name, layout in plan.layouts.items():
        yield f"the layout {shown(name)}", layout.ranks[-1:]
    for row in plan.rows:
        for group in row.explicit or ():
            yield f"a group of {shown(row.label)}", group


def of_job(job: Job) -> PlannedJob:
    """The plan of a job. A refusal of its order names the best one that is not refused."""
    _refuse_large(job.world_size)
    _check_hosts(job.ranks_per_host, job.nvlink_domain)
    try:
        plan = job.plan()
    except JobError as error:
        if "order" not in job.arguments:
            raise
        hosts = _topology(job.world_size, job.ranks_per_host)
        allowed = ranked_orders(Request.order, job.layouts, hosts)
        if not allowed:
            raise
        raise JobError(f"{error} order={allowed[0].order} can be laid out.") from None
    return PlannedJob(plan, job.ranks_per_host, job.nvlink_domain, job, job.assumed, _release())


def line_of(given: str) -> str:
    """The text of ``--from-args``: the value itself, a file's text, or that of standard input."""
    return text_of(given) if given == "-" or isfile(given) else given


def from_line(text: str, settings: Mapping[str, str] | None = None, **given: Any) -> Job:
    """The job that a launch line or a whole script starts, with these variables and flags."""
    return started(text, settings, **given)[0]


def started(
    text: str, settings: Mapping[str, str] | None = None, **given: Any
) -> tuple[Job, Command]:
    """The same, and the command that starts it."""
    found = list[Command]()
    for each in commands(text, settings):
        # A pasted line may have lost the backslashes at its ends.
        if found and re.match(r"-|.*\.py$", each.words[0].text):
            found[-1] = replace(found[-1], words=[*found[-1].words, *each.words])
        else:
            found.append(each)
    most = max((weight(each.words) for each in found), default=0)
    if not most:
        raise JobError(
            "the launch line starts no Python program: paste the line with torchrun or srun, or "
            "the script that has it."
        )
    starts = [each for each in found if weight(each.words) == most]
    jobs = [from_words(each.words, each.variables, **given) for each in starts]
    other = next((i for i, job in enumerate(jobs) if job != jobs[0]), None)
    if other is not None:
        one, another = starts[0], starts[other]
        condition = one.condition or another.condition
        raise JobError(
            f"lines {one.line} and {another.line} of the launch line start different jobs. Paste "
            f"one of them" + (f", or decide {condition} by --set NAME=VALUE." if condition else ".")
        )
    assumed = (*jobs[0].assumed, *map(by_default, starts[0].assumed))
    return replace(jobs[0], assumed=tuple(dict.fromkeys(assumed))), starts[0]


def read(text: str) -> PlannedJob:
    """One side of a comparison: a saved plan's path, or sizes and launch lines as text."""
    is_file = "--" not in text and Path(text).is_file()
    if not is_file and "--" not in text:
        raise JobError(f"{text!r} is neither a file nor sizes such as '--world-size 64 --tp 4'.")
    return saved(Path(text)) if is_file else of_job(from_line(text))
