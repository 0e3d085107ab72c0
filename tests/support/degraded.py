"""Evidence that is worse than all files of all ranks: what a real incident leaves."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

from tests.support import simulation
from tests.support.recorded import START

# What is wrong with the evidence of a hang. The first is that of all ranks.
KINDS = (
    "whole",
    "one innocent missing",
    "guilty missing",
    "several missing",
    "a host of eight missing",
    "short buffer",
    "different moments",
    "stacks missing",
)


def write(
    run: simulation.Run, directory: Path, kind: str, rng: random.Random
) -> frozenset[int] | None:
    """Write the dumps of a run as this kind of evidence, and give the ranks that wrote early.

    None if the program is too small for it.
    """
    program = run.program
    world = range(program.world)
    steps = len(program.steps[0])
    buffer = None
    moments: dict[int, int] = {}
    missing: Iterable[int] = ()
    match kind:
        case "one innocent missing":
            innocent = sorted(set(world) - program.guilty.keys())
            # Of two ranks, all that is left would be the guilty rank's own file.
            if len(world) < 3 or not innocent:
                return None
            missing = rng.sample(innocent, 1)
        case "guilty missing":
            missing = program.guilty
        case "several missing":
            missing = rng.sample(world, min(rng.randint(2, 3), len(world) - 1))
        case "a host of eight missing":
            hosts = [world[first : first + 8] for first in range(0, len(world), 8)]
            missing = rng.choice(hosts)
            if len(hosts) < 2:
                return None
        case "short buffer":
            calls_of_a_step = len(program.ops[0]) // (steps + 1)
            buffer = rng.randint(2, max(2, calls_of_a_step))
        case "different moments":
            early = rng.sample(world, rng.randint(1, len(world)))
            last_clock = max(process.clock for process in run.processes)
            begin = last_clock - (last_clock - START) // max(1, steps)
            for rank in early:
                moments[rank] = rng.randint(begin, rng.choice((last_clock, run.end)))
    simulation.write(run, directory, moments, buffer)
    names = ["trace_{}", "stack_{}.json"]
    if kind == "stacks missing":
        # And with them, of gloo, the sends.
        missing = world if rng.random() < 0.5 else rng.sample(world, rng.randint(1, len(world)))
        names = ["stack_{}.json"]
    # Files of groups are written at the start, and may be elsewhere.
    elif rng.random() >= 0.5:
        names.append("groups_{}.json")
    for rank in missing:
        for name in names:
            (directory / name.format(rank)).unlink(missing_ok=True)
    return frozenset(moments)
