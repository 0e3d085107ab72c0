"""Orders ranked by the hosts that groups touch, against a count of every group; and findings."""

import json
from itertools import permutations

import pytest
from megatron.core.parallel_state import RankGenerator

from compat.planned.job import from_sizes
from compat.planned.orders import ranked_orders
from hypergrid import GroupPlan, RankLayout
from hypergrid.topology import Topology
from tests.cli.test_cli import run

DIMS = ("tp", "cp", "ep", "dp", "pp")


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


# Sizes, and how many ranks a host has.
@pytest.mark.parametrize(
    ("tp", "cp", "pp", "dp", "etp", "ep", "per_host"),
    [
        (1, 1, 1, 3, 1, 1, 2),
        (2, 1, 1, 2, 1, 4, 2),
        (2, 3, 1, 2, 2, 3, 4),
        (2, 1, 2, 2, 2, 1, 3),
        (2, 2, 2, 2, 1, 4, 4),
        (3, 2, 2, 2, 3, 2, 8),
        (2, 2, 3, 3, 1, 3, 8),
        (3, 1, 3, 3, 3, 3, 3),
    ],
)
def test_the_ranking_is_that_of_counting_every_group_in_every_order(
    tp, cp, pp, dp, etp, ep, per_host
):
    ranks_of_stage = tp * cp * dp
    world = ranks_of_stage * pp
    dense = {"tp": tp, "cp": cp, "ep": 1, "dp": dp, "pp": pp}
    expert = {"tp": etp, "cp": 1, "ep": ep, "dp": ranks_of_stage // (etp * ep), "pp": pp}
    by_hand = {}
    for order in map("-".join, permutations(DIMS)):
        by_hand[order] = counted(order, dense, expert, per_host)
    job = from_sizes(world_size=world, gpus_per_node=per_host, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)
    hosts = Topology(RankLayout(("rank",), (world,)), per_host)
    ranking = ranked_orders("tp-cp-ep-dp-pp", job.plan().layouts, hosts)
    vectors = [ranked.numbers for ranked in ranking]
    assert vectors == sorted(vectors)
    assert set(vectors) == {
        tuple(counts.values()) for counts in by_hand.values() if counts is not None
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
