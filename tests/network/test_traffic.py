"""Orders ranked by what crosses hosts, against a count of every link; and the judgement."""

from functools import partial
from itertools import pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat.planned.checks import faults
from compat.planned.job import from_sizes
from compat.planned.traffic import VOLUMES, Shape, flows_of
from hypergrid import RankLayout
from hypergrid.network.checks import findings
from hypergrid.network.levels import Network
from hypergrid.network.traffic import LEAST_REACHED, Flow, costs, crossing, estimate, ranked
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


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_volumes_that_cross_hosts_are_the_case_of_two_levels_where_hosts_are_free(job):
    sizes, world, etp, ep, per_host = job
    planned = from_sizes(
        world_size=world,
        gpus_per_node=per_host,
        **{d: sizes[d] for d in ("tp", "cp", "pp")},
        etp=etp,
        ep=ep,
    )
    free = Network.regular(world, per_host, bandwidth={"host": 1e30, "world": 1})

    old = ranked("tp-cp-ep-dp-pp", planned.layouts, topology(world, per_host), flows_of)
    new = ranked("tp-cp-ep-dp-pp", planned.layouts, free, flows_of)

    assert [each.order for each in new] == [each.order for each in old]
    for one, other in zip(new, old, strict=True):
        assert one.total * world == pytest.approx(other.total, abs=1e-6)
        for name, sent in one.flows.items():
            assert sent * world == pytest.approx(other.flows[name], abs=1e-6)


def shared(network, one, other):
    """The number of the innermost level that two ranks share, by looking at each."""
    of_rank = [i for i, n in enumerate(network.ranks) for _ in range(n)]
    levels = [range(len(network.hosts)), *network.units.values()]
    same = [names[of_rank[one]] == names[of_rank[other]] for names in levels]
    return [*same, True].index(True)


@st.composite
def networks(draw):
    """Hosts of unequal size in domains that lie in racks."""
    domains = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    racks = draw(st.lists(st.integers(0, 1), min_size=4, max_size=4))
    ranks = [draw(st.integers(1, 3)) for _ in domains]
    units = {"nvlink": [f"d{d}" for d in domains], "rack": [f"r{racks[d]}" for d in domains]}
    return Network([f"h{i}" for i in range(len(domains))], ranks, units, {"rack": 20, "world": 5})


@settings(max_examples=60, deadline=None)
@given(networks(), st.sampled_from(["ring", "all-to-all", "neighbours"]), st.data())
def test_each_pair_of_members_pays_the_price_of_the_innermost_level_that_it_shares(
    network, pattern, data
):
    world = sum(network.ranks)
    size = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    sizes = data.draw(st.permutations([("x", size), ("y", world // size)]))
    layouts = {"all": RankLayout(*map(tuple, zip(*sizes, strict=True)))}
    flow = Flow("f", "all", ("x",), pattern, 7.0)
    found = costs(layouts, network, [flow])
    if size == 1:
        assert not found
        return
    price = [1 / network.speeds[level] for level in network.levels]
    total, slowest = 0.0, 0.0
    for members in layouts["all"].groups("x").tolist():
        if pattern == "ring":
            far = max(shared(network, a, b) for a in members for b in members)
            waits = 7 * price[far] * size
        elif pattern == "neighbours":
            waits = sum(7 * price[shared(network, a, b)] for a, b in pairwise(members))
        else:
            pairs = [(a, b) for a in members for b in members if a != b]
            waits = sum(7 / size * price[shared(network, a, b)] for a, b in pairs)
        total, slowest = total + waits, max(slowest, waits / size)
    assert found["f"].total == pytest.approx(total)
    assert found["f"].slowest == pytest.approx(slowest)


def test_an_estimate_in_numbers():
    """16 ranks on 4 hosts of two domains: dp rings leave the domain, tp stays in the host."""
    network = Network.regular(16, 4, nvlink_domain=8, bandwidth={"host": 100, "world": 10})
    layouts = {"decoder": RankLayout(("tp", "dp"), (4, 4))}
    tp = Flow("tp", "decoder", ("tp",), "ring", 50.0)
    dp = Flow("dp", "decoder", ("dp",), "ring", 30.0, hidden=True)
    found = estimate(layouts, network, [tp, dp])
    assert found.costs["tp"].volumes == {"host": 16 * 50, "nvlink": 0, "world": 0}
    assert found.costs["dp"].volumes == {"host": 0, "nvlink": 0, "world": 16 * 30}
    assert found.low == pytest.approx(50 / 100)
    assert found.high == pytest.approx((50 / 100 + 30 / 10) / LEAST_REACHED)
    assert (found.flow, found.level) == ("dp", "world")


def test_the_volumes_of_a_model_in_numbers():
    """By hand: hidden 1024, 8 layers on 2 stages, sequences of 2048 on cp=2, 4 micro-batches."""
    job = from_sizes(
        world_size=32, tp=2, cp=2, pp=2, ep=4, hidden=1024, layers=8, seq=2048, micro_batches=4
    )
    tensor = 1024 * 1024 * 2  # bytes: half of the sequence, 16 bits
    dense = Shape(1024, 8, 2048, 4).flows(job.request().layouts)
    sent = {flow.name: flow.volume * 1e9 for flow in dense}
    assert sent == pytest.approx(
        {
            "tp": 8 * tensor * 4 * 4 / 2,  # a ring of 2 passes on half
            "cp": 6 * tensor / 2 * 4 * 4,  # a ring of 2 passes each part on once
            "dp": 4 * 12 * 1024**2 / 2 * 6 * 7 / 8,  # over dp x cp = 8
            "pp": 2 * tensor / 2 * 4,
        }
    )
    ring = from_sizes(world_size=8, cp=8).request().layouts
    sent = {flow.name: flow.volume * 1e9 for flow in Shape(1024, 8, 2048, 4).flows(ring)}
    part = 1024 * 256 * 2
    assert sent["cp"] == pytest.approx(6 * part * 8 * 4 * 7)  # to all others
    experts = Shape(1024, 8, 2048, 4, experts=16, topk=3, expert_ffn=512)
    sent = {flow.name: flow.volume * 1e9 for flow in experts.flows(job.request().layouts)}
    assert sent["ep"] == pytest.approx(4 * 3 * tensor / 2 * 4 * 4)
    assert sent["tp"] == pytest.approx(4 * tensor * 4 * 4 / 2)
    assert sent["expert tp"] == pytest.approx(4 * 3 * tensor * 4 * 4 / 2)
    assert sent["expert dp"] == pytest.approx(4 * 16 * 2 * 1024 * 512 / 8 * 6 * 1 / 2)


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
