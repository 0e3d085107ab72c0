"""Evidence that is worse than all files of all ranks: what a real incident leaves."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

from tests.support import programs

# What is wrong with the evidence of a hang. The first is that of all ranks.
KINDS = (
    "whole",
    "one innocent missing",
    "guilty missing",
    "several missing",
    "a host of eight missing",
    "short buffer",
    "different moments",
)


def write(
    run: programs.Run, directory: Path, kind: str, rng: random.Random
) -> frozenset[int] | None:
    """Write the dumps of a run as this kind of evidence, and give the ranks that wrote early.

    None if the program is too small for it.
    """
    world = range(run.program.world)
    guilty = run.program.guilty.keys()
    buffer = run.program.buffer
    moments: dict[int, int] = {}
    missing: Iterable[int] = ()
    if kind == "one innocent missing":
        if len(world) < 3:
            return None  # all that is left would be the guilty rank's own file
        innocent = sorted(set(world) - guilty)
        if not innocent:
            return None
        missing = rng.sample(innocent, 1)
    elif kind == "guilty missing":
        missing = guilty
    elif kind == "several missing":
        missing = rng.sample(world, min(rng.randint(2, 3), len(world) - 1))
    elif kind == "a host of eight missing":
        hosts = [world[first : first + 8] for first in range(0, len(world), 8)]
        missing = rng.choice(hosts)
        if len(hosts) < 2:
            return None
    elif kind == "short buffer":
        calls = len(run.program.ops[0]) // (len(run.program.steps[0]) + 1)
        run.program.buffer = rng.randint(2, max(2, calls))
    elif kind == "different moments":
        late = rng.sample(world, rng.randint(1, len(world)))
        latest = max(max(host.clock, host.device) for host in run.hosts)
        begin = latest - (latest - programs.START) // max(1, len(run.program.steps[0]))
        for rank in late:
            moments[rank] = rng.randint(begin, rng.choice((latest, run.end)))
    programs.write(run, directory, moments)
    run.program.buffer = buffer
    run.moments = {}
    with_groups = rng.random() < 0.5  # they are written at the start, and may be elsewhere
    for rank in missing:
        names = [f"trace_{rank}", f"stack_{rank}.json"]
        if not with_groups:
            names.append(f"groups_{rank}.json")
        for name in names:
            (directory / name).unlink(missing_ok=True)
    return frozenset(moments)
