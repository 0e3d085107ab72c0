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
from itertools import chain
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
    """What is said about the dumps of a program."""
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
        self.cases += 1
        self.outvoted += case.outvoted
        self.first += case.first
        self.alone += case.alone
        self.certain += case.accuses
        self.wrong += [str(case)] * case.wrong
        self.missed += [str(case)] * (not case.first)
        for fault in set(case.guilty.values()):
            self.by_fault[fault, case.first] += 1

    def merge(self, other: Tally) -> None:
        self.cases += other.cases
        self.outvoted += other.outvoted
        self.first += other.first
        self.alone += other.alone
        self.certain += other.certain
        self.wrong += other.wrong
        self.missed += other.missed
        self.by_fault += other.by_fault

    def holds(self, first: float, certain: float = 0) -> bool:
        """Whether nobody was wronged, enough were named first, and enough with certainty."""
        enough = self.first >= first * self.cases and self.certain >= certain * self.cases
        return not self.wrong and enough

    def line(self) -> str:
        first, alone, certain = (
            f"{many / max(1, self.cases):.1%}" for many in (self.first, self.alone, self.certain)
        )
        return (
            f"{self.cases:,} hangs: a guilty rank is named first in {first}, only guilty ranks in "
            f"{alone}, with certainty in {certain}; {len(self.wrong)} wrong; in {self.outvoted} "
            f"most ranks made the same fault"
        )

    def faults(self) -> Iterator[str]:
        for fault in programs.FAULTS:
            right, wrong = self.by_fault[fault, True], self.by_fault[fault, False]
            if right + wrong:
                yield f"  {fault}: {right} of {right + wrong} named first"


def ours(directory: Path) -> peer.Said:
    """Our verdict in the form of the others'."""
    found = diagnose(read(directory))
    return peer.Said(found.sentence, set(found.ranks), "")


def compared(seeds: Iterable[int], kind: str = "whole") -> Counter[tuple[str, str, str]]:
    """What each analysis of each backend's dumps did: how often, and for how many seconds."""
    tools = {"torchfrtrace": peer.torchfrtrace, "fr_attribution": peer.fr_attribution}
    found: Counter[tuple[str, str, str]] = Counter()
    for seed in seeds:
        run, _ = faulty(seed)
        if run is None or run.finished:
            continue
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            if degraded.write(run, directory, kind, random.Random(f"{seed} {kind}")) is None:
                continue
            peer.with_members(directory, [*run.names.items()])
            for tool, judge in {"hypergrid diagnose": ours, **tools}.items():
                start = time.perf_counter()
                with contextlib.redirect_stdout(io.StringIO()):
                    said = judge(directory)
                row = tool, "NCCL" if run.program.nccl else "gloo"
                innocent = said.ranks - run.program.guilty.keys()
                guilty = said.ranks & run.program.guilty.keys()
                found[(*row, "hangs")] += 1
                found[(*row, "seconds")] += time.perf_counter() - start  # type: ignore[assignment]
                found[(*row, "guilty")] += bool(guilty)
                found[(*row, "alone")] += bool(guilty) and not innocent
                found[(*row, "innocent")] += len(innocent)
                found[(*row, "error")] += bool(said.error)
    return found


def table(found: Counter[tuple[str, str, str]]) -> Iterable[str]:
    """``compared`` in Markdown."""
    yield (
        "| Dumps of | Analysis | names the guilty rank | and nobody else | innocent ranks in "
        "each hang | ends in an error | ms for each hang |"
    )
    yield "|---|---|---|---|---|---|---|"
    for tool, backend in sorted({row[:2] for row in found}, key=lambda row: row[::-1]):
        many = found[tool, backend, "hangs"]
        of = {what: found[tool, backend, what] / many for *_, what in found}
        yield (
            f"| {backend} ({many}) | `{tool}` | {of['guilty']:.0%} | {of['alone']:.0%} | "
            f"{of['innocent']:.1f} | {of['error']:.0%} | {1000 * of['seconds']:.0f} |"
        )


def tally(seeds: Iterable[int], several: bool = False, only: str = "") -> dict[str, Tally]:
    """What the verdicts were, by the kind of evidence."""
    found: dict[str, Tally] = {}
    for seed in seeds:
        cases = [judged(seed, several)] if not only or only == "whole" else []
        if only != "whole":
            kinds = [kind for kind in degraded.KINDS if only in ("", kind)]
            cases.append(judged(seed, several, kinds, varied=True))
        for case in chain(*cases):
            found.setdefault(case.kind, Tally()).add(case)
    return found
