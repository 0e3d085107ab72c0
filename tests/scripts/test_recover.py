"""scripts/recover: a job that loses a rank trains on, to the bits of a fresh start."""

import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.skipif(
    not (ROOT / ".cache" / "resiliency").is_dir(),
    reason="nvidia-resiliency-ext is missing: run scripts/fetch_resiliency",
)
@pytest.mark.parametrize("fault", ["kill", pytest.param("absent", marks=pytest.mark.long)])
def test_after_a_fault_training_equals_a_fresh_start_from_the_same_checkpoint(fault):
    command = [sys.executable, "-W", "ignore", "scripts/recover", "--faults", fault]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.rstrip().endswith("equal")
