"""Output of the commands: lines and tables for people, JSON for scripts."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, astuple
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.progress import Progress
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from compat.audit.recordings import Audit
from compat.cli.source import PlannedJob
from compat.planned.checks import Finding
from compat.planned.job import WITHOUT_EFFECT
from compat.planned.layouts import has_experts, known
from compat.planned.orders import RankedOrder
from hypergrid.hangs.verdict import Diagnosis
from hypergrid.messages import few, one_line, printable
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
_FLAG = re.compile(r"--[\w-]+")
_COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "bold"}


def as_data(subject: PlannedJob) -> dict[str, Any]:
    """The data that ``plan --json`` prints; ``source.saved`` reads it back."""
    return {
        **json.loads(subject.plan.to_json()),
        "ranks_per_host": subject.ranks_per_host,
        "nvlink_domain": subject.nvlink_domain,
        # "0.19.2 (newest)": where the release comes from is no part of the plan.
        "megatron": subject.release.partition(" ")[0],
        "groups": list(summaries(subject.plan, subject.hosts)),
        "communicators_of_a_rank": communicators(subject.plan),
        "communicators_of_one_rank": communicators(subject.plan, of_one_rank=True),
    }


def of_rank(subject: PlannedJob, rank: int) -> dict[str, Any]:
    """The data that ``plan --rank N --json`` prints."""
    hosts = subject.hosts
    layouts = subject.plan.layouts.items()
    coordinates = {name: layout.coordinate(rank) for name, layout in layouts if rank in layout}
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


def head(subject: PlannedJob, printed_below: Sequence[Finding] = ()) -> Console:
    """The job in a line or two, and the assumptions; returns where to print the rest.

    ``printed_below`` are the findings of ``check``.
    """
    out = console()
    layouts = subject.layouts
    rank_count = _counted(layouts["decoder"].size, "rank")
    host_count = _counted(len(subject.hosts.names), "host")
    sizes = sizes_in_words(layouts["decoder"])
    out.print(f"{rank_count} on {host_count} of {subject.ranks_per_host}: {sizes}")
    if subject.domains is not None:
        domain_count = _counted(len(subject.domains.names), "NVLink domain")
        out.print(f"{domain_count} of {subject.nvlink_domain} GPUs")
    if has_experts(layouts):
        out.print(f"experts: {sizes_in_words(layouts['expert'])}")
    if subject.release:
        out.print(f"for megatron-core {subject.release}", style="dim")
    if subject.job is not None:
        errors = " ".join(finding.what for finding in printed_below if finding.severity == "error")
        refused_flags = _FLAG.findall(errors)
        for reading, flags in subject.job.flags.items():
            # A flag changes no group, and Megatron refuses it all the same: its error says so.
            if reading == WITHOUT_EFFECT:
                flags = [flag for flag in flags if flag not in refused_flags]
            if flags:
                listed = ", ".join(flags)
                out.print(one_line(f"{reading}: {listed}"), style="dim")
    for sentence in subject.assumed:
        out.print(f"assumed: {sentence}", style="dim")
    out.print()
    return out


def _counted(count: int, noun: str) -> str:
    """``1 host``, ``2 hosts``."""
    plural = "" if count == 1 else "s"
    return f"{count} {noun}{plural}"


def groups(out: Console, subject: PlannedJob, with_all: bool) -> None:
    """The names and their groups; ``with_all`` also those that say nothing new."""
    rows = []
    left_out = 0
    for summary in summaries(subject.plan, subject.hosts):
        largest = summary.size[1]
        says_nothing_new = largest == 1 or summary.same_as is not None
        if says_nothing_new and not with_all:
            left_out += 1
            continue
        label = Text(summary.label)
        if summary.same_as:
            label.append(f"\n  = {summary.same_as}", style="dim")
        dims = dims_in_words(summary.dims, summary.pick, largest)
        hosts = red(span(summary.hosts), summary.crossing > 0)
        rows.append((dims, span(summary.size), summary.groups, hosts, label))
    table(out, ("dims", ">ranks", ">groups", ">hosts", "name"), rows)
    if left_out:
        names = _counted(left_out, "name")
        out.print(f"\nLeft out: {names} of one-rank groups or of those of a name above; see --all.")
    note = "\nhosts: how many one group touches."
    if with_all:
        note += " = NAME: same ranks and traffic, could share communicators."
    out.print(note)
    counts = communicators(subject.plan)
    alone = communicators(subject.plan, of_one_rank=True)
    shares = []
    for share, count in counts.items():
        of_one_rank = span(alone[share])
        shares.append(f"{span(count)} with share={share}, {of_one_rank} of one rank")
    groups_of_a_rank = span(counts["none"])
    out.print(f"Each rank is in {groups_of_a_rank} groups. Communicators: {'; '.join(shares)}.")
    out.print(
        "gloo connects them at the start; NCCL on first use, or at the start with torch 2.15, with "
        "connect=eager, or where the default group is bound to a device."
    )


def rank_and_groups(out: Console, subject: PlannedJob, data: Mapping[str, Any]) -> None:
    """One rank's coordinates and all its groups: the ``data`` of ``of_rank``."""
    rank = data["rank"]
    host = data["host"]
    for name, layout in known(subject.layouts).items():
        if rank in layout:
            coordinate = layout.trimmed.coordinate(rank)
            numbers = [f"{dim}={number}" for dim, number in coordinate.items()]
            place = ", ".join(numbers) or "alone"
            out.print(f"rank {rank} on {host}, {name}: {place}")
    rows = []
    for group in data["groups"]:
        ranks = group["ranks"]
        hosts = len(group["hosts"])
        dims = dims_in_words(group["dims"], size=len(ranks))
        label = Text(group["label"])
        label.append(f"\n  {few(ranks)}", style="dim")
        rows.append((dims, len(ranks), red(hosts, hosts > 1), label))
    table(out, ("dims", ">ranks", ">hosts", "name, and the members"), rows)


def findings(out: Console, standing: Sequence[Finding], allowed: Sequence[Finding]) -> None:
    """Each finding: the fact, its cost and what to do; then those that ``--allow`` names."""
    for finding in standing:
        out.print(f"{finding.severity}: {finding.rule}", style=_COLOURS[finding.severity])
        out.print(_indented(finding.what))
        out.print(_indented(finding.cost))
        out.print(_indented(f"-> {finding.remedy}"), style="bold")
        out.print()
    for finding in allowed:
        out.print(f"allowed: {finding.rule}. {finding.what}")
    if not standing and not allowed:
        out.print("No findings.\n")


def orders(
    out: Console,
    requested: RankedOrder,
    best: Sequence[RankedOrder],
    count: int,
    places: str,
) -> None:
    """The ``best`` of ``count`` orders, and the requested one: how many ``places`` groups touch."""
    rows = [("", *ranked.numbers, ranked.order) for ranked in best]
    rows.append(("yours", *requested.numbers, requested.order))
    out.print(f"How many {places} a group touches at most, the best order first:")
    kinds = [f">{kind}" for kind in requested.hosts]
    table(out, ("", *kinds, "order"), rows)
    if best[0].numbers == requested.numbers:
        out.print(f"\nNo order of {count} is better than yours.")
    else:
        out.print(
            f"\nTo use the first of {count}: initialize_model_parallel(order={best[0].order!r}), "
            f"or hypergrid-launch --order {best[0].order}."
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
    moves = map(astuple, compared.moved)
    table(out, ("grid", "dim", ">size", ">ranks with another coordinate"), moves)
    changes = map(astuple, compared.regrouped)
    table(out, ("name", ">groups", ">ranks with other members"), changes)
    for shard in compared.resharded:
        dims = " x ".join(shard.dims)
        layers = "experts" if shard.layout == "expert" else "dense layers"
        text = f"cut as before ({dims}), {shard.ranks} ranks hold another part."
        if shard.is_cut_anew:
            old_sizes, new_sizes = (" x ".join(map(str, sizes)) for sizes in shard.sizes)
            text = f"cut anew, {dims} from {old_sizes} to {new_sizes}: every rank's part changes."
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
            bar.update(task, completed=done, total=total, refresh=done % 100 == 0)

        yield update


def working(title: str) -> AbstractContextManager[object]:
    """A line that moves on standard error, if that is a terminal, while what is inside takes long.

    A thread draws it: what is inside must not fork this process.
    """
    return Console(stderr=True, force_terminal=sys.stderr.isatty()).status(title)


def diagnosis(result: Diagnosis) -> None:
    """The verdict in five lines at most, then what could not be read."""
    out = console()
    out.print(result.sentence, style="bold")
    for line in result.chain:
        out.print(_indented(line))
    if not result.problems:
        return
    out.print("\nNot used:")
    for problem in result.problems[:_MOST_LINES]:
        out.print(_indented(problem))
    if len(result.problems) > _MOST_LINES:
        out.print(f"  and {len(result.problems) - _MOST_LINES} more")


def audit(recordings: Audit) -> None:
    """Wrong states first, then the table by package and file."""
    out = console()
    for problem in recordings.problems:
        out.print(f"{problem.kind}: {problem.text}", style="bold red")
        reads = f"{problem.reads:,} reads on {len(problem.ranks)} ranks"
        out.print(f"  {reads}; {problem.example}\n", style="dim")
    rows = []
    sites_of_file = Counter(site.file for site in recordings.sites)
    for file, counts in recordings.names_by_file():
        names = [f"{name} {count:,}" for name, count in counts.most_common()]
        reads = f"{counts.total():,}"
        sites = f"{sites_of_file[file]:,}"
        rows.append((file, reads, sites, few(names)))
    table(out, ("file", ">reads", ">sites", "of"), rows)
    site_count = len(recordings.sites)
    rank_count = len(recordings.ranks)
    releases = " and ".join(recordings.releases)
    out.print(
        f"{recordings.reads:,} reads by {site_count} sites, on {rank_count} ranks, megatron-core "
        f"{releases}."
    )
    for sentence in recordings.unread:
        out.print(f"Not read: {sentence}", style="yellow", soft_wrap=True)


def table(out: Console, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table without lines; ``">"`` before a column's name aligns it to the right.

    It is as wide as the terminal at most: texts are folded, and no number is cut. Without rows
    there is no heading.
    """
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    rows_of_cells = [list(map(_cell, row)) for row in rows]
    columns_of_cells = zip(*rows_of_cells, strict=True)
    for column, cells in zip(columns, columns_of_cells, strict=False):
        title = column.lstrip(">")
        if title == column:
            grid.add_column(title, overflow="fold")
        else:
            widest = max(cell.cell_len for cell in cells)
            grid.add_column(title, overflow="fold", justify="right", min_width=widest)
    for row_of_cells in rows_of_cells:
        grid.add_row(*row_of_cells)
    if rows_of_cells:
        out.print(grid)


def _cell(value: object) -> Text:
    """The text of a cell; a pair is a number before and after."""
    if isinstance(value, tuple):
        value = span(value, " -> ")
    text = value if isinstance(value, Text) else Text(str(value))
    text.truncate(_LONGEST, overflow="ellipsis")
    return text


def _indented(line: str) -> Padding:
    return Padding(line, (0, 0, 0, 2), expand=False)


def span(pair: tuple[int, int], to: str = "-") -> str:
    """Both numbers, or one where they are equal."""
    return to.join(map(str, dict.fromkeys(pair)))


def red(text: object, is_red: bool) -> Text:
    """The text, red and bold if ``is_red``."""
    return Text(str(text), style="bold red" if is_red else "")


def as_json(data: Mapping[str, Any]) -> None:
    """To standard output; dataclasses by their fields."""
    try:
        print(json.dumps({"schema": _SCHEMA, **data}, indent=1, default=asdict), flush=True)
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
