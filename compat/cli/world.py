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
        # With --world-size nothing depends on what launchers are told.
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
        raise _not_decided(program, "is not told the number of ranks and of hosts")
    if hosts is not None and tasks > hosts * per_host:
        fit = f"has {tasks} ranks, which do not fit on {hosts} hosts of {per_host}"
        raise _not_decided(program, fit)
    for _, outer_counts in outer_launchers:
        # srun starts torchrun, which then starts the ranks of its host: once on each of them.
        _, outer_tasks, outer_per_host = _completed(outer_counts)
        if outer_tasks != hosts or outer_per_host != 1:
            outer = f"{outer_launchers[-1][0]} does not start it once on each"
            raise _not_decided(program, f"expects {hosts} hosts, and {outer}")
    settings["world"] = tasks
    settings["per_host"] = per_host


def _not_decided(program: str, why: str) -> JobError:
    return JobError(f"{program} {why}. Give --world-size and --gpus-per-node.")


def _counts(
    reader: Reader, program: str, options: Sequence[Option], variables: Mapping[str, Word]
) -> dict[str, int]:
    """The hosts, tasks, and tasks on each host that a launcher is told, as far as it is."""
    of_job = []  # options that variables of the environment stand for
    for name, row in flags_of(program).items():
        if row.kind == "variable" and name in variables:
            of_job.append(Option(name, row, [variables[name]], 0))
    meanings = {option.row.meaning for option in options}
    # srun -n 64 in a job with --ntasks-per-node
    if program == "srun" and "tasks" in meanings:
        meanings.add("per_host")  # of the job, it is no longer the number on each host
    elif program == "srun" and meanings & {"hosts", "per_host"}:
        for option in of_job:
            # SLURM obeys both in part: which of them depends on its version.
            if option.row.meaning in ("tasks", "per_host"):
                raise JobError(
                    "srun has flags beside tasks of the script's head. Give it --ntasks."
                )
    counts = dict(_DEFAULTS.get(program, {}))
    for option in of_job:
        # A flag wins over the variable.
        if option.row.meaning not in meanings:
            reader.read(option, counts)
    for option in options:
        reader.read(option, counts)
    # srun -N 4 starts one task on each host.
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
    # 20 tasks on 3 hosts: at most 7 on each
    if per_host is None and hosts and tasks:
        per_host = -(-tasks // hosts)
    return hosts, tasks, per_host


def head_of(script: str) -> dict[str, str]:
    """The variables that SLURM sets for the ``#SBATCH`` lines of a script."""
    # Behind the first command SLURM reads no further.
    comments = re.match(r"(?:[^\S\n]*(?:#.*)?\n)*", f"{script}\n")
    assert comments is not None  # of an empty text at the least
    lines = re.findall(r"(?m)^#SBATCH(\s.*)", comments[0])
    rows = flags_of("srun")
    variables = {}
    # Their words are quoted as in bash.
    script_of_lines = "\n".join(f"sbatch {line}" for line in lines)
    sbatch_commands, _ = commands(script_of_lines)
    for command in sbatch_commands:
        for flag, row, values, _ in options_of(command.words[1:], rows)[0]:
            if not values:
                continue
            text = values[0].text
            if not flag and text in ("hetjob", "packjob"):
                raise JobError(
                    "the job has several parts (#SBATCH hetjob), whose hosts differ. Give "
                    "--world-size and the sizes instead of the script."
                )
            number = _NUMBER.fullmatch(text)
            if number is None:
                continue
            # --nodes=4 sets SLURM_NNODES and SLURM_JOB_NUM_NODES, which mean the same.
            for name, variable in rows.items():
                if name.startswith("SLURM_") and variable.meaning == row.meaning:
                    variables[name] = number[1]
    return variables
