"""One process's share of a long run; writes what it found as JSON (see ``scripts/fuzz``)."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import random
import resource
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

MEMORY = 4 << 30  # bytes on top of what is there: stock must not take the machine along


def run(release: str, numbers: range, seed: int, show: int, at: Path) -> dict[str, Any]:
    """Judge the sets of these numbers; the file `at` says which one it is at."""
    from tests.fuzzing.judging import judge
    from tests.fuzzing.wild import draw

    candidate = importlib.import_module("compat.parallel_state")
    count: Counter[str] = Counter()
    started = time.monotonic()
    kinds: Counter[str] = Counter()
    examples: list[str] = []
    for number in numbers:
        at.write_text(str(number))
        # An alarm does not stop a loop that never comes back to Python; this ends the process.
        faulthandler.dump_traceback_later(180, exit=True)
        given = draw(random.Random(f"{seed}/{release}/{number}"), release)
        verdict = judge(given, candidate)
        count["sets"] += 1
        count["accepted" if verdict.ours.error is None else "refused"] += 1
        count[verdict.told] += 1
        count["complaints"] += bool(verdict.complaints)
        count["hangs"] += "hang" in verdict.complaints
        for complaint in verdict.complaints:
            kinds[complaint[:60]] += 1
            if kinds[complaint[:60]] <= 2 and len(examples) < show:
                examples.append(f"{release} #{number} {given}: {complaint}")
    count["seconds"] = round(time.monotonic() - started)
    return {"count": count, "kinds": kinds, "examples": examples}


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("--show", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    os.environ["HYPERGRID_MEGATRON_RELEASE"] = given.release
    warnings.simplefilter("ignore")
    numbers = range(given.first, given.last)
    import torch  # noqa: F401  (before the limit, which counts what it maps)

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY,) * 2)
    found = run(given.release, numbers, given.seed, given.show, given.out.with_name("at"))
    given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
