"""One release in this process; writes FOLDER/RELEASE.json (see ``scripts/parity``)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.parity import run
from tests.parity.mutants import mutants_of, run_mutant
from tests.parity.patching import run_patched


def main() -> None:
    """Compare what the arguments say, and write ``{name: report}``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", required=True)
    parser.add_argument("-n", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--max-world", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--patched", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    scale = (options.release, options.n, options.seed, options.max_world)
    if options.mutants:
        reports = {name: run_mutant(name, *scale) for name in mutants_of(options.release)}
    else:
        import compat.parallel_state as candidate

        if options.patched:
            reports = {"": run_patched(candidate, *scale, options.first)}
        else:
            reports = {"": run(candidate, *scale, options.first)}
    fields = {name: vars(report) for name, report in reports.items()}
    (options.folder / f"{options.release}.json").write_text(json.dumps(fields))


if __name__ == "__main__":
    main()
