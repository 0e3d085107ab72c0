"""The command line about networks: levels, seconds and orders of hosts."""

import json
import os
from unittest import mock

import pytest

from hypergrid.cli.machine import _ranks
from hypergrid.network.files import FORMATS, expanded
from tests.cli.test_cli import run

NETWORK = """hosts:
  - {name: a1, gpus: 4, nvlink: d0}
  - {name: b1, gpus: 4, nvlink: d1}
  - {name: a2, gpus: 4, nvlink: d0}
  - {name: b2, gpus: 4, nvlink: d1}
  - {name: c1, gpus: 4, nvlink: d2}
"""
MODEL = "--hidden 4096 --layers 32 --seq 8192 --micro-batches 8"


@pytest.fixture
def job(tmp_path):
    """Flags of 16 ranks on a network of five hosts; a group over tp needs two."""
    (tmp_path / "net.yaml").write_text(NETWORK)
    return f"--topology {tmp_path / 'net.yaml'} --world-size 16 --tp 8"


def test_place_keeps_tp_inside_nvlink_domains_and_leaves_the_odd_host(job):
    data = json.loads(run(f"place {job} {MODEL} --json"))
    assert data["hosts"] == ["a1", "a2", "b1", "b2"] and data["spare"] == ["c1"]
    assert data["unit"] == "seconds" and data["exact"] and data["cost"] < data["given"]
    assert sum(f["cost"] for f in data["flows"].values()) == pytest.approx(data["cost"])
    assert sum(f["given"] for f in data["flows"].values()) == pytest.approx(data["given"])
    said = run(f"place {job} {MODEL}")
    assert "less than the given one. No order costs less." in " ".join(said.split())
    assert "hosts: a[1-2],b[1-2]\nspare: c1\n" in said


def test_place_writes_what_it_found_for_every_launcher(job):
    names = ["a1", "a2", "b1", "b2"]
    said = {name: run(f"place {job} --as {name}").splitlines() for name in FORMATS}
    assert expanded(said["hostlist"][0]) == names
    assert said["hostfile"] == [f"{name} slots=4" for name in names]
    assert said["slurm"] == [name for name in names for _ in range(4)]
    assert "allowed: hostfile, hostlist, slurm" in run(f"place {job} --as ray", 2)


def test_what_place_writes_has_each_rank_of_the_job_and_no_other(job):
    job = job.replace("16 --tp 8", "6 --tp 2")
    said = {name: run(f"place {job} --as {name}").splitlines() for name in FORMATS}
    assert said["slurm"] == ["a1"] * 4 + ["b1"] * 2 or said["slurm"] == ["a1"] * 4 + ["a2"] * 2
    assert [line.split()[1] for line in said["hostfile"]] == ["slots=4", "slots=2"]


def test_an_order_that_place_wrote_needs_no_other(job):
    found = run(f"place {job} --as hostlist").strip()
    again = f"{job} --hostlist {found}"
    assert "No order of hosts costs less than the given one." in run(f"place {again}")
    assert "host-order" in run(f"check {job}", 1) and "host-order" not in run(f"check {again}")


def test_check_tells_seconds_and_what_dominates_where_the_shape_is_known(job):
    data = json.loads(run(f"check {job} {MODEL} --json --suggest", 1))
    low, high = data["traffic"]["seconds"]
    assert 0 < low < high
    assert data["traffic"]["largest"] == {"flow": "tp", "level": "world"}
    # A = 8192 x 4096 x 2 bytes; 8 A for 32 layers and 8 micro-batches, 7 / 8 of it, of 16 ranks.
    gb = 16 * 8 * 8192 * 4096 * 2e-9 * 32 * 8 * 7 / 8
    assert data["traffic"]["flows"]["tp"]["volumes"]["world"] == pytest.approx(gb)
    assert data["unit"] == "seconds" and "volumes" not in data
    # Lower and upper end: over four hosts, with all of tp at 50 GB/s.
    assert low == pytest.approx(gb / 16 / 50)
    flags = "--world-size 16 --gpus-per-node 8"
    line = "--hidden-size 4096 --num-layers 32 --seq-length 8192 --global-batch-size 64"
    pasted = run(f"check {flags} --from-args '{line} --micro-batch-size $MBS'")
    assert "seconds" in pasted  # what only the traffic needs may be left to a variable
    assert "seconds" not in run(f"check {flags} --from-args '--num-layers 32 --hidden-size $H'")


def test_hosts_that_the_job_does_not_need_change_nothing_of_what_a_rank_sends(job):
    gb = 8 * 8192 * 4096 * 2e-9 * 32 * 8 * 7 / 8
    said = run(f"check {job} {MODEL}", 1)
    assert (
        next(line.split() for line in said.splitlines() if line.startswith("tp "))[1] == f"{gb:.4g}"
    )


def test_numbers_are_whole_in_a_narrow_terminal():
    flags = "--world-size 128 --tp 4 --etp 2 --cp 2 --ep 4 --pp 2 --experts 8"
    command = f"check {flags} {MODEL} --suggest --top 1"
    cells = set(run(command, COLUMNS="200").split())
    said = run(command, COLUMNS="50").split()
    numbers = {each for each in cells if each[0].isdigit() and "." in each}
    assert len(numbers) > 10 and numbers <= set(said)


def test_without_a_shape_levels_weigh_the_fixed_volumes(job):
    data = json.loads(run(f"check {job} --suggest --json", 1))
    assert data["unit"] == "volumes at the slowest level's pace" and "traffic" not in data
    assert data["orders"][0]["flows"]["tp"] == pytest.approx(8)
    plain = json.loads(run("check --world-size 16 --tp 8 --suggest --json"))
    assert plain["unit"] == "volumes between hosts" and plain["orders"][0]["flows"]["tp"] == 0


def test_show_and_plan_know_the_hosts_of_the_file(job, tmp_path):
    said = run(f"show {job}")
    assert said.count("nvlink d0") == 2 and "2 NVLink domains of 2 hosts" in said
    assert json.loads(run(f"plan {job} --rank 5 --json"))["host"] == "b1"
    run(f"show {job} --html {tmp_path / 'p.html'}")
    assert "nvlink d1" in (tmp_path / "p.html").read_text()


def test_a_saved_plan_keeps_its_network(job, tmp_path):
    (tmp_path / "plan.json").write_text(run(f"plan {job} --json"))
    saved = f"--plan {tmp_path / 'plan.json'}"
    assert run(f"plan {saved}") == run(f"plan {job}") and "assumed" not in run(f"plan {saved}")
    assert run(f"place {saved} --as hostlist") == "a[1-2],b[1-2]\n"
    assert run(f"place {saved} --hostlist a2,b2,a1,b1 --as hostlist") == "a[2,1],b[2,1]\n"
    assert "which the plan does not have" in run(f"place {saved} --hostlist z", 2)
    data = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**data, "network": {"hosts": 5}}))
    assert "no list `hosts:`" in run(f"plan {saved}", 2)


def test_tp_may_cross_hosts_inside_an_nvlink_domain():
    flags = "--world-size 72 --gpus-per-node 4 --tp 8"
    assert "tp-across-hosts" in run(f"check {flags}", 1)
    assert "tp-across" not in run(f"check {flags} --nvlink-domain 72")
    assert "tp-across-nvlink-domains" in run(f"check {flags} --nvlink-domain 4", 1)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("place --world-size 64 --topology nowhere.yaml", "nowhere.yaml"),
        ("place --world-size 64 --nvlink-domain 12", "does not hold whole hosts of 8"),
        ("place --world-size 64 --racks-per-pod 2", "racks per pod need the hosts per rack"),
        ("place --world-size 64 --bandwidth fast", "is not like host=450,world=50"),
        ("place --world-size 64 --bandwidth rack=5", "the network has the levels host, world"),
        ("place --world-size 64 --hostlist a[1-7]", "names 7 hosts, and 64 ranks need 8"),
        ("place --world-size 64 --hostlist a[1-", "is not a hostlist"),
        ("place --world-size 64 --volumes tp=nan", "--volumes tp=nan: each must be 0 or more"),
        ("check --world-size 64 --volumes dp=-1", "--volumes dp=-1: each must be 0 or more"),
        ("check --world-size 64 --hidden 5", "--layers is missing"),
        ("check --world-size 64 --hidden 0 --layers 1 --seq 1", "--hidden must be at least 1"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(command, said):
    told = run(command, 2)
    assert told.startswith("hypergrid: ") and told.count("\n") == 1 and said in told


@pytest.mark.parametrize(
    ("environment", "begins", "has_remedy"),
    [
        ({}, None, False),
        ({"SLURM_NNODES": "2", "SLURM_DISTRIBUTION": "cyclic:block"}, "interleaved", True),
        ({"SLURM_NNODES": "2", "SLURM_DISTRIBUTION": "block"}, "consecutive", False),
        ({"SLURM_NNODES": "1", "SLURM_DISTRIBUTION": "cyclic"}, None, False),
        ({"RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, "consecutive", False),
        ({"RANK": "9", "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "8"}, "interleaved", True),
        ({"RANK": "x", "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "8"}, None, False),
    ],
)
def test_the_doctor_notices_interleaved_ranks(environment, begins, has_remedy):
    names = ("SLURM", "RANK", "LOCAL", "OMPI")
    clean = {name: v for name, v in os.environ.items() if not name.startswith(names)}
    with mock.patch.dict("os.environ", {**clean, **environment}, clear=True):
        found = list(_ranks())
    assert bool(found) == (begins is not None)
    for _, state, remedy in found:
        assert state.startswith(begins) and bool(remedy) == has_remedy
