"""`hypergrid audit`: the table, the ratchet."""

import json
import subprocess
import sys

import pytest

from tests.cli.test_cli import run
from tests.support import ROOT

SITE = {
    "module": "megatron.core.transformer.attention",
    "file": "megatron/core/transformer/attention.py",
    "line": 272,
    "function": "Attention.__init__",
    "name": "get_tensor_model_parallel_group",
    "writes": False,
    "state": "actor",
    "group": "TENSOR_MODEL_PARALLEL_GROUP",
    "count": 3,
}
WRONG = {"kind": "another state", "text": "Head built under 'critic' read ...", "count": 2}


def write(directory, rank, sites, problems=()):
    directory.mkdir(exist_ok=True)
    data = {"schema": 1, "rank": rank, "process": 100 + rank, "release": "0.16"}
    told = [{**each, "example": f"got rank {rank}"} for each in problems]
    data |= {"sites": [{**SITE, **site} for site in sites], "problems": told}
    (directory / f"reads.{rank}.{100 + rank}.1.json").write_text(json.dumps(data))


@pytest.fixture
def left(tmp_path):
    directory = tmp_path / "left"
    script = {"module": "__main__", "file": "<b>.py", "function": "<module>"}
    for rank in range(2):
        write(directory, rank, [{}, {"count": 1}, {**script, "line": 9}])
    return directory


def test_the_table_has_reads_and_sites_by_package_and_file(left):
    printed = run(f"audit {left}")
    said = [line.split() for line in printed.splitlines()]
    assert said[1:3] == [
        ["megatron.core.transformer", "8", "1"],
        ["attention.py", "8", "1", "get_tensor_model_parallel_group", "8"],
    ]
    assert "14 reads by 2 sites, on 2 ranks, megatron-core 0.16." in printed


def test_as_json_a_site_has_its_states_and_groups(left):
    found = json.loads(run(f"audit {left} --json"))
    site = next(each for each in found["sites"] if each["line"] == 272)
    assert site["count"] == 8 and site["ranks"] == 2
    assert site["states"] == {"actor": 8} and site["groups"] == {SITE["group"]: 8}
    assert found["names"] == {SITE["name"]: 14} and found["reads"] == 14


def test_a_wrong_state_comes_first_and_the_status_is_1(left):
    write(left, 1, [{}], [WRONG])
    said = run(f"audit {left}", status=1)
    assert said.startswith("another state: Head built under 'critic' read")
    assert "2 reads on 1 ranks; rank 1 got rank 1" in said


def test_the_baseline_allows_moved_lines_and_refuses_new_sites(left, tmp_path):
    baseline = tmp_path / "baseline.json"
    baseline.write_text(run(f"audit {left} --json"))
    assert "As the baseline." in run(f"audit {left} --against {baseline}")
    moved, other = tmp_path / "moved", {"name": "get_context_parallel_group"}
    write(moved, 0, [{"line": 300, "count": 70}])
    said = run(f"audit {moved} --against {baseline}")
    assert "1 functions read less than in the baseline: write it again" in said
    write(moved, 0, [{"line": 300}, {"line": 301}, other])
    for known in (baseline, left):
        said = run(f"audit {moved} --against {known}", status=1)
        assert "new: get_tensor_model_parallel_group in megatron.core.transformer.attention" in said
        assert "line 300, 301: 1 before, 2 now" in said
        assert "new: get_context_parallel_group" in said and "0 before, 1 now" in said
    changes = json.loads(run(f"audit {moved} --against {left} --json", status=1))["changes"]
    assert [(each["before"], each["after"]) for each in changes] == [(1, 0), (0, 1), (1, 2)]


def test_what_cannot_be_read_is_named_and_a_directory_without_recordings_is_refused(left):
    (left / "reads.7.1.1.json").write_text('{"schema": 9, "sites": []}')
    assert "Not read: reads.7.1.1.json" in run(f"audit {left}")
    run(f"audit {left} --against {left}", status=1)  # a new site may be in it
    whole = json.loads((left / "reads.0.100.1.json").read_text())
    for name in whole:
        rest = {key: value for key, value in whole.items() if key != name}
        (left / "reads.8.1.1.json").write_text(json.dumps(rest))
        said = run(f"audit {left}")
        assert "Not read: reads.8.1.1.json" in said and f"`{name}`" in said
    (left / "empty").mkdir()
    assert "has no recording of a rank" in run(f"audit {left / 'empty'}", status=2)
    assert "No such file" in run(f"audit {left / 'nowhere'}", status=2)
    (left / "other.json").write_text("[]")
    said = run(f"audit {left} --against {left / 'other.json'}", status=2)
    assert len(said.splitlines()) <= 2 and "hypergrid: " in said


def test_no_torch_is_needed(left):
    code = (
        "import sys; sys.modules['torch'] = None; from compat.cli.app import app; "
        f"app(['audit', {str(left)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "14 reads" in done.stdout, done
