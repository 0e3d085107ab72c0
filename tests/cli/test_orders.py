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


def places(order, sizes):
    """Each rank's coordinates, counted like an odometer whose first dim turns fastest."""
    turning = [range(sizes[dim]) for dim in reversed(order)]
    return [dict(zip(reversed(order), at, strict=True)) for at in product(*turning)]


def groups(ranks, dims):
    members = {}
    for rank, at in enumerate(ranks):
        key = tuple(sorted((dim, i) for dim, i in at.items() if dim not in dims))
        members.setdefault(key, []).append(rank)
    return list(members.values())


def counted(order, dense, expert, per_host):
    """By kind the most hosts of a group, counted one by one; None where Megatron refuses it."""
    grids = [places(order, sizes) for sizes in (dense, expert)]
    pipelines = [groups(grid, ("pp",)) for grid in grids]
    if dense["pp"] > 1:
        if order[-1] != "pp" and dense["dp"] != expert["dp"]:
            return None
        if sorted(pipelines[0]) != sorted(pipelines[1]):
            return None
    kinds = [("tp", 0, ("tp",))]
    if expert["ep"] > 1 or expert["tp"] != dense["tp"]:
        kinds += [("expert tp", 1, ("tp",)), ("ep", 1, ("ep",))]
    kinds += [("cp", 0, ("cp",)), ("dp", 0, ("dp", "cp"))]
    if expert["ep"] > 1 or expert["tp"] != dense["tp"]:
        kinds += [("expert dp", 1, ("dp",))]
    kinds += [("pp", 0, ("pp",))]
    counts = {}
    for kind, grid, dims in kinds:
        of_kind = groups(grids[grid], dims)
        if len(of_kind[0]) > 1:
            counts[kind] = max(len({rank // per_host for rank in one}) for one in of_kind)
    return counts


@st.composite
def jobs(draw):
    sizes = {d: draw(st.sampled_from([1, 2, 3])) for d in ("tp", "cp", "pp", "dp")}
    world = sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"]
    fits = [
        (etp, ep)
        for etp in (1, 2, 3)
        for ep in (1, 2, 3, 4)
        if (world // sizes["pp"]) % (etp * ep) == 0
    ]
    etp, ep = draw(st.sampled_from(fits))
    return sizes, world, etp, ep, draw(st.sampled_from([2, 3, 4, 8]))


@settings(max_examples=40, deadline=None)
@given(jobs())
def test_the_ranking_is_that_of_counting_every_group_in_every_order(job):
    sizes, world, etp, ep, per_host = job
    dense = {**sizes, "ep": 1}
    expert = {"tp": etp, "cp": 1, "ep": ep, "pp": sizes["pp"]}
    expert["dp"] = world // (etp * ep * sizes["pp"])
    planned = from_sizes(
        world_size=world,
        gpus_per_node=per_host,
        **{d: sizes[d] for d in ("tp", "cp", "pp")},
        etp=etp,
        ep=ep,
    )
    by_hand = {"-".join(o): counted(o, dense, expert, per_host) for o in permutations(DIMS)}
    allowed = {order: counts for order, counts in by_hand.items() if counts is not None}

    ranking = ranked_orders("tp-cp-ep-dp-pp", planned.layouts, topology(world, per_host))

    vectors = [ranked.numbers for ranked in ranking]
    assert vectors == sorted(vectors)
    assert set(vectors) == {tuple(counts.values()) for counts in allowed.values()}
    for ranked in ranking:
        tokens = ranked.order.split("-")
        full = [d for d in DIMS if d not in tokens]
        assert ranked.hosts == by_hand["-".join(full + tokens)]
        assert list(ranked.hosts) == list(by_hand["-".join(full + tokens)])


def test_of_orders_that_are_as_good_the_asked_one_is_first():
    job = from_sizes(world_size=8, tp=2, cp=2)
    for asked in ("tp-cp-ep-dp-pp", "cp-dp-tp-ep-pp"):
        assert ranked_orders(asked, job.layouts, topology(8, 8))[0].order == asked


def test_what_sends_more_stays_inside_hosts_first():
    job = from_sizes(world_size=64, tp=8, cp=8)
    best = ranked_orders("dp-tp-cp", job.layouts, topology(64, 8))[0]
    assert best.hosts == {"tp": 1, "cp": 8, "dp": 8}
    job = from_sizes(world_size=64, cp=8, pp=8)
    best = ranked_orders("pp-cp-dp-tp-ep", job.layouts, topology(64, 8))[0]
    assert best.hosts == {"cp": 1, "dp": 1, "pp": 8}
    # Every ep group leaves its host: two hosts are better than four, whatever expert dp has then.
    job = from_sizes(world_size=64, tp=4, cp=2, pp=2, ep=4)
    best = ranked_orders("tp-cp-dp-ep-pp", job.layouts, topology(64, 8))[0]
    assert best.hosts["ep"] == 2 and best.order.startswith("tp-cp-ep-dp")


def test_a_saved_plan_in_an_order_that_megatron_refuses_is_ranked_as_it_is(tmp_path):
    """Its pipelines have other ranks in the dense layout than in that of experts."""
    layouts = {
        "decoder": RankLayout(("tp", "pp", "dp"), (2, 2, 4)),
        "expert": RankLayout(("ep", "dp", "pp"), (2, 4, 2)),
    }
    (tmp_path / "plan.json").write_text(GroupPlan(layouts).to_json())
    data = json.loads(run(f"check --plan {tmp_path / 'plan.json'} --suggest --json"))
    (saved,) = [ranked for ranked in data["orders"] if ranked["order"] == "tp-pp-dp"]
    assert saved["hosts"] == {"tp": 1, "ep": 1, "dp": 2, "expert dp": 1, "pp": 1}


def rules(per_host=8, domain=None, user_buffers=False, **sizes):
    job = from_sizes(gpus_per_node=per_host, **sizes)
    check = partial(
        faults,
        hosts=topology(job.world_size, per_host),
        domains=domain and topology(job.world_size, domain),
        user_buffers=user_buffers,
    )
    found = findings(check, job.request().layouts)
    return {finding.rule: finding.severity for finding in found}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (dict(world_size=64, tp=8), {}),
        (dict(world_size=64, tp=16), {"tp-across-hosts": "error"}),
        (dict(world_size=64, tp=16, domain=32), {}),
        (dict(world_size=64, tp=2, etp=16), {"expert-tp-across-hosts": "error"}),
        (dict(world_size=64, tp=4, ep=8), {"ep-across-hosts": "warning"}),
        (
            dict(world_size=64, tp=4, ep=8, etp=4, domain=16),
            {"ep-across-nvlink-domains": "warning"},
        ),
        (dict(world_size=64, tp=4, ep=8, etp=4, domain=32), {}),
        (dict(world_size=64, tp=4, cp=4), {"cp-across-hosts": "warning"}),
        (
            dict(world_size=16, tp=2, cp=2, order="cp-tp-ep-dp-pp"),
            {"cp-before-tp": "warning", "user-buffers": "note"},
        ),
        (
            dict(world_size=16, tp=2, cp=2, order="cp-tp-ep-dp-pp", user_buffers=True),
            {"cp-before-tp": "warning", "user-buffers": "error"},
        ),
        (
            dict(world_size=16, tp=2, pp=4, order="pp-tp-cp-ep-dp"),
            {"user-buffers": "note"},
        ),
        (dict(world_size=8, tp=2, pp=4), {}),
        (dict(world_size=20, tp=2), {}),
        (dict(world_size=1), {}),
    ],
)
def test_each_fault_is_found_and_no_other(asked, found):
    assert rules(**asked) == found


def test_a_remedy_is_an_order_that_avoids_the_fault_or_the_advice_that_none_does():
    job = from_sizes(world_size=64, gpus_per_node=8, tp=8, cp=2, order="dp-tp-cp-ep-pp")
    hosts = topology(64, 8)
    ranking = ranked_orders("dp-tp-cp-ep-pp", job.layouts, hosts)
    better = [(ranked.order, job.layouts(ranked.order)) for ranked in ranking]
    layouts, check = job.request().layouts, partial(faults, hosts=hosts)
    found = {finding.rule: finding for finding in findings(check, layouts, better)}
    assert found["tp-across-hosts"].order == ranking[0].order
    assert ranking[0].order.startswith("tp")
    none = findings(check, layouts)[0]
    assert none.order is None and "A smaller tp would stay inside" in none.remedy
