"""The commands: plan, show, check, diff, diagnose, audit, verify, doctor."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from compat.audit.recordings import read as read_reads
from compat.cli import asking, prints
from compat.cli.command import Json, app, command
from compat.cli.launch import taken_apart
from compat.cli.source import PlannedJob, Source, read, started
from compat.planned.checks import Finding, by_severity, faults, findings, refusals, silent_losses
from compat.planned.job import JobError
from compat.planned.layouts import (
    KNOWN_DIMS,
    LEVELS,
    SHARDS,
    has_experts,
    shards_of,
    unknown_dims,
)
from compat.planned.orders import dp_across, ranked_orders
from hypergrid import __version__
from hypergrid.layout import LayoutError
from hypergrid.messages import few, printable
from hypergrid.show.diff import difference

__all__ = ["app"]
_MOST_ORDERS = 10  # that are printed; --json has all
_PRINTED = Path("-")  # a page that goes to standard output


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Options before the command."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@command()
def plan(
    subject: PlannedJob,
    rank: Annotated[int | None, typer.Option(help="Only the groups of this rank.")] = None,
    with_all: Annotated[
        bool, typer.Option("--all", help="Groups of one rank, and names with the same groups, too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the groups that will be created: how many, how large, across how many hosts."""
    if rank is not None and rank not in subject.plan.window:
        first = subject.plan.window[0]
        last = subject.plan.window[-1]
        raise LayoutError(f"there is no rank {rank}: they go from {first} to {last}.")
    if as_json:
        if rank is None:
            prints.as_json(prints.as_data(subject))
        else:
            prints.as_json(prints.of_rank(subject, rank))
        return
    out = prints.head(subject)
    if rank is not None:
        prints.rank_and_groups(out, subject, rank, with_all)
    else:
        prints.groups(out, subject, with_all)


@command()
def show(
    subject: PlannedJob,
    by: Annotated[str | None, typer.Option(help="The dim that colours show; tp if any.")] = None,
    view: Annotated[
        str | None, typer.Option(help="Which layout: decoder or expert, or one of a saved plan.")
    ] = None,
    hosts: Annotated[str | None, typer.Option(help="Which hosts: 3, or 4-11.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one interactive page; - prints it.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
) -> None:
    """Show the ranks of each host, by NVLink domain: a table, a picture, or a page."""
    shown = _layout_shown(subject, view, by)
    for path in (png, svg):
        if path is not None:
            only = None if view is None and by is None else shown
            with prints.working(f"Drawing {path}"):
                _write_picture(subject, path, only, by)
    if html is not None:
        with prints.working(f"Writing {html}"):
            _write_page(subject, html, shown, by)
    written = [str(path) for path in (html, png, svg) if path not in (None, _PRINTED)]
    if written:
        # Behind a page on standard output nothing may follow.
        typer.echo(printable(f"wrote {', '.join(written)}"), err=html == _PRINTED)
    elif html is None:
        _print_table(subject, shown, by, hosts)


def _offered(subject: PlannedJob) -> list[str]:
    """The layouts that users know, of those that this job has; the experts' if it has experts."""
    offered = [name for name in (*SHARDS, LEVELS) if name in subject.layouts]
    if not has_experts(subject.layouts):
        offered = [name for name in offered if name != "expert"]
    return offered


def _layout_shown(subject: PlannedJob, view: str | None, by: str | None) -> str:
    """The layout of ``view``; else the first one in which the dim ``by`` is larger than 1.

    Each layout of Megatron has a dim ep, and only that of the experts has a larger one.
    """
    name = "decoder" if view is None else view
    if view is None and by is not None:
        larger = (other for other in _offered(subject) if subject.layouts[other].size_of(by) > 1)
        name = next(larger, name)
    if name not in subject.layouts:
        raise LayoutError(f"there is no view {name!r}: there are {', '.join(subject.layouts)}.")
    return name


def _print_table(subject: PlannedJob, name: str, by: str | None, hosts: str | None) -> None:
    from hypergrid.show.terminal import table

    layout = subject.layouts[name]
    # Without dims of one rank; a job of one rank has no others.
    long_dims = layout.trimmed.dims or layout.dims[:1]
    if by is None:
        by = "tp" if "tp" in long_dims else long_dims[0]
    # All lines first, so that an error comes before any output.
    with prints.working("Laying out the table"):
        lines = list(
            table(
                layout,
                subject.ranks_per_host,
                by,
                only=_numbers(hosts),
                width=prints.console().width,
                within=subject.within,
            )
        )
    out = prints.head(subject)
    for line in lines:
        out.print(line, no_wrap=True, crop=False)
    out.print(f"Ranks of one colour are one group over {by}; the last line numbers the groups.")


def _write_picture(subject: PlannedJob, path: Path, only: str | None, by: str | None) -> None:
    """Draw one layout, or all that are offered."""
    from hypergrid.show.picture import picture

    plan = replace(subject.plan, layouts=subject.layouts)
    names = _offered(subject) if only is None else [only]
    picture(plan, subject.ranks_per_host, path, layouts=names, by=by, within=subject.within)


def _write_page(subject: PlannedJob, path: Path, first: str, by: str | None) -> None:
    """Write the page of all layouts; it opens on the ``first``."""
    from hypergrid.show.page import page

    if by is not None:
        subject.layouts[first].dim_size(by)  # refuses a dim that is not there
    offered = _offered(subject)
    if "decoder" not in subject.plan.layouts:
        offered = list(subject.plan.layouts)
    names = [first, *(name for name in offered if name != first)]
    text = page(subject.plan, subject.ranks_per_host, offered=names, within=subject.within, by=by)
    if path == _PRINTED:
        typer.echo(text.encode(), nl=False)
    else:
        path.write_text(text, "utf-8")


@command()
def check(
    subject: PlannedJob,
    suggest: Annotated[bool, typer.Option("--suggest", help="Rank all orders.")] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="A known finding, 'cp-before-tp'; repeatable."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Check a layout: what Megatron refuses, which placements are expensive, which order avoids it.

    --suggest ranks all orders by how many hosts their groups touch.

    Exit status 1 if there is an error or a warning that --allow does not name, 0 if not, 2 if the
    layout cannot be read.
    """
    unknown = unknown_dims(subject.layouts)
    if unknown:
        raise JobError(
            f"cannot check this plan: {'; '.join(unknown)}, and the rules are for "
            f"{', '.join(sorted(KNOWN_DIMS))}. Rename the dim to the one that it is, or use show."
        )
    # Inside an NVLink domain hosts are as near as the GPUs of one.
    places = subject.domains or subject.hosts
    with prints.working("Ranking all orders"):
        ranking = ranked_orders(subject.order, subject.layouts_in, places)
    requested = next(ranked for ranked in ranking if ranked.order == subject.order)
    better = []
    for ranked in ranking:
        layouts = subject.layouts_in(ranked.order)
        if layouts and ranked is not requested and ranked.numbers <= requested.numbers:
            better.append((ranked.order, layouts))
    results = findings(_faults_of(subject), subject.layouts, better)
    if subject.job is not None:
        results = by_severity([*refusals(subject.job), *silent_losses(subject.job), *results])
    allowed = [finding for finding in results if finding.rule in (allow or ())]
    results = [finding for finding in results if finding not in allowed]
    status = int(any(finding.severity != "note" for finding in results))
    if as_json:
        data: dict[str, Any] = {}
        data["findings"] = [asdict(finding) for finding in results]
        data["allowed"] = [asdict(finding) for finding in allowed]
        if suggest:
            data["orders"] = [asdict(ranked) for ranked in ranking]
        prints.as_json(data)
        return status
    out = prints.head(subject, [*results, *allowed])
    prints.findings(out, results, allow or (), allowed)
    if suggest:
        out.print()
        kind = "NVLink domains" if subject.domains else "hosts"
        prints.orders(out, requested, ranking[:_MOST_ORDERS], len(ranking), kind)
        inside = dp_across(ranking, requested, subject.layouts, subject.refusal_of, places, kind)
        if inside:
            out.print(inside)
    return status


def _faults_of(subject: PlannedJob) -> partial[Iterator[Finding]]:
    return partial(
        faults,
        hosts=subject.hosts,
        domains=subject.domains,
        user_buffers=subject.job is not None and subject.job.user_buffers,
    )


@command(ignore_unknown_options=True)  # sizes are one argument
def diff(
    before: Annotated[str, typer.Argument(help="A saved plan, or sizes: '--world-size 8 --tp 2'.")],
    after: Annotated[str, typer.Argument(help="Another one.")],
    as_json: Json = False,
) -> int:
    """Compare two layouts: which ranks and groups change, and what that means for a checkpoint.

    Exit status 0 if nothing differs, 1 if something does.
    """
    planned = read(before)
    changed = read(after)
    compared = difference(planned.plan, changed.plan, shards_of(planned.plan, changed.plan))
    if as_json:
        prints.as_json(asdict(compared))
    else:
        prints.difference(prints.console(), compared)
    return 0 if compared.is_empty else 1


@command()
def diagnose(
    directory: Annotated[Path, typer.Argument(help="Where the job left its flight recorders.")],
    ask: Annotated[
        bool, typer.Option("--ask", help="Have the ranks, on all hosts, write first.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write one interactive page.")] = None,
    as_json: Json = False,
) -> int:
    """Find the rank that everyone waits for in a job that hangs, from the files of its ranks.

    With --ask the ranks of a running job, which record by hypergrid.record, write before the files
    are read: within five seconds. A rank that does not is named after twenty.

    Exit status 0 if nothing is wrong, 1 if something is, 2 if there is nothing to read.
    """
    from hypergrid.hangs import reading, verdict

    if not directory.is_dir():
        raise JobError(f"there is no directory {directory}{': it is a file' * directory.exists()}.")
    silent_ranks = asking.ask(directory) if ask else []
    with prints.progress("Reading") as progress:
        recordings = reading.read(directory, os.cpu_count() or 1, progress)
    # Of a rank whose script has ended, nobody expects an answer.
    silent_ranks = [
        rank
        for rank in silent_ranks
        if rank not in recordings.ranks or not recordings.ranks[rank].ended
    ]
    if silent_ranks:
        ranks = f"ranks {few(silent_ranks)} were"
        if len(silent_ranks) == 1:
            ranks = f"rank {silent_ranks[0]} was"
        recordings.problems.append(f"{ranks} asked and did not write.")
    if not recordings.ranks:
        raise JobError(
            f"{directory} has no dump of a rank: trace_RANK, groups_RANK.json or stack_RANK.json. "
            f"{' '.join(recordings.problems[:3])}"
        )
    result = verdict.diagnose(recordings)
    if as_json:
        prints.as_json(result.to_json())
    else:
        prints.diagnosis(result)
    if html is not None:
        from hypergrid.show.job import hosts_of, page_data, plan_of
        from hypergrid.show.page import page

        drawn = plan_of(recordings)
        title = f"{directory.name}: {result.kind}"
        data = page_data(recordings, result)
        text = page(drawn, hosts_of(recordings, drawn), title, job=data)
        html.write_text(text, "utf-8")
    return 0 if result.ok else 1


@command()
def audit(
    directory: Annotated[Path, typer.Argument(help="Where the ranks left their recordings.")],
    as_json: Json = False,
) -> int:
    """Count the reads of parallel_state, and name the code that reads the wrong state.

    From what ranks left in the directory of HYPERGRID_AUDIT.

    Exit status 0 if nothing is wrong, 1 if a wrong state was read, 2 if there is nothing to read.
    """
    recordings = read_reads(directory)
    if as_json:
        prints.as_json(recordings.to_json())
    else:
        prints.audit(recordings)
    return int(bool(recordings.problems))


@command()
def verify(
    source: Source | None,
    checkout: Annotated[
        Path, typer.Option(metavar="DIR", help="A checkout of Megatron-LM: its parser runs.")
    ],
    world_size: Annotated[
        int | None, typer.Option(help="Ranks of the job, instead of those of the command.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="A known finding, 'gradient *.bias'; repeatable."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="DIM", help="A dim that keeps the job's size, 'tp'; repeatable."),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            help="Search for the smallest layout that differs, or lost results that stay unseen."
        ),
    ] = True,
    as_json: Json = False,
) -> int:
    """Compare a training step in the layout of a launch with the same step on one rank.

    Two optimizer steps of a small model, with the command's flags, on one rank and in the layout:
    up to 16 gloo processes on this machine's CPU. What differs is printed to standard error, and is
    then searched down to the smallest layout that shows it.

    Exit status 0 if nothing differs, 1 if something does, 2 if the layout cannot be verified.
    """
    if source is None:
        raise JobError(
            "there is no command to verify: hypergrid verify --checkout DIR -- torchrun ..."
        )
    # Python would end with status 1, which says that something differs.
    try:
        return _verified(source, checkout, world_size, allow or (), keep or (), search, as_json)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # a file that cannot be read: the command's own sentence names it
        raise JobError(str(error) or type(error).__name__) from error


def _verified(
    source: Source,
    checkout: Path,
    world_size: int | None,
    allow: Sequence[str],
    keep: Sequence[str],
    search: bool,
    as_json: bool,
) -> int:
    from compat.cli.machine import refuse_without_torch

    refuse_without_torch()
    from compat.verification.launch import verify_line

    statuses = []
    for job, command_of_job in started(source, world_size=world_size):
        order = job.arguments.get("order")
        launch = taken_apart(command_of_job.words)
        with prints.working("Training steps on one rank and in the layout"):
            changed, report = verify_line(
                launch.script or "",
                launch.words,
                job.world_size,
                checkout,
                order=order,
                allow=allow,
                keep=keep,
                smallest=search,
                listen=lambda text: typer.echo(printable(text), err=True),
            )
        if as_json:
            prints.as_json({"changed": changed, **report.as_dict()})
        else:
            typer.echo(printable("\n".join([*changed, str(report)])))
        statuses.append(2 if report.refused else int(not report.agrees))
    return max(statuses)


@command()
def doctor() -> int:
    """Check this machine: versions, how groups would be created, whether the swap works.

    Exit status 1 if something needs a remedy.
    """
    from compat.cli.machine import examined

    out = prints.console()
    status = 0
    for name, state, remedy in examined():
        text = Text(f"{name:<20} ", style="bold")
        out.print(text.append(state, style="not bold"), soft_wrap=True)
        if remedy:
            status = 1
            indent = " " * 20
            out.print(Text(f"{indent} -> {remedy}", style="yellow"), soft_wrap=True)
    return status


def _numbers(text: str | None) -> list[int] | None:
    """The hosts of ``--hosts``: 4-6 are [4, 5, 6]."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6})?)?", text)
    if match is None:
        raise JobError(f"--hosts {text} is neither a number nor a span such as 4-11.")
    first = int(match[1])
    last = int(match[2] or first)
    return list(range(first, last + 1))
