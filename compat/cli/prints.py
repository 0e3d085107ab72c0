"""Output of the commands: lines and tables for people, JSON for scripts."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
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

_LONGEST = 1000  # characters of a name
_WIDEST = 300  # characters of a table, which is wider than the terminal where a word is
_SCHEMA = 1  # of what --json prints
_MOST_LINES = 20  # of a verdict's reasons
_MOST_NAMES = 4  # of the functions that a file reads
_COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}


def as_data(subject: PlannedJob) -> dict[str, Any]:
    """The data that ``plan --json`` prints; ``source.saved`` reads it back."""
    data: dict[str, Any] = json.loads(subject.plan.to_json())
    data["ranks_per_host"] = subject.ranks_per_host
    if subject.nvlink_domain:
        data["nvlink_domain"] = subject.nvlink_domain
    if subject.release:
        # "0.19.2 (newest)": where the release comes from is no part of the plan.
        data["megatron"] = subject.release.partition(" ")[0]
    counts = communicators(subject.plan)
    data["groups"] = [asdict(summary) for summary in summaries(subject.plan, subject.hosts)]
    data["groups_of_a_rank"] = counts["none"]
    data["communicators_of_a_rank"] = counts
    return data


def of_rank(subject: PlannedJob, rank: int) -> dict[str, Any]:
    """The data that ``plan --rank N --json`` prints."""
    hosts = subject.hosts
    coordinates = {}
    for name, layout in subject.plan.layouts.items():
        if rank in layout:
            coordinates[name] = layout.coordinate(rank)
    groups = []
    for row, ranks in subject.plan.groups_of(rank):
        groups.append(
            {
                "label": row.label,
                "layout": row.layout,
                "dims": long_dims(subject.plan, row),
                "ranks": ranks,
                "hosts": list(dict.fromkeys(map(hosts.host, ranks))),
                "backend": row.backend,
            }
        )
    return {"rank": rank, "host": hosts.host(rank), "coordinates": coordinates, "groups": groups}


def head(subject: PlannedJob) -> Console:
    """The job in a line or two, and the assumptions; returns where to print the rest."""
    out = console()
    layouts = subject.layouts
    ranks = layouts["decoder"].size
    hosts = len(subject.hosts.names)
    sizes = sizes_in_words(layouts["decoder"])
    rank_count = _counted(ranks, "rank")
    host_count = _counted(hosts, "host")
    out.print(f"{rank_count} on {host_count} of {subject.ranks_per_host}: {sizes}")
    if subject.nvlink_domain is not None:
        # The last domain may have fewer hosts than the others.
        hosts_of_domain = Counter(subject.within.values())
        smallest = min(hosts_of_domain.values())
        largest = max(hosts_of_domain.values())
        domains = _counted(len(hosts_of_domain), "NVLink domain")
        out.print(f"{domains} of {span((smallest, largest))} hosts")
    if has_experts(layouts):
        out.print(f"experts: {sizes_in_words(layouts['expert'])}")
    _rests_on(out, subject)
    return out


def _counted(count: int, noun: str) -> str:
    """``1 host``, ``2 hosts``."""
    if count > 1:
        noun += "s"
    return f"{count} {noun}"


def _rests_on(out: Console, subject: PlannedJob) -> None:
    """The release, the flags of the launch line by how they were read, and the assumptions."""
    if subject.release:
        out.print(f"for megatron-core {subject.release}", style="dim")
    if subject.job is not None:
        for reading, flags in subject.job.flags.items():
            if flags:
                out.print(f"{reading}: {', '.join(flags)}", style="dim")
    for sentence in subject.assumed:
        out.print(f"assumed: {sentence}", style="dim")
    out.print()


def rank_and_groups(out: Console, subject: PlannedJob, rank: int) -> None:
    """One rank's coordinates and its groups."""
    data = of_rank(subject, rank)
    host = data["host"]
    for name in SHARDS:
        if name in data["coordinates"]:
            coordinate = subject.plan.layouts[name].trimmed.coordinate(rank)
            numbers = [f"{dim}={number}" for dim, number in coordinate.items()]
            place = ", ".join(numbers) or "alone"
            out.print(f"rank {rank} on {host}, {name}: {place}")
    if not data["groups"]:
        out.print(f"rank {rank} on {host} is in no group.")
        return
    rows = []
    for group in data["groups"]:
        ranks = group["ranks"]
        hosts = len(group["hosts"])
        dims = dims_in_words(group["dims"], size=len(ranks))
        label = Text(group["label"])
        label.append(f"\n  {few(ranks)}", style="dim")
        crossing = hosts > 1
        rows.append((dims, len(ranks), red(hosts, crossing), label))
    table(out, ("dims", ">ranks", ">hosts", "name, and the members"), rows)


def findings(out: Console, all_findings: Sequence[Finding]) -> None:
    """Each finding: the fact, its cost and what to do."""
    for number, finding in enumerate(all_findings):
        if number:
            out.print()
        title = Text(f"{finding.severity}: ", _COLOURS[finding.severity])
        out.print(title.append(finding.rule))
        remedy = Text(f"-> {finding.remedy}", style="bold")
        for line in (Text(finding.what), Text(finding.cost), remedy):
            out.print(_indented(line))
    if not all_findings:
        out.print("No findings.")


def orders(
    out: Console,
    requested: RankedOrder,
    best: Sequence[RankedOrder],
    count: int,
    places: str,
) -> None:
    """The ``best`` of ``count`` orders, and the requested one: how many ``places`` groups touch."""
    rows = []
    for ranked in best:
        rows.append(("", ranked.order, *ranked.numbers))
    rows.append(("yours", requested.order, *requested.numbers))
    out.print(f"How many {places} a group touches at most, the best order first:")
    columns = [f">{kind}" for kind in requested.hosts]
    table(out, ("", "order", *columns), rows)
    out.print()
    if best[0].numbers == requested.numbers:
        out.print(f"No order of {count} is better than yours.")
    else:
        out.print(
            f"To use the first of {count}: initialize_model_parallel(order={best[0].order!r}), or "
            f"hypergrid-launch --order {best[0].order}."
        )


def difference(out: Console, compared: Difference) -> None:
    """The ranks that move, the groups that change, and whether weights must be resharded."""
    if compared.is_empty:
        out.print("No differences.")
        return
    before, after = compared.ranks
    if before != after:
        out.print(
            f"{before} ranks become {after}; the {compared.common} that are in both are compared."
        )
    if compared.moved:
        moves = []
        for move in compared.moved:
            sizes = span(move.sizes, " -> ")
            moves.append((move.layout, move.dim, sizes, move.ranks))
        table(out, ("grid", "dim", ">size", ">ranks with another coordinate"), moves)
        out.print()
    if compared.regrouped:
        changes = []
        for change in compared.regrouped:
            groups = span(change.groups, " -> ")
            changes.append((groups, change.ranks, change.label))
        table(out, (">groups", ">ranks with other members", "name"), changes)
        out.print()
    for shard in compared.resharded:
        dims = " x ".join(shard.dims)
        layers = "experts" if shard.layout == "expert" else "dense layers"
        if shard.is_cut_anew:
            old_sizes, new_sizes = (" x ".join(map(str, sizes)) for sizes in shard.sizes)
            text = f"cut anew, {dims} from {old_sizes} to {new_sizes}: every rank's part changes."
        else:
            text = f"cut as before ({dims}), {shard.ranks} ranks hold another part."
        out.print(f"Weights of {layers}: {text}")
    if not compared.resharded:
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
            # A line for each of 100,000 files would take longer than reading them.
            refresh = done % 100 == 0
            bar.update(task, completed=done, total=total, refresh=refresh)

        yield update


@contextmanager
def working(title: str) -> Iterator[None]:
    """A line that moves on standard error, if that is a terminal, while what is inside takes long.

    A thread draws it: what is inside must not fork this process.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    line = Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with line:
        line.add_task(title, total=None)
        yield


def diagnosis(result: Diagnosis) -> None:
    """The verdict, then why, then what could not be read."""
    out = console()
    out.print(Text(result.sentence, style="bold"))
    for heading, lines in (("Why", result.chain), ("Not used", result.problems)):
        if lines:
            out.print(f"\n{heading}:")
        for line in lines[:_MOST_LINES]:
            out.print(_indented(Text(line)))
        if len(lines) > _MOST_LINES:
            out.print(f"  and {len(lines) - _MOST_LINES} more")


def audit(recordings: Audit, changes: Sequence[Change] | None) -> None:
    """Wrong states first, then the table by package and file, then what a baseline says."""
    out = console()
    for problem in recordings.problems:
        line = Text(f"{problem.kind}: ", "bold red")
        out.print(line.append(problem.text, "not bold default"))
        reads = f"{problem.reads:,} reads on {len(problem.ranks)} ranks"
        out.print(f"  {reads}; {problem.example}\n", style="dim")
    rows: list[tuple[object, ...]] = []
    for package, package_files in groupby(recordings.files(), lambda file: file.package):
        files = list(package_files)
        package_reads = sum(file.reads for file in files)
        package_sites = sum(file.sites for file in files)
        rows.append((Text(package, "bold"), f"{package_reads:,}", f"{package_sites:,}", ""))
        for file in files:
            most_read = file.names.most_common(_MOST_NAMES)
            names = [f"{name} {count:,}" for name, count in most_read]
            if len(file.names) > _MOST_NAMES:
                names.append(f"{len(file.names) - _MOST_NAMES} more")
            base = file.file.rpartition("/")[2]
            rows.append((f"  {base}", f"{file.reads:,}", f"{file.sites:,}", ", ".join(names)))
    table(out, ("package and file", ">reads", ">sites", "of"), rows)
    ranks = f"{len(recordings.ranks)} ranks"
    # A rank that was restarted has recorded in several processes.
    if recordings.processes != len(recordings.ranks):
        ranks += f" in {recordings.processes} processes"
    reads = f"{recordings.reads:,} reads by {len(recordings.sites)} sites"
    releases = " and ".join(recordings.releases)
    out.print(f"\n{reads}, on {ranks}, megatron-core {releases}.")
    for sentence in recordings.unread:
        out.print(f"Not read: {sentence}", style="yellow", soft_wrap=True)
    if changes is not None:
        _beside_baseline(out, changes)


def _beside_baseline(out: Console, changes: Sequence[Change]) -> None:
    """The sites that read more than in a baseline, and how many read less."""
    fewer = 0
    for change in changes:
        if change.after <= change.before:
            fewer += 1
            continue
        lines = ", ".join(map(str, change.lines))
        counts = f"line {lines}: {change.before} before, {change.after} now"
        function = f"{change.module}, {change.function}"
        line = Text("new: ", "bold red")
        line.append(f"{change.name} in {function}, {counts}", "not bold default")
        out.print(line, soft_wrap=True)
    if fewer:
        out.print(f"{fewer} functions read less than in the baseline: write it again with --json.")
    if not changes:
        out.print("As the baseline.")


def table(out: Console, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table without lines; ``">"`` before a column's name aligns it to the right.

    No word is cut, but an absurd one: the table is rather wider than the terminal.
    """
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        name = column.lstrip(">")
        if column.startswith(">"):
            grid.add_column(name, justify="right", no_wrap=True, min_width=len(name))
        else:
            grid.add_column(name, overflow="fold")
    for row in rows:
        cells = [cell if isinstance(cell, Text) else Text(str(cell)) for cell in row]
        for cell in cells:
            cell.truncate(_LONGEST, overflow="ellipsis")
        grid.add_row(*cells)
    # Of each column its longest word.
    least_width = Measurement.get(out, out.options.update(width=_WIDEST), grid).minimum
    if least_width > out.width:
        grid.width = least_width
    out.print(grid, crop=False)


def _indented(line: Text) -> Padding:
    return Padding(line, (0, 0, 0, 2), expand=False)


def span(pair: tuple[int, int], to: str = "-") -> str:
    """Both numbers, or one where they are equal."""
    return to.join(map(str, dict.fromkeys(pair)))


def red(text: object, is_red: bool) -> Text:
    """The text, red and bold if ``is_red``."""
    return Text(str(text), style="bold red" if is_red else "")


def as_json(data: Mapping[str, Any]) -> None:
    """To standard output."""
    print(json.dumps({"schema": _SCHEMA, **data}, indent=1))


class _Console(Console):
    """Writes out the control characters of names."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def console() -> Console:
    """The terminal; its width and colours as rich finds them, 80 columns where there is none."""
    return _Console(highlight=False, markup=False, emoji=False)
