"""Verify layouts with the megatron-core on the path; the result is JSON.

python -m tests.verification -n RANDOM --seed SEED
"""

from __future__ import annotations

import argparse
import json
import random
import sys

from compat.verification import Report, verify
from compat.verification.gpt import small_gpt, uneven_batch
from compat.verification.ranks import in_child
from compat.verification.search import reports
from tests.verification.layouts import KNOWN, random_layout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    layouts = [random_layout(draw) for _ in range(options.n)]
    of_random = verify(small_gpt, uneven_batch(), layouts, smallest=False)
    refused = []
    wrong = []
    for report in of_random:
        if report.refused:
            refused.append(str(report))
        elif report.findings:
            wrong.append(report.as_dict())
        if not report.agrees:
            print(report, file=sys.stderr)
    agree = len(of_random) - len(refused) - len(wrong)
    outcome = {"known": in_child(known), "agree": agree, "refused": refused, "wrong": wrong}
    print(json.dumps(outcome))


def known() -> dict[str, str]:
    """Whether this megatron-core shows each known fault: yes, no, or refused."""
    shown = {}
    for name, fault in KNOWN.items():
        try:
            (report,) = reports(fault.task(), [fault.layout], smallest=False)
        except ValueError as error:  # an option that this release does not have
            print(f"{name}: {error}", file=sys.stderr)
            shown[name] = "no such option"
            continue
        shown[name] = shows(report)
    return shown


def shows(report: Report) -> str:
    if report.refused:
        print(report, file=sys.stderr)
        return "refused"
    return "yes" if report.findings else "no"


if __name__ == "__main__":
    main()
