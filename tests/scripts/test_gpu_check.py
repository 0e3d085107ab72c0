"""scripts/gpu_check without a GPU: what it skips, its rehearsal, and that it notices."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support import ROOT

SCRIPT = str(ROOT / "scripts" / "gpu_check")


def check_gpus(*arguments):
    """Run the script without a GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HYPERGRID_SHARE": "all"}
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_without_a_gpu_each_check_says_that_it_was_skipped_and_why():
    done = check_gpus()
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"(?m)^skipped    .* no CUDA device", done.stdout)) > 10
    assert "scripts/gpu_check --rehearse" in done.stdout


# Of a part: rows that it has beside others.
ROWS = {
    "creation": ("creation, bound compound default group", "suspend"),
    "memory": ("memory, unbound default group, share=all",),
    "faults": ("killed, unbound", "disagreement, unbound", "raises while others connect, bound"),
}


@pytest.mark.parametrize("part", ROWS)
def test_each_part_is_rehearsed_and_its_rows_are_kept_as_they_come(part, tmp_path):
    kept = tmp_path / "rows.jsonl"
    files = ("--logs", str(tmp_path), "--json", str(kept))
    done = check_gpus("--rehearse", "8", "--part", part, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ROWS[part]:
        assert f"rehearsed  {row}" in done.stdout
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(rows) >= len(ROWS[part]) and {row["ranks"] for row in rows} == {"8 on gloo"}
    assert [*tmp_path.iterdir()] == [kept]  # of ranks that do not fail no log stays


def test_a_rank_that_is_late_is_a_row_and_its_log_stays(tmp_path):
    options = ("--timeout", "0.01", "--logs", str(tmp_path))
    done = check_gpus("--rehearse", "--part", "memory", *options)
    assert done.returncode == 1
    assert "rank 0 did not finish in time; rank 1 did" in done.stdout
    assert len([*tmp_path.glob("*/memory_*/rank_*.log")]) == 4
