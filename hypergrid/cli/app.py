"""The commands: plan, show, check, diff, diagnose, audit, parity, verify, doctor."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from compat.planned.checks import Finding, by_severity, faults, findings, refusals
from compat.planned.job import JobError
from compat.planned.layouts import KNOWN_DIMS, SHARDS, has_experts, shards_of, unknown_dims
from compat.planned.orders import ranked_orders
from hypergrid import __version__
from hypergrid.cli import prints, processes
from hypergrid.cli.command import Json, app, command
from hypergrid.cli.launch import script_of
from hypergrid.cli.prints import red, span
from hypergrid.cli.source import PlannedJob, line_of, read, saved, started
from hypergrid.files import bytes_of, decoded
from hypergrid.layout import LayoutError
from hypergrid.messages import few, one_line, printable
from hypergrid.show.diff import Dump, against_dump, difference, unfit
from hypergrid.summary import communicators, dims_in_words, summaries

__all__ = ["app"]


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
    as_json: Json = False,
) -> None:
    """Print the groups that will be created: how many, how large, across how many hosts."""
    if rank is not None and rank not in subject.plan.window:
        window = subject.plan.window
        raise LayoutError(f"there is no rank {rank}: they go from {window[0]} to {window[-1]}.")
    if as_json:
        prints.as_json(prints.as_data(subject) if rank is None else prints.of_rank(subject, rank))
        return
    out = prints.head(subject)
    if rank is not None:
        prints.rank_and_groups(out, subject, rank)
        return
    rows = []
    for line in summaries(subject.plan, subject.hosts):
        label = Text(line.label)
        if line.same_as:
            label.append(f"\n  = {line.same_as}", style="dim")
        dims, hosts = (
            dims_in_words(line.dims, line.pick, line.size[1]),
            red(span(line.hosts), line.crossing > 0),
        )
        rows.append((dims, span(line.size), line.groups, hosts, label))
    prints.table(out, ("dims", ">ranks", ">groups", ">hosts", "name"), rows)
    made = communicators(subject.plan)
    shares = ", ".join(f"{span(n)} with share={share}" for share, n in made.items())
    out.print(
        "\nhosts: how many one group touches. = NAME: same ranks and traffic, could share "
        "communicators."
    )
    out.print(f"Each rank is in {span(made['none'])} groups; communicators: {shares}.")


@command()
def show(
    subject: PlannedJob,
    by: Annotated[str | None, typer.Option(help="The dim that colours show; tp if any.")] = None,
    view: Annotated[
        str | None, typer.Option(help="Which layout: decoder or expert, or one of a saved plan.")
    ] = None,
    hosts: Annotated[str | None, typer.Option(help="Which hosts: 3, or 4-11.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one interactive page.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
) -> None:
    """Show the ranks of each host, by NVLink domain: a table, a picture, or a page."""
    name = "decoder" if view is None else view
    if name not in subject.layouts:
        raise LayoutError(f"there is no view {name!r}: there are {', '.join(subject.layouts)}.")
    within = subject.within
    per_host = subject.ranks_per_host
    for path in (png, svg):
        if path is not None:
            from hypergrid.show.picture import picture

            drawn = replace(subject.plan, layouts=subject.layouts)
            both = view is None and by is None and has_experts(subject.layouts)
            names = ("decoder", "expert") if both else name
            picture(drawn, per_host, path, layout=names, by=by, within=within)
    if html is not None:
        from hypergrid.show.page import page

        offered = list(SHARDS) if "decoder" in subject.plan.layouts else None
        if view is not None:  # the first one is shown at first
            offered = [view, *(other for other in offered or subject.layouts if other != view)]
        if by is not None:
            subject.layouts[name].dim_size(by)  # refuses a dim that is not there
        text = page(subject.plan, per_host, offered=offered, within=within, by=by)
        html.write_text(text, "utf-8")
    written = [str(path) for path in (html, png, svg) if path is not None]
    if written:
        typer.echo(printable(f"wrote {', '.join(written)}"))
        return
    from hypergrid.show.terminal import table

    only, width = _numbers(hosts), prints.console().width
    layout = subject.layouts[name]
    long = layout.trimmed.dims or layout.dims[:1]
    chosen = by or ("tp" if "tp" in long else long[0])
    # All lines first, so that an error comes before any output.
    lines = list(table(layout, per_host, chosen, only=only, width=width, within=within))
    out = prints.head(subject)
    for line in lines:
        out.print(line, no_wrap=True, crop=False)
    out.print(f"Ranks of one colour are one group over {chosen}; the last line numbers the groups.")


@command(of_model=True)
def check(
    subject: PlannedJob,
    suggest: Annotated[bool, typer.Option("--suggest", help="Rank all orders.")] = False,
    top: Annotated[int, typer.Option(help="How many orders to print.", min=1)] = 10,
    as_json: Json = False,
) -> int:
    """Check a layout: what Megatron refuses, which placements are expensive, which order avoids it.

    --suggest ranks all orders by how many hosts their groups touch.

    Exit status 1 if there is an error or a warning, 0 if not, 2 if the layout cannot be read.
    """
    unknown = unknown_dims(subject.layouts)
    if unknown:
        raise JobError(
            f"cannot check this plan: {'; '.join(unknown)}, and the rules are for "
            f"{', '.join(sorted(KNOWN_DIMS))}. Rename the dim to the one that it is, or use show."
        )
    # Inside an NVLink domain hosts are as near as the GPUs of one.
    places = subject.domains or subject.hosts
    ranking = ranked_orders(subject.order, subject.layouts_in, places)
    asked = next(ranked for ranked in ranking if ranked.order == subject.order)
    better = (
        (ranked.order, subject.layouts_in(ranked.order) or {})
        for ranked in ranking
        if ranked.numbers <= asked.numbers and ranked is not asked
    )
    found = findings(_faults_of(subject), subject.layouts, better)
    if subject.job is not None:
        found = by_severity([*refusals(subject.job), *found])
    status = int(any(finding.severity != "note" for finding in found))
    if as_json:
        data: dict[str, Any] = {"findings": [asdict(finding) for finding in found]}
        if suggest:
            data["orders"] = [asdict(ranked) for ranked in ranking]
        prints.as_json(data)
        return status
    out = prints.head(subject)
    prints.findings(out, found)
    if suggest:
        out.print()
        kind = "NVLink domains" if subject.domains else "hosts"
        prints.orders(out, asked, ranking[:top], len(ranking), kind)
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
    after: Annotated[
        list[str], typer.Argument(help="Another one, or dumps of hypergrid.dump() of any ranks.")
    ],
    as_json: Json = False,
) -> int:
    """Compare two layouts, or a plan and the live groups of a job.

    Exit status 0 if nothing differs, 1 if something does.
    """
    one = read(before)
    dumps = [dump for dump in map(_dump, after) if dump is not None]
    if len(dumps) == len(after):
        said = [line for dump in dumps for line in against_dump(one.plan, dump)]
        if as_json:
            prints.as_json({"differences": said})
        else:
            typer.echo(printable("\n".join(said) or f"{len(dumps)} dumps are as planned."))
        return 1 if said else 0
    if len(after) > 1:
        raise JobError("give two layouts, or one and any number of dumps.")
    other = read(after[0])
    found = difference(one.plan, other.plan, shards_of(one.plan, other.plan))
    if as_json:
        prints.as_json(asdict(found))
    else:
        prints.difference(prints.console(), found)
    return 0 if found.is_empty else 1


@command()
def diagnose(
    directory: Annotated[
        Path | None, typer.Argument(help="Where the job left its flight recorders.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Name ranks by this saved plan.")
    ] = None,
    pids: Annotated[
        list[int] | None,
        typer.Option("--pid", help="Have these ranks, or a torchrun's, write first; repeatable."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one interactive page.")] = None,
    as_json: Json = False,
) -> int:
    """Find the rank that everyone waits for in a job that hangs, from the files of its ranks.

    With --pid the ranks of a running job on this host are asked first; they record by
    hypergrid.record, and the directory is that of HYPERGRID_RECORD.

    Exit status 0 if nothing is wrong, 1 if something is, 2 if there is nothing to read.
    """
    from hypergrid.hangs import reading, verdict

    problems: tuple[str, ...] = ()
    if pids:
        try:
            directory, _, problems = processes.ask(pids, directory)
        except processes.AskError as error:
            raise JobError(f"{error}.") from None
    if directory is None:
        raise JobError("name the DIRECTORY of the dumps, or the processes by --pid.")
    if not directory.is_dir():
        raise JobError(f"there is no directory {directory}{': it is a file' * directory.exists()}.")
    with prints.progress("Reading") as progress:
        left = reading.read(directory, os.cpu_count() or 1, progress)
    left.problems += problems
    if not left.ranks:
        raise JobError(" ".join((_without_dumps(directory), *left.problems[:3])))
    layout = saved(plan).plan if plan else None
    wrong = unfit(layout, left) if layout else ""
    if wrong:
        left.problems.append(one_line(f"{plan} is not the plan of this job: {wrong}."))
        layout = None
    found = verdict.diagnose(left, layout)
    if as_json:
        prints.as_json(found.to_json())
    else:
        prints.diagnosis(found)
    if html is not None:
        from hypergrid.show.job import hosts_of, page_data, plan_of
        from hypergrid.show.page import page

        drawn = layout or plan_of(left)
        title = f"{directory.name}: {found.kind}"
        text = page(drawn, hosts_of(left, drawn), title, job=page_data(left, found))
        html.write_text(text, "utf-8")
    return 0 if found.ok else 1


@command()
def audit(
    directory: Annotated[Path, typer.Argument(help="Where the ranks left their recordings.")],
    against: Annotated[
        Path | None,
        typer.Option(metavar="BASELINE", help="What --json printed before, or a directory."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Count the reads of parallel_state, and name the code that reads the wrong state.

    From what ranks left in the directory of HYPERGRID_AUDIT. With --against new sites are a fault
    too: a ratchet for CI.

    Exit status 0 if nothing is wrong, 1 if a wrong state was read, a site is new, or, with
    --against, a file cannot be read; 2 if there is nothing to read.
    """
    from hypergrid.show import audit as reads

    found = reads.read(directory)
    changes = None if against is None else reads.against(found, reads.baseline(against))
    new = [each for each in changes or () if each.after > each.before]
    if as_json:
        more = {"changes": [asdict(each) for each in changes]} if changes is not None else {}
        prints.as_json({**found.to_json(), **more})
    else:
        prints.audit(found, changes)
    partial = against is not None and bool(found.unread)  # a site may be in the rest
    return int(bool(found.problems or new) or partial)


@command()
def parity(subject: PlannedJob) -> int:
    """Compare the groups of a layout with those of the installed megatron-core.

    Exit status 0 if all groups are equal, 1 if not.
    """
    from hypergrid.cli.machine import compared

    if subject.job is None:
        raise JobError("a saved plan has no arguments of Megatron: give sizes instead.")
    release, rows = compared(subject.job)
    out = prints.head(subject)
    cells = ((*row, "yes" if equal else red("NO", True)) for *row, equal in rows)
    prints.table(out, ("grid", "groups over", ">groups", "equal"), cells)
    differ = sum(not equal for *_, equal in rows)
    out.print(
        f"\nmegatron-core {release}'s RankGenerator: "
        + (f"{differ} of {len(rows)} kinds of groups differ." if differ else "all groups equal.")
        + " The ranks of each group and their order were compared; names, backends and options "
        "are those of the release, and were not."
    )
    return 1 if differ else 0


@command()
def verify(
    from_args: Annotated[
        str, typer.Option(metavar="LINE", help="A launch line or script, pasted, in a file, or -.")
    ],
    checkout: Annotated[
        Path, typer.Option(metavar="DIR", help="A checkout of Megatron-LM: its parser runs.")
    ],
    variables: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A variable that the line does not set."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Ranks of the job, instead of those of the line.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="A known finding, 'gradient *.bias'; repeatable."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="DIM", help="A dim that keeps the job's size, 'tp'; repeatable."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Compare a training step in the layout of a launch line with the same step on one rank.

    One optimizer step of a small model, with the line's flags, on one rank and in the layout: up
    to 16 gloo processes on this machine's CPU. What differs is searched down to the smallest
    layout that shows it.

    Exit status 0 if nothing differs, 1 if something does, 2 if the layout cannot be verified.
    """
    # Python would end with status 1, which says that something differs.
    try:
        return _verified(
            from_args, checkout, variables or (), world_size, allow or (), keep or (), as_json
        )
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # a file that cannot be read: the command's own sentence names it
        raise JobError(str(error) or type(error).__name__) from error


def _verified(
    from_args: str,
    checkout: Path,
    variables: Sequence[str],
    world_size: int | None,
    allow: Sequence[str],
    keep: Sequence[str],
    as_json: bool,
) -> int:
    from compat.verification.launch import verify_line

    pairs = dict(each.partition("=")[::2] for each in variables)
    job, start = started(line_of(from_args), pairs, world_size=world_size)
    order = job.arguments.get("order")
    changed, report = verify_line(
        *script_of(start.words), job.world_size, checkout, order=order, allow=allow, keep=keep
    )
    if as_json:
        prints.as_json({"changed": changed, **report.as_dict()})
    else:
        typer.echo(printable("\n".join([*changed, str(report)])))
    return 2 if report.refused else int(not report.agrees)


@command()
def doctor() -> int:
    """Check this machine: versions, how groups would be created, whether the swap works.

    Exit status 1 if something needs a remedy.
    """
    from hypergrid.cli.machine import examined

    out, status = prints.console(), 0
    for name, state, remedy in examined():
        text = Text(f"{name:<20} ", style="bold")
        out.print(text.append(state, style="not bold"), soft_wrap=True)
        if remedy:
            status = 1
            out.print(Text(f"{'':<20} -> {remedy}", style="yellow"), soft_wrap=True)
    return status


def _without_dumps(directory: Path) -> str:
    said = f"{directory} has no dump of a rank: trace_RANK, groups_RANK.json or stack_RANK.json."
    below = set[str]()
    with suppress(OSError):  # a directory that has gone meanwhile
        for path in directory.glob("*/*_[0-9]*"):
            below.add(path.parent.name)
    return f"{said} Some seem to be in {few(sorted(below))}." if below else said


def _dump(text: str) -> Dump | None:
    """The data that ``hypergrid.dump`` wrote to this file; None if the file has other data."""
    if "--" in text or not Path(text).is_file():
        return None
    raw = bytes_of(text)
    is_dump = {"pid", "groups"} <= decoded(raw, dict[str, Any], text).keys()
    return decoded(raw, Dump, text) if is_dump else None


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not all(re.fullmatch(r"\d{1,6}", number) for number in (first, last or first)):
        raise JobError(f"--hosts {text} is neither a number nor a span such as 4-11.")
    return list(range(int(first), int(last or first) + 1))
