"""Small programs that do to ``parallel_state`` what others' code does.

``scripts/parity --clients`` runs them.

A program is a generator that takes a `Client` and yields a step's name, with a value of its own to
compare, if it has one. After each step the module is asked everything. Run on stock and on
``compat.parallel_state``, a program has to see the same.

`programs` has what no single change shows: ``tests.parity.patching`` writes each global and
replaces each function in turn.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from types import ModuleType

from tests.clients.programs import PROGRAMS, Program
from tests.parity.comparing import Snapshot
from tests.parity.running import View
from tests.parity.watching import watch


def clients_on_two_ranks(rng: random.Random, release: str, max_world: int) -> Iterator[View]:
    """What two ranks see of each program, in the program's own world."""
    for name, program in PROGRAMS.items():
        for rank in sorted({0, program.world * 5 // 6}):
            show = functools.partial(_to_its_end, program, rank, release)
            yield View(f"{name}, rank {rank}", show, is_written_to=True)


def _to_its_end(program: Program, rank: int, release: str, module: ModuleType) -> Snapshot:
    """What a program shows, which works on stock and on ours."""
    snapshot = watch(program.run, module, program.config(), rank, release)
    # Two failures would agree, and nothing would have been compared.
    assert snapshot["outcome"] == "ok", (program, snapshot["outcome"])
    return snapshot
