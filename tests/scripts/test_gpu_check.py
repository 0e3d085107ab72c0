"""scripts/gpu_check without a GPU: what it skips, its rehearsal, and that it notices."""

import importlib.machinery
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hypergrid import of_torch
from tests.support import ROOT, forked

SCRIPT = str(ROOT / "scripts" / "gpu_check")


def _run(*arguments):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HYPERGRID_SHARE": "all"}
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def gpu_check():
    sys.path.insert(0, str(ROOT / "scripts"))
    loader = importlib.machinery.SourceFileLoader("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
    loader.exec_module(module)
    sys.path.remove(str(ROOT / "scripts"))
    return module


CREATION = [
    f"creation, {default} default group{connect}"
    for default, connect in (
        *((kind, eager) for kind in ("unbound", "bound") for eager in ("", ", connect=eager")),
        ("unbound", ", connect=lazy"),
        ("unbound compound", ""),
        ("bound compound", ""),
        ("DETAIL", ""),
    )
]
SEVERAL = [
    *(f"abort under load, {default} default group" for default in ("unbound", "bound")),
    "a rank fails before its split",
    *(f"sends, {how}" for how in ("connect=eager", "split", "connect=lazy")),
]


def test_without_a_gpu_each_check_says_that_it_was_skipped_and_why():
    done = _run()
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("skipped ")]
    checks = [*CREATION, "memory", "options", "recording", "suspend"]
    checks += ["training: dense", "training: experts", "te", *SEVERAL]
    lacks = [] if of_torch.has("lazy NCCL") else ["nccl2, lazy_init"]
    assert found[: len(checks)] == [f"skipped    {check:46} no CUDA device" for check in checks]
    assert [line[11:27] for line in found[len(checks) :]] == lacks
    assert "--rehearse" in done.stdout


def test_the_rehearsal_runs_the_checks_over_gloo_and_says_that_it_is_one():
    done = _run("--rehearse", "--only", "creation", "memory", "options", "te")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("REHEARSAL on the CPU (ranks: 2)")
    for check in [*CREATION, "memory: share=none", "memory: share=all", "options"]:
        assert f"rehearsed  {check:46} " in done.stdout
    assert done.stdout.count(" by split;") == 3
    assert not any(line.startswith("ok") for line in done.stdout.splitlines())


def test_what_several_gpus_show_is_rehearsed_on_the_stand_in_and_is_a_page():
    checks = ["recording", "suspends", "aborts", "fails", "sends"]
    done = _run("--rehearse", "--markdown", "--only", *checks)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if "| rehearsed |" in line]
    labels = ["recording while a graph is captured", "suspend", *SEVERAL]
    assert [label.removeprefix("| ") for label, *_ in rows] == labels
    assert "| Check | Result | Seen |\n|---|---|---|\n| recording" in done.stdout
    told = {label: seen for label, _, seen in rows}
    assert "'native', communicators=" in told["| suspend"]
    assert "rank 0: CreationError after 5" in told["| a rank fails before its split"]


def test_a_rank_that_hangs_is_a_row_and_not_the_end():
    done = _run("--rehearse", "--only", "memory", "options", "--timeout", "0.01")
    assert done.returncode == 1
    for check in ("memory", "options"):
        assert f"FAILED     {check:46} rank 0 did not finish in time" in done.stdout


def _fails_beside_one_that_waits(device):
    print("before")
    if os.environ["RANK"] == "1":
        raise ValueError("what went wrong")
    time.sleep(60)


def test_a_rank_that_fails_ends_the_others_and_its_last_lines_are_told(gpu_check):
    gpu_check.CHECKS["bad"] = _fails_beside_one_that_waits
    with pytest.raises(forked.RankFailure) as failure:
        gpu_check.launch("bad", kind="cpu", world=2, timeout=30)
    line = "rank 1: ValueError: what went wrong"
    assert failure.value.line == line
    assert str(failure.value).startswith(f"{line}\nbefore\nTraceback")
    assert str(failure.value).endswith("ValueError: what went wrong\n")


def _ways(rank, gpu_check, wrong):
    """Rank 0's faults where every group is one too many, or has another name on each rank."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    os.chdir(os.path.dirname(os.environ["STORE_FILE"]))
    close = gpu_check.ps.destroy_model_parallel
    gather = gpu_check.gathered
    if wrong == "left":
        gpu_check.ps.destroy_model_parallel = lambda abort: None if abort else close()
    elif wrong == "names":
        gpu_check.gathered = lambda mine: gather(
            {key: f"{name}{rank}" for key, name in mine.items()}
        )
    (row,) = gpu_check.creation(torch.device("cpu"), "label", "bound", "torch")
    return row.faults


@pytest.mark.parametrize("wrong", ["left", "names", ""])
def test_creation_tells_of_groups_that_are_left_and_of_names_that_differ(gpu_check, wrong):
    faults = forked.run_ranks(2, _ways, gpu_check, wrong, backend="")[0]
    words = {"left": "20 groups are left", "names": " and ", "": ""}[wrong]
    assert bool(faults) == bool(wrong) and all(words in fault for fault in faults)


def test_interrupted_it_leaves_no_rank_behind():
    command = [sys.executable, SCRIPT, "--rehearse", "--only", "memory"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as running:
        children, ranks = Path(f"/proc/{running.pid}/task/{running.pid}/children"), []
        while running.poll() is None and len(ranks) < 2:
            ranks = children.read_text().split()
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 1
    assert len(ranks) == 2 and not any(Path("/proc", rank).exists() for rank in ranks)


def _trained(*losses, digest="d"):
    steps = [{"loss": loss, "loss_hex": loss.hex()} for loss in losses]
    return {"steps": steps, "rank_digests": [digest], "new_group_calls": [1]}


@pytest.mark.parametrize(
    ("ours", "again", "verdict"),
    [
        (_trained(2.0, 1.0), None, (False, False)),
        (_trained(2.0, 1.0, digest="e"), _trained(2.0, 1.0), (True, False)),
        (_trained(2.0, 1.1), _trained(2.0, 1.0), (True, False)),
        (_trained(2.0, 1.001), _trained(2.0, 1.002), (False, True)),
        (_trained(2.0, 1.1), _trained(2.0, 1.001), (True, False)),
        (_trained(2.0, float("nan")), _trained(2.0, 1.001), (True, False)),
    ],
)
def test_trainings_differ_only_as_far_as_stock_differs_from_itself(gpu_check, ours, again, verdict):
    runs = {"stock": [_trained(2.0, 1.0), again], "hypergrid": [ours]}
    row = gpu_check.trained("training", lambda side: [runs[side].pop(0)])
    assert (bool(row.faults), bool(row.skipped)) == verdict


def test_options_are_read_from_the_live_group_and_a_wrong_one_is_named(gpu_check):
    def options(**config):
        numbers = dict.fromkeys(gpu_check.NUMBERS, -1) | config
        return SimpleNamespace(config=SimpleNamespace(**numbers), is_high_priority_stream=True)

    live = mock.Mock()
    live._get_backend.return_value.options = options(max_ctas=4)
    with mock.patch.object(dist, "ProcessGroupNCCL", mock.Mock(Options=options), create=True):
        found = gpu_check.reached(live, torch.device("cuda", 0))
    assert found == gpu_check.EXPECTED["DATA_PARALLEL_GROUP_WITH_CP"]
    right = gpu_check.EXPECTED | {"OTHER": {}}
    assert gpu_check.misread(right) == []
    (fault,) = gpu_check.misread(right | {"OTHER": found})
    assert fault == "OTHER has {'max_ctas': 4, 'is_high_priority_stream': True}, asked for {}"


def _products(rank, gpu_check, wrong):
    """Two ranks' shards of plain products; ``wrong`` leaves the sum over ranks out."""
    world = dist.group.WORLD

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            dist.all_reduce(out := x.clone())
            return x if wrong else out

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            dist.all_reduce(out := grad.clone())
            return out

    class Column(torch.nn.Linear):
        def forward(self, x):
            return super().forward(Copied.apply(x))

    class Row(torch.nn.Linear):
        def forward(self, x):
            return Summed.apply(super().forward(x))

    torch.manual_seed(rank)
    shards = Column(64, 64, bias=False), Row(64, 64, bias=False)
    layer = torch.nn.LayerNorm(128, dtype=torch.bfloat16)
    return gpu_check.products(*shards, layer, world, torch.device("cpu"))[1]


@pytest.mark.parametrize("wrong", [False, True])
def test_products_of_shards_are_those_of_the_whole_or_a_fault(gpu_check, wrong):
    for faults in forked.run_ranks(2, _products, gpu_check, wrong):
        assert [fault.rsplit(" ", 1)[0] for fault in faults] == (
            ["the products are off by"] if wrong else []
        )
