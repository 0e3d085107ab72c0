"""The layout of a command: from sizes, a pasted launch line, or a saved plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compat.megatron.job import RANKS_PER_HOST, Job, JobError, from_line
from compat.megatron.planning import Request
from compat.megatron.traffic import SHARDS, flows_of
from hypergrid.analysis.traffic import ranked
from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import shown
from hypergrid.plan import GroupPlan
from hypergrid.topology import Topology

_LONGEST = 64 << 20  # bytes of a saved plan or dump


@dataclass(frozen=True)
class Subject:
    """A plan, where its ranks are, and how it would look in another order."""

    plan: GroupPlan
    ranks_per_host: int
    job: Job | None = None  # None: it was saved
    hosts_per_rack: int | None = None
    assumed: tuple[str, ...] = ()

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

    def models(self) -> Iterator[tuple[str, Mapping[str, RankLayout]]]:
        """Each grid of an assembly by its name, with the layouts of its dense and expert layers."""
        for name in self.plan.grids:
            known = {"decoder": name, "expert": f"{name}/expert"}
            found = {key: self.plan.layouts.get(each) for key, each in known.items()}
            yield name, {key: layout for key, layout in found.items() if layout is not None}

    @property
    def hosts(self) -> Topology:
        """The hosts of all ranks."""
        return _hosts(self.plan.window.stop, self.ranks_per_host)

    @property
    def racks(self) -> Topology | None:
        """The racks of all ranks, where they are known."""
        if not self.hosts_per_rack:
            return None
        return _hosts(self.plan.window.stop, self.ranks_per_host * self.hosts_per_rack)


def _hosts(ranks: int, on_each: int) -> Topology:
    return Topology(RankLayout(("rank",), (ranks,)), on_each)


def _turned(layout: RankLayout, order: str) -> RankLayout:
    sizes = dict(zip(layout.dims, layout.sizes, strict=True))
    tokens = [token for token in order.split("-") if token in sizes]
    return RankLayout.from_order("-".join(tokens), sizes).on(layout.ranks)


def saved(
    path: Path, ranks_per_host: int | None = None, hosts_per_rack: int | None = None
) -> Subject:
    """The plan in a file: what ``plan --json`` printed, or a ``GroupPlan.to_json()``."""
    data = read_json(path)
    if "layouts" not in data:
        raise JobError(
            f"{path} is not a plan: it has no layouts. `hypergrid plan --json` writes one."
        )
    try:
        plan = GroupPlan.from_json(json.dumps(data))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = str(error).removesuffix(".")
        raise JobError(f"{path} is not a valid plan: {why}.") from None
    known = range(plan.window.stop)  # an encoder's ranks are in front of the window
    for what, ranks in _ranks_named(plan):
        outside = next((rank for rank in ranks if rank not in known), None)
        if outside is not None:
            raise JobError(
                f"{path} is not a valid plan: {what} has rank {outside}, and the first "
                f"layout, which the plan is for, ends at rank {known[-1]}."
            )
    given = ranks_per_host or data.get("ranks_per_host")
    per_host = given or min(RANKS_PER_HOST, len(plan.window))
    assumed = () if given else (f"{per_host} ranks on each host; --gpus-per-node says otherwise",)
    return Subject(plan, per_host, None, hosts_per_rack, assumed)


def _ranks_named(plan: GroupPlan) -> Iterator[tuple[str, Sequence[int]]]:
    for name, layout in plan.layouts.items():
        yield f"the layout {shown(name)}", layout.ranks[-1:]
    for row in plan.rows:
        for group in row.explicit or ():
            yield f"a group of {shown(row.label)}", group


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of JSON, of bounded size."""
    if path.stat().st_size > _LONGEST:
        raise JobError(
            f"{path} is larger than {_LONGEST >> 20} MiB: too large for a plan or a dump."
        )
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise JobError(f"{path} is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise JobError(f"{path} does not hold a JSON object.")
    return data


def of_job(job: Job) -> Subject:
    """The plan of a job. A refusal of its order names the best one that is not refused."""
    try:
        return Subject(job.plan(), job.ranks_per_host, job, job.hosts_per_rack, job.assumed)
    except JobError as error:
        hosts = _hosts(job.world_size, job.ranks_per_host)
        allowed = ranked(Request.order, job.layouts, hosts, flows_of)
        if not allowed or "order" not in job.arguments:
            raise
        raise JobError(f"{error} order={allowed[0].order} can be laid out.") from None


def read(text: str) -> Subject:
    """One side of a comparison: a saved plan's path, or sizes and launch lines as text."""
    is_file = "--" not in text and Path(text).is_file()
    if not is_file and "--" not in text:
        raise JobError(f"{text!r} is neither a file nor sizes such as '--world-size 64 --tp 4'.")
    return saved(Path(text)) if is_file else of_job(from_line(text))
