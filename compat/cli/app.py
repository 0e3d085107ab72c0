"""The commands: plan, show, check, diff, diagnose, audit, verify, doctor."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from compat.audit.recordings import read as read_reads
from compat.cli import asking, prints
from compat.cli.command import app, as_json_flag, launch_command, layout_command
from compat.cli.launch import taken_apart
from compat.cli.source import PlannedJob, read, started
from compat.planned.checks import SEVERITIES, expensive, refusals, silent_losses
from compat.planned.job import JobError
from compat.planned.layouts import LEVELS, Layouts, known, refuse_unknown_dims, shards_of
from compat.planned.orders import dp_across, ranked_orders
from hypergrid.messages import few, printable
from hypergrid.show.diff import difference
from hypergrid.show.page import page
from hypergrid.show.picture import picture
from hypergrid.show.terminal import table

__all__ = ["app"]
_MOST_ORDERS = 10  # that are printed; --json has all


@layout_command
@click.option("--rank", type=int, help="Only the groups of this rank.")
@click.option("--all", "with_all", is_flag=True, help="Groups of one rank, and equal ones, too.")
@as_json_flag
def plan(subject: PlannedJob, rank: int | None, with_all: bool, as_json: bool) -> None:
    """Print the groups that will be created: how many, how large, across how many hosts."""
    if rank is not None:
        data = prints.of_rank(subject, rank)
        if as_json:
            prints.as_json(data)
        else:
            prints.rank_and_groups(prints.head(subject), subject, data)
    elif as_json:
        prints.as_json(prints.as_data(subject))
    else:
        prints.groups(prints.head(subject), subject, with_all)


@layout_command
@click.option("--by", help="The dim that colours show; tp if any.")
@click.option("--hosts", help="Which hosts: 3, or 4-11.")
@click.option("--html", help="Write one interactive page; - prints it.")
@click.option("--png", type=Path, help="Write a picture.")
@click.option("--svg", type=Path, help="Write a picture.")
def show(
    subject: PlannedJob,
    by: str | None,
    hosts: str | None,
    html: str | None,
    png: Path | None,
    svg: Path | None,
) -> None:
    """Show the ranks of each host: a table, a picture, or a page.

    The layout is that of dense layers, or with --by the first one in which this dim is larger than
    1: --by ep shows that of experts.
    """
    names = _names_shown(subject.plan.layouts, by)
    drawn = names if by is None else names[:1]
    pictures = [path for path in (png, svg) if path is not None]
    for path in pictures:
        with prints.working(f"Drawing {path}"):
            picture(
                subject.plan, subject.hosts, path, layouts=drawn, by=by, domains=subject.domains
            )
    if html is not None:
        _write_page(subject, html, names, by)
    if html is None and not pictures:
        _print_table(subject, names[0], by, hosts)
    for written in (*pictures, html):
        if written not in (None, "-"):
            # Behind a page on standard output nothing may follow.
            click.echo(printable(f"wrote {written}"), err=html == "-")


def _names_shown(layouts: Layouts, by: str | None) -> list[str]:
    """The layouts that users know, first the one with the dim ``by``; of outside code all."""
    names = list(layouts)
    if "decoder" in layouts:
        names = [name for name in (*known(layouts), LEVELS) if name in layouts]
    if by is not None:
        # Each layout of Megatron has a dim ep, and only that of the experts has a larger one.
        with_dim = [name for name in layouts if layouts[name].size_of(by) > 1]
        names = [*with_dim[:1], *names]
    return list(dict.fromkeys(names))  # each once


def _print_table(subject: PlannedJob, name: str, by: str | None, hosts: str | None) -> None:
    layout = subject.plan.layouts[name]
    # Without dims of one rank; a job of one rank has no others.
    long_dims = layout.trimmed.dims or layout.dims[:1]
    if by is None:
        by = "tp" if "tp" in long_dims else long_dims[0]
    only = None
    if hosts is not None:
        only = _numbers(hosts)
    # All lines first, so that an error comes before any output.
    with prints.working("Laying out the table"):
        width = prints.console().width
        lines = list(table(layout, subject.hosts, by, only=only, width=width))
    out = prints.head(subject)
    for line in lines:
        out.print(line, no_wrap=True, crop=False)
    out.print(f"Ranks of one colour are one group over {by}; the last line numbers the groups.")


def _write_page(subject: PlannedJob, path: str, names: Sequence[str], by: str | None) -> None:
    """Write the page of these layouts of the plan; ``-`` prints it."""
    if by is not None:
        subject.plan.layouts[names[0]].dim_size(by)  # refuses a dim that is not there
    with prints.working(f"Writing {path}"):
        text = page(subject.plan, subject.hosts, offered=names, domains=subject.domains, by=by)
    if path == "-":
        click.echo(text.encode(), nl=False)
    else:
        Path(path).write_text(text, "utf-8")


@layout_command
@click.option("--suggest", is_flag=True, help="Rank all orders.")
@click.option("--allow", multiple=True, metavar="RULE", help="A known finding; repeatable.")
@as_json_flag
def check(subject: PlannedJob, suggest: bool, allow: Sequence[str], as_json: bool) -> int:
    """Check a layout: what Megatron refuses, which placements are expensive, which order avoids it.

    --suggest ranks all orders by how many hosts their groups touch.

    Exit status 1 if there is an error or a warning that --allow does not name, 0 if not, 2 if the
    layout cannot be read.
    """
    refuse_unknown_dims(subject.layouts)
    # Inside an NVLink domain hosts are as near as the GPUs of one.
    places = subject.domains or subject.hosts
    place = "NVLink domain" if subject.domains else "host"
    with prints.working("Ranking all orders"):
        ranking = ranked_orders(subject.order, subject.layouts, places)
    position = [ranked.order for ranked in ranking].index(subject.order)
    requested = ranking[position]
    all_findings = list(expensive(subject.layouts, place, places, ranking[:position]))
    if subject.job is not None:
        losses = silent_losses(subject.job)
        all_findings = [*refusals(subject.job), *all_findings, *losses]
    # Stable: what Megatron refuses stays in front of the other errors.
    all_findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    allowed = [finding for finding in all_findings if finding.rule in allow]
    standing = [finding for finding in all_findings if finding.rule not in allow]
    status = int(any(finding.severity != "note" for finding in standing))
    if as_json:
        data: dict[str, Any] = {"findings": standing, "allowed": allowed}
        if suggest:
            data["orders"] = ranking
        prints.as_json(data)
        return status
    out = prints.head(subject, all_findings)
    prints.findings(out, standing, allowed)
    if suggest:
        prints.orders(out, requested, ranking[:_MOST_ORDERS], len(ranking), f"{place}s")
        across = dp_across(ranking, requested, subject.layouts, places, f"{place}s")
        if across:
            out.print(across)
    return status


# Sizes are one argument, '--world-size 8 --tp 2'.
@app.command(context_settings={"ignore_unknown_options": True})
@click.argument("before")
@click.argument("after")
@as_json_flag
def diff(before: str, after: str, as_json: bool) -> int:
    """Compare two layouts: which ranks and groups change, and what that means for a checkpoint.

    BEFORE and AFTER are saved plans, or sizes: '--world-size 8 --tp 2'.

    Exit status 0 if nothing differs, 1 if something does.
    """
    planned = read(before)
    changed = read(after)
    shards = shards_of(planned.plan.layouts, changed.plan.layouts)
    compared = difference(planned.plan, changed.plan, shards)
    if as_json:
        prints.as_json(asdict(compared))
    else:
        prints.difference(prints.console(), compared)
    return int(not compared.is_empty)


@app.command()
@click.argument("directory", type=Path)
@click.option("--ask", is_flag=True, help="Have the ranks, on all hosts, write first.")
@click.option("--html", type=Path, help="Write one interactive page.")
@as_json_flag
def diagnose(directory: Path, ask: bool, html: Path | None, as_json: bool) -> int:
    """Find the rank that everyone waits for in a job that hangs, from the files of its ranks.

    DIRECTORY is where the job left its flight recorders. With --ask the ranks of a running job,
    which record by hypergrid.record, write before the files are read: within five seconds. A rank
    that does not is named after twenty.

    Exit status 0 if nothing is wrong, 1 if something is, 2 if there is nothing to read.
    """
    from hypergrid.hangs import reading, verdict

    silent_ranks = asking.ask(directory) if ask else []
    with prints.progress("Reading") as progress:
        recordings = reading.read(directory, os.cpu_count() or 1, progress)
    # Of a rank whose script has ended, nobody expects an answer.
    ended_ranks = {rank for rank, recording in recordings.ranks.items() if recording.ended}
    silent_ranks = [rank for rank in silent_ranks if rank not in ended_ranks]
    if silent_ranks:
        recordings.problems.append(
            f"these ranks were asked and did not write: {few(silent_ranks)}."
        )
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

        drawn = plan_of(recordings)
        title = f"{directory.name}: {result.kind}"
        data = page_data(recordings, result)
        text = page(drawn, hosts_of(recordings, drawn), title, job=data)
        html.write_text(text, "utf-8")
    return int(not result.ok)


@app.command()
@click.argument("directory", type=Path)
@as_json_flag
def audit(directory: Path, as_json: bool) -> int:
    """Count the reads of parallel_state, and name the code that reads the wrong state.

    From what ranks left in DIRECTORY, that of HYPERGRID_AUDIT.

    Exit status 0 if nothing is wrong, 1 if a wrong state was read, 2 if there is nothing to read.
    """
    recordings = read_reads(directory)
    if as_json:
        prints.as_json(recordings.to_json())
    else:
        prints.audit(recordings)
    return int(bool(recordings.problems))


@launch_command
@click.option(
    "--checkout",
    required=True,
    type=Path,
    metavar="DIR",
    help="A checkout of Megatron-LM: its parser runs.",
)
@click.option("--world-size", type=int, help="Ranks of the job, instead of the command's.")
@click.option(
    "--allow",
    multiple=True,
    metavar="PATTERN",
    help="A known finding, 'gradient *.bias'; repeatable.",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="DIM",
    help="A dim that keeps the job's size, 'tp'; repeatable.",
)
@click.option(
    "--no-search",
    is_flag=True,
    help="Do not search for the smallest layout that differs, nor for lost results.",
)
@as_json_flag
def verify(
    checkout: Path,
    world_size: int | None,
    allow: Sequence[str],
    keep: Sequence[str],
    no_search: bool,
    as_json: bool,
    **launch: Any,
) -> int:
    """Compare a training step in the layout of a launch with the same step on one rank.

    Two optimizer steps of a small model, with the command's flags, on one rank and in the layout:
    up to 16 gloo processes on this machine's CPU. What differs is printed to standard error, and is
    then searched down to the smallest layout that shows it.

    Exit status 0 if nothing differs, 1 if something does, 2 if the layout cannot be verified.
    """
    from compat.cli.machine import refuse_without_torch

    statuses = []
    # Python would end with status 1, which says that something differs.
    try:
        jobs = started(world_size=world_size, **launch)
        refuse_without_torch()
        from compat.verification.launch import verify_line

        for job, command in jobs:
            if not command.words:
                raise JobError("there is no command: hypergrid verify --checkout DIR -- torchrun")
            taken = taken_apart(command.words)
            with prints.working("Training steps on one rank and in the layout"):
                changed, report = verify_line(
                    taken.script or "",
                    taken.words,
                    job.world_size,
                    checkout,
                    order=job.arguments.get("order"),
                    allow=allow,
                    keep=keep,
                    smallest=not no_search,
                    listen=lambda text: click.echo(printable(text), err=True),
                )
            if as_json:
                prints.as_json({"changed": changed, **report.as_dict()})
            else:
                click.echo(printable("\n".join([*changed, str(report)])))
            statuses.append(2 if report.refused else int(not report.agrees))
    except (Exception, KeyboardInterrupt) as error:
        raise JobError(str(error) or type(error).__name__) from error
    return max(statuses)


@app.command()
def doctor() -> int:
    """Check this machine: versions, how groups would be created, whether the swap works.

    Exit status 1 if something needs a remedy.
    """
    from compat.cli.machine import examined

    out = prints.console()
    status = 0
    for name, state, remedy in examined():
        out.print(f"{name:<20} {state}", soft_wrap=True)
        if remedy:
            status = 1
            out.print(f"{'':<20} -> {remedy}", style="yellow", soft_wrap=True)
    return status


def _numbers(text: str) -> range:
    """The hosts of ``--hosts``: 4-6 are 4, 5 and 6."""
    numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if numbers is None:
        raise JobError(f"--hosts {text} is neither a number nor a span such as 4-11.")
    first, last = numbers.groups()
    return range(int(first), int(last or first) + 1)
