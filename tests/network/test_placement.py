"""Orders of hosts: the best of all at small worlds, never worse than the given, and fast."""

import os
import random
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat.planned.job import from_sizes
from compat.planned.traffic import flows_of
from hypergrid import LayoutError, RankLayout
from hypergrid.network.levels import Network
from hypergrid.network.placement import ALL_ORDERS, place
from hypergrid.network.traffic import Flow, costs


def spent(layouts, network, flows):
    """What a rank pays on average, from the costs of traffic."""
    ranks = max(layout.size for layout in layouts.values())
    return sum(cost.total for cost in costs(layouts, network, flows).values()) / ranks


def least(layouts, network, flows):
    """Over all orders of the hosts; those with the same units in the same places are one."""
    places = list(zip(network.ranks, *network.units.values(), strict=True))
    differ = {tuple(places[i] for i in p): p for p in permutations(range(len(places)))}
    return min(spent(layouts, network.in_order(order), flows) for order in differ.values())


@st.composite
def worlds(draw, most):
    """Hosts of equal or unequal size, domains in racks in pods, more hosts than needed or not."""
    hosts = draw(st.integers(1, most))
    each = draw(st.sampled_from([1, 2, 4]))
    ranks = [each if draw(st.integers(0, 3)) else draw(st.integers(1, 3)) for _ in range(hosts)]
    domain = [draw(st.integers(0, 3)) for _ in range(hosts)]
    rack, pod = ([draw(st.integers(0, 1)) for _ in range(4)] for _ in range(2))
    units = {
        "nvlink": [f"d{d}" for d in domain],
        "rack": [f"r{rack[d]}" for d in domain],
        "pod": [f"p{pod[rack[d]]}" for d in domain],
    }
    kept = draw(st.lists(st.sampled_from(list(units)), unique=True))
    network = Network([f"h{i}" for i in range(hosts)], ranks, {n: units[n] for n in kept})
    world = sum(ranks) - draw(st.integers(0, min(2, sum(ranks) - 1)))
    a = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    b = draw(st.sampled_from([n for n in range(1, world // a + 1) if world // a % n == 0]))
    layouts = {"all": RankLayout(("x", "y", "z"), (a, b, world // a // b))}
    flows = [
        Flow(f"{dim} {pattern}", "all", (dim,), pattern, draw(st.integers(1, 9)))
        for dim in "xyz"
        for pattern in draw(st.lists(st.sampled_from(PATTERNS), unique=True, max_size=2))
    ]
    return layouts, network, flows


PATTERNS = ("ring", "all-to-all", "neighbours")


@settings(max_examples=int(os.environ.get("HYPERGRID_PLACEMENTS", "40")), deadline=None)
@given(worlds(most=ALL_ORDERS))
def test_no_order_of_up_to_eight_hosts_costs_less(world):
    layouts, network, flows = world
    found = place(layouts, network, flows)
    used = [*found.order, *found.spare]
    assert found.exact and sorted(used) == list(range(len(network.hosts)))
    assert found.cost == pytest.approx(least(layouts, network, flows), rel=1e-7)
    assert found.cost == pytest.approx(spent(layouts, network.in_order(used), flows), rel=1e-7)
    assert found.given == pytest.approx(spent(layouts, network, flows), rel=1e-7)
    if found.cost == found.given and not found.spare:
        turned = network.in_order(found.order)
        assert spent(layouts, turned, flows) <= spent(layouts, network, flows) * (1 + 1e-7)


def scattered(hosts, per_host, units, seed=0):
    """A network whose hosts come in a random order; ``units``: hosts in each unit, by level."""
    names = {n: [f"{n}{i // size}" for i in range(hosts)] for n, size in units.items()}
    order = list(range(hosts))
    random.Random(seed).shuffle(order)
    return Network([f"h{i}" for i in range(hosts)], per_host, names).in_order(order)


@pytest.mark.parametrize("seed", range(4))
def test_hosts_in_a_random_order_are_sorted_again_for_a_large_job(seed):
    """The same cost as in the order in which units were built, for blocks that fit into them."""
    layouts = from_sizes(world_size=1024, tp=8, pp=4, ep=4, gpus_per_node=4).request().layouts
    network = scattered(256, 4, {"nvlink": 16, "rack": 32, "pod": 64}, seed)
    in_order = scattered(256, 4, {"nvlink": 16, "rack": 32, "pod": 64}, seed).in_order(
        sorted(range(256), key=lambda i: int(network.hosts[i][1:]))
    )
    flows = flows_of(layouts)
    found = place(layouts, network, flows)
    assert not found.exact and found.cost < found.given
    assert found.cost <= spent(layouts, in_order, flows) * (1 + 1e-7)


def test_a_segment_is_taken_from_a_unit_that_has_room_for_it():
    """Domains of 5, 3 and 4 hosts: three groups of 4 hosts, two of them inside a domain."""
    domains = [*"aabbbaacccca"]
    network = Network([f"h{i}" for i in range(12)], 4, {"nvlink": domains})
    layouts = {"all": RankLayout(("ep", "dp"), (16, 3))}
    found = place(layouts, network, [Flow("ep", "all", ("ep",), "ring", 1.0)])
    groups = [{domains[host] for host in found.order[i : i + 4]} for i in range(0, 12, 4)]
    assert sorted(map(len, groups)) == [1, 1, 2]


@settings(max_examples=30, deadline=None)
@given(worlds(most=14))
def test_a_placement_is_never_worse_than_the_given_order(world):
    layouts, network, flows = world
    found = place(layouts, network, flows)
    assert found.cost <= found.given
    turned = network.in_order([*found.order, *found.spare])
    assert spent(layouts, turned, flows) == pytest.approx(found.cost, rel=1e-7)


def test_an_order_that_nothing_beats_is_kept():
    layouts = {"all": RankLayout(("tp", "dp"), (8, 4))}
    network = Network.regular(32, 8, hosts_per_rack=2)
    assert place(layouts, network, [Flow("dp", "all", ("dp",), "ring", 1.0)]).order == (0, 1, 2, 3)


def test_too_few_hosts_are_refused():
    layouts = {"all": RankLayout(("dp",), (9,))}
    with pytest.raises(LayoutError, match="has 8 ranks on 1 hosts, and the job has 9"):
        place(layouts, Network(["a"], 8), [])
