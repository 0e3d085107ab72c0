"""How many ranks a launch has, and how many on each host: each launcher's own rules, or refused."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from compat.cli.reader import RANKS_BESIDE, Option, Reader, options_of
from compat.planned.flags import flags_of
from compat.planned.job import JobError

LAUNCHERS = ("torchrun", "srun", "mpirun", "deepspeed", "accelerate", "ibrun")
_DEFAULTS = {"torchrun": {"hosts": 1, "per_host": 1}}
_NUMBER = re.compile(r"(?:gpu:)?(?:[a-z]{1,3}\d+\w*:)?(\d+)")  # 8, a100:8, gpu:8, gpu:h100:8
# OpenMPI's variables that place ranks, as its flags do.
_PLACES_RANKS = re.compile(r"(OMPI|PRTE)_MCA_\w*(hostfile|rmaps|mapping|ppr|dash_host)\w*")


def read_programs(
    reader: Reader, programs: Sequence[tuple[str, list[Option]]], variables: Mapping[str, str]
) -> list[tuple[str, dict[str, int]]]:
    """Read the flags of the programs in front of a script; the launchers with their numbers.

    A command without a launcher runs in a rank of the job: the variables of that rank count.
    """
    launchers = []
    for program, options in programs:
        if program not in LAUNCHERS:
            for option in options:
                reader.read(option, reader.settings)
        # With --world-size nothing depends on what launchers are told.
        elif "world" not in reader.overrides:
            launchers.append((program, _counts(reader, program, options, variables)))
    if not launchers and "world" not in reader.overrides:
        of_rank = _counts(reader, "rank", [], variables)
        if "world" in of_rank:
            reader.settings.update(of_rank)
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
    for outer_program, outer_counts in outer_launchers:
        # srun starts torchrun, which then starts the ranks of its host: once on each of them.
        _, outer_tasks, outer_per_host = _completed(outer_counts)
        if outer_tasks != hosts or outer_per_host != 1:
            outer = f"{outer_program} does not start it once on each"
            raise _not_decided(program, f"expects {hosts} hosts, and {outer}")
    settings["world"] = tasks
    settings["per_host"] = per_host


def _not_decided(program: str, why: str) -> JobError:
    return JobError(f"{program} {why}. Give --world-size and --gpus-per-node beside the command.")


def _counts(
    reader: Reader, program: str, options: Sequence[Option], variables: Mapping[str, str]
) -> dict[str, int]:
    """The hosts, tasks, and tasks on each host that a launcher is told, as far as it is."""
    if program == "mpirun":
        for name in variables:
            if _PLACES_RANKS.fullmatch(name):
                raise _not_decided(program, f"has {name} in its environment, which places ranks")
    flags = {option.row.meaning for option in options}
    told = set(flags)
    counts = dict(_DEFAULTS.get(program, {}))
    # A flag wins over the variable, and of two variables the first.
    for name, row in flags_of(program).items():
        # In a job with --ntasks-per-node `srun -n 64` has another number on each host.
        is_for_tasks = program == "srun" and row.meaning == "per_host" and "tasks" in flags
        if row.kind != "variable" or row.meaning in told or is_for_tasks:
            continue
        if variables.get(name):
            told.add(row.meaning)
            reader.read(Option(name, row, [variables[name]]), counts)
    for option in options:
        reader.read(option, counts)
    if program == "srun":
        for name in ("SLURM_DISTRIBUTION", "SLURM_HOSTFILE"):
            if not variables.get(name, "block").startswith("block"):
                raise JobError(f"{name}={variables[name]} is not read. {RANKS_BESIDE}")
        of_job = variables.get("SLURM_NNODES")
        has_tasks_of_job = "tasks" in counts and "tasks" not in flags
        # With the tasks of its job on fewer hosts srun starts as many as its version decides.
        if has_tasks_of_job and "hosts" in flags and of_job not in (None, str(counts["hosts"])):
            raise _not_decided("srun", f"is told {counts['hosts']} hosts in a job of {of_job}")
        _check_tasks(counts)
    return counts


def _check_tasks(counts: dict[str, int]) -> None:
    """Complete what srun is told, or refuse what does not go together."""
    from_gpus = counts.pop("tasks_from_gpus", None)
    if "tasks" in counts:
        if {"hosts", "per_host"} <= counts.keys():
            expected = counts["hosts"] * counts["per_host"]
            if counts["tasks"] != expected:
                why = f"is told {counts['tasks']} tasks and, for its hosts, {expected}"
                raise _not_decided("srun", why)
        return
    if from_gpus is not None and not {"hosts", "per_host"} <= counts.keys():
        raise _not_decided("srun", "is to count its tasks by GPUs, which are not read")
    # srun -N 4 starts one task on each host.
    counts.setdefault("per_host", 1)


def variables_of_step(options: Sequence[Option], variables: dict[str, str]) -> dict[str, str]:
    """The variables of the first task that srun starts."""
    hosts: int | None = None
    tasks: int | None = None
    # Where the numbers are not decided, a script that needs them has an empty one.
    with suppress(JobError):
        counts = _counts(Reader({}), "srun", options, variables)
        hosts, tasks, _ = _completed(counts)
    of_step = dict(variables)
    for name in ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"):
        of_step[name] = "0"
    for names, number in (
        (("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), hosts),
        (("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), tasks),
    ):
        for name in names:
            of_step.pop(name, None)
            if number is not None:
                of_step[name] = str(number)
    return of_step


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
    rows = flags_of("srun")
    numbers: dict[str, str] = {}
    distribution: dict[str, str] = {}
    for line in re.findall(r"(?m)^#SBATCH\s(.*)", comments[0]):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            raise JobError(f"the line #SBATCH {line} leaves a quote open. Close it.") from None
        for flag, row, values in options_of(words, rows)[0]:
            if not flag and values[0] in ("hetjob", "packjob"):
                raise JobError(
                    "the job has several parts (#SBATCH hetjob), whose hosts differ. Give the "
                    "sizes instead of the script: --world-size 64 --tp 4."
                )
            if flag in ("-m", "--distribution") and values:
                distribution["SLURM_DISTRIBUTION"] = values[0]
            number = _NUMBER.fullmatch(values[0]) if values else None
            if row.meaning and number is not None:
                numbers[row.meaning] = number[1]
    # SLURM computes it where the script does not say it.
    if "tasks" not in numbers and {"hosts", "per_host"} <= numbers.keys():
        numbers["tasks"] = str(int(numbers["hosts"]) * int(numbers["per_host"]))
    variables = distribution
    for name, row in rows.items():
        # --nodes=4 sets SLURM_NNODES and SLURM_JOB_NUM_NODES, which mean the same.
        if name.startswith("SLURM_") and row.meaning in numbers:
            variables[name] = numbers[row.meaning]
    return variables
