"""The commands on a saved plan of several grids."""

import json

import pytest
from typer.testing import CliRunner

from hypergrid import AssemblyPlan, GridPart, GroupPlan, Link
from hypergrid.cli.app import app
from hypergrid.hangs.reading import Recording
from hypergrid.hangs.verdict import coordinate


@pytest.fixture
def run(tmp_path):
    vision, text = GridPart({"dp": 4}, (0, 1, 2, 8)), GridPart({"tp": 2, "pp": 2}, range(4, 8))
    plan = AssemblyPlan({"vision": vision, "text": text}, [Link("vision", "text")]).plan
    (tmp_path / "saved.json").write_text(plan.to_json())

    def command(*words, status=0):
        words = [str(tmp_path / word) if word.endswith(".json") else word for word in words]
        done = CliRunner().invoke(app, words, env={"NO_COLOR": "1", "COLUMNS": "90"})
        assert done.exit_code == status, done.output
        return done.output

    command.plan, command.at = plan, tmp_path
    return command


def test_plan_lists_grids_links_and_their_groups_and_its_json_is_read_back(run):
    said = run("plan", "--plan", "saved.json", "--gpus-per-node", "4")
    assert "9 ranks on 3 hosts of 4, 2 grids" in said
    assert "vision: dp=4, order dp; ranks 0..2,8" in said
    assert "vision->text: fan-in 4 to 1; 0 -> 4, 1 -> 4, 2 -> 4, 8 -> 4" in said
    assert "listed     5      1     3 vision->text leaders" in said
    of_rank = run("plan", "--plan", "saved.json", "--rank", "4")
    assert "rank 4 on host0, text: tp=0, pp=0" in of_rank and "4, 6" in of_rank
    assert "rank 3 on host0 is in no group." in run("plan", "--plan", "saved.json", "--rank", "3")
    (run.at / "far.json").write_text(run.plan.to_json().replace("[0, 1, 2, 4, 8]", "[0, 99]"))
    assert "has rank 99, and the grids end at rank 8." in " ".join(
        run("plan", "--plan", "far.json", status=2).split()
    )
    text = run("plan", "--plan", "saved.json", "--json")
    assert json.loads(text)["schema"] == 2 and GroupPlan.from_json(text) == run.plan


def test_show_draws_each_grid_and_the_page_lists_every_group(run):
    said = run("show", "--plan", "saved.json", "--gpus-per-node", "4")
    assert "vision:\nhost0" in said and "text:\nhost1" in said and "dp group" in said
    assert "dp group" not in run("show", "--plan", "saved.json", "--view", "text")
    page = run.at / "page.html"
    run("show", "--plan", "saved.json", "--html", str(page))
    assert "vision-\\u003etext leaders" in page.read_text()
    run("show", "--plan", "saved.json", "--view", "audio", status=2)


def test_check_looks_at_each_grid_and_at_links(run):
    said = run("check", "--plan", "saved.json", "--gpus-per-node", "5", status=1)
    assert "error: tp-across-hosts\n  text:" in said
    assert "warning: link-across-hosts\n  vision->text: 1 of 1 parts of text" in said
    run("check", "--plan", "saved.json", "--suggest", status=2)


def test_diff_compares_grids_by_name_and_dumps_by_group(run):
    assert "No differences" in run("diff", "saved.json", "saved.json")
    text = GridPart({"tp": 4, "pp": 1}, range(4, 8))
    other = AssemblyPlan({"vision": GridPart({"dp": 4}, (0, 1, 2, 8)), "text": text})
    (run.at / "other.json").write_text(other.plan.to_json())
    said = run("diff", "saved.json", "other.json", status=1)
    assert "text tp  2 -> 4" in said and "vision->text leaders" in said
    group = {"label": "vision/dp", "ranks": [0, 1, 2, 8]}
    dump = {"rank": 1, "pid": 1, "groups": [group, {"label": "text/subgroup tp:2", "ranks": [1]}]}
    (run.at / "dump.json").write_text(json.dumps(dump))
    said = run("diff", "saved.json", "dump.json", status=1).splitlines()
    assert said == [
        "rank 1: vision->text leaving was planned but not created.",
        "rank 1: vision->text leaders was planned but not created.",
    ]


def test_a_diagnosis_names_ranks_by_their_grid(run):
    assert coordinate(Recording({}, {}, 9, ()), run.plan, 8) == {"vision dp": 3}
    assert coordinate(Recording({}, {}, 9, ()), run.plan, 7) == {"text tp": 1, "text pp": 1}
    assert coordinate(Recording({}, {}, 9, ()), run.plan, 3) == {}
