"""The command line: what it prints, at 80 columns and without colour, and how it ends."""

import json
import os
import re
import shlex
import subprocess
import sys
from unittest import mock

import pytest
from typer.testing import CliRunner

import hypergrid
from compat.cli import machine
from compat.cli.app import app
from compat.megatron import releases
from hypergrid import GroupPlan, GroupRow, RankLayout
from tests.support import ROOT

HOSTS = "--world-size 64 --gpus-per-node 8"
SIZES = f"{HOSTS} --tp 4 --cp 2 --pp 2 --ep 4 --order tp-cp-ep-dp-pp"
FAR = f"{HOSTS} --tp 4 --pp 2 --order dp-tp-cp-ep-pp"
LINE = (
    "torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 "
    "--context-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 4"
)
WIDER = {name: {"dims": ["dp"], "sizes": [n]} for name, n in (("decoder", 4), ("expert", 6))}


def run(command, status=0, **environment):
    given = {"NO_COLOR": "1", "COLUMNS": "80", **environment}
    done = CliRunner().invoke(app, shlex.split(command), env=given, prog_name="hypergrid")
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == status, done.output
    return done.output


def rows(said):
    """The cells of each line of a table that begins a name, by that name."""
    lines = [line.split() for line in said.splitlines() if line.strip()]
    return {cells[-1]: cells[:-1] for cells in lines if cells[0] != "="}


def without_flags(said):
    """The output without the lines about the flags of a launch line."""
    head, _, rest = said.partition("\n\n")
    return re.sub(r"(?s)\n(used|without effect|not known): .*", "", head) + "\n\n" + rest


def test_the_plan_is_a_table_of_names():
    said = run("plan " + SIZES)
    assert said.startswith("64 ranks on 8 hosts of 8: tp=4 cp=2 dp=4 pp=2, order tp-cp-dp-pp\n")
    assert "experts: tp=4 ep=4 dp=2 pp=2" in said
    table = rows(said)
    assert table["TENSOR_MODEL_PARALLEL_GROUP"] == ["tp", "4", "16", "1"]
    assert table["DATA_PARALLEL_GROUP_WITH_CP"] == ["dp-cp", "8", "8", "4"]
    assert table["POSITION_EMBEDDING_GROUP"] == ["pp", "first", "1", "32", "1"]
    assert "19-20 with share=none" in said
    assert "= DATA_PARALLEL_GROUP_WITH_CP" in run(f"plan {HOSTS} --tp 4")


def test_sizes_a_launch_line_and_a_saved_plan_say_the_same(tmp_path):
    saved = tmp_path / "plan.json"
    saved.write_text(run(f"plan {SIZES} --json"))
    said = run("plan " + SIZES)
    assert without_flags(run(f"plan --from-args '{LINE}'")) == said
    assert run(f"plan --plan {saved}") == said
    assert run(f"check --plan {saved}", 1) == run("check " + SIZES, 1)
    assert run(f"check --suggest --plan {saved}", 1).count("best order first") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 99}, "a plan of schema 99 cannot be read"),
        ({"schema": 2}, "an assembly: several grids, or grids over listed ranks, in one file"),
        ({"layouts": {}}, "a plan needs a layout"),
        ({"rows": 5}, "expected `array`, got `int`, at `rows`"),
        ({"layouts": WIDER, "rows": []}, "layout 'expert' has rank 5, and the first layout"),
        ({"layout": "attic"}, "is over the layout 'attic', and the plan has decoder, expert"),
        ({"dims": ["xp"]}, "invalid dim 'xp'"),
        ({"chunk": 0}, "a row cannot have chunk=0"),
        ({"pick": "some"}, "invalid enum value 'some', at `rows[0].pick`"),
        ({"explicit": "ab"}, "expected `array | null`, got `str`, at `rows[0].explicit`"),
        ({"explicit": [[0, 7], [7, 8]]}, "a group of 'DATA_PARALLEL_GROUP_WITH_CP' has rank 8,"),
        ({"explicit": [[-1, 2]]}, "which the plan is for, ends at rank 7"),
        ({"label": 5}, "expected `str`, got `int`, at `rows[0].label`"),
        ({"options": {"a": 1}}, "expected `array | null`, got `object`, at `rows[0].options`"),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["plan --plan", "check --plan", "show --plan", "diff"])
def test_a_saved_plan_that_makes_no_sense_is_refused_in_a_line(tmp_path, command, change, said):
    data = json.loads(run("plan --world-size 8 --json"))
    data |= change if change.keys() <= data.keys() else {"rows": [{**data["rows"][0], **change}]}
    (tmp_path / "plan.json").write_text(json.dumps(data))
    told = run(f"{command} {tmp_path / 'plan.json'}" + " '--world-size 8'" * (command == "diff"), 2)
    assert told.startswith("hypergrid: ") and told.count("\n") == 1 and said in told


def test_a_saved_plan_with_a_network_of_an_earlier_release_is_refused_by_name(tmp_path):
    saved = json.loads(run("plan --world-size 8 --json"))
    saved["network"] = {"hosts": ["a", "b"], "ranks": [4, 4]}
    (tmp_path / "plan.json").write_text(json.dumps(saved))
    refusal = run(f"plan --plan {tmp_path / 'plan.json'}", 2)
    assert "has a network of hosts" in refusal and "--gpus-per-node" in refusal


def test_a_saved_plan_may_have_an_encoders_ranks_in_front(tmp_path):
    layouts = {"decoder": RankLayout(("dp",), (6,), 2)}
    plan = GroupPlan(layouts, (GroupRow("MODEL", "decoder", ("dp",), explicit=((0, 1, 2),)),))
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert rows(run(f"plan --plan {tmp_path / 'plan.json'}"))["MODEL"] == ["dp", "3", "1", "1"]
    assert "  0, 1, 2" in run(f"plan --plan {tmp_path / 'plan.json'} --rank 2")


def test_a_saved_plan_may_begin_with_any_layout_and_names_are_shown_as_they_are(tmp_path):
    layouts = {"vision": RankLayout(("a", "dp"), (2, 8)), "decoder": RankLayout(("[red]",), (8,))}
    plan_rows = (GroupRow("V", "vision", ("dp",)), GroupRow("D", "decoder", ("[red]",)))
    (tmp_path / "plan.json").write_text(GroupPlan(layouts, plan_rows).to_json())
    said = run(f"plan --plan {tmp_path / 'plan.json'}")
    assert "8 ranks on 2 hosts of 8: [red]=8" in said
    assert rows(said)["V"] == ["dp", "8", "2", "2"]
    assert rows(said)["D"] == ["[red]", "8", "1", "1"]
    data = json.loads(run(f"plan --plan {tmp_path / 'plan.json'} --rank 12 --json"))
    assert (data["host"], data["coordinates"]) == ("host1", {"vision": {"a": 0, "dp": 6}})


@pytest.mark.parametrize(("dim", "size"), [("pp", 2), ("tp", 4)])
def test_check_refuses_a_plan_with_a_dim_that_it_has_no_rules_for(tmp_path, dim, size):
    text = run(f"plan {SIZES} --json")
    saved = tmp_path / "plan.json"
    saved.write_text(text.replace(f'"{dim}"', '"stage"'))
    refusal = run(f"check --plan {saved}", 2)
    assert f"the layout decoder has the dim stage of size {size}" in refusal
    assert "the layout expert has the dim stage" in refusal and "No findings" not in refusal
    assert "stage=" in run(f"show --plan {saved}")


@pytest.mark.parametrize("place", ["label", "layout", "dim", "backend", "traffic", "megatron"])
@pytest.mark.parametrize("command", ["plan", "show", "check", "diff"])
def test_a_name_in_a_saved_plan_prints_no_line_of_its_own(tmp_path, command, place):
    forged = "tp\nNo findings."
    data = json.loads(run("plan --world-size 8 --tp 2 --json"))
    if place == "megatron":
        data["megatron"] = forged
    elif place == "layout":
        data["layouts"][forged] = data["layouts"]["decoder"]
    elif place == "dim":
        dims = data["layouts"]["decoder"]["dims"]
        data["layouts"][f"x{len(dims)}"] = {"dims": [forged], "sizes": [8]}
    else:
        data["rows"][0][place] = forged
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(data))
    option = "" if command == "diff" else "--plan "
    other = " '--world-size 8'" * (command == "diff")
    refusal = run(f"{command} {option}{saved}{other}", 2)
    assert refusal.count("\n") == 1
    assert "has a line break: 'tp\\nNo findings.'" in refusal


def test_a_label_in_a_dump_prints_no_line_of_its_own(tmp_path):
    forged = {"label": "dp\n1 dumps are as planned.", "ranks": [0, 1]}
    dump = {"pid": 1, "rank": 0, "groups": [forged]}
    (tmp_path / "dump.json").write_text(json.dumps(dump))
    differences = run(f"diff '--world-size 8' {tmp_path / 'dump.json'}", 1)
    assert "dp\\n1 dumps are as planned. exists but was not planned." in differences


def test_a_saved_plan_without_a_decoder_has_a_picture_of_its_first_layout(tmp_path):
    plan = GroupPlan({"vision": RankLayout(("a", "dp"), (2, 8))})
    (tmp_path / "plan.json").write_text(plan.to_json())
    run(f"show --plan {tmp_path / 'plan.json'} --svg {tmp_path / 'plan.svg'}")
    assert "16 ranks on 2 hosts: a=2 dp=8" in (tmp_path / "plan.svg").read_text()


def panels(flags, tmp_path):
    """The titles of a picture's panels."""
    run(f"show {flags} --svg {tmp_path / 'plan.svg'}")
    return re.findall(r">([^<>\n]+ = \d+)</text>", (tmp_path / "plan.svg").read_text())


def test_a_picture_shows_each_kind_of_group_of_a_job(tmp_path):
    assert panels("--world-size 64 --tp 4 --cp 2", tmp_path) == ["tp = 4", "cp = 2", "dp = 8"]
    experts = "--world-size 1024 --tp 4 --pp 8 --ep 32"
    assert panels(experts, tmp_path) == ["tp = 4", "dp and expert ep = 32", "pp = 8"]
    assert panels(f"{experts} --by ep", tmp_path) == ["ep = 32"]
    levels = (
        "--from-args 'torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py "
        "--tensor-model-parallel-size 4 --context-parallel-size 8 "
        "--hierarchical-context-parallel-sizes 2 4'"
    )
    assert panels(levels, tmp_path) == ["tp = 4", "cp = 8", "dp = 2", "cp0 = 2", "cp1 = 4"]
    run(f"show {levels} --html {tmp_path / 'page.html'}")
    offered = re.search(r'"offered":(\[.*?\])', (tmp_path / "page.html").read_text())[1]
    assert json.loads(offered) == ["decoder", "decoder_cp_levels"]


def test_a_flag_beside_a_launch_line_wins():
    assert "tp=8" in run(f"plan --from-args '{LINE}' --tp 8")


def test_the_release_that_is_planned_is_told_chosen_and_saved(tmp_path, monkeypatch):
    small = "plan --world-size 16 --tp 2"
    assert "\nfor megatron-core 0.16\n" in run(small)
    old = run(f"{small} --megatron v0.12.3")
    assert "\nfor megatron-core 0.12 (--megatron)\n" in old and run(small) != old
    (tmp_path / "old.json").write_text(run(f"{small} --megatron 0.12 --json"))
    again = run(f"plan --plan {tmp_path / 'old.json'}")
    assert "\nfor megatron-core 0.12\n" in again
    assert again.partition("\n\n")[2] == old.partition("\n\n")[2]
    assert json.loads(run(f"{small} --json"))["megatron"] == "0.16"
    assert "is not a release: write it as in '0.16.1'" in run(f"{small} --megatron main", 2)
    monkeypatch.setattr(releases, "_DECIDED", ((0, 19), None, "none installed"))
    assert "\nfor megatron-core 0.19 (none installed)\n" in run(small)


def test_the_order_of_the_environment_is_obeyed_and_told():
    order = {"HYPERGRID_ORDER": "dp-tp-cp-ep-pp"}
    said = run("plan --world-size 16 --tp 2", **order)
    assert "order dp-tp\n" in said
    assert "assumed: the order dp-tp-cp-ep-pp, from HYPERGRID_ORDER in the environment" in said
    assert "order tp-dp\n" in run("plan --world-size 16 --tp 2 --order tp-cp-ep-dp-pp", **order)
    script = "export HYPERGRID_ORDER=dp-tp-cp-ep-pp; torchrun --nproc-per-node 8 x.py --tp 2"
    assert "order dp-tp\n" in run(f"plan --from-args '{script}'")


def test_a_launch_line_is_text_a_file_or_standard_input(tmp_path, monkeypatch):
    (tmp_path / "job.sh").write_text("#SBATCH -N 2\nsrun --ntasks-per-node 8 python x.py --tp $TP")
    said = run(f"plan --from-args {tmp_path / 'job.sh'} --set TP=4")
    assert said.startswith("16 ranks on 2 hosts of 8: tp=4 dp=4, order tp-dp\n")
    assert "used: SLURM_NNODES 2, --ntasks-per-node 8, --tp 4" in said
    done = CliRunner().invoke(app, ["plan", "--from-args", "-"], input=LINE)
    assert "64 ranks on 8 hosts of 8" in done.output
    assert "--set is NAME=VALUE" in run("plan --world-size 8 --set TP=4", 2)


def test_the_json_of_a_plan_is_a_plan_and_its_counts():
    data = json.loads(run(f"plan {SIZES} --json"))
    plan = GroupPlan.from_json(json.dumps(data))
    assert data["schema"] == 1 and data["ranks_per_host"] == 8
    assert [each["label"] for each in data["groups"]] == [row.label for row in plan.rows]
    (ep,) = [each for each in data["groups"] if each["label"] == "EXPERT_MODEL_PARALLEL_GROUP"]
    assert (ep["groups"], ep["size"], ep["hosts"], ep["crossing"]) == (16, [4, 4], [2, 2], 16)
    assert data["communicators_of_a_rank"]["none"] == data["groups_of_a_rank"]


def test_one_rank_has_its_place_and_its_groups():
    said = run(f"plan {SIZES} --rank 37")
    assert "rank 37 on host4, decoder: tp=1, cp=1, dp=0, pp=1" in said
    assert " 36, 37, 38, 39" in said
    data = json.loads(run(f"plan {SIZES} --rank 37 --json"))
    (tp,) = [each for each in data["groups"] if each["label"] == "TENSOR_MODEL_PARALLEL_GROUP"]
    assert tp["ranks"] == [36, 37, 38, 39] and tp["hosts"] == ["host4"]


def test_where_each_rank_stands():
    said = run(f"show {HOSTS} --tp 4 --by tp --hosts 7")
    lines = {line[:12].strip(): line[12:].split() for line in said.splitlines()}
    assert lines["host7"] == [str(rank) for rank in range(56, 64)]
    assert lines["tp"] == ["0", "1", "2", "3"] * 2
    assert lines["dp"] == ["14"] * 4 + ["15"] * 4
    assert lines["tp group"] == ["14"] * 4 + ["15"] * 4
    assert "  ep " in run(f"show {SIZES} --view expert")


def test_a_large_world_is_folded():
    said = run("show --world-size 16384 --tp 8 --gpus-per-node 8")
    assert "2043 hosts between" in said and "host2047" in said and len(said.splitlines()) < 50
    assert len(run("show --world-size 256 --gpus-per-node 8").splitlines()) > 90


def test_a_host_of_many_ranks_goes_on_in_the_next_line():
    said = run("show --world-size 72 --gpus-per-node 72 --tp 8")
    assert said.count("host0") > 1 and " 71 " in said


def test_tp_that_leaves_the_host_is_seen_and_the_order_that_fixes_it():
    said = run("check --suggest " + FAR, 1)
    assert "error: tp-across-hosts" in said
    assert "-> order=tp-" in said
    assert "yours" in said
    best = " ".join(said.split()).partition("hypergrid-launch --order ")[2].rstrip(".")
    assert "tp-across-hosts" not in run(f"check {HOSTS} --tp 4 --pp 2 --order {best}")


def test_the_judgement_as_json():
    data = json.loads(run(f"check --suggest --json {FAR}", 1))
    assert data["findings"][0]["rule"] == "tp-across-hosts"
    assert data["orders"][0]["hosts"]["tp"] == 1
    (asked,) = [ranked for ranked in data["orders"] if ranked["order"] == "dp-tp-cp-ep-pp"]
    assert asked["hosts"]["tp"] == 4


def test_a_good_layout_has_status_0():
    assert "No findings." in run(f"check {HOSTS} --tp 8")


def test_two_layouts_are_compared():
    said = run(f"diff '{HOSTS} --tp 4' '{HOSTS} --tp 8'", 1)
    assert "4 -> 8" in said and "cut anew, tp x pp from 4 x 1 to 8 x 1" in " ".join(said.split())
    assert run(f"diff '{HOSTS} --tp 4' '{HOSTS} --tp 4'") == "No differences.\n"
    assert json.loads(run(f"diff '{HOSTS} --tp 4' '{HOSTS} --tp 8' --json", 1))["common"] == 64


def test_a_plan_is_compared_with_what_lives(tmp_path, fake_world):
    from compat.state import ParallelState

    fake_world(16, 5)
    state = ParallelState.create(tensor_model_parallel_size=4)
    dump = tmp_path / "rank5.json"
    hypergrid.dump(dump)
    state.destroy()
    assert "as planned" in run(f"diff '--world-size 16 --tp 4' {dump}")
    said = run(f"diff '--world-size 16 --tp 2' {dump} {dump}", 1)
    assert "TENSOR_MODEL_PARALLEL_GROUP has the ranks [4, 5, 6, 7], planned were [4, 5]" in said


def test_the_installed_megatron_is_compared_and_named():
    said = run(f"parity {SIZES}")
    assert "RankGenerator: all groups equal." in said and "megatron-core 0." in said
    from megatron.core import parallel_state

    with mock.patch.object(parallel_state.RankGenerator, "get_ranks", return_value=[[0]]):
        assert "kinds of groups differ" in run(f"parity {SIZES}", 1)


def test_the_doctor_finds_this_machine_well():
    said = run("doctor")
    assert "works: megatron.core.parallel_state is ours" in said
    assert "creation" in said and "members" in said and "gloo" in said


@pytest.fixture
def hostile_directory(tmp_path, monkeypatch):
    """The current directory, with packages that leave a file behind when they are imported."""
    for package in ("megatron", "megatron/core", "megatron/training"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("open('was_run', 'w').close()")
    (tmp_path / "megatron" / "training" / "arguments.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_verify_runs_only_a_checkout_that_is_named(hostile_directory):
    said = run(f"verify --from-args '{LINE}'", 2)
    assert "Missing option '--checkout'" in said
    assert not (hostile_directory / "was_run").exists()


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no ranks"), KeyboardInterrupt(), BrokenPipeError("closed"), MemoryError()],
)
def test_verify_ends_with_status_2_whatever_happens(error, tmp_path):
    with mock.patch("compat.verification.launch.verify_line", side_effect=error):
        said = run(f"verify --checkout {tmp_path} --from-args '{LINE}'", 2)
    assert said.strip() == f"hypergrid: {str(error) or type(error).__name__}"


@pytest.mark.parametrize("path", [[], [""]], ids=["as installed", "as python -m"])
def test_the_doctor_imports_from_where_its_own_process_does(hostile_directory, monkeypatch, path):
    elsewhere = [each for each in sys.path if each not in ("", str(hostile_directory))]
    monkeypatch.setattr(sys, "path", [*path, *elsewhere])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    machine._trial()
    assert (hostile_directory / "was_run").exists() == bool(path)


@pytest.fixture
def a_path_with(tmp_path, monkeypatch):
    def make(name, text):
        package = tmp_path / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
        return tmp_path

    return make


def test_the_doctor_names_an_empty_transformer_engine_and_the_remedy(a_path_with):
    a_path_with(
        "transformer_engine", "raise RuntimeError('Found empty `transformer-engine` meta package')"
    )
    state, remedy = machine._trial()
    assert "empty `transformer-engine` meta package" in state
    assert "pip uninstall transformer-engine" in remedy


def test_the_doctor_gives_the_last_words_of_an_import_that_fails(a_path_with):
    path = a_path_with("einops", "raise OSError('libmagic.so: cannot open')")
    (path / "megatron").mkdir()
    (path / "megatron" / "__init__.py").write_text("import einops")
    state, remedy = machine._trial()
    assert state == "fails: OSError: libmagic.so: cannot open" and "Fix" in remedy


@pytest.mark.parametrize(
    ("value", "installed", "warned"),
    [(None, "0.6", True), (None, None, False), ("1", "0.6", True), ("0", "0.6", False)],
)
def test_the_doctor_says_what_ends_processes_that_begin_again(
    value, installed, warned, monkeypatch
):
    monkeypatch.setattr(machine, "_installed", lambda name: installed)
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_USE_COMM_NONBLOCKING"):
        monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", value)
    (_, watchdog, remedy), (_, connects, none) = machine._nccl()
    assert bool(remedy) == warned and not none
    assert watchdog == "0" or watchdog.startswith(f"{value or 3}, not 0: NCCL's watchdog ends")
    assert "TORCH_NCCL_NONBLOCKING_TIMEOUT" in connects


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan", "the number of ranks is missing"),
        ("plan --world-size 8 --tp 3", "not divisible by tensor_model_parallel_size=3: it leaves"),
        ("plan --world-size 8 --rank 8", "there is no rank 8: they go from 0 to 7"),
        ("plan --world-size 8 --order tp-xp", "'xp', which has no size"),
        (
            "check --world-size 16 --tp 2 --ep 4 --pp 2 --order tp-pp-ep-dp",
            "does not end in pp, so the data-parallel sizes, dense 4 and expert 1, must be "
            "equal. Put pp last, or change the expert sizes.",
        ),
        ("plan --plan nowhere.json", ": nowhere.json cannot be opened: No such file or directory."),
        ("plan", "is missing. Give --world-size, or the line"),
        ("plan --plan pyproject.toml", "pyproject.toml: the plan is not valid: expected `object`"),
        ("plan --plan x --tp 2", "--plan holds the whole layout"),
        ("show --world-size 8 --by xp", "invalid dim 'xp'"),
        ("show --world-size 8 --view xp", "there is no view 'xp'"),
        ("show --world-size 8 --hosts 9", "there is no host 9"),
        ("show --world-size 8 --hosts a", "neither a number nor a span"),
        ("diff a b", "neither a file nor sizes"),
        ("diff '--world-size 8' '--world-size 8' '--world-size 8'", "give two layouts"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(command, said, monkeypatch):
    monkeypatch.chdir(ROOT)
    out = run(command, 2)
    assert said in out and out.startswith("hypergrid: ") and out.count("\n") == 1


def in_a_process(code, **environment):
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


PLANNING = (
    f"plan {SIZES}",
    f"plan {SIZES} --json",
    f"plan {SIZES} --rank 3",
    f"show {SIZES}",
    f"check --suggest {SIZES}",
    f"diff '{SIZES}' '{HOSTS}'",
    "plan --world-size 16384 --tp 8 --cp 2 --pp 8 --ep 8",
)


@pytest.mark.parametrize("command", PLANNING)
def test_planning_imports_no_torch_and_fits_80_columns_without_colour(command):
    words = ["hypergrid", *shlex.split(command)]
    code = "import sys, runpy; sys.modules['torch'] = None; sys.modules['megatron'] = None;"
    code += f"sys.argv = {words!r}; runpy.run_module('hypergrid', run_name='__main__')"
    status, out, err = in_a_process(code, NO_COLOR="1", FORCE_COLOR="1")
    assert status in (0, 1) and err == ""
    out = re.sub(r"\x1b\[[012]m", "", out)  # bold and dim are no colours
    assert "\x1b" not in out
    if "--json" not in command:
        assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("command", ["plan --world-size 64 --json", "show --world-size 64"])
def test_a_reader_that_closes_the_pipe_early_causes_no_message(command):
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "hypergrid", *command.split()]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_colours_tell_groups_apart():
    code = f"import sys; sys.argv = ['hypergrid', 'show', *{HOSTS.split()!r}, '--tp', '4'];"
    code += "from hypergrid.__main__ import main; main()"
    _, out, _ = in_a_process(code, FORCE_COLOR="1", TERM="xterm-256color", COLORTERM="truecolor")
    line = next(line for line in out.splitlines() if "host0" in line)
    assert len({part.split("m")[0] for part in line.split("\x1b[") if "48;2" in part}) == 2


def test_a_release_of_the_environment_that_is_none_is_one_sentence():
    code = (
        "from hypergrid.__main__ import main; import sys; sys.argv = ['hypergrid', 'plan']; main()"
    )
    status, _, err = in_a_process(code, HYPERGRID_MEGATRON_RELEASE="main")
    assert (status, err.count("\n")) == (2, 1) and "is not a release: write it as in" in err


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_says_what_to_install(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['hypergrid', 'plan'];"
    code += "from hypergrid.__main__ import main; main()"
    status, _, err = in_a_process(code)
    assert status == 2 and err == (
        f"hypergrid: the command line needs {missing}: pip install '.[cli]' in a checkout of "
        "hypergrid\n"
    )
