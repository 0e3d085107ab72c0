"""The layout of a command: from sizes, a pasted launch line, or a saved plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import isfile
from pathlib import Path
from typing import Any, Literal

from compat.megatron import releases
from compat.megatron.planning import Request
from compat.planned.job import RANKS_PER_HOST, Job, JobError, by_default, from_words, weight
from compat.planned.traffic import SHARDS, VOLUMES, flows_of
from hypergrid.cli.shell import Command, commands
from hypergrid.files import bytes_of, decoded, text_of
from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import shown
from hypergrid.network.files import expanded, from_data
from hypergrid.network.files import read as read_network
from hypergrid.network.levels import Network
from hypergrid.network.placement import HostOrder, place
from hypergrid.network.traffic import Estimate, Flow, Layouts, estimate, ranked
from hypergrid.plan import GroupPlan, GroupRow
from hypergrid.topology import Topology

_NOT_SAID = 1 << 30  # ranks of a host of which its file says nothing


@dataclass(frozen=True)
class NetworkFlags:
    """How the network was asked for, beside the sizes of its units."""

    topology: str | None = None  # a file
    hostlist: str | None = None
    bandwidth: str | None = None  # "host=450,world=50"
    data: Any = None  # of a saved plan, as a file's

    def network(self, ranks: int, per_host: int, **units: int | None) -> tuple[Network, bool]:
        """The network of that many ranks, and whether ``per_host`` counts there.

        ``units`` are those of ``Network.regular``.
        """
        if self.data is not None:
            network = from_data(self.data, _NOT_SAID)
        elif self.topology is None:
            network = Network.regular(ranks, per_host, **units)  # type: ignore[arg-type]
        elif any(size is not None for size in units.values()):
            flag = next(name for name, size in units.items() if size is not None)
            raise JobError(
                f"--topology has the levels of the network: leave out --{flag.replace('_', '-')}."
            )
        else:
            network = read_network(Path(self.topology), _NOT_SAID)
        counts = (self.topology or self.data) is None or _NOT_SAID in network.ranks
        own = tuple(per_host if n == _NOT_SAID else n for n in network.ranks)
        network = replace(network, ranks=own)
        if self.hostlist is not None:
            network = self._listed(network, ranks)
        if self.bandwidth is not None:
            network = replace(network, bandwidth={**network.bandwidth, **self._speeds()})
        network.numbers(ranks)  # refuses too few
        return network, counts

    def _listed(self, network: Network, ranks: int) -> Network:
        names = expanded(self.hostlist or "")
        if self.topology is None and self.data is None:
            if len(names) < len(network.hosts):
                raise JobError(
                    f"--hostlist names {len(names)} hosts, and {ranks} ranks need "
                    f"{len(network.hosts)}."
                )
            return replace(network, hosts=tuple(names[: len(network.hosts)]))
        place = {name: number for number, name in enumerate(network.hosts)}
        unknown = [name for name in names if name not in place]
        if unknown:
            raise JobError(
                f"--hostlist names {unknown[0]}, which {self.topology or 'the plan'} does not have."
            )
        return network.in_order([place[name] for name in names])

    def _speeds(self) -> dict[str, float]:
        try:
            pairs = [pair.split("=") for pair in (self.bandwidth or "").split(",")]
            return {level.strip(): float(speed) for level, speed in pairs}
        except ValueError:
            raise JobError(f"--bandwidth {self.bandwidth} is not like host=450,world=50.") from None


@dataclass(frozen=True)
class PlannedJob:
    """A plan, where its ranks are, and how it would look in another order."""

    plan: GroupPlan
    network: Network
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
        """The layouts under another order; None where it is not allowed."""
        if self.job is not None:
            return self.job.layouts(order)
        both = {n: each for n, each in self.layouts.items() if n in SHARDS}
        try:
            turned = {name: _turned(layout, order) for name, layout in both.items()}
        except LayoutError:
            return None
        pipelines = {each.stride("pp") for each in turned.values() if "pp" in each.dims}
        return turned if len(pipelines) < 2 else None

    @property
    def hosts(self) -> Topology:
        """The hosts of all ranks."""
        return self.network.topology(self.plan.window.stop)

    @property
    def places(self) -> dict[str, Topology]:
        """The hosts and other units of all ranks, by level."""
        names = self.network.levels[:-1]
        return {name: self.network.topology(self.plan.window.stop, name) for name in names}

    @property
    def boxes(self) -> dict[str, int]:
        """The ranks of each host that has any of the job's."""
        return dict(self.hosts.hosts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Traffic:
    """The volumes of a step and their network: in seconds where the shape is known.

    Else in the model's volumes: where only hosts are known, what crosses them; else at the pace of
    each level, as parts of the slowest.
    """

    subject: PlannedJob
    network: Topology | Network
    flows_of: Callable[[Layouts], list[Flow]]
    unit: Literal["seconds", "volumes between hosts", "volumes at the slowest level's pace"]

    @classmethod
    def of(
        cls, subject: PlannedJob, volumes: Mapping[str, float] | None = None, by_hosts: bool = True
    ) -> Traffic:
        """The cost by ``volumes`` if given, else by the model's shape, else by fixed volumes.

        Without ``by_hosts`` it is never what crosses hosts alone.
        """
        network, shape = subject.network, subject.job and subject.job.shape
        if shape and volumes is None:
            stages = subject.job and subject.job.arguments.get(
                "virtual_pipeline_model_parallel_size"
            )
            flows_of_shape = partial(shape.flows, virtual_stages=stages or 1)
            return cls(subject, network, flows_of_shape, "seconds")
        of_volumes = partial(flows_of, volumes=VOLUMES if volumes is None else volumes)
        if by_hosts and not network.units and not network.bandwidth:
            return cls(subject, subject.hosts, of_volumes, "volumes between hosts")
        slowest = min(network.speeds.values())
        ratios = {level: speed / slowest for level, speed in network.speeds.items()}
        scaled = replace(network, bandwidth=ratios)
        return cls(subject, scaled, of_volumes, "volumes at the slowest level's pace")

    @property
    def seconds(self) -> bool:
        """Whether costs are seconds."""
        return self.unit == "seconds"

    def estimate(self, order: Sequence[int] = ()) -> Estimate:
        """Of the layout as it was asked for; ``order`` is another one of its hosts."""
        layouts, network = self.subject.layouts, self._priced
        network = network.in_order(order) if order else network
        return estimate(layouts, network, self.flows_of(layouts))

    def placed(self) -> HostOrder:
        """The order of hosts that costs least."""
        layouts = self.subject.layouts
        return place(layouts, self._priced, self.flows_of(layouts))

    @property
    def _priced(self) -> Network:
        assert isinstance(self.network, Network)  # by_hosts was given without it
        return self.network


def _turned(layout: RankLayout, order: str) -> RankLayout:
    sizes = dict(zip(layout.dims, layout.sizes, strict=True))
    tokens = [token for token in order.split("-") if token in sizes]
    return RankLayout.from_order("-".join(tokens), sizes, layout.offset)


@dataclass
class _Beside:
    """The fields that ``plan --json`` writes beside the plan itself."""

    ranks_per_host: int | None = None
    network: dict[str, Any] | None = None
    megatron: str = ""


def saved(
    path: Path,
    ranks_per_host: int | None = None,
    where: NetworkFlags = NetworkFlags(),
    **units: int | None,
) -> PlannedJob:
    """The plan in a file: what ``plan --json`` printed, or a ``GroupPlan.to_json()``."""
    text = bytes_of(path)
    try:
        plan, beside = GroupPlan.from_json(text), decoded(text, _Beside, "the plan")
    except ValueError as error:
        raise JobError(f"{path}: {error}") from None
    _refuse_large(plan.window.stop, plan.rows)
    known = range(plan.window.stop)  # an encoder's ranks are in front of the window
    for what, ranks in _ranks_named(plan):
        outside = next((rank for rank in ranks if rank not in known), None)
        if outside is not None:
            raise JobError(
                f"{path} is not a valid plan: {what} has rank {outside}, and the first layout, "
                f"which the plan is for, ends at rank {known[-1]}."
            )
    given = ranks_per_host or beside.ranks_per_host
    per_host = given or min(RANKS_PER_HOST, len(plan.window))
    assumed = () if given else (f"{per_host} ranks on each host; --gpus-per-node says otherwise",)
    if beside.network is not None and where.topology is None and not any(units.values()):
        where = replace(where, data=beside.network)
    network, counts = where.network(plan.window.stop, per_host, **units)
    return PlannedJob(plan, network, None, assumed if counts else (), beside.megatron)


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


def _ranks_named(plan: GroupPlan) -> Iterator[tuple[str, Sequence[int]]]:
    for name, layout in plan.layouts.items():
        yield f"the layout {shown(name)}", layout.ranks[-1:]
    for row in plan.rows:
        for group in row.explicit or ():
            yield f"a group of {shown(row.label)}", group


def of_job(job: Job, where: NetworkFlags = NetworkFlags()) -> PlannedJob:
    """The plan of a job. A refusal of its order names the best one that is not refused."""
    units = {n: getattr(job, n) for n in ("nvlink_domain", "hosts_per_rack", "racks_per_pod")}
    _refuse_large(job.world_size)
    network, counts = where.network(job.world_size, job.ranks_per_host, **units)
    assumed = tuple(s for s in job.assumed if counts or "ranks on each host" not in s)
    try:
        return PlannedJob(job.plan(), network, job, assumed, _release())
    except JobError as error:
        hosts = network.topology(job.world_size)
        allowed = ranked(Request.order, job.layouts, hosts, flows_of)
        if not allowed or "order" not in job.arguments:
            raise
        raise JobError(f"{error} order={allowed[0].order} can be laid out.") from None


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
