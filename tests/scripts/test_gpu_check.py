"""scripts/gpu_check without a GPU: what it skips, its rehearsal, and that it notices."""

import os
import subprocess
import sys

import pytest

from tests.support import ROOT, script_module

SCRIPT = str(ROOT / "scripts" / "gpu_check")


def check_gpus(*arguments):
    """Run the script without a GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HYPERGRID_SHARE": "all"}
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def gpu_check():
    return script_module("gpu_check")


def test_without_a_gpu_each_check_says_that_it_was_skipped_and_why(gpu_check):
    done = check_gpus()
    assert done.returncode == 0, done.stderr
    for label, *_ in gpu_check.jobs(1, 1):
        assert f"skipped    {label:50} no CUDA device" in done.stdout
    assert "scripts/gpu_check --rehearse" in done.stdout


def test_the_rehearsal_runs_every_check_but_training(gpu_check):
    checks = [check for check in gpu_check.CHECKS if check not in ("machine", "training")]
    done = check_gpus("--rehearse", "--only", *checks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("REHEARSAL on the CPU (ranks: 2)")
    rehearsed = [line for line in done.stdout.splitlines() if line.startswith("rehearsed")]
    labels = [label for label, check, *_ in gpu_check.jobs(1, 1) if check == "creation"]
    labels += ["memory: share=none", "memory: share=all", "options", "recording", "suspend"]
    for label in labels:
        assert any(line.startswith(f"rehearsed  {label}") for line in rehearsed), label


def test_a_rank_that_hangs_is_a_row_and_not_the_end():
    done = check_gpus("--rehearse", "--only", "memory", "options", "--timeout", "0.01")
    assert done.returncode == 1
    for check in ("memory", "options"):
        assert f"FAILED     {check:50} rank 0 did not finish in time" in done.stdout


def results(*losses, digest="d"):
    steps = [{"loss": loss, "loss_hex": loss.hex()} for loss in losses]
    return {"steps": steps, "rank_digests": [digest], "new_group_calls": [1]}


@pytest.mark.parametrize(
    ("swapped", "second_stock", "fails", "skips"),
    [
        (results(2.0, 1.0), None, False, False),
        (results(2.0, 1.0, digest="e"), results(2.0, 1.0), True, False),
        (results(2.0, 1.1), results(2.0, 1.0), True, False),
        (results(2.0, 1.001), results(2.0, 1.002), False, True),
    ],
)
def test_a_training_may_differ_only_where_stock_differs_from_itself(
    gpu_check, swapped, second_stock, fails, skips
):
    runs = {"stock": [results(2.0, 1.0), second_stock], "hypergrid": [swapped]}
    row = gpu_check.compared_training("training", lambda side: [runs[side].pop(0)])
    assert (bool(row.faults), bool(row.skipped)) == (fails, skips)


def test_a_wrong_option_is_named(gpu_check):
    assert gpu_check.wrong_options(gpu_check.EXPECTED_OPTIONS) == []
    (fault,) = gpu_check.wrong_options({**gpu_check.EXPECTED_OPTIONS, "OTHER": {"max_ctas": 4}})
    assert fault == "OTHER has {'max_ctas': 4}, asked for {}"
