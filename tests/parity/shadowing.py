"""A shadow run beside stock, over random configurations: ``python -m tests.parity.shadowing``.

In a process of its own, as the release is fixed at import: ``HYPERGRID_MEGATRON_RELEASE`` names it.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from types import ModuleType

from compat.swap import answers, shadow
from tests.parity.breaking import is_nonsense
from tests.parity.configurations import random_config
from tests.parity.mutants import mutants_of, spelt
from tests.parity.recording import Recorder, observed
from tests.parity.repairs import repaired_stocks, replaced
from tests.parity.snapshots import initialisation
from tests.parity.surface import Config
from tests.support.stock import load_stock


def shadowed(stock: ModuleType, config: Config, rank: int, release: str) -> list[str] | None:
    """Differences that a shadow run finds on one rank; None where stock refuses."""
    found: list[str] = []

    def report(call: int, ranks: object, summary: str, differences: list[str]) -> None:
        found.extend(differences)

    with observed(Recorder(stock, config, rank, release)), tempfile.TemporaryDirectory() as folder:
        answers.report = report
        shadow.watch(stock)
        _, _, args, kwargs = initialisation(config, release, folder)
        try:
            stock.initialize_model_parallel(*args, **kwargs)
        except Exception:
            return None
    return found


def differences(release: str, n: int, seed: str, mutant: str | None = None) -> Iterator[str]:
    """The findings of a shadow run beside stock, or beside a mutant, by configuration."""
    pair = spelt(mutant, release) if mutant else None
    edit = replaced(pair) if pair else None
    for number in range(n):
        config = random_config(random.Random(f"{seed}/{release}/{number}"), release, 64)
        for rank in () if is_nonsense(config) else config["ranks"]:
            found = shadowed(load_stock(release, edit), config, rank, release)
            repaired = repaired_stocks(release, config) if found and not mutant else ()
            if found and all(shadowed(stock, config, rank, release) for stock in repaired):
                yield f"#{number} rank {rank} of {config['world_size']} {config['kwargs']}: {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release")
    parser.add_argument("-n", type=int, default=20)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--mutants", action="store_true", help="print those that are found")
    given = parser.parse_args()
    if not given.mutants:
        print(*differences(given.release, given.n, given.seed), "done", sep="\n")
        return
    for mutant in mutants_of(given.release):
        if next(differences(given.release, given.n, given.seed, mutant), None):
            print(mutant)


if __name__ == "__main__":
    main()
