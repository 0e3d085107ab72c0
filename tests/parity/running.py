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
from tests.parity.snapshots import Snapshot, snapshot
from tests.parity.surface import Config, compare_surface
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

    def add(self, where: str, lines: list[str]) -> None:
        """Count differences, each a line that begins with `where`, and keep a few as examples."""
        for line in lines:
            difference = line.removeprefix(where).partition(": stock ")[0]
            difference = re.sub(r"^created \('?(\w*).*", r"created \1", difference)
            self.differences[difference] += 1
            if self.differences[difference] <= 2:
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
    load_candidate = fresh(candidate)
    report.add("", compare_surface(load_candidate(), release))
    for number in range(first, first + n):
        if report.differences.total() >= stop_after:
            break
        config = random_config(random.Random(f"{seed}/{release}/{number}"), release, max_world)
        refusal = None
        for rank in config["ranks"]:
            stock = snapshot(load_stock(release), config, rank, release)
            _compare_rank(report, number, config, rank, stock, load_candidate)
            report.ranks += 1
            report.answers += 1 + sum(map(len, stock["answers"].values()))
            report.answers += len(stock["groups"]) + len(stock["created"])
            if stock["outcome"] != "ok":
                refusal = refusal or f"{stock['outcome']['raises'][0]}: {config['kind']}"
        if refusal:
            report.refused += 1
            report.refusals[refusal] += 1
        report.configurations += 1
    report.seconds = time.monotonic() - started
    return report


def fresh(candidate: ModuleType | Callable[[], ModuleType]) -> Callable[[], ModuleType]:
    """What gives the candidate for one more rank: a module again and again."""
    if isinstance(candidate, ModuleType):
        return lambda: candidate
    return candidate


def _compare_rank(
    report: Report,
    number: int,
    config: Config,
    rank: int,
    stock: Snapshot,
    load_candidate: Callable[[], ModuleType],
) -> None:
    """Report how the candidate differs from stock as one rank, and from all repaired ones."""
    where = (
        f"#{number} ({config['kind']}) rank {rank} of {config['world_size']} "
        f"{config['kwargs']} {config['environment'] or ''}: "
    )
    nonsense = is_nonsense(config)
    candidate = snapshot(load_candidate(), config, rank, report.release)
    differences = compare(stock, candidate, where, nonsense)
    if not differences:
        return
    for repaired in repaired_stocks(report.release, config):
        repaired_stock = snapshot(repaired, config, rank, report.release)
        if not compare(repaired_stock, candidate, where, nonsense):
            report.repaired += 1
            return
    report.add(where, differences)
