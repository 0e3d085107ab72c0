"""The sets of one release, in a process of its own (see ``scripts/fuzz``)."""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import time
import warnings

from compat import parallel_state
from tests.fuzzing.judging import judge
from tests.fuzzing.wild import draw


def main() -> int:
    """Judge the sets, print a line of counts, then the complaints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", required=True)
    for name in ("-n", "--seed", "--first"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    release = options.release
    started = time.monotonic()
    accepted = 0
    complaints: list[str] = []
    for number in range(options.first, options.first + options.n):
        # An alarm does not stop a loop that never comes back to Python; this ends the process.
        faulthandler.dump_traceback_later(180, exit=True)
        arguments = draw(random.Random(f"{options.seed}/{release}/{number}"), release)
        outcome, complaints_of_set = judge(arguments, parallel_state)
        accepted += outcome.error is None
        complaints += [f"{release} #{number} {arguments}: {text}" for text in complaints_of_set]
    seconds = time.monotonic() - started
    print(
        f"{release} {options.n} sets, {accepted} accepted, {options.n - accepted} refused, "
        f"{len(complaints)} complaints, {seconds:.0f} s"
    )
    for complaint in complaints[:20]:
        print(complaint.encode("ascii", "backslashreplace").decode())
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
