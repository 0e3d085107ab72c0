"""`hypergrid diagnose`: the verdict first, exit status, JSON, a page."""

import json

import pytest

from compat.cli import asking
from tests.cli.test_cli import in_a_process, run
from tests.show.test_show import browser, follow, needs_browser  # noqa: F401 - a fixture
from tests.support import ROOT
from tests.support.recorded import Rank, stack, write

GROUPS = {
    "0": ("default_pg", [0, 1, 2, 3]),
    "1": ("TENSOR", [0, 1]),
    "2": ("TENSOR", [2, 3]),
}


@pytest.fixture
def recorded(tmp_path):
    """Rank 3 is missing in the last call; calls overlap."""
    directory = tmp_path / "left"
    directory.mkdir()
    ranks = [Rank(rank, GROUPS) for rank in range(4)]
    for _ in range(15):
        for rank in ranks:
            rank.call("1" if rank.rank < 2 else "2", after=1, lasts=1.5)
    ranks[2].call("2", done=False)
    ranks[0].call("0", done=False)
    ranks[1].call("0", done=False)
    stack(directory, 3, [("/job/<data>.py", 12, "load")], written=ranks[2].now + 90 * 10**9)
    return write(directory, ranks)


def test_the_verdict_comes_first_and_the_status_is_1(recorded):
    output = run(f"diagnose {recorded}", status=1)
    assert output.startswith(
        "Rank 3 (host0) never entered all_reduce #16 of TENSOR 2..3, in which "
    )
    assert "it is in load (/job/<data>.py:12)" in " ".join(output.split())
    assert "\n  Next: read the stack of rank 3" in output


def test_the_verdict_is_printed_before_a_page_that_cannot_be_written(recorded):
    output = run(
        f"diagnose {recorded} --html {recorded / 'no' / 'page.html'}", 2, prints_first=True
    )
    assert output.startswith("Rank 3 (host0) never entered") and "No such file" in output


@pytest.mark.parametrize("ended_ranks", [(), (3,)])
def test_a_rank_that_did_not_write_is_named_unless_its_script_has_ended(
    ended_ranks, recorded, monkeypatch
):
    for rank in ended_ranks:
        stack(recorded, rank, reason="ended")
    monkeypatch.setattr(asking, "ask", lambda directory: [3])
    output = run(f"diagnose {recorded} --ask", status=1)
    assert ("these ranks were asked and did not write: 3." in output) == (not ended_ranks)


def test_the_default_group_has_one_name_in_the_verdict_and_on_the_page(recorded, tmp_path):
    page = tmp_path / "page.html"
    verdict = json.loads(run(f"diagnose {recorded} --html {page} --json", status=1))
    written = page.read_text()
    assert "of the default group: not done" in written
    for text in (json.dumps(verdict), written):
        assert "default_pg" not in text


def test_groups_without_recorders_say_how_ranks_write(tmp_path):
    dump = {"schema": 1, "rank": 0, "world_size": 1, "host": "a", "pid": 1, "groups": []}
    (tmp_path / "groups_0.json").write_text(json.dumps(dump))
    assert "No rank has written what it was doing" in run(f"diagnose {tmp_path}", status=1)


def test_files_that_cannot_be_read_are_named_and_no_dumps_is_a_refusal(recorded):
    (recorded / "trace_1").write_bytes(b"\x80\x02")
    assert "Not used:\n  trace_1 cannot be read" in run(f"diagnose {recorded}", status=1)
    (recorded / "empty").mkdir()
    assert "has no dump of a rank" in run(f"diagnose {recorded / 'empty'}", status=2)
    assert "has no dump of a rank: trace_RANK" in run(f"diagnose {recorded.parent}", status=2)
    assert "nowhere cannot be opened: No such file or directory" in run(
        f"diagnose {recorded / 'nowhere'}", status=2
    )


def test_no_torch_is_needed(recorded):
    without = "sys.modules['torch'] = None; "
    status, printed, _ = in_a_process(f"diagnose {recorded} --html /dev/null", without)
    assert status == 1 and printed.startswith("Rank 3")


@needs_browser
def test_the_page_marks_the_cause_and_shows_a_ranks_calls(recorded, tmp_path, browser):  # noqa: F811
    page = tmp_path / "page.html"
    run(f"diagnose {recorded} --html {page}", status=1)
    tab = browser.new_context().new_page()
    wrong = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("console", lambda message: wrong.append(message.text))
    tab.goto(page.as_uri())
    follow(tab, (ROOT / "tests" / "cli" / "page.txt").read_text().splitlines())
    tab.context.close()
    assert not wrong
