"""Verify the known faults and the layouts with the megatron-core on the path; the result is JSON.

python -m tests.verification -n LAYOUTS
"""

from __future__ import annotations

import argparse
import json
import sys

from compat.verification import verify
from compat.verification.gpt import small_gpt, uneven_batch
from compat.verification.ranks import in_child
from compat.verification.search import reports
from tests.verification.layouts import KNOWN, LAYOUTS, Case


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=10, help="how many of the layouts")
    options = parser.parse_args()
    refused = []
    wrong = []
    layouts = LAYOUTS[: options.n]
    for report in verify(small_gpt, uneven_batch(), layouts, smallest=False):
        if report.refused:
            refused.append(str(report))
        elif report.findings:
            wrong.append(report.as_dict())
        if not report.agrees:
            print(report, file=sys.stderr)
    agree = len(layouts) - len(refused) - len(wrong)
    known = in_child(lambda: {name: shown(fault) for name, fault in KNOWN.items()})
    print(json.dumps({"known": known, "agree": agree, "refused": refused, "wrong": wrong}))


def shown(fault: Case) -> str:
    """Whether this megatron-core shows a known fault: yes, no, or why that is not said."""
    try:
        (report,) = reports(fault.task(), [fault.layout], smallest=False)
    except ValueError as error:  # an option that this release does not have
        print(f"{fault.layout}: {error}", file=sys.stderr)
        return "no such option"
    if report.refused:
        print(report, file=sys.stderr)
        return "refused"
    return "yes" if report.findings else "no"


if __name__ == "__main__":
    main()
