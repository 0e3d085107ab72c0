"""Orders ranked by the hosts that groups touch, against a count of every group; and findings."""

import json
from functools import partial
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat.planned.checks import faults, findings
from compat.planned.job import from_sizes
from compat.planned.orders import ranked_orders
from hypergrid import GroupPlan, RankLayout
from hypergrid.topology import Topology
from tests.cli.test_cli import run

DIMS = ("tp", "cp", "ep", "dp", "pp")


def topology(world, per_host):
    return Topology(RankLayout(("rank",), (world,)), per_host)


def groups(order, sizes, dims):
    """The groups over dims of a grid whose first dim counts fastest, rank by rank."""
    outer_first = order[::-1]
    members = {}
    for rank, place in enumerate(product(*(range(sizes[dim]) for dim in outer_first))):
        key = tuple(index for dim, index in zip(outer_first, place, strict=True) if dim not in dims)
        members.setdefault(key, []).append(rank)
    return sorted(members.values())


def counted(order, dense, expert, per_host):
    """By kind the most hosts of a group, counted one by one; None where Megatron refuses it."""
    if dense["pp"] > 1:
        if order[-1] != "pp" and dense["dp"] != expert["dp"]:
            return None
        if groups(order, dense, ["pp"]) != groups(order, expert, ["pp"]):
            return None
    kinds = {
        "tp": (dense, ["tp"]),
        "expert tp": (expert, ["tp"]),
        "ep": (expert, ["ep"]),
        "cp": (dense, ["cp"]),
        "dp": (dense, ["dp", "cp"]),
        "expert dp": (expert, ["dp"]),
        "pp": (dense, ["pp"]),
    }
    has_experts = expert["ep"] > 1 or expert["tp"] != dense["tp"]
    counts = {}
    for kind, (sizes, dims) in kinds.items():
        of_kind = groups(order, sizes, dims)
        if len(of_kind[0]) > 1 and (sizes is dense or has_experts):
            counts[kind] = max(len({rank // per_host for rank in ranks}) for ranks in of_kind)
    return counts


SMALL = st.sampled_from([1, 2, 3])


@settings(max_examples=40, deadline=None)
@given(st.data(), SMALL, SMALL, SMALL, SMALL, st.sampled_from([2, 3, 4, 8]))
def test_the_ranking_is_that_of_counting_every_group_in_every_order(data, tp, cp, pp, dp, per_host):
    ranks_of_stage = tp * cp * dp
    fits = [
        (etp, ep) for etp in (1, 2, 3) for ep in (1, 2, 3, 4) if not ranks_of_stage % (etp * ep)
    ]
    etp, ep = data.draw(st.sampled_from(fits))
    world = ranks_of_stage * pp
    dense = {"tp": tp, "cp": cp, "ep": 1, "dp": dp, "pp": pp}
    expert = {"tp": etp, "cp": 1, "ep": ep, "dp": ranks_of_stage // (etp * ep), "pp": pp}
    by_hand = {}
    for order in permutations(DIMS):
        by_hand["-".join(order)] = counted(order, dense, expert, per_host)
    job = from_sizes(world_size=world, gpus_per_node=per_host, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)

    ranking = ranked_orders("tp-cp-ep-dp-pp", job.layouts, topology(world, per_host))

    vectors = [ranked.numbers for ranked in ranking]
    assert vectors == sorted(vectors)
    assert set(vectors) == {
        tuple(hosts.values()) for hosts in by_hand.values() if hosts is not None
    }
    for ranked in ranking:
        dims = ranked.order.split("-")
        # Dims of size 1 are left out of an order that is shown.
        order = "-".join([dim for dim in DIMS if dim not in dims] + dims)
        assert list(ranked.hosts.items()) == list(by_hand[order].items())


def best(asked, **sizes):
    job = from_sizes(**sizes)
    return ranked_orders(asked, job.layouts, topology(sizes["world_size"], 8))[0]


@pytest.mark.parametrize("asked", ["tp-cp-ep-dp-pp", "cp-dp-tp-ep-pp"])
def test_of_orders_that_are_as_good_the_asked_one_is_first(asked):
    assert best(asked, world_size=8, tp=2, cp=2).order == asked


@pytest.mark.parametrize(
    ("asked", "sizes", "hosts"),
    [
        ("dp-tp-cp", {"tp": 8, "cp": 8}, {"tp": 1, "cp": 8, "dp": 8}),
        ("pp-cp-dp-tp-ep", {"cp": 8, "pp": 8}, {"cp": 1, "dp": 1, "pp": 8}),
        # Every ep group leaves its host: two hosts are better than four.
        (
            "tp-cp-dp-ep-pp",
            {"tp": 4, "cp": 2, "pp": 2, "ep": 4},
            {"tp": 1, "ep": 2, "cp": 1, "dp": 4, "expert dp": 2, "pp": 2},
        ),
    ],
)
def test_what_sends_more_stays_inside_hosts_first(asked, sizes, hosts):
    ranked = best(asked, world_size=64, **sizes).hosts
    ranked.pop("expert tp", None)
    assert ranked == hosts


def test_a_saved_plan_in_an_order_that_megatron_refuses_is_ranked_as_it_is(saved):
    """Its pipelines have other ranks in the dense layout than in that of experts."""
    layouts = {
        "decoder": RankLayout(("tp", "pp", "dp"), (2, 2, 4)),
        "expert": RankLayout(("ep", "dp", "pp"), (2, 4, 2)),
    }
    orders = json.loads(run(f"check {saved(GroupPlan(layouts).to_json())} --suggest --json"))
    hosts = {ranked["order"]: ranked["hosts"] for ranked in orders["orders"]}
    assert hosts["tp-pp-dp"] == {"tp": 1, "ep": 1, "dp": 2, "expert dp": 1, "pp": 1}


TURNED = "cp-tp-ep-dp-pp"


@pytest.mark.parametrize(
    ("sizes", "domain", "expected"),
    [
        ({"world_size": 64, "tp": 8}, None, {}),
        ({"world_size": 64, "tp": 16}, None, {"tp-across-hosts": "error"}),
        ({"world_size": 64, "tp": 16}, 32, {}),
        ({"world_size": 64, "tp": 2, "etp": 16}, None, {"expert-tp-across-hosts": "error"}),
        ({"world_size": 64, "tp": 4, "ep": 8}, None, {"ep-across-hosts": "warning"}),
        ({"world_size": 64, "etp": 4, "ep": 8}, 16, {"ep-across-nvlink-domains": "warning"}),
        ({"world_size": 64, "etp": 4, "ep": 8}, 32, {}),
        ({"world_size": 64, "tp": 4, "cp": 4}, None, {"cp-across-hosts": "warning"}),
        (
            {"world_size": 16, "tp": 2, "cp": 2, "order": TURNED},
            None,
            {"cp-before-tp": "warning", "user-buffers": "note"},
        ),
        (
            {"world_size": 16, "tp": 2, "cp": 2, "order": TURNED, "tp_comm_overlap": True},
            None,
            {"cp-before-tp": "warning", "user-buffers": "error"},
        ),
        (
            {"world_size": 16, "tp": 2, "pp": 4, "order": "pp-tp-cp-ep-dp"},
            None,
            {"user-buffers": "note"},
        ),
        ({"world_size": 8, "tp": 2, "pp": 4}, None, {}),
        ({"world_size": 20, "tp": 2}, None, {}),
        ({"world_size": 1}, None, {}),
    ],
)
def test_each_fault_is_found_and_no_other(sizes, domain, expected):
    job = from_sizes(gpus_per_node=8, **sizes)
    check = partial(
        faults,
        hosts=topology(job.world_size, 8),
        domains=domain and topology(job.world_size, domain),
        user_buffers=job.user_buffers,
    )
    severities = {
        finding.rule: finding.severity for finding in findings(check, job.request().layouts)
    }
    assert severities == expected


def test_a_remedy_is_an_order_that_avoids_the_fault_or_the_advice_that_none_does():
    job = from_sizes(world_size=64, gpus_per_node=8, tp=8, cp=2, order="dp-tp-cp-ep-pp")
    hosts = topology(64, 8)
    ranking = ranked_orders("dp-tp-cp-ep-pp", job.layouts, hosts)
    better = [(ranked.order, job.layouts(ranked.order)) for ranked in ranking]
    layouts = job.request().layouts
    check = partial(faults, hosts=hosts)
    orders = {finding.rule: finding.order for finding in findings(check, layouts, better)}
    assert orders["tp-across-hosts"] == ranking[0].order
    assert ranking[0].order.startswith("tp")
    first = findings(check, layouts)[0]
    assert first.order is None and "A smaller tp would stay inside" in first.remedy
