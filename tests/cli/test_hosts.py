"""The command line about hosts and NVLink domains."""

import json

import pytest

from tests.cli.test_cli import run

HOSTS = "--world-size 16 --gpus-per-node 4 --tp 8"
DOMAINS = f"{HOSTS} --nvlink-domain 8"


def test_a_page_names_the_nvlink_domains(tmp_path):
    run(f"show {DOMAINS} --html {tmp_path / 'page.html'}")
    assert '"within":"NVLink domain 1"' in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("flags", "status", "orders"),
    [
        (DOMAINS, 0, {"tp-cp-ep-dp-pp": {"tp": 1, "dp": 2}, "dp-tp": {"tp": 2, "dp": 1}}),
        (HOSTS, 1, {"tp-cp-ep-dp-pp": {"tp": 2, "dp": 2}, "dp-tp": {"tp": 4, "dp": 1}}),
    ],
)
def test_orders_are_ranked_by_what_leaves_the_host_or_the_nvlink_domain(flags, status, orders):
    ranked = json.loads(run(f"check {flags} --suggest --json", status))["orders"]
    assert [(order["order"], order["hosts"]) for order in ranked] == list(orders.items())


def test_a_saved_plan_keeps_its_hosts_and_domains(saved):
    option = saved(run(f"plan {DOMAINS} --json"))
    printed = run(f"plan {option}")
    assert printed == run(f"plan {DOMAINS}") and "assumed" not in printed
    assert run(f"check {option}") == run(f"check {DOMAINS}")
    assert "1 NVLink domain of 4 hosts" in run(f"plan {option} --nvlink-domain 16")
    assert "8 hosts of 2:" in run(f"plan {option} --gpus-per-node 2")


@pytest.mark.parametrize("field", ["ranks_per_host", "nvlink_domain"])
@pytest.mark.parametrize("impossible", [0, -1, 2**40, 10**30])
def test_a_saved_plan_with_impossible_hosts_is_refused(saved, field, impossible):
    plan = json.loads(run(f"plan {DOMAINS} --json"))
    run(f"plan {saved({**plan, field: impossible})}", 2)


def test_numbers_are_whole_in_a_narrow_terminal():
    command = "check --world-size 16384 --tp 4 --etp 2 --cp 2 --ep 4 --pp 2 --suggest --top 1"
    numbers = {word for word in run(command, COLUMNS="200").split() if word.isdigit()}
    assert len(numbers) > 5 and numbers <= set(run(command, COLUMNS="50").split())
