"""What the commands print: lines and tables for people, JSON for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from compat.megatron.traffic import SHARDS, has_experts
from hypergrid.analysis.checks import Finding
from hypergrid.analysis.diff import Difference
from hypergrid.analysis.summary import (
    Summary,
    communicators,
    descriptors,
    long_dims,
    names,
    summaries,
)
from hypergrid.analysis.traffic import Ranked
from hypergrid.cli.source import Subject
from hypergrid.layout import RankLayout
from hypergrid.messages import few

SCHEMA = 1  # of what --json prints
_COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}


def as_data(subject: Subject) -> dict[str, Any]:
    """What ``plan --json`` prints."""
    fewest, most = names(subject.plan)
    return {
        **subject.to_json(),
        "groups": [asdict(line) for line in lines_of(subject)],
        "groups_of_a_rank": [fewest, most],
        "communicators_of_a_rank": communicators(subject.plan),
        "gloo_descriptors_of_a_rank": descriptors(subject.plan),
    }


def of_rank(subject: Subject, rank: int) -> dict[str, Any]:
    """What ``plan --rank N --json`` prints."""
    topology = subject.hosts(subject.layouts["decoder"])
    return {
        "schema": SCHEMA,
        "rank": rank,
        "host": topology.host(rank),
        "coordinates": {
            name: layout.coordinate(rank) for name, layout in subject.plan.layouts.items()
        },
        "groups": [
            {
                "label": row.label,
                "layout": row.layout,
                "dims": long_dims(subject.plan, row),
                "ranks": ranks,
                "hosts": list(dict.fromkeys(map(topology.host, ranks))),
                "backend": row.backend,
            }
            for row, ranks in subject.plan.groups_of(rank)
        ],
    }


def print_rank(out: Console, subject: Subject, rank: int) -> None:
    """One rank's coordinates and its groups."""
    data = of_rank(subject, rank)
    for name in SHARDS:
        if name in data["coordinates"]:
            place = ", ".join(
                f"{dim}={at}"
                for dim, at in subject.plan.layouts[name].trimmed.coordinate(rank).items()
            )
            out.print(f"rank {rank} on {data['host']}, {name}: {place or 'alone'}")
    table = new_table("dims", ">ranks", ">hosts", "name, and the members")
    for group in data["groups"]:
        hosts = Text(str(len(group["hosts"])), style="bold red" if group["hosts"][1:] else "")
        dims, ranks = "-".join(group["dims"]) or "alone", group["ranks"]
        label = Text(group["label"]).append(f"\n  {few(ranks)}", style="dim")
        table.add_row(dims, str(len(ranks)), hosts, label)
    out.print(table)


def print_head(out: Console, subject: Subject) -> None:
    """The job in a line or two, and the assumptions."""
    layouts = subject.layouts
    hosts = len(subject.hosts(layouts["decoder"]).names)
    ranks = layouts["decoder"].size
    out.print(
        f"{ranks} ranks on {hosts} host{'s' * (hosts > 1)} of {subject.ranks_per_host}: "
        f"{_sizes(layouts['decoder'])}"
    )
    if has_experts(layouts):
        out.print(f"experts: {_sizes(layouts['expert'])}")
    for line in subject.assumed:
        out.print(f"assumed: {line}", style="dim")
    out.print()


def _sizes(layout: RankLayout) -> str:
    layout = layout.trimmed
    if not layout.dims:
        return "one rank"
    sizes = " ".join(f"{d}={s}" for d, s in zip(layout.dims, layout.sizes, strict=True))
    return f"{sizes}, order {layout.order}"


def print_finding(out: Console, finding: Finding) -> None:
    """What is so, what it costs, what to do."""
    out.print(Text(f"{finding.severity}: ", _COLOURS[finding.severity]).append(finding.rule))
    for line in (finding.what, finding.cost):
        out.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
    out.print(Padding(Text(f"-> {finding.remedy}", style="bold"), (0, 0, 0, 2), expand=False))
    out.print()


def print_orders(out: Console, asked: Ranked, orders: list[Ranked], top: int) -> None:
    """The best orders and the one that was asked for, with the reasons."""
    shown = orders[:top] + [asked] * (asked not in orders[:top])
    flows = list(orders[0].flows)
    table = new_table("", "order", ">between hosts", *(f">{flow}" for flow in flows))
    for each in shown:
        marks = ("best" * (each is orders[0]), "yours" * (each is asked))
        style = "bold" if each is orders[0] else ""
        cells = [_amount(each.total), *(_amount(each.flows[flow]) for flow in flows)]
        table.add_row(", ".join(filter(None, marks)), each.order, *cells, style=style)
    out.print(table)
    out.print()
    for line in _explained(orders[0], asked, len(orders)):
        out.print(line)


def _explained(best: Ranked, asked: Ranked, many: int) -> Iterable[str]:
    inside = [flow for flow, amount in best.flows.items() if not amount]
    out = [f"{flow} ({_amount(n)})" for flow, n in best.flows.items() if n]
    verb = "stays inside a host" if len(inside) == 1 else "stay inside hosts"
    reasons = [f"{_listed(inside)} {verb}"] * bool(inside)
    reasons += [f"what crosses is {_listed(out)}"] * bool(out)
    if best.order == asked.order or best.total == asked.total:
        yield f"No order of {many} sends less between hosts than yours: {'; '.join(reasons)}."
    else:
        yield (
            f"{best.order} sends least of {many} orders: {'; '.join(reasons)}. Yours sends "
            f"{_amount(asked.total)}, {best.order} {_amount(best.total)}."
        )
        yield (
            f"To use it: initialize_model_parallel(order={best.order!r}), or hypergrid-launch "
            f"--order {best.order}."
        )
    yield (
        "Unit: one activation tensor a layer and micro-batch; the model is in "
        "compat/megatron/traffic.py, --volumes changes it."
    )


def print_difference(out: Console, found: Difference) -> None:
    """Which ranks move, which groups change, and whether weights must be resharded."""
    if found.is_empty:
        out.print("No differences.")
        return
    if found.ranks[0] != found.ranks[1]:
        out.print(
            f"{found.ranks[0]} ranks become {found.ranks[1]}; the {found.common} that are in both "
            f"are compared."
        )
    if found.moved:
        table = new_table("grid", "dim", ">size", ">ranks with another coordinate")
        for moved in found.moved:
            table.add_row(moved.layout, moved.dim, _arrow(moved.sizes), str(moved.ranks))
        out.print(table)
        out.print()
    if found.regrouped:
        table = new_table(">groups", ">ranks with other members", "name")
        for group in found.regrouped:
            table.add_row(_arrow(group.groups), str(group.ranks), group.label)
        out.print(table)
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


def lines_of(subject: Subject) -> list[Summary]:
    """The plan in a line for each name."""
    return list(summaries(subject.plan, subject.hosts(subject.layouts["decoder"])))


def new_table(*columns: str) -> Table:
    """A table without lines; ``">"`` before a column's name aligns it to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        right = name.startswith(">")
        table.add_column(
            name.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right
        )
    return table


def span(pair: tuple[int, int]) -> str:
    """Fewest and most, in one number where they are equal."""
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}-{pair[1]}"


def _arrow(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} -> {pair[1]}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _amount(value: float) -> str:
    return f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}"


def print_json(data: Mapping[str, Any]) -> None:
    """To standard output."""
    json.dump(data, sys.stdout, indent=1)
    sys.stdout.write("\n")


def console() -> Console:
    """The terminal; its width and colours as rich finds them, 80 columns where there is none."""
    return Console(highlight=False, soft_wrap=False)
