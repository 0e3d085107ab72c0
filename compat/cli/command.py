"""How a command is declared: its flags, the layout that it is about, and its errors."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from compat.cli.prints import drop_output
from compat.cli.source import PlannedJob, Source, of_job, saved, started
from compat.megatron import releases
from compat.planned.job import JobError, from_sizes
from hypergrid.files import FileError
from hypergrid.layout import LayoutError
from hypergrid.messages import printable

app = typer.Typer(
    help="Shows, checks and compares which ranks of a training job communicate with each other, "
    "without a GPU. Only verify and doctor need torch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_LONGEST = 1000  # characters of an error
Json = Annotated[bool, typer.Option("--json", help="Print JSON, as docs/command-line.md says.")]

# Flags of a launch, of the same form as those of a layout.
_LAUNCH: tuple[tuple[str, Any, str | None, str], ...] = (
    ("run", bool, None, "COMMAND is a script: bash runs it, without its launchers."),
    ("timeout", float, "SECONDS", "How long the script may run; 60 if not given."),
    ("chdir", str, "DIR", "Where the script runs; in its own folder if not given."),
    ("from-args", str, "LINE", "One launch command, pasted: quotes are read, nothing expands."),
    ("prefix", str, "model.", "Of the overrides that hold the job's sizes."),
)
# Flags of a layout: the type of the value, how it is shown, and help.
_FLAGS: tuple[tuple[str, Any, str | None, str], ...] = (
    ("megatron", str, "0.16.1", "Plan as this release; the installed one if not given."),
    ("plan", str, "FILE", "A saved plan: what `plan --json` printed."),
    ("world-size", int, None, "Ranks of the job."),
    ("gpus-per-node", int, None, "Ranks on each host; 8 if not given."),
    ("nvlink-domain", int, None, "GPUs in each NVLink domain, if it is larger than a host."),
    ("tp", int, None, "Tensor parallel size."),
    ("cp", int, None, "Context parallel size."),
    ("pp", int, None, "Pipeline parallel size."),
    ("vp", int, None, "Virtual stages on each pipeline rank."),
    ("ep", int, None, "Expert parallel size."),
    ("etp", int, None, "Tensor parallel size of experts; tp if not given."),
    ("instances", int, None, "Instances of the distributed optimizer."),
    ("order", str, "tp-cp-ep-dp-pp", "Dims from fastest to slowest."),
    ("no-gloo", bool, None, "Without gloo twins of the data-parallel groups."),
    ("tp-comm-overlap", bool, None, "With Transformer Engine's user buffers."),
)


_SHOWN_BY = "plan"
_COMMAND = inspect.Parameter(
    "words",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[--] [COMMAND...]",
            help="A command that starts a job, with its words; with --run a script of bash.",
        ),
    ],
)
_WRITTEN = ("html", "png", "svg")  # flags of files of which each holds one job


def command(
    **settings: Any,
) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Make a function a command.

    Its docstring is the help, its parameters are the flags, and it returns the exit status, 0 if
    nothing. ``source`` stands for the flags of a launch, ``subject`` for these and those of a
    layout: the function is called for each job that is started. An expected error is printed as
    one line, with exit status 2. ``settings`` are those of click's context.
    """

    def add(function: Callable[..., int | None]) -> Callable[..., None]:
        parameters = dict(inspect.signature(function, eval_str=True).parameters)
        has_subject = parameters.pop("subject", None) is not None
        has_launch = parameters.pop("source", None) is not None or has_subject
        # The flags of a layout stand in the help of one command, and the others name it.
        is_shown = function.__name__ == _SHOWN_BY
        of_launch: list[inspect.Parameter] = []
        of_layout: list[inspect.Parameter] = []
        if has_launch:
            of_launch = [_COMMAND, *(_parameter(*flag, is_shown=True) for flag in _LAUNCH)]
            # The words behind the command's first one are its own, whatever they look like.
            settings["allow_interspersed_args"] = False
        if has_subject:
            of_layout = [_parameter(*flag, is_shown=is_shown) for flag in _FLAGS]
        keywords = of_launch + of_layout
        for parameter in parameters.values():
            keywords.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        def answer(arguments: dict[str, Any]) -> int:
            if not has_launch:
                return function(**arguments) or 0
            source = _source(**{flag.name: arguments.pop(flag.name) for flag in of_launch})
            if not has_subject:
                return function(source=source, **arguments) or 0
            flags = {flag.name: arguments.pop(flag.name) for flag in of_layout}
            subjects = _subjects(source, **flags)
            if len(subjects) > 1 and any(arguments.get(name) for name in _WRITTEN):
                raise JobError(
                    f"{len(subjects)} different jobs are started, and a file holds one. Choose one "
                    f"by the script's arguments or its environment."
                )
            statuses = []
            for number, subject in enumerate(subjects, 1):
                if len(subjects) > 1:
                    typer.echo(f"hypergrid: job {number} of {len(subjects)}", err=True)
                statuses.append(function(subject=subject, **arguments) or 0)
            return max(statuses)

        @functools.wraps(function)
        def run(**arguments: Any) -> None:
            status = 0
            try:
                status = answer(arguments)
                sys.stdout.flush()
            except BrokenPipeError:
                drop_output()
            except (LayoutError, JobError, FileError, OSError, ImportError) as error:
                typer.echo(_sentence(error), err=True)
                status = 2
            raise typer.Exit(status)

        # Typer makes the flags of the signature and of the annotations.
        run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
        # Typer would keep the line breaks of a docstring: a paragraph is one line.
        paragraphs = (inspect.getdoc(function) or "").split("\n\n")
        help_text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        if of_layout and not is_shown:
            help_text += f"\n\nThe flags of a layout are those of `hypergrid {_SHOWN_BY} --help`."
        return app.command(help=help_text, context_settings=settings)(run)

    return add


def _sentence(error: Exception) -> str:
    """An error in one line, of which control characters are written out."""
    message = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename} cannot be opened: {error.strerror}."
    sentence = printable(f"hypergrid: {message[:_LONGEST]}")
    return " ".join(sentence.split())[:_LONGEST]


def _parameter(
    flag: str, kind: Any, metavar: str | None, description: str, is_shown: bool
) -> inspect.Parameter:
    option = typer.Option(
        f"--{flag}",
        help=description,
        metavar=metavar,
        rich_help_panel="Layout",
        show_default=False,
        hidden=not is_shown,
    )
    return inspect.Parameter(
        flag.replace("-", "_"),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _source(
    words: list[str] | None,
    run: bool | None,
    from_args: str | None,
    timeout: float | None,
    chdir: str | None,
    prefix: str | None,
) -> Source | None:
    """The launch that the flags name; None if they name none."""
    if words and from_args is not None:
        raise JobError("give a command or --from-args, and not both.")
    if run and not words:
        raise JobError("--run needs a script behind it: hypergrid check --run job.sh ARGUMENTS.")
    if not words and from_args is None:
        if prefix is not None:
            raise JobError("--prefix chooses between overrides of a command: give the command.")
        return None
    return Source(words or (), bool(run), from_args, timeout or Source.timeout, chdir, prefix)


def _subjects(
    source: Source | None, plan: str | None, megatron: str | None, **sizes: Any
) -> list[PlannedJob]:
    """The layouts of a command, from its flags: one for each job that is started."""
    try:
        releases.follow(megatron)
    except ValueError as error:
        raise JobError(str(error)) from None
    if plan is not None:
        ranks_per_host = sizes.pop("gpus_per_node")
        nvlink_domain = sizes.pop("nvlink_domain")
        if source is not None or megatron is not None or any(sizes.values()):
            raise JobError("--plan holds the whole layout: give it alone, or sizes instead.")
        return [saved(Path(plan), ranks_per_host, nvlink_domain)]
    if source is None:
        return [of_job(from_sizes(**sizes))]
    return [of_job(job) for job, _ in started(source, **sizes)]
