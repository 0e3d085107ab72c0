"""Orders ranked by what crosses hosts, against a count of every link; and the judgement."""

from functools import partial
from itertools import pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat.megatron.checks import faults
from compat.megatron.job import from_sizes
from compat.megatron.traffic import VOLUMES, flows_of
from hypergrid import RankLayout
from hypergrid.analysis.checks import findings
from hypergrid.analysis.traffic import crossing, ranked
from hypergrid.topology import Topology

DIMS = ("tp", "cp", "ep", "dp", "pp")


def topology(world, per_host):
    return Topology(RankLayout(("rank",), (world,)), per_host)


def places(order, sizes):
    """Each rank's coordinates, counted like an odometer whose first dim turns fastest."""
    turning = [range(sizes[dim]) for dim in reversed(order)]
    return [dict(zip(reversed(order), at, strict=True)) for at in product(*turning)]


def groups(ranks, dims):
    found = {}
    for rank, at in enumerate(ranks):
        key = tuple(sorted((dim, i) for dim, i in at.items() if dim not in dims))
        found.setdefault(key, []).append(rank)
    return list(found.values())


def crossed(members, per_host, pattern):
    """Volumes that go at the pace of links between hosts, rank by rank."""
    hosts = [rank // per_host for rank in members]
    if pattern == "ring":  # all members go at the pace of the slowest link
        return len(hosts) * (len(set(hosts)) > 1)
    if pattern == "neighbours":
        return sum(a != b for a, b in pairwise(hosts))
    return sum(a != b for a in hosts for b in hosts) / len(hosts)


def counted(order, dense, expert, per_host):
    """The model's total by counting every link, or None where Megatron refuses the order."""
    grids = [places(order, sizes) for sizes in (dense, expert)]
    pipelines = [groups(grid, ("pp",)) for grid in grids]
    if dense["pp"] > 1:
        if order[-1] != "pp" and dense["dp"] != expert["dp"]:
            return None
        if sorted(pipelines[0]) != sorted(pipelines[1]):
            return None
    flows = [(0, ("tp",), "ring", "tp"), (0, ("cp",), "ring", "cp")]
    flows += [(0, ("dp", "cp"), "ring", "dp"), (0, ("pp",), "neighbours", "pp")]
    if expert["ep"] > 1 or expert["tp"] != dense["tp"]:
        flows += [(1, ("tp",), "ring", "tp"), (1, ("dp",), "ring", "dp")]
        flows += [(1, ("ep",), "all-to-all", "ep")]
    return sum(
        VOLUMES[whose] * crossed(members, per_host, pattern)
        for grid, dims, pattern, whose in flows
        for members in groups(grids[grid], dims)
    )


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
def test_the_ranking_is_that_of_counting_every_link_in_every_order(job):
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
    allowed = {order: total for order, total in by_hand.items() if total is not None}

    found = ranked("tp-cp-ep-dp-pp", planned.layouts, topology(world, per_host), flows_of)

    assert found[0].total == pytest.approx(min(allowed.values()))
    totals = [each.total for each in found]
    assert totals == pytest.approx(sorted(totals))
    assert {round(t, 6) for t in totals} == {round(t, 6) for t in allowed.values()}
    for each in found:
        tokens = each.order.split("-")
        full = [d for d in DIMS if d not in tokens]
        assert each.total == pytest.approx(by_hand["-".join(full + tokens)])


def test_of_orders_that_send_the_same_the_asked_one_is_first():
    job = from_sizes(world_size=8, tp=2, cp=2)
    for asked in ("tp-cp-ep-dp-pp", "cp-dp-tp-ep-pp"):
        found = ranked(asked, job.layouts, topology(8, 8), flows_of)
        assert found[0].order == asked


def test_volumes_decide_what_goes_inside():
    job = from_sizes(world_size=64, tp=8, cp=8)
    best = []
    for more in ({}, {"cp": 100}):
        flows = partial(flows_of, volumes={**VOLUMES, **more})
        best.append(ranked("dp-tp-cp", job.layouts, topology(64, 8), flows)[0].flows)
    assert [(flows["tp"], flows["cp"]) for flows in best] == [(0, 3 * 64), (8 * 64, 0)]


def test_one_flow_in_numbers():
    layouts = {"decoder": RankLayout(("dp", "tp"), (4, 4))}  # tp: every 4th rank, 2 hosts of 8
    sent = crossing(layouts, Topology(layouts["decoder"], 8), flows_of(layouts))
    assert sent == {"tp": 8 * 16, "dp": 0}


def rules(per_host=8, racks=None, user_buffers=False, **sizes):
    job = from_sizes(gpus_per_node=per_host, **sizes)
    check = partial(
        faults,
        hosts=topology(job.world_size, per_host),
        racks=racks and topology(job.world_size, per_host * racks),
        user_buffers=user_buffers,
    )
    found = findings(check, job.request().layouts)
    return {each.rule: each.severity for each in found}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (dict(world_size=64, tp=8), {}),
        (dict(world_size=64, tp=16), {"tp-across-hosts": "error"}),
        (dict(world_size=64, tp=2, etp=16), {"expert-tp-across-hosts": "error"}),
        (dict(world_size=64, tp=4, ep=8), {"ep-across-hosts": "warning"}),
        (
            dict(world_size=64, tp=4, ep=8, racks=2),
            {"ep-across-hosts": "warning", "ep-across-racks": "warning"},
        ),
        (dict(world_size=64, tp=4, ep=8, racks=4), {"ep-across-hosts": "warning"}),
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
            {"pp-innermost": "warning", "user-buffers": "note"},
        ),
        (dict(world_size=8, tp=2, pp=4), {"dp-1": "note"}),
        (dict(world_size=20, tp=2), {"uneven-hosts": "warning"}),
        (dict(world_size=1), {}),
    ],
)
def test_each_fault_is_found_and_no_other(asked, found):
    assert rules(**asked) == found


def test_a_remedy_is_an_order_that_avoids_the_fault_or_the_advice_that_none_does():
    job = from_sizes(world_size=64, gpus_per_node=8, tp=8, cp=2, order="dp-tp-cp-ep-pp")
    hosts = topology(64, 8)
    orders = ranked("dp-tp-cp-ep-pp", job.layouts, hosts, flows_of)
    better = [(each.order, job.layouts(each.order)) for each in orders]
    layouts, check = job.request().layouts, partial(faults, hosts=hosts)
    found = {each.rule: each for each in findings(check, layouts, better)}
    assert found["tp-across-hosts"].order == orders[0].order
    assert orders[0].order.startswith("tp")
    none = findings(check, layouts)[0]
    assert none.order is None and "A smaller tp would fit" in none.remedy
