"""scripts/gpu_check without a GPU: what it skips, its rehearsal, and that it notices."""

import json
import os
import subprocess
import sys
import time

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
    for part in gpu_check.PARTS:
        for label, *_ in gpu_check.jobs(part, 1, 1):
            assert f"skipped    {label:50} no CUDA device" in done.stdout
    assert "scripts/gpu_check --rehearse" in done.stdout


ROWS = {  # of a part: how a row begins, and what it says
    "creation": [
        ("creation, unbound default group, connect=eager", "by everyone; an all_reduce on each"),
        ("creation, bound compound default group", "by split; an all_reduce on each"),
        ("options", "max_ctas"),
        ("recording", "nothing is captured"),
        ("suspend", "keep"),
    ],
    "memory": [
        ("memory, bound default group, share=none", "groups of one rank used 0, destroyed 0"),
        ("memory, unbound default group, share=all", "of one rank"),
    ],
    "faults": [
        ("killed, unbound", "rank 3: abort"),
        ("abort, bound", "rank 5: abort"),
        ("disagreement, unbound", "AgreementError on all"),
        ("killed while others connect, unbound", "rank 7: after"),
        ("raises while others connect, bound", "planted"),
    ],
    "figures": [
        ("figures, unbound default group: ours initialises", "(6 times)"),
        ("figures, bound default group: torch destroys what stock leaves", "(6 times)"),
    ],
}


@pytest.mark.parametrize("part", ROWS)
def test_each_part_is_rehearsed_with_eight_ranks_and_its_rows_are_kept_as_they_come(part, tmp_path):
    kept = tmp_path / "rows.jsonl"
    limits = ("--seconds", "280", "--timeout", "250")
    files = ("--logs", str(tmp_path), "--json", str(kept))
    done = check_gpus("--rehearse", "8", "--part", part, *files, *limits)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("REHEARSAL on the CPU (ranks: 8)")
    lines = [line for line in done.stdout.splitlines() if line.startswith(("rehearsed", "skipped"))]
    for label, words in ROWS[part]:
        (line,) = (line for line in lines if line.startswith(f"rehearsed  {label}"))
        assert words in line
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(rows) == len(lines) and {row["ranks"] for row in rows} == {"8 on gloo"}
    assert [*tmp_path.iterdir()] == [kept]  # of ranks that do not fail no log stays


def test_hangs_are_recorded_and_diagnosed_until_the_time_of_the_part_is_over(tmp_path):
    start = time.monotonic()
    options = ("--seconds", "25", "--logs", str(tmp_path))
    done = check_gpus("--rehearse", "8", "--part", "hangs", *options)
    assert time.monotonic() - start < 120
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rehearsed  hang: stopped" in done.stdout and "Rank 5 (" in done.stdout
    assert "skipped    hang: slow" in done.stdout and "no time left" in done.stdout


def test_a_rank_that_is_late_is_a_row_and_its_log_stays(tmp_path):
    options = ("--timeout", "0.01", "--logs", str(tmp_path))
    done = check_gpus("--rehearse", "--part", "memory", *options)
    assert done.returncode == 1
    for default in ("bound", "unbound"):
        label = f"memory, {default} default group"
        assert f"FAILED     {label:50} rank 0 did not finish in time; rank 1 did" in done.stdout
    logs = [*tmp_path.glob("*/memory_*/rank_*.log")]
    assert len(logs) == 4 and all(log.read_text() for log in logs)  # stacks, or that no gdb is here


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
