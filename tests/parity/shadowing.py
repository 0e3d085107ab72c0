"""A shadow run beside stock, over random configurations: ``python -m tests.parity.shadowing``.

In a process of its own, as the release is fixed at import: ``HYPERGRID_MEGATRON_RELEASE`` names it.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType

from compat.swap import answers, shadow
from tests.parity.breaking import is_nonsense
from tests.parity.configurations import initialisation, random_config
from tests.parity.recording import Recorder, observed
from tests.parity.repairs import repaired_stocks
from tests.parity.surface import Config
from tests.support.stock import load_stock


def shadowed(stock: ModuleType, config: Config, rank: int, release: str) -> list[str]:
    """Differences that a shadow run finds on one rank; none where stock refuses."""
    reported: list[str] = []

    def report(call: int, ranks: object, summary: str, differences: list[str]) -> None:
        reported.extend(differences)

    with observed(Recorder(stock, config, rank, release)), tempfile.TemporaryDirectory() as folder:
        answers.report = report
        shadow.watch(stock)
        args, kwargs = initialisation(config, release, folder)
        with suppress(Exception):
            stock.initialize_model_parallel(*args, **kwargs)
    return reported


def differences(release: str, n: int, seed: str) -> Iterator[str]:
    """The findings of a shadow run beside stock, by configuration."""
    for number in range(n):
        config = random_config(random.Random(f"{seed}/{release}/{number}"), release, 64)
        if is_nonsense(config):
            continue
        for rank in config["ranks"]:
            reported = shadowed(load_stock(release), config, rank, release)
            # What only a bug of stock explains is no difference: then a repaired one has none.
            for repaired in repaired_stocks(release) if reported else ():
                reported = reported and shadowed(repaired, config, rank, release)
            if reported:
                where = f"#{number} rank {rank} of {config['world_size']} {config['kwargs']}"
                yield f"{where}: {reported}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release")
    parser.add_argument("-n", type=int, default=20)
    parser.add_argument("--seed", default="0")
    options = parser.parse_args()
    print(*differences(options.release, options.n, options.seed), "done", sep="\n")


if __name__ == "__main__":
    main()
