"""Many configurations, one report."""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType

from tests.parity.breaking import is_nonsense
from tests.parity.comparing import Snapshot, compare
from tests.parity.configurations import random_config
from tests.parity.repairs import repaired_stocks
from tests.parity.snapshots import snapshot
from tests.parity.surface import Config, compare_surface
from tests.support.stock import load_stock


@dataclass
class Report:
    """What a run found.

    `ranks` counts ranks, each once for each of its views; `refused` counts configurations that
    stock refused on at least one rank; `differences` counts differences by what differs, and
    `examples` keeps the first few of each; `repaired` counts views in which the candidate agrees
    with a repaired stock instead.
    """

    release: str
    configurations: int = 0
    refused: int = 0
    ranks: int = 0
    repaired: int = 0
    differences: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, where: str, lines: list[str]) -> None:
        """Count differences, each a line that begins with `where`, and keep a few as examples."""
        for line in lines:
            difference = line.removeprefix(where).partition(": stock ")[0]
            difference = re.sub(r"^created \('?(\w*).*", r"created \1", difference)
            self.differences[difference] += 1
            if self.differences[difference] <= 2:
                self.examples.append(line)


@dataclass(frozen=True)
class View:
    """One way to look at a configuration: what `show` gives of a module."""

    where: str
    show: Callable[[ModuleType], Snapshot]
    nonsense: bool = False
    is_written_to: bool = False


def ranks_of_one(rng: random.Random, release: str, max_world: int) -> Iterator[View]:
    """What each chosen rank of a configuration shows, from before to after its initialisation."""
    config = random_config(rng, release, max_world)
    for rank in config["ranks"]:
        show = functools.partial(snapshot, config=config, rank=rank, release=release)
        yield View(place(config, rank), show, is_nonsense(config))


def place(config: Config, rank: int) -> str:
    """A configuration and a rank in words."""
    where = f"({config['kind']}) rank {rank} of {config['world_size']} {config['kwargs']}"
    return f"{where} {config['environment'] or ''}"


def run(
    candidate: ModuleType | Callable[[], ModuleType],
    release: str,
    n: int,
    seed: int,
    max_world: int,
    first: int = 0,
    stop_after: int = 20_000,
    views: Callable[[random.Random, str, int], Iterator[View]] = ranks_of_one,
) -> Report:
    """Compare `candidate` with stock over `n` random configurations.

    Parameters
    ----------
    candidate : module, or callable
        the module, used again and again; a callable gives a fresh one for each view.
    max_world : int
        the largest world; most worlds are far smaller.
    first : int
        number of the first configuration, to repeat one from a report.
    stop_after : int
        differences after which the run ends.
    views : callable
        draws a configuration, and gives what is compared of it; by default `ranks_of_one`.
    """
    report = Report(release)
    load_candidate = (lambda: candidate) if isinstance(candidate, ModuleType) else candidate
    report.add("", compare_surface(load_candidate(), release))
    for number in range(first, first + n):
        if report.differences.total() >= stop_after:
            break
        rng = random.Random(f"{seed}/{release}/{number}")
        is_refused = False
        for view in views(rng, release, max_world):
            stock = view.show(load_stock(release))
            _compare(report, f"#{number} {view.where}: ", view, stock, view.show(load_candidate()))
            is_refused |= stock["outcome"] != "ok"
        report.configurations += 1
        report.refused += is_refused
    return report


def _compare(report: Report, where: str, view: View, stock: Snapshot, candidate: Snapshot) -> None:
    """Report how the candidate differs from stock, and from all repaired ones."""
    report.ranks += 1
    differences = compare(stock, candidate, where, view.nonsense, view.is_written_to)
    for repaired in repaired_stocks(report.release) if differences else ():
        repaired_stock = view.show(repaired)
        if not compare(repaired_stock, candidate, where, view.nonsense, view.is_written_to):
            report.repaired += 1
            return
    report.add(where, differences)
