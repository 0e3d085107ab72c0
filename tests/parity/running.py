"""Many configurations, one report."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

from tests.parity.breaking import is_nonsense
from tests.parity.comparing import compare
from tests.parity.configurations import random_config
from tests.parity.repairs import repaired_stocks
from tests.parity.snapshots import snapshot
from tests.parity.surface import compare_surface
from tests.support.stock import load_stock


@dataclass
class Report:
    """What a run found.

    `answers` counts single values that were compared; `refused` counts configurations that stock
    refused on at least one rank; `refusals` counts them by exception and kind of configuration;
    `differences` counts differences by what differs, and `examples` keeps the first few of each;
    `repaired` counts ranks on which the candidate agrees with a repaired stock instead.
    """

    release: str
    configurations: int = 0
    refused: int = 0
    ranks: int = 0
    answers: int = 0
    repaired: int = 0
    seconds: float = 0.0
    differences: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)

    def add(self, where: str, found: list[str]) -> None:
        """Count differences, each a line that begins with `where`, and keep a few as examples."""
        for line in found:
            what = line.removeprefix(where).partition(": stock ")[0]
            what = re.sub(r"^created \('?(\w*).*", r"created \1", what)
            self.differences[what] += 1
            if self.differences[what] <= 2:
                self.examples.append(line)

    def __str__(self) -> str:
        counts = f"{self.configurations} configurations, {self.refused} refused"
        lines = [f"{self.release}: {counts}, {self.ranks} ranks, {self.answers} answers"]
        lines += [f"{self.differences.total()} differences", *self.examples[:20]]
        return "\n".join(lines)


def run(
    candidate: ModuleType | Callable[[], ModuleType],
    release: str,
    n: int,
    seed: int,
    max_world: int,
    first: int = 0,
    stop_after: int = 20_000,
) -> Report:
    """Compare `candidate` with stock over `n` random configurations.

    Parameters
    ----------
    candidate : module, or callable
        the module, used again and again; a callable gives a fresh one for each rank.
    max_world : int
        the largest world; most worlds are far smaller.
    first : int
        number of the first configuration, to repeat one from a report.
    stop_after : int
        differences after which the run ends.
    """
    report = Report(release)
    started = time.monotonic()
    fresh = (lambda: candidate) if isinstance(candidate, ModuleType) else candidate
    report.add("", compare_surface(fresh(), release))
    for number in range(first, first + n):
        if report.differences.total() >= stop_after:
            break
        config = random_config(random.Random(f"{seed}/{release}/{number}"), release, max_world)
        nonsense = is_nonsense(config)
        refusal = None
        for rank in config["ranks"]:
            where = (
                f"#{number} ({config['kind']}) rank {rank} of {config['world_size']} "
                f"{config['kwargs']} {config['environment'] or ''}: "
            )
            ours = snapshot(load_stock(release), config, rank, release)
            theirs = snapshot(fresh(), config, rank, release)
            found = compare(ours, theirs, where, nonsense)
            for repaired in repaired_stocks(release, config) if found else ():
                other = snapshot(repaired, config, rank, release)
                if not compare(other, theirs, where, nonsense):
                    found = []
                    report.repaired += 1
                    break
            report.add(where, found)
            report.ranks += 1
            report.answers += 1 + sum(map(len, ours["answers"].values()))
            report.answers += len(ours["groups"]) + len(ours["created"])
            if ours["outcome"] != "ok":
                refusal = refusal or f"{ours['outcome']['raises'][0]}: {config['kind']}"
        if refusal:
            report.refused += 1
            report.refusals[refusal] += 1
        report.configurations += 1
    report.seconds = time.monotonic() - started
    return report
