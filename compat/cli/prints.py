"""Output of the commands: lines and tables for people, JSON for scripts."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from compat.audit.recordings import Audit
from compat.cli.source import PlannedJob
from compat.planned.checks import Finding
from compat.planned.layouts import SHARDS, has_experts
from compat.planned.orders import RankedOrder
from hypergrid.hangs.verdict import Diagnosis
from hypergrid.messages import few, one_line, printable
from hypergrid.policy import Policy
from hypergrid.show.diff import Difference
from hypergrid.summary import (
    communicators,
    dims_in_words,
    long_dims,
    sizes_in_words,
    summaries,
)

_LONGEST = 1000  # characters of a name
_SCHEMA = 1  # of what --json prints
_MOST_LINES = 20  # of a verdict's reasons
_MOST_NAMES = 4  # of the functions that a file reads
_FLAG = re.compile(r"--[\w-]+")
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
    data["communicators_of_one_rank"] = communicators(subject.plan, of_one_rank=True)
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


def head(subject: PlannedJob, found: Sequence[Finding] = ()) -> Console:
    """The job in a line or two, and the assumptions; returns where to print the rest.

    ``found`` is what is printed below.
    """
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
    _rests_on(out, subject, found)
    return out


def _counted(count: int, noun: str) -> str:
    """``1 host``, ``2 hosts``."""
    if count > 1:
        noun += "s"
    return f"{count} {noun}"


def _rests_on(out: Console, subject: PlannedJob, found: Sequence[Finding]) -> None:
    """The release, the flags of the launch line by how they were read, and the assumptions."""
    # A flag changes no group, and Megatron refuses it all the same: its error says so.
    refused = set[str]()
    for finding in found:
        if finding.severity == "error":
            refused.update(_FLAG.findall(finding.what))
    if subject.release:
        out.print(f"for megatron-core {subject.release}", style="dim")
    if subject.job is not None:
        for reading, read_flags in subject.job.flags.items():
            flags = read_flags
            if reading == "without effect":
                flags = [flag for flag in read_flags if flag.partition(" ")[0] not in refused]
            if flags:
                out.print(one_line(f"{reading}: {', '.join(flags)}"), style="dim")
    for sentence in subject.assumed:
        out.print(f"assumed: {sentence}", style="dim")
    out.print()


def groups(out: Console, subject: PlannedJob, with_all: bool) -> None:
    """The names and their groups; ``with_all`` also those that say nothing new."""
    rows = []
    left_out = Counter[str]()
    for summary in summaries(subject.plan, subject.hosts):
        reason = _says_nothing_new(summary.size[1], summary.same_as)
        if reason and not with_all:
            left_out[reason] += 1
            continue
        label = Text(summary.label)
        if summary.same_as:
            label.append(f"\n  = {summary.same_as}", style="dim")
        dims = dims_in_words(summary.dims, summary.pick, summary.size[1])
        # A row of which a group touches several hosts is red.
        hosts = red(span(summary.hosts), summary.crossing > 0)
        rows.append((dims, span(summary.size), summary.groups, hosts, label))
    table(out, ("dims", ">ranks", ">groups", ">hosts", "name"), rows)
    _print_left_out(out, left_out)
    note = "\nhosts: how many one group touches."
    if with_all:
        note += " = NAME: same ranks and traffic, could share communicators."
    out.print(note)
    counts = communicators(subject.plan)
    alone = communicators(subject.plan, of_one_rank=True)
    shares = []
    for share, count in counts.items():
        shares.append(f"{span(count)} with share={share}, {span(alone[share])} of one rank")
    out.print(f"Each rank is in {span(counts['none'])} groups. Communicators: {'; '.join(shares)}.")
    out.print(
        "gloo connects them at the start; NCCL on first use, or at the start with torch 2.15, with "
        "connect=eager, or where the default group is bound to a device."
    )


def _says_nothing_new(size: int, same_as: str | None) -> str | None:
    """Why a table leaves out a name whose largest group has this size; None if it does not."""
    if size == 1:
        return "groups of one rank"
    if same_as is not None:
        return "the ranks and the traffic of a name above"
    return None


def _print_left_out(out: Console, left_out: Counter[str]) -> None:
    """How many names were left out, by reason."""
    parts = [f"{_counted(count, 'name')} for {why}" for why, count in sorted(left_out.items())]
    if parts:
        out.print(f"\nLeft out: {', '.join(parts)}; --all prints them.")


def rank_and_groups(out: Console, subject: PlannedJob, rank: int, with_all: bool) -> None:
    """One rank's coordinates and its groups; ``with_all`` also those that say nothing new."""
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
    left_out = Counter[str]()
    shared = subject.plan.sharing(rank, Policy(share="all"))
    for group, (*_, same_as) in zip(data["groups"], shared, strict=True):
        ranks = group["ranks"]
        reason = _says_nothing_new(len(ranks), same_as)
        if reason and not with_all:
            left_out[reason] += 1
            continue
        hosts = len(group["hosts"])
        dims = dims_in_words(group["dims"], size=len(ranks))
        label = Text(group["label"])
        label.append(f"\n  {few(ranks)}", style="dim")
        crossing = hosts > 1
        rows.append((dims, len(ranks), red(hosts, crossing), label))
    table(out, ("dims", ">ranks", ">hosts", "name, and the members"), rows)
    _print_left_out(out, left_out)


def findings(
    out: Console,
    standing: Sequence[Finding],
    rules: Sequence[str] = (),
    allowed: Sequence[Finding] = (),
) -> None:
    """Each finding: the fact, its cost and what to do; then what ``--allow`` names by ``rules``."""
    for number, finding in enumerate(standing):
        if number:
            out.print()
        title = Text(f"{finding.severity}: ", _COLOURS[finding.severity])
        out.print(title.append(finding.rule))
        remedy = Text(f"-> {finding.remedy}", style="bold")
        for line in (Text(finding.what), Text(finding.cost), remedy):
            out.print(_indented(line))
    if not standing:
        out.print("No findings that are not allowed." if allowed else "No findings.")
    allowed_rules = set[str]()
    for finding in allowed:
        allowed_rules.add(finding.rule)
        out.print(f"\nallowed: {finding.rule}. {finding.what}")
    for rule in sorted(set(rules) - allowed_rules):
        out.print(f"\nallowed, and not found: {rule}")


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
        rows.append(("", *ranked.numbers, ranked.order))
    rows.append(("yours", *requested.numbers, requested.order))
    out.print(f"How many {places} a group touches at most, the best order first:")
    columns = [f">{kind}" for kind in requested.hosts]
    table(out, ("", *columns, "order"), rows)
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
    """The verdict in five lines at most, then what could not be read."""
    out = console()
    out.print(Text(result.sentence, style="bold"))
    for line in result.chain:
        out.print(_indented(Text(line)))
    if not result.problems:
        return
    out.print("\nNot used:")
    for problem in result.problems[:_MOST_LINES]:
        out.print(_indented(Text(problem)))
    if len(result.problems) > _MOST_LINES:
        out.print(f"  and {len(result.problems) - _MOST_LINES} more")


def audit(recordings: Audit) -> None:
    """Wrong states first, then the table by package and file."""
    out = console()
    for problem in recordings.problems:
        line = Text(f"{problem.kind}: ", "bold red")
        out.print(line.append(problem.text, "not bold default"))
        reads = f"{problem.reads:,} reads on {len(problem.ranks)} ranks"
        out.print(f"  {reads}; {problem.example}\n", style="dim")
    rows = []
    for file in recordings.files():
        names = [f"{name} {count:,}" for name, count in file.names.most_common(_MOST_NAMES)]
        if len(file.names) > _MOST_NAMES:
            names.append(f"{len(file.names) - _MOST_NAMES} more")
        rows.append((file.file, f"{file.reads:,}", f"{file.sites:,}", ", ".join(names)))
    table(out, ("file", ">reads", ">sites", "of"), rows)
    ranks = f"{len(recordings.ranks)} ranks"
    # A rank that was restarted has recorded in several processes.
    if recordings.processes != len(recordings.ranks):
        ranks += f" in {recordings.processes} processes"
    reads = f"{recordings.reads:,} reads by {len(recordings.sites)} sites"
    releases = " and ".join(recordings.releases)
    out.print(f"\n{reads}, on {ranks}, megatron-core {releases}.")
    for sentence in recordings.unread:
        out.print(f"Not read: {sentence}", style="yellow", soft_wrap=True)


def table(out: Console, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table without lines; ``">"`` before a column's name aligns it to the right.

    It is as wide as the terminal at most: texts are folded, and no number is cut. Without rows
    there is no heading.
    """
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        is_number = column.startswith(">")
        align: JustifyMethod = "right" if is_number else "left"
        grid.add_column(column.lstrip(">"), justify=align, overflow="fold")
        grid.columns[-1].min_width = 1 if is_number else None
    for row in rows:
        cells = [cell if isinstance(cell, Text) else Text(str(cell)) for cell in row]
        for column_of_cell, cell in zip(grid.columns, cells, strict=True):
            cell.truncate(_LONGEST, overflow="ellipsis")
            if column_of_cell.min_width is not None:
                column_of_cell.min_width = max(column_of_cell.min_width, cell.cell_len)
        grid.add_row(*cells)
    if grid.rows:
        out.print(grid)


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
    try:
        print(json.dumps({"schema": _SCHEMA, **data}, indent=1), flush=True)
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Write the rest of the standard output nowhere: who reads it has gone, as ``head -1`` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Console(Console):
    """Writes out the control characters of names."""

    def on_broken_pipe(self) -> None:
        """Rich would end the process with status 1, whatever the answer is."""
        drop_output()

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def console() -> Console:
    """The terminal; its width and colours as rich finds them, 80 columns where there is none."""
    return _Console(highlight=False, markup=False, emoji=False)
