"""scripts/studies/upstream_bridges: megatron-core's own tests pass on hypergrid's grids."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

CLONE = Path(os.environ.get("MEGATRON_LM", ROOT / ".cache" / "Megatron-LM"))
pytestmark = pytest.mark.long  # a study


@pytest.mark.skipif(
    not CLONE.is_dir(), reason=f"{CLONE} is missing: a clone of NVIDIA/Megatron-LM with its tags"
)
def test_upstreams_tests_pass_unchanged():  # of one release and a few; the script has them all
    few = ["--releases", "0.19.2", "-k", "pg_membership or different_pp_size or 2d_fan"]
    done = subprocess.run(
        [sys.executable, "scripts/studies/upstream_bridges", "--repository", str(CLONE), *few],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "6 passed" in done.stdout
