"""`hypergrid audit`: the table."""

import json

import pytest

from tests.cli.test_cli import in_a_process, run

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
SCRIPT = {"module": "__main__", "file": "<b>.py", "function": "<module>"}


def write(directory, rank, sites, problems=()):
    """The recording of a rank."""
    directory.mkdir(exist_ok=True)
    recording = {
        "schema": 1,
        "rank": rank,
        "release": "0.16",
        "sites": [SITE | site for site in sites],
        "problems": list(problems),
    }
    path = directory / f"reads.{rank}.{100 + rank}.1.json"
    path.write_text(json.dumps(recording))


@pytest.fixture
def recordings(tmp_path):
    directory = tmp_path / "left"
    for rank in range(2):
        write(directory, rank, [{}, {"count": 1}, {**SCRIPT, "line": 9}])
    return directory


def test_the_table_has_reads_and_sites_by_file_and_needs_no_torch(recordings):
    status, out, _ = in_a_process(
        f"audit {recordings}", "sys.modules['torch'] = None; ", COLUMNS="200"
    )
    words = " ".join(out.split())
    assert status == 0
    assert "attention.py 8 1 get_tensor_model_parallel_group 8" in words
    assert "14 reads by 2 sites, on 2 ranks, megatron-core 0.16." in words
    sites = json.loads(run(f"audit {recordings} --json"))["sites"]
    assert [(site["count"], site["states"]) for site in sites] == [
        (6, {"actor": 6}),
        (8, {"actor": 8}),
    ]


def test_a_wrong_state_comes_first_and_the_status_is_1(recordings):
    text = "Head built under 'critic' read ..."
    problem = {"kind": "another state", "text": text, "count": 2, "example": "got rank 1"}
    write(recordings, 1, [{}], [problem])
    printed = run(f"audit {recordings}", 1)
    assert printed.startswith("another state: Head built under 'critic' read")
    assert "2 reads on 1 ranks; rank 1 got rank 1" in printed


def test_what_cannot_be_read_is_named_beside_the_report_on_the_others(recordings):
    recording = json.loads((recordings / "reads.0.100.1.json").read_text())
    whole = run(f"audit {recordings}")
    file = recordings / "reads.7.1.1.json"
    file.write_text(json.dumps({**recording, "schema": 9}))
    printed = run(f"audit {recordings}")
    assert printed.startswith(whole.rstrip())
    assert f"Not read: {file.name}" in printed and "`schema`" in printed
    file.write_text('{"schema": 1, "ra')  # its disk was full
    assert f"Not read: {file.name}" in run(f"audit {recordings}")
    (unread,) = json.loads(run(f"audit {recordings} --json"))["unread"]
    assert unread.startswith(file.name)


def test_a_directory_without_recordings_is_refused(recordings):
    (recordings / "empty").mkdir()
    assert "has no recording of a rank" in run(f"audit {recordings / 'empty'}", 2)
    assert "No such file" in run(f"audit {recordings / 'nowhere'}", 2)
