"""Orders ranked by the hosts that groups touch, against a count of every group; and findings."""

import json
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from compat.planned.job import from_sizes
from compat.planned.orders import dp_across, ranked_orders
from hypergrid import GroupPlan, RankLayout
from hypergrid.topology import Topology
from tests.cli.test_cli import run

DIMS = ("tp", "cp", "ep", "dp", "pp")


def topology(world, per_host):
    return Topology(RankLayout(("rank",), (world,)), per_host)


def counted(order, dense, expert, per_host):
    """By kind the most hosts of a group, counted one by one; None where Megatron refuses it."""
    groups = RankGenerator(**dense, order=order).get_ranks
    expert_groups = RankGenerator(**expert, order=order).get_ranks
    if dense["pp"] > 1:
        if not order.endswith("pp") and dense["dp"] != expert["dp"]:
            return None
        if sorted(groups("pp")) != sorted(expert_groups("pp")):
            return None
    has_experts = expert["ep"] > 1 or expert["tp"] != dense["tp"]
    groups_of_kind = {
        "tp": groups("tp"),
        "expert tp": expert_groups("tp") if has_experts else [[0]],
        "ep": expert_groups("ep"),
        "cp": groups("cp"),
        "dp": groups("dp-cp"),
        "expert dp": expert_groups("dp") if has_experts else [[0]],
        "pp": groups("pp"),
    }
    counts = {}
    for kind, members_of_groups in groups_of_kind.items():
        if len(members_of_groups[0]) > 1:
            hosts = [{rank // per_host for rank in members} for members in members_of_groups]
            counts[kind] = max(map(len, hosts))
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
    for order in map("-".join, permutations(DIMS)):
        by_hand[order] = counted(order, dense, expert, per_host)
    job = from_sizes(world_size=world, gpus_per_node=per_host, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)

    hosts = topology(world, per_host)

    ranking = ranked_orders("tp-cp-ep-dp-pp", job.plan().layouts, hosts)

    requested = next(ranked for ranked in ranking if ranked.order == "tp-cp-ep-dp-pp")
    across = dp_across(ranking, requested, job.plan().layouts, hosts, "hosts")
    counts_inside = {
        all(number == 1 for kind, number in counts.items() if not kind.endswith("dp"))
        for counts in by_hand.values()
        if counts is not None
    }
    if "with dp across" in across:
        assert True not in counts_inside
        assert "do not fill" in across or "must be" in across
    elif across:
        assert True in counts_inside

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


def test_a_saved_plan_in_an_order_that_megatron_refuses_is_ranked_as_it_is(saved):
    """Its pipelines have other ranks in the dense layout than in that of experts."""
    layouts = {
        "decoder": RankLayout(("tp", "pp", "dp"), (2, 2, 4)),
        "expert": RankLayout(("ep", "dp", "pp"), (2, 4, 2)),
    }
    orders = json.loads(run(f"check {saved(GroupPlan(layouts).to_json())} --suggest --json"))
    hosts = {ranked["order"]: ranked["hosts"] for ranked in orders["orders"]}
    assert hosts["tp-pp-dp"] == {"tp": 1, "ep": 1, "dp": 2, "expert dp": 1, "pp": 1}
