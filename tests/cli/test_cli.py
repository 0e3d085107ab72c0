"""The command line: what it prints, at 80 columns and without colour, and how it ends."""

import json
import os
import re
import shlex
import subprocess
import sys
from typing import NamedTuple
from unittest import mock

import pytest
from click.testing import CliRunner

from compat.cli.app import app
from compat.megatron import releases
from tests.support import ROOT, table

HOSTS = "--world-size 64 --gpus-per-node 8"
SIZES = f"{HOSTS} --tp 4 --cp 2 --pp 2 --ep 4 --order tp-cp-ep-dp-pp"
LINE = (
    "torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 "
    "--context-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 4"
)


def run(command, status=0, stdin=None, prints_first=False, **environment):
    """What a command prints: with status 2 one sentence, unless it has printed before."""
    variables = {"NO_COLOR": "1", "COLUMNS": "80", **environment}
    words = shlex.split(command) if isinstance(command, str) else command
    done = CliRunner().invoke(app, words, input=stdin, env=variables, prog_name="hypergrid")
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == status, done.output
    if status == 2 and "Usage: " not in done.output and not prints_first:
        assert done.output.startswith("hypergrid: ") and done.output.count("\n") == 1
    return done.output


def row(output, name):
    """The cells before a name in a table."""
    for line in output.splitlines():
        cells = line.split()
        if cells and cells[-1] == name and cells[0] != "=":
            return " ".join(cells[:-1])
    raise AssertionError(output)


class Answer(NamedTuple):
    """A block of a text file: a command, its variables and status, and lines that it prints."""

    variables: dict[str, str]
    command: str
    status: int
    lines: list[str]

    def check(self, output):
        """Blanks do not matter; a line behind ! is not printed."""
        printed = " ".join(output.split())
        for line in self.lines:
            if line.startswith("! "):
                assert line[2:] not in printed
            elif line.startswith("findings: "):
                rules = re.findall(r"\b(?:error|warning|note): [a-z-]+", printed)
                assert line == f"findings: {', '.join(rules) or 'none'}"
            else:
                assert line in printed


def answers(file):
    """The blocks of a text file under ``tests/``."""
    for text in (ROOT / "tests" / file).read_text().split("\n\n"):
        first, *lines = [line for line in text.splitlines() if not line.startswith("#")] or [""]
        block = re.fullmatch(r"((?:[A-Z_]+=\S* )*)(.+) -> (\d)", first)
        if block:
            variables = dict(pair.split("=") for pair in block[1].split())
            yield Answer(variables, block[2], int(block[3]), lines)


@pytest.mark.parametrize("answer", answers("cli/answers.txt"), ids=lambda answer: answer.command)
def test_a_command_answers_and_ends_with_its_status(answer, monkeypatch):
    monkeypatch.chdir(ROOT)
    answer.check(run(answer.command, answer.status, **answer.variables))


def test_sizes_a_launch_line_and_a_saved_plan_say_the_same(saved):
    option = saved(run(f"plan {SIZES} --json"))
    printed = run(f"plan {SIZES}")
    assert run(f"plan {option}") == printed
    of_line = run(f"plan --from-args '{LINE}'")
    assert of_line.partition("\n\n")[2] == printed.partition("\n\n")[2]
    assert run(f"check {option}", 1) == run(f"check {SIZES}", 1)
    assert run(f"check --suggest {option}", 1).count("best order first") == 1


def layout(name, size, dim="dp"):
    return {name: {"dims": [dim], "sizes": [size]}}


@pytest.mark.parametrize(("change", "refusal"), table("cli/plans.txt"))
@pytest.mark.parametrize("command", ["plan", "check", "show", "diff"])
def test_a_saved_plan_that_makes_no_sense_is_refused_in_a_line(saved, command, change, refusal):
    plan = json.loads(run("plan --world-size 8 --json"))
    fields = json.loads(change)
    if fields.keys() <= {*plan, "nvlink_domain"}:
        plan |= fields
    else:
        plan["rows"][0] |= fields
    option = saved(plan)
    if command == "diff":
        option = option.removeprefix("--plan ") + " '--world-size 8'"
    assert refusal in run(f"{command} {option}", 2)


@pytest.mark.parametrize("dim", ["pp", "tp"])
def test_check_refuses_a_plan_with_a_dim_that_it_has_no_rules_for(saved, dim):
    option = saved(run(f"plan {SIZES} --json").replace(f'"{dim}"', '"stage"'))
    refusal = run(f"check {option}", 2)
    assert "the layout decoder has the dim stage, and the rules are for cp, dp, ep, pp" in refusal
    assert "stage=" in run(f"show {option}")


LEVELS = (
    "--from-args 'torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py "
    "--tensor-model-parallel-size 4 --context-parallel-size 8 "
    "--hierarchical-context-parallel-sizes 2 4'"
)


@pytest.mark.parametrize(
    ("flags", "panels"),
    [
        ("--world-size 64 --tp 4 --cp 2", "tp = 4, cp = 2, dp = 8"),
        (
            "--world-size 1024 --tp 4 --pp 8 --ep 32",
            "decoder tp = 4, decoder dp = 32, decoder pp = 8, expert ep = 32",
        ),
        ("--world-size 1024 --tp 4 --pp 8 --ep 32 --by ep", "ep = 32"),
        (
            LEVELS,
            "decoder tp = 4, decoder cp = 8, decoder dp = 2, decoder_cp_levels cp0 = 2, "
            "decoder_cp_levels cp1 = 4",
        ),
    ],
)
def test_a_picture_shows_each_kind_of_group_of_a_job(flags, panels, tmp_path):
    run(f"show {flags} --svg {tmp_path / 'plan.svg'}")
    titles = re.findall(r">([^<>\n]+ = \d+)</text>", (tmp_path / "plan.svg").read_text())
    assert ", ".join(titles) == panels


DOMAINS = "--world-size 16 --gpus-per-node 4 --tp 8 --nvlink-domain 8"


def test_a_saved_plan_keeps_its_hosts_and_domains(saved):
    option = saved(run(f"plan {DOMAINS} --json"))
    printed = run(f"plan {option}")
    assert printed == run(f"plan {DOMAINS}") and "assumed" not in printed
    assert run(f"check {option}") == run(f"check {DOMAINS}")
    assert "1 NVLink domain of 16 GPUs" in run(f"plan {option} --nvlink-domain 16")
    assert "8 hosts of 2:" in run(f"plan {option} --gpus-per-node 2")


def test_numbers_are_whole_in_a_narrow_terminal():
    command = "check --world-size 16384 --tp 4 --etp 2 --cp 2 --ep 4 --pp 2 --suggest"
    numbers = {word for word in run(command, COLUMNS="200").split() if word.isdigit()}
    assert len(numbers) > 5 and numbers <= set(run(command, COLUMNS="50").split())


def test_the_release_that_is_planned_is_saved_and_its_reason_told(saved, monkeypatch):
    small = "plan --world-size 16 --tp 2"
    old = run(f"{small} --megatron v0.14.0")
    again = run(f"plan {saved(run(f'{small} --megatron 0.14 --json'))}")
    assert "\nfor megatron-core 0.14\n" in again
    assert again.partition("\n\n")[2] == old.partition("\n\n")[2]
    monkeypatch.setattr(releases, "_DECIDED", ((0, 19), None, "none installed"))
    assert "\nfor megatron-core 0.19 (none installed)\n" in run(small)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no ranks"), KeyboardInterrupt(), BrokenPipeError("closed"), MemoryError()],
)
def test_verify_ends_with_status_2_whatever_happens(error, tmp_path):
    with mock.patch("compat.verification.launch.verify_line", side_effect=error):
        refusal = run(f"verify --checkout {tmp_path} --from-args '{LINE}'", 2)
    assert refusal.strip() == f"hypergrid: {str(error) or type(error).__name__}"


START = "from hypergrid.__main__ import main; main()"


def in_a_process(command, before="", **environment):
    """The status, the output and the errors of a command in a process of its own."""
    variables = dict(os.environ)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        variables.pop(name, None)
    words = ["hypergrid", *shlex.split(command)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv = {words!r}; {before}{START}"],
        cwd=ROOT,
        env={**variables, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        f"plan {SIZES}",
        f"plan {SIZES} --rank 3",
        f"show {SIZES}",
        f"show {SIZES} --html /dev/null",
        f"check --suggest {SIZES}",
        f"diff '{SIZES}' '{HOSTS}'",
        f"plan --from-args '{LINE}'",
        "plan --world-size 16384 --tp 8 --cp 2 --pp 8 --ep 8",
    ],
)
def test_planning_imports_no_torch_and_fits_80_columns_without_colour(command):
    before = "sys.modules['torch'] = None; sys.modules['megatron'] = None; "
    status, out, err = in_a_process(command, before, NO_COLOR="1", FORCE_COLOR="1")
    assert status in (0, 1) and err == ""
    out = re.sub(r"\x1b\[[012]m", "", out)  # bold and dim are no colours
    assert "\x1b" not in out
    assert max(map(len, ["", *out.splitlines()])) <= 80


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("plan --world-size 64 --json", 0),
        ("show --world-size 64 --html -", 0),
        ("check --world-size 64 --gpus-per-node 4 --tp 8", 1),
        ("diff '--world-size 8' '--world-size 16'", 1),
    ],
)
def test_a_reader_that_closes_the_pipe_early_changes_no_status_and_causes_no_message(
    command, status
):
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "hypergrid", *shlex.split(command)]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (status, b"")


@pytest.mark.parametrize(
    ("before", "refusal"),
    [
        ("sys.modules['click'] = None; ", "the command line needs click"),
        ("sys.modules['rich'] = None; ", "the command line needs rich"),
    ],
)
def test_without_the_extra_the_command_says_what_to_install(before, refusal):
    status, _, err = in_a_process("plan --from-args 'torchrun x.py'", before)
    assert status == 2 and err.startswith("hypergrid: ") and err.count("\n") == 1
    assert f"{refusal}: pip install '.[cli]' in a checkout of hypergrid" in err


def test_a_wrong_release_in_the_environment_is_refused_by_name():
    status, _, err = in_a_process("plan --world-size 8", HYPERGRID_MEGATRON_RELEASE="banana")
    assert status == 2
    assert err.startswith("hypergrid: HYPERGRID_MEGATRON_RELEASE='banana' is not a release")
