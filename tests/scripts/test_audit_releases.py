"""A row of scripts/studies/audit_releases for each release, with the counts of docs/audit.md."""

import subprocess
import sys

import pytest

from compat.megatron.releases import PUBLISHED
from tests.support import ROOT

pytestmark = pytest.mark.long  # a study


def test_the_newest_release_reads_as_often_as_the_page_says():
    command = (sys.executable, "scripts/studies/audit_releases", "--release", PUBLISHED[-1])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (measured,) = [line for line in done.stdout.splitlines() if line.startswith("| 0.")]
    release, handed, reads, sites, _, _ = measured.strip("| ").split(" | ")
    assert (release, handed) == (PUBLISHED[-1], "a collection")
    page = " ".join((ROOT / "docs" / "audit.md").read_text().split())
    assert f"and {release} {reads} times at {sites}" in page
