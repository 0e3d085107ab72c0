"""One release in this process; writes the report as JSON (see ``scripts/parity``)."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tests.parity import run
from tests.parity.mutants import mutants_of, run_mutant
from tests.parity.patching import run_patched
from tests.support.stock import load_stock


def main() -> None:
    """Compare what the arguments say, and write ``{name: report}``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", required=True)
    parser.add_argument("-n", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--max-world", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--time-budget", type=float)
    parser.add_argument("--against-itself", action="store_true")
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--patched", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    scale = (given.release, given.n, given.seed, given.max_world)
    if given.mutants:
        reports = {name: run_mutant(name, *scale) for name in mutants_of(given.release)}
    else:
        candidate: ModuleType | Callable[[], ModuleType]
        if given.against_itself:
            candidate = functools.partial(load_stock, given.release)
        else:
            import compat.parallel_state as candidate  # type: ignore[no-redef]
        if given.patched:
            reports = {"": run_patched(candidate, *scale, given.first)}
        else:
            reports = {"": run(candidate, *scale, given.time_budget, given.first)}
    given.out.write_text(json.dumps({name: vars(report) for name, report in reports.items()}))


if __name__ == "__main__":
    main()
