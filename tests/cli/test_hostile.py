"""Whatever is typed or read: an answer or one sentence, in bounded time and memory."""

import json
import os
import shlex
import time

import pytest
from typer.testing import CliRunner

from compat.cli import asking
from compat.cli.app import app
from tests.cli.test_cli import run
from tests.support import hostile

CONTROL = "\x1b[2J\x07\u202e"
SIZES = "--world-size 8 --tp 2"


def test_mutated_files_and_texts_give_an_answer_or_one_sentence():
    """As ``scripts/dev/hostile``, which tries 10,000."""
    found = [f"#{n} {hostile.case(n).command}: {said}" for n, said in hostile.findings(range(300))]
    assert found == []


@pytest.mark.parametrize("where", ["label", "dim", "path"])
def test_control_characters_of_names_do_not_reach_the_terminal(tmp_path, where):
    plan = json.loads(run(f"plan {SIZES} --json"))
    path = tmp_path / "plan.json"
    if where == "label":
        plan["rows"][0]["label"] = f"A{CONTROL}"
    elif where == "dim":
        dims = plan["layouts"]["decoder"]["dims"]
        plan |= {
            "rows": [],
            "layouts": {"decoder": {"dims": ["tp", f"d{CONTROL}"], "sizes": [2, 4]}},
        }
        assert len(dims) > 2
    else:
        path = tmp_path / f"plan{CONTROL}.json"
        plan["rows"] = 5
    path.write_text(json.dumps(plan))
    for command in ("plan", "show", "check", "plan --rank 1"):
        done = CliRunner().invoke(app, [*command.split(), "--plan", str(path)])
        assert not {*CONTROL} & {"\x1b", "\x07", "\u202e"} & {*done.output}
        assert done.exit_code == (2 if where == "path" else done.exit_code)
    assert r"\x1b[2J" in run(f"plan --plan {shlex.quote(str(path))}", done.exit_code)


@pytest.mark.parametrize("text", ["plan --plan", "diff '-- 8'"])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, text):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        if not (text.startswith("diff") and path != "/dev/zero"):
            said = run(f"{text} {path}", 2)
            assert said.startswith("hypergrid: ") and said.count("\n") == 1


def test_a_long_line_in_the_head_of_a_script_is_refused_before_it_is_read():
    before = time.process_time()
    done = CliRunner().invoke(app, ["plan", "--from-args", "#SBATCH --ntasks" + "x" * 2**20])
    assert done.exit_code == 2 and "longer than 131,072 characters" in done.output
    assert time.process_time() - before < 5


def test_a_pasted_line_may_be_longer_than_the_name_of_a_file():
    line = f"--world-size 8 --tensor-model-parallel-size 2 --save {'x' * 300}"
    assert "8 ranks" in run(f"plan --from-args '{line}'")
    assert "8 ranks" in run(f"plan --from-args '{line} {'--y ' * 1000}'")


@pytest.mark.parametrize("many", [2**20 + 1, 10**9, 2**63, 10**30])
def test_too_many_ranks_are_refused_at_once(tmp_path, many):
    said = run(f"plan --from-args '--world-size {many}'", 2)
    assert "must be from 1 to 1,048,576" in said or "must be a whole number" in said
    layouts = {"x": {"dims": ["a"], "sizes": [many]}}
    (tmp_path / "plan.json").write_text(json.dumps({"schema": 1, "layouts": layouts, "rows": []}))
    assert "too many" in run(f"check --plan {tmp_path / 'plan.json'}", 2)


def test_ranks_are_asked_in_a_directory_that_others_cannot_change(tmp_path):
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("mine")
    shared.mkdir()
    (shared / "asked").symlink_to(victim)
    (shared / "groups_0.json").write_text('{"host": ' + "[" * 5000)
    (shared / "groups_1x.json").write_text("")
    assert asking.ask(shared, 0.2) == [0]
    assert victim.read_text() == "mine" and not (shared / "asked").is_symlink()
    assert sorted(path.name for path in shared.iterdir()) == [
        "asked", "groups_0.json", "groups_1x.json",
    ]  # fmt: skip
    forged = tmp_path / "a\nNobody is stuck"
    shared.rename(forged)
    forged.chmod(0o777)
    with pytest.raises(PermissionError, match="every user may replace the files in"):
        asking.ask(forged)
    said = run(f"diagnose --ask {shlex.quote(str(forged))}", 2)
    assert len(said.splitlines()) == 1


def test_an_error_is_not_longer_than_a_paragraph():
    for long in "x" * 50_000, "\udcff" * 50_000:
        said = run(f"plan {SIZES} --order {shlex.quote(long)}", 2)
        assert len(said) < 1100
        assert len(run(f"plan --from-args {shlex.quote('`' + long)}", 2)) < 1100
