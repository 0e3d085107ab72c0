"""The flags of programs, and those of the commands."""

import shlex
import subprocess
import sys

import pytest
from torch.distributed.run import get_args_parser

from compat.launch import CHOICES, SWITCHES
from compat.planned.flags import flags_of
from tests.cli.test_cli import run

RUN = "torchrun --nproc-per-node 8 p.py"
OF_NEWER_TORCH = {
    "numa-binding",
    "shutdown-timeout",
    "virtual-local-rank",
    "signals-to-handle",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
}


def test_the_list_of_torchruns_flags_is_that_of_its_parser():
    rows = dict(flags_of("torchrun"))
    known = {name for name, row in rows.items() if row.kind != "variable"} - {"use-env"}
    parsed = set()
    for action in get_args_parser()._actions:
        names = {option.lstrip("-").replace("_", "-") for option in action.option_strings}
        for name in names - {"h", "help"}:
            parsed.add(name)
            assert rows[name].values == ("0" if action.nargs == 0 else "1"), name
    assert parsed <= known <= parsed | OF_NEWER_TORCH


def test_the_list_of_our_launchers_flags_is_that_of_its_parser():
    assert set(flags_of("ours")) == {"order", "m", "audit", *CHOICES, *SWITCHES}


def test_flags_of_python_are_known_to_python():
    for name, row in flags_of("python").items():
        if row.values == "0" and len(name) == 1 and row.kind != "starts" and name != "x":
            command = [sys.executable, f"-{name}", "-c", ""]
            assert subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 0, name


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("--ep 4 --experts 6", "num-experts"),
        ("--tp 4 --heads 6", "num-attention-heads"),
        ("--pp 4 --layers 30", "num-layers"),
        ("--pp 4 --vp 2 --layers 12", "num-layers"),
        ("--tp 2 --micro-batch-size 2 --global-batch-size 12", "global-batch-size"),
    ],
)
def test_what_megatrons_own_checks_refuse_is_a_finding(flags, rule):
    findings = run(f"check --world-size 8 {flags}", 1)
    assert f"error: {rule}\n" in findings and "Megatron refuses" in findings


def test_what_megatrons_own_checks_allow_is_no_finding():
    run("check --world-size 8 --tp 2 --vp 1 --layers 7 --heads 4 --experts 3")


@pytest.mark.parametrize("command", ["plan", "check", "parity", "show"])
def test_the_commands_refuse_what_the_call_refuses(command):
    refusal = run(f"{command} --world-size 64 --tp 8 --vp 4", 2)
    assert "virtual_pipeline_model_parallel_size=4 needs pipeline_model_parallel_size" in refusal


def test_a_script_is_an_argument_of_its_own(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(f"A=(2 4 8)\n{RUN} --tp ${{A[$SLURM_ARRAY_TASK_ID]}}\n")
    assert "tp=4" in run(f"check {script} --set SLURM_ARRAY_TASK_ID=1")
    assert "there is no file" in run(f"check {tmp_path / 'no.sh'}", 2)
    assert "there is no file no.sh" in run("plan --from-args no.sh", 2)


def test_a_default_is_taken_only_where_it_is_asked_for_and_said():
    command = f"plan --from-args {shlex.quote(RUN + ' --tp ${TP:-4}')}"
    assert "Add --set TP=VALUE" in run(command, 2)
    assert "assumed: TP=4, its default" in run(f"{command} --defaults")


def test_the_flags_of_a_layout_stand_in_the_help_of_one_command():
    assert "--gpus-per-node" in run("plan --help")
    assert "--gpus-per-node" not in run("show --help")
    assert "--layers" not in run("parity --help")


def test_the_page_opens_with_the_view_and_the_dim_that_were_asked_for(tmp_path):
    page = tmp_path / "page.html"
    run(f"show --world-size 16 --tp 2 --ep 4 --view expert --by ep --html {page}")
    assert '"offered":["expert","decoder"]' in page.read_text() and '"by":"ep"' in page.read_text()
