"""How a command is declared: its flags, the layout that it is about, and its errors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from compat.cli.source import PlannedJob, from_line, line_of, of_job, saved
from compat.megatron import releases
from compat.planned.job import JobError, from_sizes
from hypergrid.files import FileError
from hypergrid.layout import LayoutError
from hypergrid.messages import printable

app = typer.Typer(
    help="Shows, checks and compares which ranks of a training job communicate with each other, "
    "without a GPU. Only parity, verify and doctor need torch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_LONGEST = 1000  # characters of an error
Json = Annotated[bool, typer.Option("--json", help="Print JSON, as docs/command-line.md says.")]

# Flags of a layout: the type of the value, how it is shown, and help.
_FLAGS: tuple[tuple[str, Any, str | None, str], ...] = (
    ("from-args", str, "LINE", "A launch line or script, pasted, in a file, or - for its input."),
    ("set", list[str], "NAME=VALUE", "A variable of the launch line that it does not set."),
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
    ("defaults", bool, None, "Take the default of ${NAME:-default} where NAME is not set."),
)
# What only `check` reads: of the model and the batch.
_OF_MODEL: tuple[tuple[str, Any, str | None, str], ...] = (
    ("layers", int, None, "Layers of the model."),
    ("heads", int, None, "Attention heads."),
    ("experts", int, None, "Experts of each layer."),
    ("micro-batch-size", int, None, "Sequences of a micro-batch."),
    ("global-batch-size", int, None, "Sequences of a step."),
)


_SHOWN_BY = "plan"
_SCRIPT = inspect.Parameter(
    "script",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None,
        typer.Argument(help="A launch script, or a manifest of Kubernetes; - for input."),
    ],
)


def command(
    of_model: bool = False, **settings: Any
) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Make a function a command.

    Its docstring is the help, its parameters are the flags (``subject`` stands for those of a
    layout), and it returns the exit status, 0 if nothing. An expected error is printed as one line,
    with exit status 2. ``settings`` are those of click's context; ``of_model`` adds the flags of a
    model.
    """

    def add(function: Callable[..., int | None]) -> Callable[..., None]:
        parameters = dict(inspect.signature(function, eval_str=True).parameters)
        of_layout: list[inspect.Parameter] = []
        # The flags of a layout stand in the help of one command, and the others name it.
        is_shown = function.__name__ == _SHOWN_BY
        if parameters.pop("subject", None):
            of_layout = [_SCRIPT]
            of_layout += [_parameter(*flag, is_shown=is_shown) for flag in _FLAGS]
            if of_model:
                of_layout += [_parameter(*flag, is_shown=True) for flag in _OF_MODEL]
        keywords = list(of_layout)
        for parameter in parameters.values():
            keywords.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(function)
        def run(**arguments: Any) -> None:
            try:
                if of_layout:
                    flags = {flag.name: arguments.pop(flag.name) for flag in of_layout}
                    arguments["subject"] = _subject(**flags)
                status = function(**arguments) or 0
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


def _subject(
    script: str | None,
    from_args: str | None,
    plan: str | None,
    set: list[str] | None,
    megatron: str | None,
    defaults: bool | None,
    **sizes: Any,
) -> PlannedJob:
    """The layout of a command, from its flags."""
    try:
        releases.follow(megatron)
    except ValueError as error:
        raise JobError(str(error)) from None
    if script is not None:
        if from_args is not None or plan is not None:
            raise JobError("give one of SCRIPT, --from-args and --plan.")
        if script != "-" and not Path(script).is_file():
            raise JobError(f"there is no file {script}. A pasted line goes behind --from-args.")
        from_args = script
    variables = {}
    for pair in set or ():
        name, equals, value = pair.partition("=")
        if not equals or from_args is None:
            raise JobError("--set is NAME=VALUE, for a variable of --from-args.")
        variables[name] = value
    if plan is not None:
        ranks_per_host = sizes.pop("gpus_per_node")
        nvlink_domain = sizes.pop("nvlink_domain")
        if from_args is not None or megatron is not None or any(sizes.values()):
            raise JobError("--plan holds the whole layout: give it alone, or sizes instead.")
        return saved(Path(plan), ranks_per_host, nvlink_domain)
    if from_args is None:
        return of_job(from_sizes(**sizes))
    return of_job(from_line(line_of(from_args), variables, bool(defaults), **sizes))
