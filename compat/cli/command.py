"""How a command is declared: its flags, the jobs that it is about, and its errors."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from compat.cli.prints import drop_output
from compat.cli.source import planned_jobs
from compat.planned.flags import Flag
from compat.planned.job import SIZES, JobError
from hypergrid import __version__
from hypergrid.messages import printable

_LONGEST = 1000  # characters of an error
_WRITTEN = ("html", "png", "svg")  # flags of files of which each holds one job

as_json_flag = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, as docs/command-line.md says."
)
# What starts a job: the arguments of `started`.
_LAUNCH = (
    click.argument("words", nargs=-1, metavar="[--] [COMMAND...]"),
    click.option("--run", is_flag=True, help="COMMAND is a script: bash runs it, no launcher."),
    click.option("--timeout", type=float, help="Seconds that the script may run; 60."),
    click.option(
        "--chdir", type=Path, metavar="DIR", help="Where the script runs; in its own folder."
    ),
    click.option("--from-args", metavar="LINE", help="A pasted command, in which nothing expands."),
)
# Flags of a layout, and their help; sizes.txt has their values.
_LAYOUT = {
    "megatron": "Plan as this release, 0.16.1; the installed one if not given.",
    "plan": "A saved plan: the file of what `plan --json` printed.",
    "world-size": "Ranks of the job.",
    "gpus-per-node": "Ranks on each host; 8 if not given.",
    "nvlink-domain": "GPUs in each NVLink domain, if it is larger than a host.",
    "tp": "Tensor parallel size.",
    "cp": "Context parallel size.",
    "pp": "Pipeline parallel size.",
    "vp": "Virtual stages on each pipeline rank.",
    "ep": "Expert parallel size.",
    "etp": "Tensor parallel size of experts; tp if not given.",
    "instances": "Instances of the distributed optimizer.",
    "order": "Dims from fastest to slowest: tp-cp-ep-dp-pp.",
    "no-gloo": "Without gloo twins of the data-parallel groups.",
    "tp-comm-overlap": "With Transformer Engine's user buffers.",
}
_TEXT = Flag("1", kind="text")  # what no size is


class _Commands(click.Group):
    """Commands that return their exit status; an expected error is printed as a line, status 2."""

    def invoke(self, context: click.Context) -> None:
        status = 0
        try:
            status = super().invoke(context) or 0
            sys.stdout.flush()
        except BrokenPipeError:
            drop_output()
        except (ValueError, OSError, ImportError) as error:
            click.echo(_sentence(error), err=True)
            status = 2
        context.exit(status)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(version)s")
def app() -> None:
    """Shows, checks and compares which ranks of a training job communicate with each other.

    Without a GPU; only verify and doctor need torch. The flags of a layout, which plan, show and
    check have, are in the help of plan.
    """


def launch_command(function: Callable[..., int | None]) -> click.Command:
    """Make a function a command with the flags of a launch, which ``started`` takes."""
    for flag in reversed(_LAUNCH):
        function = flag(function)
    # The words behind the command's first one are its own, whatever they look like.
    return app.command(context_settings={"allow_interspersed_args": False})(function)


def layout_command(function: Callable[..., int | None]) -> click.Command:
    """Make a function a command with the flags of a launch and of a layout.

    It is called for each job that is started, with the ``subject`` and its own flags; the command
    ends with the largest status.
    """
    own_names = list(inspect.signature(function).parameters)[1:]

    @functools.wraps(function)
    def for_each_job(**arguments: Any) -> int:
        own = {name: arguments.pop(name) for name in own_names}
        subjects = planned_jobs(**arguments)
        if len(subjects) > 1 and any(own.get(name) for name in _WRITTEN):
            raise JobError(
                f"{len(subjects)} different jobs are started, and a file holds one. Choose one "
                f"by the script's arguments or its environment."
            )
        statuses = []
        for number, subject in enumerate(subjects, 1):
            if len(subjects) > 1:
                click.echo(f"hypergrid: job {number} of {len(subjects)}", err=True)
            statuses.append(function(subject, **own) or 0)
        return max(statuses)

    command: Callable[..., int | None] = for_each_job
    for name, text in reversed(_LAYOUT.items()):
        row = SIZES.get(name, _TEXT)
        kind: type = int
        if row.kind == "text":
            kind = str
        if row.values == "0":  # such a flag takes no value
            kind = bool
        command = click.option(
            f"--{name}",
            type=kind,
            is_flag=kind is bool,
            help=text,
            hidden=function.__name__ != "plan",
        )(command)
    return launch_command(command)


def _sentence(error: Exception) -> str:
    """An error in one line, of which control characters are written out."""
    message = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename} cannot be opened: {error.strerror}."
    sentence = printable(f"hypergrid: {message}")
    return " ".join(sentence.split())[:_LONGEST]
