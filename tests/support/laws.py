"""The two laws of a verdict, measured on random programs (tests/support/programs.py).

Whoever is named with certainty is guilty, always. And of programs with one fault that hang, the
guilty rank is named first in nine of ten. What most ranks do is the program: where most made the
same fault, equal dumps come of a program in which the others are guilty, so neither law asks who
it was. ``compared`` measures other analyses on the same programs.
"""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import Diagnosis, diagnose
from tests.support import degraded, peer, simulation
from tests.support.programs import (
    FAULTS,
    Program,
    injected,
    random_program,
    with_rare_calls,
    with_sends_in_the_world,
    with_two_backends,
    without_line,
)
from tests.support.simulation import Run

# Of each kind of evidence, in how many hangs a guilty rank must be named first, and with certainty.
GOALS = {
    "whole": (0.9, 0.57),
    "one innocent missing, varied": (0.8, 1 / 3),
    "whole, a rare call": (0.8, 0.4),
    "whole, a rare call is left out": (0.35, 0),
    "whole, two backends": (0.85, 0.5),
}
# The evidence of programs on two backends.
KINDS_OF_BOTH = ("whole", "one innocent missing", "short buffer", "stacks missing")


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
    def named(self) -> set[int]:
        return set(self.diagnosis.ranks)

    @property
    def guilty(self) -> set[int]:
        return set(self.run.program.guilty)

    @property
    def wrong(self) -> bool:
        """Whether an innocent is named with certainty, or waiting ranks are said to be well."""
        if not self.diagnosis.certain:
            return False
        is_innocent_named = not self.outvoted and not self.named <= self.guilty
        is_well = self.diagnosis.ok or self.diagnosis.kind == "slow"
        waiting_ranks = {process.rank for process in self.run.processes if process.waiting_in}
        return is_innocent_named or (is_well and not waiting_ranks <= self.early)

    def __str__(self) -> str:
        program = self.run.program
        backend = program.prefix or ("nccl" if program.nccl else "gloo")
        recorded = " stacks" * program.stacks + " p2p" * program.p2p
        certainty = "certain" if self.diagnosis.certain else "not certain"
        return (
            f"{self.kind}, seed {self.seed}: {program.guilty} of {program.world} on {backend}"
            f"{recorded}; {self.diagnosis.kind} {self.diagnosis.ranks} {certainty}: "
            f"{self.diagnosis.sentence}"
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


def with_a_rare_call(seed: int, left_out: bool) -> Run | None:
    """A random program in which few ranks call each other once; None where nobody hangs.

    One of them leaves that out, or a rank has another fault.
    """
    rng = random.Random(f"{seed} rare")
    program, line = with_rare_calls(random_program(rng, steps=rng.randint(2, 5)), rng)
    faulty: Program | None
    if left_out:
        faulty = without_line(program, line, rng)
    else:
        faulty = injected(program, rng.choice(FAULTS), rng.randrange(program.world), rng)
    if faulty is None:
        return None
    run = Run(faulty, rng)
    return None if run.finished else run


def judged_with_a_rare_call(seed: int) -> Iterator[Case]:
    """The verdicts on both."""
    for left_out in (False, True):
        run = with_a_rare_call(seed, left_out)
        if run is not None:
            kind = "whole, a rare call is left out" if left_out else "whole, a rare call"
            yield Case(seed, kind, run, verdict(run), outvoted=False)


def hanging_on_two_backends(seed: int) -> Run | None:
    """A random program on NCCL and gloo that hangs by one fault; None where nobody hangs."""
    rng = random.Random(f"{seed} two backends")
    program = random_program(rng, steps=rng.randint(2, 5))
    if rng.random() < 0.5:
        program = with_sends_in_the_world(program)
    program = with_two_backends(program, rng)
    fault = rng.choice((*FAULTS, "device"))
    faulty = injected(program, fault, rng.randrange(program.world), rng)
    if faulty is None:
        return None
    run = Run(faulty, rng)
    return None if run.finished else run


def judged_on_two_backends(seed: int) -> Iterator[Case]:
    """The verdicts on it, by the kind of evidence."""
    run = hanging_on_two_backends(seed)
    if run is not None:
        for kind in KINDS_OF_BOTH:
            yield from _judged(seed, run, kind, f"{kind}, two backends")


def judged(
    seed: int, several: bool = False, kinds: Iterable[str] = ("whole",), varied: bool = False
) -> Iterator[Case]:
    """The verdicts on it, by the kind of evidence."""
    hang = hanging(seed, several, varied)
    if hang is None:
        return
    run, is_outvoted = hang
    for kind in kinds:
        title = f"{kind}, varied" if varied else kind
        yield from _judged(seed, run, kind, title, is_outvoted)


def _judged(seed: int, run: Run, kind: str, title: str, outvoted: bool = False) -> Iterator[Case]:
    """The verdict on one kind of evidence; none where the program is too small for it."""
    with tempfile.TemporaryDirectory() as directory:
        early = degraded.write(run, Path(directory), kind, random.Random(f"{seed} {kind}"))
        if early is not None:
            yield Case(seed, title, run, diagnose(read(directory)), outvoted, early)


def verdict(run: Run) -> Diagnosis:
    """The verdict on the dumps of a program."""
    with tempfile.TemporaryDirectory() as directory:
        simulation.write(run, Path(directory))
        return diagnose(read(directory))


@dataclass
class Tally:
    """The verdicts on many programs, counted; the cases that broke a law, as text."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def add(self, case: Case) -> None:
        diagnosis = case.diagnosis
        is_first = bool(case.named) and diagnosis.ranks[0] in case.guilty
        self.counts["cases"] += 1
        self.counts["first"] += is_first
        self.counts["certain"] += bool(case.named) and diagnosis.certain
        if case.wrong:
            self.wrong.append(str(case))
        if not is_first:
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
    for seed in seeds:
        cases: list[Case] = []
        if only in ("", "whole"):
            cases += judged(seed, several)
        if only in ("", "a rare call") and not several:
            cases += judged_with_a_rare_call(seed)
        if only in ("", "two backends") and not several:
            cases += judged_on_two_backends(seed)
        if only not in ("whole", "a rare call", "two backends"):
            cases += judged(seed, several, [only] if only else degraded.KINDS, varied=True)
        for case in cases:
            tallies.setdefault(case.kind, Tally()).add(case)
    return tallies


# Comparison with other analyses.


def hypergrid_diagnose(directory: Path) -> peer.Said:
    """Our verdict in the form of the others'."""
    diagnosis = diagnose(read(directory))
    return peer.Said(diagnosis.sentence, set(diagnosis.ranks), "")


ANALYSES = {
    "fr_attribution": peer.fr_attribution,
    "hypergrid diagnose": hypergrid_diagnose,
    "torchfrtrace": peer.torchfrtrace,
}


def compared(seeds: Iterable[int], kind: str = "whole") -> Counter[tuple[str, str, str]]:
    """How often each analysis did what with each backend's dumps: (backend, analysis, column)."""
    counts = Counter[tuple[str, str, str]]()
    for seed in seeds:
        hang = hanging(seed)
        if hang is None:
            continue
        run, _ = hang
        backend = "NCCL" if run.program.nccl else "gloo"
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            if degraded.write(run, directory, kind, random.Random(f"{seed} {kind}")) is None:
                continue
            peer.with_members(directory, [*run.groups.items()])
            for analysis, judge in ANALYSES.items():
                with contextlib.redirect_stdout(io.StringIO()):
                    answer = judge(directory)
                guilty = answer.ranks & run.program.guilty.keys()
                innocent = answer.ranks - guilty
                counts[backend, analysis, "hangs"] += 1
                counts[backend, analysis, "guilty"] += bool(guilty)
                counts[backend, analysis, "alone"] += bool(guilty) and not innocent
                counts[backend, analysis, "innocent"] += len(innocent)
                counts[backend, analysis, "error"] += bool(answer.error)
    return counts


def table(counts: Counter[tuple[str, str, str]]) -> Iterator[str]:
    """``compared`` in Markdown, as in docs/hangs.md."""
    yield (
        "| Dumps of | Analysis | names the guilty rank | and nobody else | innocent ranks per hang "
        "| ends in an error |"
    )
    yield "|---|---|---|---|---|---|"
    for backend in ("NCCL", "gloo"):
        for analysis in ANALYSES:
            hangs = counts[backend, analysis, "hangs"]
            cells = [f"{backend} ({hangs})", f"`{analysis}`"]
            for column in ("guilty", "alone", "innocent", "error"):
                share = counts[backend, analysis, column] / max(1, hangs)
                cells.append(f"{share:.1f}" if column == "innocent" else f"{share:.0%}")
            yield f"| {' | '.join(cells)} |"
