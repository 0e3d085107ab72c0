"""How many ranks a launch has, and how many on each host.

Of the hosts, the tasks, and the tasks on each host two decide: for every launcher, by its table in
``compat/planned/flags``. What does not decide them is refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from compat.cli.reader import RANKS_BESIDE, Option, Reader, options_of
from compat.planned.flags import flags_of
from compat.planned.job import JobError

LAUNCHERS = ("torchrun", "srun", "mpirun", "deepspeed", "accelerate", "ibrun")
# Where the number of tasks is not told either.
_DEFAULTS = {"torchrun": {"hosts": 1, "per_host": 1}, "srun": {"per_host": 1}}
# Variables of the first task of srun.
OF_FIRST_TASK = {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
_NUMBER = re.compile(r"(?:gpu:)?(?:[a-z]{1,3}\d+\w*:)?(\d+)")  # 8, a100:8, gpu:8, gpu:h100:8


class Ranks(NamedTuple):
    """The tasks that a launcher starts; 20 tasks on 3 hosts are at most 7 on each."""

    hosts: int
    tasks: int
    per_host: int


def read_programs(
    reader: Reader, programs: Sequence[tuple[str, list[Option]]], variables: Mapping[str, str]
) -> None:
    """Read the flags of the programs in front of a script, and the ranks that they start.

    A command without a launcher runs in a rank of the job: the variables of that rank count.
    """
    launchers = [program for program in programs if program[0] in LAUNCHERS]
    for program, options in programs:
        if program not in LAUNCHERS:
            for option in options:
                reader.read(option, reader.settings)
    # Nothing depends then on what launchers are told.
    if "world" in reader.overrides:
        return
    if not launchers:
        of_rank: dict[str, int] = {}
        for option in options_of_variables("rank", variables):
            _read_variable(reader, "rank", option, of_rank)
        reader.settings.update({**of_rank, **reader.overrides})
        return
    *outer_launchers, (program, options) = launchers
    ranks = _ranks_of(reader, program, options, variables, reader.overrides.get("per_host"))
    for outer_program, outer_options in outer_launchers:
        outer = _ranks_of(reader, outer_program, outer_options, variables)
        # srun starts torchrun, which then starts the ranks of its host: once on each of them.
        if outer.tasks != ranks.hosts or outer.per_host != 1:
            why = f"expects {ranks.hosts} hosts, and {outer_program} does not start it once on each"
            raise _not_decided(program, why)
    reader.settings["world"] = ranks.tasks
    reader.settings["per_host"] = ranks.per_host


def options_of_variables(program: str, variables: Mapping[str, str]) -> Iterator[Option]:
    """The variables that a program reads, as options."""
    for name, row in flags_of(program).items():
        variable = name.removeprefix("$")
        text = variables.get(variable)
        if variable != name and text:
            yield Option(variable, row, [text])


def _read_variable(reader: Reader, program: str, option: Option, numbers: dict[str, int]) -> None:
    """Read a variable into ``numbers``; one that says otherwise than they do is refused.

    How many tasks a launcher then starts depends on its version.
    """
    told: dict[str, int] = {}
    reader.read(option, told)
    for meaning, number in told.items():
        number_before = numbers.setdefault(meaning, number)
        if number_before != number:
            text = option.values[0]
            raise _not_decided(program, f"is told otherwise by {option.flag}={text}")


def _not_decided(program: str, why: str) -> JobError:
    return JobError(f"{program} {why}. {RANKS_BESIDE}")


def _ranks_of(
    reader: Reader,
    program: str,
    options: Sequence[Option],
    variables: Mapping[str, str],
    per_host: int | None = None,
) -> Ranks:
    """The ranks that a launcher starts; ``per_host`` wins over what it is told."""
    numbers: dict[str, int] = {}
    for option in options:
        reader.read(option, numbers)
    if per_host is not None:
        numbers["per_host"] = per_host
    is_decided = len(numbers.keys() & {*Ranks._fields}) >= 2
    for option in options_of_variables(program, variables):
        if not is_decided or option.row.meaning not in Ranks._fields:
            _read_variable(reader, program, option, numbers)
    # GPUs are not read, from which it would count its tasks.
    if "tasks" not in numbers and "tasks_from_gpus" not in numbers:
        numbers = {**_DEFAULTS.get(program, {}), **numbers}
    is_told = len(numbers.keys() & {*Ranks._fields}) >= 2
    if not is_told or min(numbers.values()) < 1:
        raise _not_decided(program, "is not told the number of ranks and of hosts")
    hosts = numbers.get("hosts", 0)
    tasks = numbers.get("tasks", 0)
    on_each = numbers.get("per_host", 0)
    # At most one of them is 0, which the others decide.
    tasks = tasks or hosts * on_each
    on_each = on_each or -(-tasks // hosts)
    hosts = hosts or -(-tasks // on_each)
    # Of 20 tasks on 3 hosts, two have 7 and one has 6.
    if -(-tasks // hosts) != on_each:
        expected = hosts * on_each
        raise _not_decided(program, f"is told {tasks} tasks and, for its hosts, {expected}")
    return Ranks(hosts, tasks, on_each)


def variables_of_step(options: Sequence[Option], variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of the first task that srun starts."""
    of_step = {**variables, **OF_FIRST_TASK}
    # Where its ranks are not decided, a launch that srun starts is refused by the same variables.
    with suppress(JobError):
        ranks = _ranks_of(Reader({}), "srun", options, variables)
        of_step |= _variables_of({"hosts": ranks.hosts, "tasks": ranks.tasks})
    return of_step


def _variables_of(numbers: Mapping[str, int]) -> dict[str, str]:
    """The variables of SLURM that have these numbers, by the meanings of its flags."""
    variables = {}
    for flag, row in flags_of("srun").items():
        name = flag.removeprefix("$")
        # --nodes=4 sets SLURM_NNODES and SLURM_JOB_NUM_NODES, which mean the same.
        if name.startswith("SLURM_") and row.meaning in numbers:
            variables[name] = str(numbers[row.meaning])
    return variables


def head_of(script: str) -> dict[str, str]:
    """The variables that SLURM sets for the ``#SBATCH`` lines of a script."""
    words: list[str] = []
    for line in script.split("\n"):
        # Behind the first command SLURM reads no further.
        if re.match(r"\s*[^\s#]", line) is not None:
            break
        if re.match(r"#SBATCH\s", line) is None:
            continue
        try:
            words_of_line = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:
            raise JobError(f"the line {line} leaves a quote open. Close it.") from None
        if words_of_line in (["hetjob"], ["packjob"]):
            raise JobError(
                "the job has several parts (#SBATCH hetjob), whose hosts differ. Give the sizes "
                "instead of the script: --world-size 64 --tp 4."
            )
        words += words_of_line
    numbers: dict[str, int] = {}
    distribution = {}
    for flag, row, values in options_of(words, flags_of("srun"))[0]:
        value = "".join(values)
        if flag in ("-m", "--distribution"):
            distribution["SLURM_DISTRIBUTION"] = value
        number = _NUMBER.fullmatch(value)
        if row.meaning and number is not None:
            numbers[row.meaning] = int(number[1])
    # SLURM computes it where the script does not say it.
    if {"hosts", "per_host"} <= numbers.keys():
        numbers.setdefault("tasks", numbers["hosts"] * numbers["per_host"])
    return {**_variables_of(numbers), **distribution}
