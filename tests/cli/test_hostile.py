"""Whatever is typed or read: an answer or one sentence, in bounded time and memory."""

import json
import os
import shlex
import time

import pytest

from compat.cli import asking
from tests.cli.test_cli import layout, run
from tests.support import hostile
from tests.support.forked import on_ranks

CONTROL = "\x1b[2J\x07\u202e"
CHARACTERS = {"\x1b", "\x07", "\u202e"}
SIZES = "--world-size 8 --tp 2"


@on_ranks(1, backend="", timeout=200)
def test_mutated_files_and_texts_give_an_answer_or_one_sentence(rank):
    """As ``scripts/dev/hostile``, which tries 10,000."""
    assert list(hostile.findings(range(300))) == []


def test_control_characters_of_names_and_paths_do_not_reach_the_terminal(saved, tmp_path):
    labelled = json.loads(run(f"plan {SIZES} --json"))
    labelled["rows"][0]["label"] = f"A{CONTROL}"
    named = {**labelled, "layouts": layout("decoder", 8, f"d{CONTROL}"), "rows": []}
    for plan, status in ((labelled, 0), (named, 2)):
        option = saved(plan)
        for command in ("plan", "plan --rank 1", "show"):
            assert not CHARACTERS & set(run(f"{command} {option}"))
        assert not CHARACTERS & set(run(f"check {option}", status))
        assert r"\x1b[2J" in run(f"plan {option}")
    path = tmp_path / f"plan{CONTROL}.json"
    path.write_text("[]")
    refusal = run(f"plan --plan {shlex.quote(str(path))}", 2)
    assert r"\x1b[2J" in refusal and not CHARACTERS & set(refusal)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        run(f"plan --plan {path}", 2)
    run("diff '-- 8' /dev/zero", 2)


def test_a_long_line_is_refused_before_it_is_read():
    before = time.process_time()
    refusal = run(["plan", "--from-args", "torchrun --ntasks" + "x" * 2**20], 2)
    assert "longer than 131,072 characters" in refusal
    assert time.process_time() - before < 5


def test_a_pasted_line_may_be_longer_than_the_name_of_a_file():
    line = f"--world-size 8 --tensor-model-parallel-size 2 --save {'x' * 300}"
    assert "8 ranks" in run(f"plan --from-args '{line} {'--y ' * 1000}'")


def test_ranks_are_asked_in_a_directory_that_others_cannot_change(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    shared = tmp_path / "a\nNobody is stuck"
    shared.mkdir()
    (shared / "asked").symlink_to(victim)
    (shared / "groups_0.json").write_text('{"host": ' + "[" * 5000)
    (shared / "groups_1x.json").write_text("")
    assert asking.ask(shared, 0.2) == [0]
    # A link is replaced, and not written through.
    assert victim.read_text() == "mine" and not (shared / "asked").is_symlink()
    assert len([*shared.iterdir()]) == 3
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="every user may replace the files in"):
        asking.ask(shared)
    run(["diagnose", "--ask", str(shared)], 2)


@pytest.mark.parametrize("long", ["x" * 50_000, "\udcff" * 50_000])
def test_an_error_is_not_longer_than_a_paragraph(long):
    assert len(run(["plan", "--world-size", "8", "--order", long], 2)) < 1100
    assert len(run(["plan", "--from-args", "`" + long], 2)) < 1100
