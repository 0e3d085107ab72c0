"""Broken copies of stock: the harness has to notice each of these."""

from __future__ import annotations

import functools

from tests.parity.repairs import replaced
from tests.parity.running import Report, run
from tests.support import table
from tests.support.stock import load_stock, source

MUTANTS = {name: (eval(old), eval(new)) for name, old, new in table("parity/mutants.txt")}


def spelt(name: str, release: str) -> tuple[str, str] | None:
    """A mutant as the release's source spells it; None where there is nothing to break so."""
    old, new = MUTANTS[name]
    for quote in ('"', "'"):
        if old.replace('"', quote) in source(release):
            return old.replace('"', quote), new.replace('"', quote)
    return None


def mutants_of(release: str) -> list[str]:
    """The names of the `MUTANTS` that apply to a release."""
    return [name for name in MUTANTS if spelt(name, release) is not None]


def run_mutant(name: str, release: str, n: int, seed: int, max_world: int) -> Report:
    """Stock beside one of the `MUTANTS`, ended by the first configuration that differs."""
    pair = spelt(name, release)
    assert pair is not None, (name, release)
    mutant = functools.partial(load_stock, release, replaced(pair))
    return run(mutant, release, n, seed, max_world, stop_after=1)
