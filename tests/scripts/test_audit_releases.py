"""The table of docs/audit.md is what the command prints; one of its rows is measured again."""

import subprocess
import sys

from compat.megatron.releases import PUBLISHED
from tests.support import ROOT


def test_a_row_of_the_table_in_the_docs_is_what_the_command_measures():
    rows = (ROOT / "docs" / "audit.md").read_text().splitlines()
    assert {row.split()[1] for row in rows if row.startswith("| 0.")} == {*PUBLISHED}
    command = (sys.executable, "scripts/dev/audit_releases", "--release", PUBLISHED[-1])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    measured = [line for line in done.stdout.splitlines() if line.startswith("| 0.")]
    assert len(measured) == 1 and measured[0] in rows
