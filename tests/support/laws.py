"""The two laws of a verdict, measured on random programs (tests/support/programs.py).

Whoever is named with certainty is guilty, always. And of programs with one fault that hang, the
guilty rank is named first in nine of ten. What most ranks do is the program: where most made the
same fault, equal dumps come of a program in which the others are guilty, so neither law asks who
it was. ``compared`` measures others' analyses on them, too.
"""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import Diagnosis, diagnose
from tests.support import degraded, peer, programs

# Of each kind of evidence, in how many hangs a guilty rank must be named first, and with certainty.
GOALS = {
    "whole": (0.9, 0.57),
    "one innocent missing, varied": (0.8, 1 / 3),
}


@dataclass
class Case:
    """A program that was run with its faults, and the verdict."""

    seed: int
    run: programs.Run
    diagnosis: Diagnosis
    same: bool = False  # all guilty ranks met one condition, in one line
    kind: str = "whole"  # of evidence
    early: frozenset[int] = frozenset()  # ranks that wrote before the end

    @property
    def guilty(self) -> dict[int, str]:
        return self.run.program.guilty

    @property
    def outvoted(self) -> bool:
        """Whether most ranks are guilty of the same fault in the same line."""
        return self.same and 2 * len(self.guilty) > self.run.program.world

    @property
    def accuses(self) -> bool:
        return self.diagnosis.certain and bool(self.diagnosis.ranks)

    @property
    def wrong(self) -> bool:
        """Whether an innocent is named with certainty, or waiting ranks are said to be well."""
        innocent = not self.outvoted and not set(self.diagnosis.ranks) <= self.guilty.keys()
        hosts = [host for host in self.run.hosts if host.rank not in self.early]
        waits = any(host.now or host.open for host in hosts)
        nobody = self.diagnosis.ok or self.diagnosis.kind == "slow"
        return self.diagnosis.certain and (innocent or (nobody and waits))

    @property
    def first(self) -> bool:
        return bool(self.diagnosis.ranks) and self.diagnosis.ranks[0] in self.guilty

    @property
    def alone(self) -> bool:
        return bool(self.diagnosis.ranks) and set(self.diagnosis.ranks) <= self.guilty.keys()

    def __str__(self) -> str:
        program = self.run.program
        how = program.prefix or ("nccl" if program.nccl else "gloo")
        how += " stacks" * program.stacks + " p2p" * program.p2p
        certain = "certain" if self.diagnosis.certain else "not certain"
        return (
            f"{self.kind}, seed {self.seed}: {program.guilty} of {program.world} on {how}; "
            f"{self.diagnosis.kind} {self.diagnosis.ranks} {certain}: {self.diagnosis.sentence}"
        )


def faulty(
    seed: int, several: bool = False, varied: bool = False
) -> tuple[programs.Run | None, bool]:
    """A random program with one fault, or with two to three, that has come to rest.

    And whether several ranks made one fault in one line. ``varied``: the same program, with one
    of the names that a backend may have, and half the time with its sends in the default group.
    """
    rng = random.Random(seed)
    program = programs.random_program(rng, steps=rng.randint(2, 5))
    changed: programs.Program | None = program
    fault = rng.choice(programs.FAULTS)
    many = rng.randint(2, 3) if several else 1
    same = rng.random() < 0.5  # one condition in the script that some ranks meet
    ranks = rng.sample(range(program.world), min(many, program.world))
    lines = rng.getrandbits(32)
    for rank in ranks:
        fault = fault if same else rng.choice(programs.FAULTS)
        chance = random.Random(lines) if same else rng
        changed = changed and programs.injected(changed, fault, rank, chance)
    if changed and varied:
        variation = random.Random(f"{seed} varied")
        if variation.random() < 0.5:
            changed = programs.with_sends_in_the_world(changed)
        if changed.nccl:
            changed = replace(changed, prefix=variation.choice(("nccl", "nccl2", "nccl-lazy")))
    return (programs.Run(changed, rng) if changed else None), same and several


def judged(
    seed: int, several: bool = False, kinds: Iterable[str] = ("whole",), varied: bool = False
) -> Iterator[Case]:
    """The verdicts on it, by the kind of evidence; none where nobody hangs because of the fault."""
    run, same = faulty(seed, several, varied)
    if run is None or run.finished:
        return
    for kind in kinds:
        rng = random.Random(f"{seed} {kind}")
        with tempfile.TemporaryDirectory() as directory:
            early = degraded.write(run, Path(directory), kind, rng)
            if early is None:
                continue
            diagnosis = diagnose(read(directory))
        title = f"{kind}, varied" if varied else kind
        yield Case(seed, run, diagnosis, same, title, early)


def verdict(run: programs.Run) -> Diagnosis:
    """The verdict on the dumps of a program."""
    with tempfile.TemporaryDirectory() as directory:
        programs.write(run, Path(directory))
        return diagnose(read(directory))


@dataclass
class Tally:
    """What the verdicts on many programs were."""

    cases: int = 0
    outvoted: int = 0
    first: int = 0
    alone: int = 0
    certain: int = 0
    wrong: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    by_fault: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def add(self, case: Case) -> None:
        by_fault = Counter((fault, case.first) for fault in set(case.guilty.values()))
        wrong = [str(case)] if case.wrong else []
        missed = [] if case.first else [str(case)]
        counts = (1, case.outvoted, case.first, case.alone, case.accuses)
        self.merge(Tally(*counts, wrong, missed, by_fault))

    def merge(self, other: Tally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def holds(self, first: float, certain: float = 0) -> bool:
        """Whether nobody was wronged, enough were named first, and enough with certainty."""
        enough = self.first >= first * self.cases and self.certain >= certain * self.cases
        return not self.wrong and enough

    def line(self) -> str:
        cases = max(1, self.cases)
        return (
            f"{self.cases:,} hangs: a guilty rank is named first in {self.first / cases:.1%}, only "
            f"guilty ranks in {self.alone / cases:.1%}, with certainty in "
            f"{self.certain / cases:.1%}; {len(self.wrong)} wrong; in {self.outvoted} most ranks "
            "made the same fault"
        )

    def faults(self) -> Iterator[str]:
        for fault in programs.FAULTS:
            first = self.by_fault[fault, True]
            cases = first + self.by_fault[fault, False]
            if cases:
                yield f"  {fault}: {first} of {cases} named first"


def ours(directory: Path) -> peer.Said:
    """Our verdict in the form of the others'."""
    diagnosis = diagnose(read(directory))
    return peer.Said(diagnosis.sentence, set(diagnosis.ranks), "")


TOOLS = {
    "hypergrid diagnose": ours,
    "torchfrtrace": peer.torchfrtrace,
    "fr_attribution": peer.fr_attribution,
}


def compared(seeds: Iterable[int], kind: str = "whole") -> Counter[tuple[str, str, str]]:
    """How often each analysis did what with each backend's dumps, and for how many seconds."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for seed in seeds:
        run, _ = faulty(seed)
        if run is None or run.finished:
            continue
        backend = "NCCL" if run.program.nccl else "gloo"
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            if degraded.write(run, directory, kind, random.Random(f"{seed} {kind}")) is None:
                continue
            peer.with_members(directory, [*run.names.items()])
            for tool, judge in TOOLS.items():
                start = time.perf_counter()
                with contextlib.redirect_stdout(io.StringIO()):
                    answer = judge(directory)
                innocent = answer.ranks - run.program.guilty.keys()
                guilty = answer.ranks - innocent
                values: dict[str, float] = {
                    "hangs": 1,
                    "seconds": time.perf_counter() - start,
                    "guilty": bool(guilty),
                    "alone": bool(guilty) and not innocent,
                    "innocent": len(innocent),
                    "error": bool(answer.error),
                }
                for column, value in values.items():
                    counts[tool, backend, column] += value  # type: ignore[assignment]
    return counts


def table(counts: Counter[tuple[str, str, str]]) -> Iterable[str]:
    """``compared`` in Markdown."""
    yield (
        "| Dumps of | Analysis | names the guilty rank | and nobody else | innocent ranks in "
        "each hang | ends in an error | ms for each hang |"
    )
    yield "|---|---|---|---|---|---|---|"
    for backend, tool in sorted({(backend, tool) for tool, backend, _ in counts}):
        hangs = counts[tool, backend, "hangs"]
        columns = ("guilty", "alone", "innocent", "error", "seconds")
        guilty, alone, innocent, error, seconds = (
            counts[tool, backend, column] / hangs for column in columns
        )
        yield (
            f"| {backend} ({hangs}) | `{tool}` | {guilty:.0%} | {alone:.0%} | {innocent:.1f} | "
            f"{error:.0%} | {1000 * seconds:.0f} |"
        )


def tally(seeds: Iterable[int], several: bool = False, only: str = "") -> dict[str, Tally]:
    """What the verdicts were, by the kind of evidence."""
    tallies: dict[str, Tally] = {}
    kinds = [kind for kind in degraded.KINDS if only in ("", kind)]
    for seed in seeds:
        cases: list[Case] = []
        if only in ("", "whole"):
            cases += judged(seed, several)
        if only != "whole":
            cases += judged(seed, several, kinds, varied=True)
        for case in cases:
            tallies.setdefault(case.kind, Tally()).add(case)
    return tallies
