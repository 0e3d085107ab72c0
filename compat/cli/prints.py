"""Output of the commands: lines and tables for people, JSON for scripts."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.progress import Progress
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from compat.cli.source import PlannedJob
from compat.planned.checks import Finding
from compat.planned.layouts import SHARDS, has_experts
from compat.planned.orders import RankedOrder
from hypergrid.hangs.verdict import Diagnosis
from hypergrid.messages import few, printable
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
        "ranks_per_host": subject.ranks_per_host,
        **({"nvlink_domain": subject.nvlink_domain} if subject.nvlink_domain else {}),
        **({"megatron": subject.release.partition(" ")[0]} if subject.release else {}),
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
    ranks = layouts["decoder"].size
    out.print(
        f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)} of "
        f"{subject.ranks_per_host}: {sizes_in_words(layouts['decoder'])}"
    )
    if subject.nvlink_domain is not None:
        hosts_of_domain = Counter(subject.within.values())
        domains = len(hosts_of_domain)
        many = span((min(hosts_of_domain.values()), max(hosts_of_domain.values())))
        out.print(f"{domains} NVLink domain{'s' * (domains > 1)} of {many} hosts")
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


def rank_and_groups(out: Console, subject: PlannedJob, rank: int) -> None:
    """One rank's coordinates and its groups."""
    data = of_rank(subject, rank)
    for name in (n for n in SHARDS if n in data["coordinates"]):
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


def orders(
    out: Console, asked: RankedOrder, best: Sequence[RankedOrder], many: int, places: str
) -> None:
    """The ``best`` of ``many`` orders and ``asked``: how many ``places`` their groups touch."""
    rows = []
    for ranked in [*best, *[asked] * (asked not in best)]:
        marks = ", ".join(["best"] * (ranked is best[0]) + ["yours"] * (ranked is asked))
        style = "bold" if ranked is best[0] else ""
        cells = (marks, ranked.order, *map(str, ranked.numbers))
        rows.append([Text(cell, style=style) for cell in cells])
    out.print(f"How many {places} a group touches at most, by kind of groups:")
    table(out, ("", "order", *(f">{kind}" for kind in asked.hosts)), rows)
    out.print()
    out.print(
        "Of two orders the better one has the smaller number in the first column in which they "
        "differ; kinds that send more are further left."
    )
    if best[0].numbers == asked.numbers:
        out.print(f"No order of {many} is better than yours.")
    else:
        out.print(
            f"To use the first of {many}: initialize_model_parallel(order={best[0].order!r}), or "
            f"hypergrid-launch --order {best[0].order}."
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


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, if that is a terminal: a function of what is done and of all."""
    # No thread may draw it: files are read by forked processes.
    bar = Progress(
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(title)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, refresh=done % 100 == 0)

        yield update


def diagnosis(found: Diagnosis) -> None:
    """The verdict, then why, then what could not be read."""
    out = console()
    out.print(Text(found.sentence, style="bold"))
    for heading, lines in (("Why", found.chain), ("Not used", found.problems)):
        if lines:
            out.print(f"\n{heading}:")
        for line in lines[:20]:
            out.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
        if len(lines) > 20:
            out.print(f"  and {len(lines) - 20} more")


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
