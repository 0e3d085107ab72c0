"""What the commands print: lines and tables for people, JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from compat.megatron.traffic import SHARDS, has_experts
from hypergrid.analysis.checks import Finding
from hypergrid.analysis.diagnosis import Diagnosis
from hypergrid.analysis.diff import Difference
from hypergrid.analysis.stragglers import Late
from hypergrid.analysis.summary import (
    communicators,
    descriptors,
    dims_in_words,
    long_dims,
    sizes_in_words,
    summaries,
)
from hypergrid.analysis.traffic import Ranked
from hypergrid.cli.source import Subject
from hypergrid.messages import few, span_of

_SCHEMA = 1  # of what --json prints
_COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}


def as_data(subject: Subject) -> dict[str, Any]:
    """What ``plan --json`` prints; ``source.saved`` reads it back."""
    made = communicators(subject.plan)
    return {
        **json.loads(subject.plan.to_json()),
        "ranks_per_host": subject.ranks_per_host,
        "groups": [asdict(line) for line in summaries(subject.plan, subject.hosts)],
        "groups_of_a_rank": made["none"],
        "communicators_of_a_rank": made,
        "gloo_descriptors_of_a_rank": descriptors(subject.plan),
    }


def of_rank(subject: Subject, rank: int) -> dict[str, Any]:
    """What ``plan --rank N --json`` prints."""
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


def head(subject: Subject) -> Console:
    """The job in a line or two, and the assumptions; returns where to print the rest."""
    out, layouts, hosts = console(), subject.layouts, len(subject.hosts.names)
    if subject.plan.grids:
        _grids(out, subject)
        return out
    out.print(
        f"{layouts['decoder'].size} ranks on {hosts} host{'s' * (hosts > 1)} of "
        f"{subject.ranks_per_host}: {sizes_in_words(layouts['decoder'])}"
    )
    if has_experts(layouts):
        out.print(f"experts: {sizes_in_words(layouts['expert'])}")
    for line in subject.assumed:
        out.print(f"assumed: {line}", style="dim")
    out.print()
    return out


def _grids(out: Console, subject: Subject) -> None:
    plan, hosts = subject.plan, len(subject.hosts.names)
    out.print(
        f"{len(plan.window)} ranks on {hosts} host{'s' * (hosts > 1)} of {subject.ranks_per_host}, "
        f"{len(plan.grids)} grids"
    )
    for name in plan.grids:
        layout = plan.layouts[name]
        out.print(f"{name}: {sizes_in_words(layout)}; ranks {span_of(layout.ranks)}")
    for link in plan.links:
        ends = link.ends(plan.layouts)
        pairs = ", ".join(f"{source} -> {target}" for source, target in ends.pairs[:8])
        out.print(f"{link.name}: {ends.kind}; {pairs}{', ...' * (len(ends.pairs) > 8)}")
    for line in subject.assumed:
        out.print(f"assumed: {line}", style="dim")
    out.print()


def rank_and_groups(out: Console, subject: Subject, rank: int) -> None:
    """One rank's coordinates and its groups."""
    data = of_rank(subject, rank)
    for name in (n for n in subject.plan.grids or SHARDS if n in data["coordinates"]):
        place = subject.plan.layouts[name].trimmed.coordinate(rank)
        at = ", ".join(f"{dim}={number}" for dim, number in place.items())
        out.print(f"rank {rank} on {data['host']}, {name}: {at or 'alone'}")
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


def finding(out: Console, found: Finding) -> None:
    """What is so, what it costs, what to do."""
    out.print(Text(f"{found.severity}: ", _COLOURS[found.severity]).append(found.rule))
    for line in (Text(found.what), Text(found.cost), Text(f"-> {found.remedy}", style="bold")):
        out.print(Padding(line, (0, 0, 0, 2), expand=False))
    out.print()


def orders(out: Console, asked: Ranked, found: list[Ranked], top: int) -> None:
    """The best orders and the one that was asked for, with the reasons."""
    best, rows = found[0], []
    for each in found[:top] + [asked] * (asked not in found[:top]):
        marks = ", ".join(["best"] * (each is best) + ["yours"] * (each is asked))
        amounts = map(_amount, (each.total, *each.flows.values()))
        style = "bold" if each is best else ""
        rows.append([Text(cell, style=style) for cell in (marks, each.order, *amounts)])
    table(out, ("", "order", ">between hosts", *(f">{flow}" for flow in best.flows)), rows)
    out.print()
    for line in _explained(best, asked, len(found)):
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


def difference(out: Console, found: Difference) -> None:
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
    for heading, lines in (("Why", found.chain), ("Not read", found.problems)):
        if lines:
            out.print(f"\n{heading}:")
        for line in lines[:20]:
            out.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
        if len(lines) > 20:
            out.print(f"  and {len(lines) - 20} more")
    if late is not None:
        late = [each for each in late if each.stands_out]
        if not late:
            out.print("\nNobody comes last to collectives more often than by chance.")
            return
        out.print("\nWho comes last to collectives, and how long the others wait for it:")
        rows = [
            (
                f"{each.dim} {each.at}" if each.dim else f"rank {each.at}",
                f"{each.share:.0%}",
                f"{each.chance:.0%}",
                f"{each.last:,} of {each.calls:,}",
                f"{each.median * 1e3:,.1f}",
                f"{each.seconds:,.2f}",
                each.label,
            )
            for each in late[:20]
        ]
        columns = ("who", ">last", ">by chance", ">calls", ">median ms", ">sum s", "group")
        table(out, columns, rows)


def table(out: Console, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table without lines; ``">"`` before a column's name aligns it to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        right = name.startswith(">")
        made.add_column(
            name.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right
        )
    for cells in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))
    out.print(made)


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


def console() -> Console:
    """The terminal; its width and colours as rich finds them, 80 columns where there is none."""
    return Console(highlight=False, markup=False, emoji=False)
