"""The edits of one release, in a process of its own (see ``scripts/shadow_fuzz``)."""

from __future__ import annotations

import argparse
import sys

from tests.shadows.judging import draw, judge


def main() -> int:
    """Judge the edits; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--release", "--seed"):
        parser.add_argument(name, required=True)
    for name in ("-n", "--first"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    complaints = 0
    for number in range(options.first, options.first + options.n):
        edit = draw(options.release, f"{options.seed}/{number}")
        verdict = judge(options.release, edit)
        complaints += bool(verdict.complaint)
        kind = verdict.complaint or verdict.kind
        print(f"{options.release} #{number} {edit.name}: {kind}", flush=True)
    print(f"{options.release} {options.n} edits, {complaints} complaints", flush=True)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
