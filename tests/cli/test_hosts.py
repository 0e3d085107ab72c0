"""The command line about hosts and NVLink domains; and ranks that are interleaved over hosts."""

import json
import os
from unittest import mock

import pytest

from compat.cli.machine import _ranks
from tests.cli.test_cli import run

DOMAINS = "--world-size 16 --gpus-per-node 4 --tp 8 --nvlink-domain 8"


def test_tp_may_cross_hosts_inside_an_nvlink_domain():
    flags = "--world-size 72 --gpus-per-node 4 --tp 8"
    assert "tp-across-hosts" in run(f"check {flags}", 1)
    assert "tp-across" not in run(f"check {flags} --nvlink-domain 72")
    assert "tp-across-nvlink-domains" in run(f"check {flags} --nvlink-domain 4", 1)


def test_show_and_plan_name_the_nvlink_domains(tmp_path):
    said = run(f"show {DOMAINS}")
    lines = [line.strip() for line in said.splitlines()]
    assert lines.count("NVLink domain 0") == lines.count("NVLink domain 1") == 1
    assert lines.index("NVLink domain 0") < lines.index("NVLink domain 1")
    assert "2 NVLink domains of 2 hosts" in said and "4 hosts of 4:" in said
    assert "2 NVLink domains of 1-2 hosts" in run(f"plan {DOMAINS.replace('16', '12', 1)} --tp 2")
    assert json.loads(run(f"plan {DOMAINS} --rank 5 --json"))["host"] == "host1"
    run(f"show {DOMAINS} --html {tmp_path / 'p.html'}")
    assert '"within":"NVLink domain 1"' in (tmp_path / "p.html").read_text()


def test_orders_are_ranked_by_what_leaves_the_nvlink_domain():
    data = json.loads(run(f"check {DOMAINS} --suggest --json"))
    assert data["orders"][0] == {"order": "tp-cp-ep-dp-pp", "hosts": {"tp": 1, "dp": 2}}
    assert data["orders"][1] == {"order": "dp-tp", "hosts": {"tp": 2, "dp": 1}}
    assert "No order of 2 is better than yours." in run(f"check {DOMAINS} --suggest")
    assert "How many NVLink domains a group touches" in run(f"check {DOMAINS} --suggest")
    by_hosts = f"check {DOMAINS.partition(' --nvlink')[0]} --suggest"
    by_hosts_alone = json.loads(run(f"{by_hosts} --json", 1))["orders"]
    assert [ranked["hosts"] for ranked in by_hosts_alone] == [
        {"tp": 2, "dp": 2},
        {"tp": 4, "dp": 1},
    ]


def test_a_saved_plan_keeps_its_hosts_and_domains(tmp_path):
    saved = tmp_path / "plan.json"
    saved.write_text(run(f"plan {DOMAINS} --json"))
    said = run(f"plan --plan {saved}")
    assert said == run(f"plan {DOMAINS}") and "assumed" not in said
    assert run(f"check --plan {saved}") == run(f"check {DOMAINS}")
    assert "1 NVLink domain of 4 hosts" in run(f"plan --plan {saved} --nvlink-domain 16")
    assert "8 hosts of 2:" in run(f"plan --plan {saved} --gpus-per-node 2")


@pytest.mark.parametrize("field", ["ranks_per_host", "nvlink_domain"])
@pytest.mark.parametrize("value", [0, -1, 2**40, 10**30])
def test_a_saved_plan_with_impossible_hosts_is_refused(tmp_path, field, value):
    data = json.loads(run(f"plan {DOMAINS} --json"))
    (tmp_path / "plan.json").write_text(json.dumps({**data, field: value}))
    said = run(f"plan --plan {tmp_path / 'plan.json'}", 2)
    assert said.startswith("hypergrid: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan --world-size 64 --nvlink-domain 12", "12 GPUs does not hold whole hosts of 8. Give"),
        ("plan --world-size 64 --nvlink-domain 0", "--nvlink-domain must be from 1 to 1,048,576"),
        (f"plan --world-size 64 --nvlink-domain {8 * 10**30}", "--nvlink-domain must be from 1"),
        (f"plan --world-size 64 --gpus-per-node {10**30}", "--gpus-per-node must be from 1 to"),
        ("plan --world-size 64 --gpus-per-node 0", "--gpus-per-node must be from 1 to"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(command, said):
    told = run(command, 2)
    assert told.startswith("hypergrid: ") and told.count("\n") == 1 and said in told


def test_numbers_are_whole_in_a_narrow_terminal():
    command = "check --world-size 16384 --tp 4 --etp 2 --cp 2 --ep 4 --pp 2 --suggest --top 1"
    cells = set(run(command, COLUMNS="200").split())
    said = run(command, COLUMNS="50").split()
    numbers = {cell for cell in cells if cell.isdigit()}
    assert len(numbers) > 5 and numbers <= set(said)


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
