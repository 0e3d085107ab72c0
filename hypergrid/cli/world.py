"""How many ranks a launch has, and how many on each host: each launcher's own rules."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from math import prod
from typing import TypeAlias

from compat.planned.flags import flags_of
from compat.planned.job import JobError
from hypergrid.cli.bash import Word
from hypergrid.cli.reader import Reader

# The flags of a launcher by their meaning: the flag as it is written, and its values.
Options: TypeAlias = dict[str, tuple[str, Sequence[Word]]]
_GPUS = "SLURM_GPUS_ON_NODE"
_NEEDS = {
    "srun": "--ntasks, or --nodes and --ntasks-per-node",
    "mpirun": "-n",
    "deepspeed": "--num_gpus and --num_nodes",
    "accelerate": "--num_processes and --num_machines",
}


def ranks_of(
    reader: Reader, launchers: Sequence[tuple[str, Options]], variables: Mapping[str, Word]
) -> None:
    """Set the number of ranks and hosts that the launchers start."""
    programs = [pair for pair in launchers if pair[0] in (*_NEEDS, "torchrun")]
    settings = reader.settings
    if not programs:
        if "WORLD_SIZE" in variables and "world" not in settings:
            world = reader.number("WORLD_SIZE", [variables["WORLD_SIZE"]])
            settings.update(world=world) if world is not None else None
        return
    if "world" in reader.overrides:
        # The user says how many ranks there are: the hosts too, or 8 on each.
        return
    program, options = programs[-1]
    refused = options.get("refused") or options.get("hostfile")
    if refused is not None:
        raise JobError(
            f"{refused[0]} of {program} decides the ranks in a way that is not read: {program} is "
            f"not told the number of ranks. Give --world-size and --gpus-per-node."
        )
    tasks, hosts, per_host = _RULES[program](reader, options, variables)
    for outer, outer_options in programs[:-1]:
        _check_launchers(reader, outer, outer_options, program, hosts, variables)
    if reader.missing:
        return
    if tasks is None:
        raise JobError(f"{program} is not told the number of ranks. Give {_NEEDS[program]}.")
    if per_host is None and hosts:
        per_host = -(-tasks // hosts)
    settings["world"] = tasks
    if hosts is not None:
        settings["hosts"] = hosts
    if "per_host" not in reader.overrides:
        if per_host is None:
            raise JobError(
                f"{program} does not say how many of its {tasks} ranks are on each host. Give "
                f"--gpus-per-node."
            )
        settings["per_host"] = per_host


_Ranks: TypeAlias = "tuple[int | None, int | None, int | None]"  # tasks, hosts, tasks on each host


def _torchrun(reader: Reader, options: Options, variables: Mapping[str, Word]) -> _Ranks:
    defaults = {"hosts": "PET_NNODES", "per_host": "PET_NPROC_PER_NODE"}
    found = {}
    for meaning, variable in defaults.items():
        if meaning in options:
            found[meaning] = _one(reader, meaning, *options[meaning], variables)
        elif variable in variables:
            found[meaning] = _one(reader, meaning, variable, [variables[variable]], variables)
        else:
            found[meaning] = reader.overrides.get(meaning, 1)
    hosts, per_host = found["hosts"], found["per_host"]
    if hosts is None or per_host is None:
        return None, None, None
    return hosts * per_host, hosts, per_host


def _one(
    reader: Reader, meaning: str, flag: str, words: Sequence[Word], variables: Mapping[str, Word]
) -> int | None:
    """The number of hosts, or of ranks on each; what the user gives wins."""
    if meaning in reader.overrides:
        return int(reader.overrides[meaning])
    text = words[0].text
    if meaning == "per_host" and text in ("gpu", "auto", "cpu"):
        if _GPUS not in variables or text == "cpu":
            raise JobError(
                f"{flag} {text} is the number of GPUs of the host, which the launch line does not "
                f"say. Give it by --gpus-per-node."
            )
        return reader.number(_GPUS, [variables[_GPUS]])
    span = re.fullmatch(r"(\d+)[:-](\d+)", text)
    if span and span[1] != span[2]:
        raise JobError(
            f"{flag} {text} leaves the number of hosts open until the job runs. Give one of them "
            f"by --world-size."
        )
    number = int(span[1]) if span else reader.number(flag, words)
    if number is not None:
        reader.flags["used"].append(f"{flag} {text}")
    return number


def _srun(reader: Reader, options: Options, variables: Mapping[str, Word]) -> _Ranks:
    def value(meaning: str, variable: str) -> int | None:
        if meaning in options:
            return _one(reader, meaning, *options[meaning], variables)
        if variable in variables:
            return _one(reader, meaning, variable, [variables[variable]], variables)
        return None

    hosts = value("hosts", "" if "nodelist" in options else "SLURM_NNODES")
    if hosts is None and "nodelist" in options:
        flag, words = options["nodelist"]
        hosts = hosts_in(words[0].text)
        # The brackets of a list are a pattern to bash; no file is named as a list of hosts.
        if any(hole.name or not hole.why for hole in words[0].holes):
            reader.lacks(flag, words[0])
    per_host = value("per_host", "SLURM_NTASKS_PER_NODE")
    tasks = value("tasks", "")
    if tasks is None and per_host is not None and hosts is not None:
        tasks = hosts * per_host
    of_job = value("", "SLURM_NTASKS") if tasks is None else None
    if of_job is not None:
        tasks = of_job
    if "hosts" in options and "tasks" not in options and "SLURM_NTASKS" in variables:
        of_head = variables.get("SLURM_NNODES")
        if of_head is None or of_head.text != str(hosts):
            tasks_of_head = variables["SLURM_NTASKS"].text
            raise JobError(
                f"srun takes {tasks_of_head} tasks from the script's head and other hosts from its "
                f"flags. Give it --ntasks."
            )
    if tasks is None:
        tasks = hosts  # one on each
    return tasks, hosts, per_host


def _mpirun(reader: Reader, options: Options, variables: Mapping[str, Word]) -> _Ranks:
    tasks = reader.number(*options["tasks"]) if "tasks" in options else None
    per_host = reader.number(*options["per_host"]) if "per_host" in options else None
    hosts = None
    if "map_by" in options and per_host is None:
        found = re.match(r"ppr:(\d+):node", options["map_by"][1][0].text)
        per_host = int(found[1]) if found else None
    if "hostlist" in options:
        flag, words = options["hostlist"]
        if words[0].holes:
            reader.lacks(flag, words[0])
        slots = [int(host.partition(":")[2] or 1) for host in words[0].text.split(",")]
        if len(set(slots)) == 1:
            hosts = len(slots)
            per_host = per_host or slots[0]
            tasks = tasks or sum(slots)
    return tasks, None if hosts is None or tasks is None else -(-tasks // (per_host or 1)), per_host


def _product(reader: Reader, options: Options, variables: Mapping[str, Word]) -> _Ranks:
    """DeepSpeed and accelerate: what their flags leave out comes from files."""
    hosts = reader.number(*options["hosts"]) if "hosts" in options else None
    per_host = reader.number(*options["per_host"]) if "per_host" in options else None
    tasks = reader.number(*options["tasks"]) if "tasks" in options else None
    if hosts is not None and per_host is not None:
        tasks = hosts * per_host
    return tasks if hosts is not None else None, hosts, per_host


_RULES = {
    "torchrun": _torchrun,
    "srun": _srun,
    "mpirun": _mpirun,
    "deepspeed": _product,
    "accelerate": _product,
}


def _check_launchers(
    reader: Reader,
    outer: str,
    options: Options,
    program: str,
    hosts: int | None,
    variables: Mapping[str, Word],
) -> None:
    """A launcher that another one starts must be started once on each host."""
    if "refused" in options:
        raise JobError(
            f"{options['refused'][0]} of {outer} decides how often {program} starts in a way that "
            f"is not read. Give --world-size and --gpus-per-node."
        )
    started, _, on_each = _RULES[outer](reader, options, variables)
    is_several = (started is not None and started != hosts) or (on_each or 1) > 1
    if is_several and hosts is not None:
        count = f"{started} times" if started else f"{on_each} times on each host"
        raise JobError(
            f"{outer} starts {program} {count}, and each of them expects {hosts} hosts: one "
            f"{program} on each host is needed. Give {outer} one task for each host."
        )


def hosts_in(nodelist: str) -> int:
    """The number of hosts in a list such as ``dgx[01-04,7],login``."""
    count = 0
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        sizes = []
        for numbers in re.findall(r"\[([^\]]*)\]", part):
            spans = [span.partition("-") for span in numbers.split(",")]
            if not all(first.isdigit() and (last or first).isdigit() for first, _, last in spans):
                raise JobError(f"the list of hosts {nodelist} cannot be read.")
            sizes.append(sum(int(last or first) - int(first) + 1 for first, _, last in spans))
        count += prod(sizes)
    return count


_OF_HEAD = {
    "hosts": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "tasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "per_host": ("SLURM_NTASKS_PER_NODE",),
    "gpus": ("SLURM_GPUS_ON_NODE",),
    "gres": ("SLURM_GPUS_ON_NODE",),
}


def head_of(script: str) -> tuple[dict[str, str], bool]:
    """The variables that SLURM sets for ``#SBATCH`` lines, and whether the job is of parts."""
    lines = re.match(r"(?:[^\S\n]*(?:#.*)?\n)*", f"{script}\n")
    variables: dict[str, str] = {}
    head = lines[0] if lines else ""
    for line in re.findall(r"(?m)^#SBATCH(.*)", head):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise JobError(f"#SBATCH{line} cannot be read: {error}.") from None
        for word, behind in zip(words, [*words[1:], ""], strict=True):
            name, equals, value = word.partition("=")
            if not word.startswith("--"):
                name, equals, value = word[:2], word[2:], word[2:]
            row = flags_of("srun").get(name.lstrip("-")) if name.startswith("-") else None
            text = value if equals else behind
            if row is None:
                continue
            if row.meaning == "nodelist":
                variables.setdefault("SLURM_NNODES", str(hosts_in(text)))
            if row.meaning in ("gpus", "gres"):
                text = text.partition(",")[0].rpartition(":")[2]
            variables |= dict.fromkeys(_OF_HEAD.get(row.meaning, ()), text)
    sizes = [variables.get(name, "") for name in ("SLURM_NNODES", "SLURM_NTASKS_PER_NODE")]
    if "SLURM_NTASKS" not in variables and all(re.fullmatch(r"\d{1,9}", size) for size in sizes):
        tasks = str(int(sizes[0]) * int(sizes[1]))
        variables |= {"SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks}
    return variables, re.search(r"(?m)^#SBATCH\s+(hetjob|packjob)", head) is not None
