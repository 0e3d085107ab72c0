"""The sets of one release, in a process of its own (see ``scripts/fuzz``)."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import random
import sys
import time
import warnings
from collections import Counter


def main() -> int:
    """Judge the sets, print a line of counts, then the complaints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", required=True)
    for name in ("-n", "--seed", "--first"):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    from tests.fuzzing.judging import judge
    from tests.fuzzing.wild import draw

    candidate = importlib.import_module("compat.parallel_state")
    started = time.monotonic()
    count: Counter[str] = Counter()
    found: list[str] = []
    for number in range(given.first, given.first + given.n):
        # An alarm does not stop a loop that never comes back to Python; this ends the process.
        faulthandler.dump_traceback_later(180, exit=True)
        drawn = draw(random.Random(f"{given.seed}/{given.release}/{number}"), given.release)
        outcome, complaints = judge(drawn, candidate)
        count["accepted" if outcome.error is None else "refused"] += 1
        found += [f"{given.release} #{number} {drawn}: {each}" for each in complaints]
    seconds = time.monotonic() - started
    print(
        f"{given.release} {given.n} sets, {count['accepted']} accepted, {count['refused']} "
        f"refused, {len(found)} complaints, {seconds:.0f} s"
    )
    for complaint in found[:20]:
        print(complaint.encode("ascii", "backslashreplace").decode())
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
