"""One release in this process; writes FOLDER/RELEASE.json (see ``scripts/parity``)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import compat.parallel_state as candidate
from tests.clients import clients_on_two_ranks
from tests.fuzzing.wild import wild_sets
from tests.parity import run
from tests.parity.mutants import mutants_of, run_mutant
from tests.parity.patching import programs_on_one_rank
from tests.parity.running import ranks_of_one

VIEWS = {"patched": programs_on_one_rank, "clients": clients_on_two_ranks, "wild": wild_sets}


def main() -> None:
    """Compare what the arguments say, and write ``{name: report}``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", required=True)
    parser.add_argument("-n", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--max-world", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--mutants", action="store_true")
    parser.set_defaults(views=ranks_of_one)
    for name, views in VIEWS.items():
        parser.add_argument(f"--{name}", dest="views", action="store_const", const=views)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    scale = (options.release, options.n, options.seed, options.max_world)
    if options.mutants:
        reports = {name: run_mutant(name, *scale) for name in mutants_of(options.release)}
    else:
        reports = {"": run(candidate, *scale, options.first, views=options.views)}
    fields = {name: vars(report) for name, report in reports.items()}
    (options.folder / f"{options.release}.json").write_text(json.dumps(fields))


if __name__ == "__main__":
    main()
