"""Output of the commands: lines and tables for people, JSON for scripts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from compat.planned.traffic import SHARDS, has_experts
from hypergrid.cli.source import PlannedJob, Traffic
from hypergrid.hangs.stragglers import Late
from hypergrid.hangs.verdict import Diagnosis
from hypergrid.messages import few, printable, span_of
from hypergrid.network.checks import Finding
from hypergrid.network.files import FORMATS, hostlist
from hypergrid.network.levels import Network
from hypergrid.network.placement import HostOrder
from hypergrid.network.traffic import Estimate, Ranked
from hypergrid.show.audit import Audit, Change
from hypergrid.show.diff import Difference
from hypergrid.summary import (
    communicators,
    dims_in_words,
    long_dims,
    sizes_in_words,
    summaries,
)

_LONGEST = 250  # characters of a name that are kept in one piece
_SCHEMA = 1  # of what --json prints
_COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}


def as_data(subject: PlannedJob) -> dict[str, Any]:
    """The data that ``plan --json`` prints; ``source.saved`` reads it back."""
    made = communicators(subject.plan)
    return {
        **json.loads(subject.plan.to_json()),
        "ranks_per_host": subject.network.ranks[0],
        **({"megatron": subject.release.partition(" ")[0]} if subject.release else {}),
        **({"network": subject.network.to_json()} if subject.network.is_irregular else {}),
        "groups": [asdict(line) for line in summaries(subject.plan, subject.hosts)],
        "groups_of_a_rank": made["none"],
        "communicators_of_a_rank": made,
    }


def of_rank(subject: PlannedJob, rank: int) -> dict[str, Any]:
    """The data that ``plan --rank N --json`` prints."""
    hosts = subject.hosts
    return {
        "rank": rank,
        "host": hosts.host(rank),
        "coordinates": {
            name: layout.coordinate(rank)
            for name, layout in subject.plan.layouts.items()
            if rank in layout
        },
        "groups": [
            {
                "label": row.label,
                "layout": row.layout,
                "dims": long_dims(subject.plan, row),
                "ranks": ranks,
                "hosts": list(dict.fromkeys(map(hosts.host, ranks))),
                "backend": row.backend,
            }
            for row, ranks in subject.plan.groups_of(rank)
        ],
    }


def head(subject: PlannedJob) -> Console:
    """The job in a line or two, and the assumptions; returns where to print the rest."""
    out, layouts, hosts = console(), subject.layouts, len(subject.hosts.names)
    if subject.plan.grids:
        _grids(out, subject)
        return out
    each = span((min(subject.network.ranks), max(subject.network.ranks)))
    ranks = layouts["decoder"].size
    out.print(
        f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)} of {each}: "
        f"{sizes_in_words(layouts['decoder'])}"
    )
    for level, units in subject.network.units.items():
        used = Counter(units[:hosts])
        many = span((min(used.values()), max(used.values())))
        kind = "NVLink domain" if level == "nvlink" else level
        out.print(f"{len(used)} {kind}{'s' * (len(used) > 1)} of {many} hosts")
    if has_experts(layouts):
        out.print(f"experts: {sizes_in_words(layouts['expert'])}")
    _rests_on(out, subject)
    return out


def _rests_on(out: Console, subject: PlannedJob) -> None:
    if subject.release:
        out.print(f"for megatron-core {subject.release}", style="dim")
    for what, flags in subject.job.flags.items() if subject.job else ():
        if flags:
            out.print(f"{what}: {', '.join(flags)}", style="dim")
    for line in subject.assumed:
        out.print(f"assumed: {line}", style="dim")
    out.print()


def _grids(out: Console, subject: PlannedJob) -> None:
    plan, hosts = subject.plan, len(subject.hosts.names)
    out.print(
        f"{len(plan.window)} ranks on {hosts} host{'s' * (hosts > 1)} of "
        f"{span((min(subject.network.ranks), max(subject.network.ranks)))}, "
        f"{len(plan.grids)} grids"
    )
    for name in plan.grids:
        layout = plan.layouts[name]
        out.print(f"{name}: {sizes_in_words(layout)}; ranks {span_of(layout.ranks)}")
    for link in plan.links:
        ends = link.ends(plan.layouts)
        pairs = ", ".join(f"{source} -> {target}" for source, target in ends.pairs[:8])
        out.print(f"{link.name}: {ends.kind}; {pairs}{', ...' * (len(ends.pairs) > 8)}")
    _rests_on(out, subject)


def rank_and_groups(out: Console, subject: PlannedJob, rank: int) -> None:
    """One rank's coordinates and its groups."""
    data = of_rank(subject, rank)
    for name in (n for n in subject.plan.grids or SHARDS if n in data["coordinates"]):
        place = subject.plan.layouts[name].trimmed.coordinate(rank)
        at = ", ".join(f"{dim}={number}" for dim, number in place.items())
        out.print(f"rank {rank} on {data['host']}, {name}: {at or 'alone'}")
    if not data["groups"]:
        out.print(f"rank {rank} on {data['host']} is in no group.")
        return
    rows = []
    for group in data["groups"]:
        hosts, ranks = len(group["hosts"]), group["ranks"]
        label = Text(group["label"]).append(f"\n  {few(ranks)}", style="dim")
        rows.append(
            (
                dims_in_words(group["dims"], size=len(ranks)),
                len(ranks),
                red(hosts, hosts > 1),
                label,
            )
        )
    table(out, ("dims", ">ranks", ">hosts", "name, and the members"), rows)


def findings(out: Console, found: Sequence[Finding]) -> None:
    """Of each: what is so, what it costs, what to do."""
    for number, each in enumerate(found):
        if number:
            out.print()
        out.print(Text(f"{each.severity}: ", _COLOURS[each.severity]).append(each.rule))
        for line in (Text(each.what), Text(each.cost), Text(f"-> {each.remedy}", style="bold")):
            out.print(Padding(line, (0, 0, 0, 2), expand=False))
    if not found:
        out.print("No findings.")


def traffic(out: Console, subject: PlannedJob, found: Estimate) -> None:
    """The volume of each flow over each level, and the seconds that it takes."""
    network, ranks = subject.network, subject.layouts["decoder"].size
    rows = []
    for name, cost in sorted(found.costs.items(), key=lambda pair: -pair[1].slowest):
        amounts = (cost.volumes[level] for level in network.levels)
        cells = [_amount(volume / ranks) if volume else "" for volume in amounts]
        rows.append((name, *cells, _amount(cost.slowest)))
    columns = (f">{level}" for level in network.levels)
    out.print("GB that a rank sends in a step, by level, and seconds of the slowest group:")
    table(out, ("flow", *columns, ">seconds"), rows)
    out.print()
    _speeds(out, network)
    out.print(
        f"A rank waits {_amount(found.low)} to {_amount(found.high)} s for the network in each "
        f"step."
        + (f" Most of it is {found.flow}, over the level {found.level}." if found.flow else "")
    )


def _speeds(out: Console, network: Network) -> None:
    speeds = ", ".join(f"{level} {_amount(gb)}" for level, gb in network.speeds.items())
    out.print(f"GB/s of a rank: {speeds}; --bandwidth changes them.")


def traffic_data(found: Estimate) -> dict[str, Any]:
    """An estimate as JSON."""
    return {
        "seconds": [found.low, found.high],
        "largest": {"flow": found.flow, "level": found.level},
        "flows": {name: asdict(cost) for name, cost in found.costs.items()},
    }


def placement(out: Console, network: Network, traffic: Traffic, found: HostOrder) -> None:
    """The cost of the given order of hosts and of the order that was found, and that order."""
    flows = _placed_flows(traffic, found)
    rows = [(name, _amount(old), _amount(new)) for name, (old, new) in flows.items()]
    total = ("in all", *map(_amount, (found.given, found.cost)))
    table(out, ("flow", ">as given", ">placed"), [*rows, total])
    out.print()
    better = "No order costs less." if found.exact else "It is the best of those that were tried."
    if found.cost < found.given:
        less = f"{1 - found.cost / found.given:.0%}"
        out.print(f"This order of hosts costs {less} less than the given one. {better}")
    else:
        tried = (
            "No order of hosts" if found.exact else "None of the orders of hosts that were tried"
        )
        same = found.order == tuple(range(len(found.order)))
        also = "." if same else "; this one sends less over the outer levels."
        out.print(f"{tried} costs less than the given one{also}")
    out.print(f"hosts: {hostlist(network.hosts[i] for i in found.order)}", soft_wrap=True)
    if found.spare:
        out.print(f"spare: {hostlist(network.hosts[i] for i in found.spare)}", soft_wrap=True)
    out.print()
    _speeds(out, network)
    out.print(f"--as writes it for a launcher: {', '.join(FORMATS)}.")
    out.print(f"Unit: {traffic.unit}, of a rank on average; docs/placement.md has the model.")


def placement_data(network: Network, traffic: Traffic, found: HostOrder) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "hosts": [network.hosts[i] for i in found.order],
        "spare": [network.hosts[i] for i in found.spare],
        "unit": traffic.unit,
        "given": found.given,
        "cost": found.cost,
        "exact": found.exact,
        "flows": {
            name: {"given": old, "cost": new}
            for name, (old, new) in _placed_flows(traffic, found).items()
        },
    }


def _placed_flows(traffic: Traffic, found: HostOrder) -> dict[str, tuple[float, float]]:
    """Of each flow what it costs in the given order, and in the one that was found."""
    ranks = max(layout.size for layout in traffic.subject.layouts.values())
    old, new = (traffic.estimate(order).costs for order in ((), (*found.order, *found.spare)))
    return {name: (old[name].total / ranks, new[name].total / ranks) for name in old}


def orders(out: Console, asked: Ranked, found: list[Ranked], top: int, unit: str) -> None:
    """The best orders and the one that was asked for, with the reasons."""
    best, rows = found[0], []
    for each in found[:top] + [asked] * (asked not in found[:top]):
        marks = ", ".join(["best"] * (each is best) + ["yours"] * (each is asked))
        amounts = map(_amount, (each.total, *each.flows.values()))
        style = "bold" if each is best else ""
        rows.append([Text(cell, style=style) for cell in (marks, each.order, *amounts)])
    total = {"seconds": ">seconds", "volumes between hosts": ">between hosts"}.get(unit, ">cost")
    table(out, ("", "order", total, *(f">{flow}" for flow in best.flows)), rows)
    out.print()
    for line in _explained(best, asked, len(found), unit):
        out.print(line)


def _explained(best: Ranked, asked: Ranked, many: int, unit: str) -> Iterable[str]:
    inside = [flow for flow, amount in best.flows.items() if not amount]
    out = [f"{flow} ({_amount(n)})" for flow, n in best.flows.items() if n]
    verb = "stays inside a host" if len(inside) == 1 else "stay inside hosts"
    reasons = [f"{_listed(inside)} {verb}"] * bool(inside)
    hosts = unit == "volumes between hosts"
    reasons += [f"what {'crosses' if hosts else 'costs'} is {_listed(out)}"] * bool(out)
    does, least = ("sends", "sends least") if hosts else ("costs", "costs least")
    if best.order == asked.order or best.total == asked.total:
        less = "sends less between hosts" if hosts else "costs less"
        yield f"No order of {many} {less} than yours: {'; '.join(reasons)}."
    else:
        yield (
            f"{best.order} {least} of {many} orders: {'; '.join(reasons)}. Yours {does} "
            f"{_amount(asked.total)}, {best.order} {_amount(best.total)}."
        )
        yield (
            f"To use it: initialize_model_parallel(order={best.order!r}), or hypergrid-launch "
            f"--order {best.order}."
        )
    if unit == "seconds":
        yield "Unit: seconds of a step, on average over the ranks; docs/placement.md has the model."
        return
    pace = "" if hosts else ", at the pace of the slowest level, on average over the ranks"
    yield (
        f"Unit: one activation tensor a layer and micro-batch{pace}; the model is in "
        "compat/planned/traffic.py, --volumes changes it."
    )


def difference(out: Console, found: Difference) -> None:
    """The ranks that move, the groups that change, and whether weights must be resharded."""
    if found.is_empty:
        out.print("No differences.")
        return
    if found.ranks[0] != found.ranks[1]:
        out.print(
            f"{found.ranks[0]} ranks become {found.ranks[1]}; the {found.common} that are in both "
            f"are compared."
        )
    if found.moved:
        rows = ((m.layout, m.dim, span(m.sizes, " -> "), m.ranks) for m in found.moved)
        table(out, ("grid", "dim", ">size", ">ranks with another coordinate"), rows)
        out.print()
    if found.regrouped:
        changes = ((span(r.groups, " -> "), r.ranks, r.label) for r in found.regrouped)
        table(out, (">groups", ">ranks with other members", "name"), changes)
        out.print()
    for shard in found.resharded:
        dims = " x ".join(shard.dims)
        what = "experts" if shard.layout == "expert" else "dense layers"
        if shard.is_cut_anew:
            sizes = [" x ".join(map(str, each)) for each in shard.sizes]
            text = f"cut anew, {dims} from {sizes[0]} to {sizes[1]}: every rank's part changes."
        else:
            text = f"cut as before ({dims}), {shard.ranks} ranks hold another part."
        out.print(f"Weights of {what}: {text}")
    if not found.resharded:
        out.print("Weights: every rank keeps its part.")


def diagnosis(found: Diagnosis, late: Sequence[Late] | None = None) -> None:
    """The verdict, then why, then what could not be read, then who comes last."""
    out = console()
    out.print(Text(found.sentence, style="bold"))
    for heading, lines in (("Why", found.chain), ("Not used", found.problems)):
        if lines:
            out.print(f"\n{heading}:")
        for line in lines[:20]:
            out.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
        if len(lines) > 20:
            out.print(f"  and {len(lines) - 20} more")
    if late is not None:
        late = [each for each in late if each.stands_out]
        if not late:
            out.print("\nNobody made others wait in collectives for more than 1% of the time.")
            return
        out.print("\nWho made others wait in collectives, the longest first:")
        table(out, LATE, map(late_row, late[:20]))


LATE = ("who", ">seconds", ">of all time", ">a step", ">calls", "mostly in")


def late_row(each: Late) -> tuple[str, ...]:
    """The cells of LATE."""
    return (
        f"{each.dim} {each.at}" if each.dim else f"rank {each.at}",
        f"{each.seconds:,.2f}",
        f"{each.share:.0%}",
        "" if each.per_step is None else f"{each.per_step:,.3f}",
        f"{each.calls:,}",
        f"{each.operation} of {each.label}",
    )


def audit(found: Audit, changes: Sequence[Change] | None) -> None:
    """Wrong states first, then the table by package and file, then what a baseline says."""
    out = console()
    for problem in found.problems:
        out.print(Text(f"{problem.kind}: ", "bold red").append(problem.text, "not bold default"))
        on = f"  {problem.reads:,} reads on {len(problem.ranks)} ranks; {problem.example}"
        out.print(f"{on}\n", style="dim")
    rows = []
    for package, files in groupby(found.files(), lambda each: each.package):
        of = list(files)
        total = (sum(each.reads for each in of), sum(each.sites for each in of))
        rows.append([Text(cell, "bold") for cell in (package, *map("{:,}".format, total), "")])
        for each in of:
            names = [f"{name} {count:,}" for name, count in each.names.most_common(4)]
            names += [f"{len(each.names) - 4} more"] * (len(each.names) > 4)
            file = f"  {each.file.rpartition('/')[2]}"
            counts = f"{each.reads:,}", f"{each.sites:,}"
            rows.append([Text(cell) for cell in (file, *counts, ", ".join(names))])
    table(out, ("package and file", ">reads", ">sites", "of"), rows)
    ranks, releases = len(found.ranks), " and ".join(found.releases)
    again = f" in {found.processes} processes" * (found.processes != ranks)
    sum_ = f"{found.reads:,} reads by {len(found.sites)} sites, on {ranks} ranks{again}"
    out.print(f"\n{sum_}, megatron-core {releases}.")
    for line in found.unread:
        out.print(f"Not read: {line}", style="yellow", soft_wrap=True)
    if changes is None:
        return
    new = [each for each in changes if each.after > each.before]
    for change in new:
        at = ", ".join(map(str, change.lines))
        lines = f"line {at}: {change.before} before, {change.after} now"
        what = f"{change.name} in {change.module}, {change.function}, {lines}"
        out.print(Text("new: ", "bold red").append(what, "not bold default"), soft_wrap=True)
    if len(changes) > len(new):
        fewer = f"{len(changes) - len(new)} functions read less than in the baseline"
        out.print(f"{fewer}: write it again with --json.")
    if not changes:
        out.print("As the baseline.")


def table(out: Console, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table without lines; ``">"`` before a column's name aligns it to the right.

    No word is cut, but an absurd one: the table is rather wider than the terminal.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    every = [[each if isinstance(each, Text) else Text(str(each)) for each in row] for row in rows]
    for cell in (cell for row in every for cell in row):
        cell.truncate(4 * _LONGEST, overflow="ellipsis")
    least = -1  # there is a blank between columns
    for i, name in enumerate(columns):
        right, name = name.startswith(">"), name.lstrip(">")
        made.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right)
        words = [word for row in every for word in row[i].plain.split("\n" if right else None)]
        least += 1 + min(_LONGEST, max(map(len, (name, *words))))
    for cells in every:
        made.add_row(*cells)
    made.width = least if least > out.width else None
    out.print(made, crop=False)


def span(pair: tuple[int, int], to: str = "-") -> str:
    """Both numbers, or one where they are equal."""
    return to.join(map(str, dict.fromkeys(pair)))


def red(text: object, wanted: bool) -> Text:
    """The text, red and bold if so ``wanted``."""
    return Text(str(text), style="bold red" if wanted else "")


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _amount(value: float) -> str:
    return f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}"


def as_json(data: Mapping[str, Any]) -> None:
    """To standard output."""
    print(json.dumps({"schema": _SCHEMA, **data}, indent=1))


class _Console(Console):
    """Writes out the control characters of names, and no blanks at the ends of lines."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        blanks: list[Segment] = []  # that may end a line
        for text, style, control in super().render(renderable, options):
            if control:
                yield Segment(text, style, control)
                continue
            text = re.sub(r" +\n", "\n", printable(text))
            rest = text if style and style.bgcolor else text.rstrip(" ")
            if rest:
                yield from () if rest.startswith("\n") else blanks
                blanks = []
                yield Segment(rest, style)
            blanks.append(Segment(text[len(rest) :], style))


def console() -> Console:
    """The terminal; its width and colours as rich finds them, 80 columns where there is none."""
    return _Console(highlight=False, markup=False, emoji=False)
