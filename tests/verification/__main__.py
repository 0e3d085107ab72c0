"""Verify layouts with the megatron-core on the path; the result is JSON.

python -m tests.verification -n RANDOM --seed SEED
"""

from __future__ import annotations

import argparse
import json
import random
import sys

from compat.verification import verify
from compat.verification.gpt import small_gpt, uneven_batch
from tests.verification.layouts import KNOWN, random_layout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    batch = uneven_batch()
    reports = verify(small_gpt, batch, KNOWN.values(), smallest=False)
    known = {
        name: "refused" if report.refused else "yes" if report.findings else "no"
        for name, report in zip(KNOWN, reports, strict=True)
    }
    draw = random.Random(given.seed)
    reports = verify(small_gpt, batch, [random_layout(draw) for _ in range(given.n)])
    refused = [str(report) for report in reports if report.refused]
    wrong = [report.as_dict() for report in reports if report.findings]
    for report in reports:
        if not report.agrees:
            print(report, file=sys.stderr)
    agree = sum(report.agrees for report in reports)
    print(json.dumps({"known": known, "agree": agree, "refused": refused, "wrong": wrong}))


if __name__ == "__main__":
    main()
