"""The two laws of a verdict, measured on random programs (tests/support/programs.py).

Whoever is named with certainty is guilty, always. And of programs with one fault that hang, the
guilty rank is named first in nine of ten. What most ranks do is the program: where most made the
same fault, equal dumps come of a program in which the others are guilty, so neither law asks who
it was.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import Diagnosis, diagnose
from tests.support import simulation
from tests.support.programs import (
    FAULTS,
    injected,
    random_program,
    with_sends_in_the_world,
)
from tests.support.recorded import START
from tests.support.simulation import Run

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
# Of each kind of evidence, in how many hangs a guilty rank must be named first, and with certainty.
GOALS = {
    "whole": (0.9, 0.58),
    "one innocent missing, varied": (0.8, 1 / 3),
}


@dataclass
class Case:
    """A program that hangs by its faults, and the verdict."""

    seed: int
    kind: str  # of evidence
    run: Run
    diagnosis: Diagnosis
    outvoted: bool  # most ranks are guilty of the same fault in the same line
    early: frozenset[int] = frozenset()  # ranks that wrote before the end

    @property
    def is_wrong(self) -> bool:
        """Whether an innocent is named with certainty, or waiting ranks are said to be well."""
        if not self.diagnosis.certain:
            return False
        named = set(self.diagnosis.ranks)
        is_innocent_named = not self.outvoted and not named <= self.run.program.guilty.keys()
        is_well = self.diagnosis.kind in ("ok", "slow")
        waiting_ranks = {process.rank for process in self.run.processes if process.waiting_in}
        return is_innocent_named or (is_well and not waiting_ranks <= self.early)

    @property
    def is_first(self) -> bool:
        """Whether a guilty rank is named first."""
        return bool({*self.diagnosis.ranks[:1]} & self.run.program.guilty.keys())

    def __str__(self) -> str:
        program = self.run.program
        backend = program.prefix or ("nccl" if program.nccl else "gloo")
        certainty = "certain" if self.diagnosis.certain else "not certain"
        return (
            f"{self.kind}, seed {self.seed}: {program.guilty} of {program.world} on {backend}; "
            f"{self.diagnosis.kind} {self.diagnosis.ranks} {certainty}: {self.diagnosis.sentence}"
        )


def hanging(seed: int, several: bool = False, varied: bool = False) -> tuple[Run, bool] | None:
    """A random program that hangs by one fault, or by two to three, and whether most did the same.

    None where nobody hangs. ``varied``: the same program, with one of the names that a backend may
    have, and half the time with its sends in the default group.
    """
    rng = random.Random(seed)
    program = random_program(rng, steps=rng.randint(2, 5))
    fault = rng.choice(FAULTS)
    guilty_count = rng.randint(2, 3) if several else 1
    is_same = rng.random() < 0.5  # one condition in the script that some ranks meet
    ranks = rng.sample(range(program.world), min(guilty_count, program.world))
    seed_of_same = rng.getrandbits(32)
    for rank in ranks:
        if is_same:
            faulty = injected(program, fault, rank, random.Random(seed_of_same))
        else:
            faulty = injected(program, rng.choice(FAULTS), rank, rng)
        if faulty is None:
            return None
        program = faulty
    if varied:
        variation = random.Random(f"{seed} varied")
        if variation.random() < 0.5:
            program = with_sends_in_the_world(program)
        if program.nccl:
            program = replace(program, prefix=variation.choice(("nccl", "nccl2", "nccl-lazy")))
    run = Run(program, rng)
    is_outvoted = several and is_same and 2 * len(ranks) > program.world
    return None if run.finished else (run, is_outvoted)


def judged(
    seed: int, several: bool = False, kinds: Iterable[str] = ("whole",), varied: bool = False
) -> Iterator[Case]:
    """The verdicts on it, by the kind of evidence; none where the program is too small for it."""
    hang = hanging(seed, several, varied)
    if hang is None:
        return
    run, is_outvoted = hang
    for kind in kinds:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            early = write_degraded(run, directory, kind, random.Random(f"{seed} {kind}"))
            if early is not None:
                title = f"{kind}, varied" if varied else kind
                yield Case(seed, title, run, diagnose(read(directory)), is_outvoted, early)


def verdict(run: Run) -> Diagnosis:
    """The verdict on the dumps of a program."""
    with tempfile.TemporaryDirectory() as directory:
        simulation.write(run, Path(directory))
        return diagnose(read(directory))


def summary(diagnosis: Diagnosis) -> str:
    """Kind and ranks, such as "never entered 3, certain"."""
    words = " ".join([diagnosis.kind, *map(str, diagnosis.ranks)])
    return f"{words}, certain" if diagnosis.certain else words


def write_degraded(
    run: Run, directory: Path, kind: str, rng: random.Random
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


@dataclass
class Tally:
    """The verdicts on many programs, counted; the cases that broke a law, as text."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def add(self, case: Case) -> None:
        self.counts["cases"] += 1
        self.counts["first"] += case.is_first
        self.counts["certain"] += bool(case.diagnosis.ranks) and case.diagnosis.certain
        if case.is_wrong:
            self.wrong.append(str(case))
        if not case.is_first:
            self.missed.append(str(case))

    def merge(self, tally: Tally) -> None:
        self.counts += tally.counts
        self.wrong += tally.wrong
        self.missed += tally.missed

    def share(self, column: str) -> float:
        return self.counts[column] / max(1, self.counts["cases"])

    def holds(self, first: float, certain: float = 0) -> bool:
        """Whether nobody was wronged, enough were named first, and enough with certainty."""
        return not self.wrong and self.share("first") >= first and self.share("certain") >= certain

    def line(self) -> str:
        return (
            f"{self.counts['cases']:,} hangs: a guilty rank is named first in "
            f"{self.share('first'):.1%}, ranks with certainty in {self.share('certain'):.1%}; "
            f"{len(self.wrong)} wrong"
        )


def tally(seeds: Iterable[int], several: bool = False, only: str = "") -> dict[str, Tally]:
    """The verdicts on these programs, by the kind of evidence; ``only``: with one kind."""
    tallies: dict[str, Tally] = {}
    kinds = [only] if only else KINDS
    for seed in seeds:
        cases: list[Case] = []
        if only in ("", "whole"):
            cases += judged(seed, several)
        if only != "whole":
            cases += judged(seed, several, kinds, varied=True)
        for case in cases:
            tallies.setdefault(case.kind, Tally()).add(case)
    return tallies
