"""How many ranks a launch has, and how many on each host: each launcher's own rules, or refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from compat.cli.bash import Word, commands
from compat.cli.reader import Option, Reader, options_of
from compat.planned.flags import flags_of
from compat.planned.job import JobError

LAUNCHERS = ("torchrun", "srun", "mpirun", "deepspeed", "accelerate")
_DEFAULTS = {"torchrun": {"hosts": 1, "per_host": 1}}
_NUMBER = re.compile(r"(?:gpu:)?(?:[a-z]{1,3}\d+\w*:)?(\d+)")  # 8, a100:8, gpu:8, gpu:h100:8


def read_programs(
    reader: Reader, programs: Sequence[tuple[str, list[Option]]], variables: Mapping[str, Word]
) -> list[tuple[str, dict[str, int]]]:
    """Read the flags of the programs in front of a script; the launchers with their numbers."""
    launchers = []
    for program, options in programs:
        if program not in LAUNCHERS:
            for option in options:
                reader.read(option, reader.settings)
        elif "world" not in reader.overrides:
            launchers.append((program, _counts(reader, program, options, variables)))
    return launchers


def set_ranks(settings: dict[str, Any], launchers: Sequence[tuple[str, dict[str, int]]]) -> None:
    """Set the number of ranks of a job, and of those on each host, as its launchers start them."""
    *outer_launchers, (program, counts) = launchers
    if "per_host" in settings:
        counts["per_host"] = settings["per_host"]
    hosts, tasks, per_host = _completed(counts)
    if tasks is None or per_host is None:
        why = "is not told the number of ranks and of hosts"
    elif hosts is not None and tasks > hosts * per_host:
        why = f"has {tasks} ranks, which do not fit on {hosts} hosts of {per_host}"
    elif any(_completed(outer)[1:] != (hosts, 1) for _, outer in outer_launchers):
        why = f"expects {hosts} hosts, and {outer_launchers[-1][0]} does not start it once on each"
    else:
        settings["world"] = tasks
        settings["per_host"] = per_host
        return
    raise JobError(f"{program} {why}. Give --world-size and --gpus-per-node.")


def _counts(
    reader: Reader, program: str, options: Sequence[Option], variables: Mapping[str, Word]
) -> dict[str, int]:
    """The hosts, tasks, and tasks on each host that a launcher is told, as far as it is."""
    meanings = {option.row.meaning for option in options}
    of_job = [
        Option(name, row, [variables[name]], 0)
        for name, row in flags_of(program).items()
        if row.kind == "variable" and name in variables
    ]
    if program == "srun" and "tasks" in meanings:
        meanings.add("per_host")  # of the job, it is no longer the number on each host
    elif program == "srun" and meanings & {"hosts", "per_host"}:
        # SLURM obeys both in part: which of them depends on its version.
        meanings_of_job = {option.row.meaning for option in of_job}
        if meanings_of_job & {"tasks", "per_host"}:
            raise JobError("srun has flags beside tasks of the script's head. Give it --ntasks.")
    counts = dict(_DEFAULTS.get(program, {}))
    for option in (*of_job, *options):
        if option.row.meaning not in meanings or option.line:
            reader.read(option, counts)
    if program == "srun" and "tasks" not in counts:
        counts.setdefault("per_host", 1)
    return counts


def _completed(counts: Mapping[str, int]) -> tuple[int | None, int | None, int | None]:
    """The hosts, tasks, and tasks on each host; None where it is not known."""
    hosts = counts.get("hosts")
    tasks = counts.get("tasks")
    per_host = counts.get("per_host")
    if tasks is None and hosts is not None and per_host is not None:
        tasks = hosts * per_host
    if per_host is None and hosts and tasks:
        per_host = -(-tasks // hosts)
    return hosts, tasks, per_host


def head_of(script: str) -> dict[str, str]:
    """The variables that SLURM sets for the ``#SBATCH`` lines of a script."""
    comments = re.match(r"(?:[^\S\n]*(?:#.*)?\n)*", f"{script}\n")
    lines = re.findall(r"(?m)^#SBATCH(\s.*)", comments[0] if comments else "")
    table = flags_of("srun")
    variables = {}
    for command in commands("\n".join(f"sbatch {line}" for line in lines))[0]:
        options, _ = options_of(command.words[1:], table)
        for flag, row, values, _ in options:
            if not flag and values[0].text in ("hetjob", "packjob"):
                raise JobError(
                    "the job has several parts (#SBATCH hetjob), whose hosts differ. Give "
                    "--world-size and the sizes instead of the script."
                )
            number = _NUMBER.fullmatch(values[0].text) if values else None
            for name, variable in table.items():
                if number and variable.meaning == row.meaning and name.startswith("SLURM_"):
                    variables[name] = number[1]
    return variables
