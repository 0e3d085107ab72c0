"""After losses: the largest number of whole replicas, on which processes, and who is left over."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat.resiliency.replicas import NoReplicaError, Replicas
from hypergrid import RankLayout, Topology
from hypergrid.layout import LayoutError
from tests.support import table


@st.composite
def jobs(draw):
    """A layout, the host of each process (all of the layout's ranks and some spares), losses."""
    dims = draw(st.permutations(("tp", "ep", "pp", "dp")))
    sizes = tuple(draw(st.integers(1, 3)) for _ in dims)
    layout = RankLayout(tuple(dims), sizes)
    hosts = []
    for number, count in enumerate(draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))):
        hosts += [f"h{number}"] * count
    hosts += ["last"] * (layout.size - len(hosts))
    processes = st.integers(0, len(hosts) - 1)
    losses = draw(st.lists(st.sets(processes, max_size=4), max_size=4))
    return layout, hosts, losses


def largest(layout, together, hosts, alive):
    """The largest number of replicas whose blocks over ``together`` have one host each."""
    free_processes = Counter(hosts[process] if together else "" for process in alive)
    block_size = layout.dim_size(together)
    blocks = sum(count // block_size for count in free_processes.values())
    blocks_of_replica = layout.dim_size(layout.orthogonal("dp")) // block_size
    return min(layout.size_of("dp"), blocks // blocks_of_replica)


@given(jobs())
def test_the_largest_number_of_whole_replicas_goes_on_with_their_blocks_on_one_host(job):
    layout, hosts, losses = job
    replicas = Replicas.first(Topology(layout, hosts))
    alive = {*range(len(hosts))}
    assert replicas.layout.size_of("dp") == largest(layout, (), hosts, alive)
    for lost in losses:
        alive -= lost
        expected = largest(layout, replicas.together, hosts, alive)
        if not expected:
            with pytest.raises(NoReplicaError, match="not one whole replica is left"):
                replicas.without(lost)
            return
        before = replicas
        replicas = before.without(lost)
        assert replicas.layout.size_of("dp") == expected
        assert len(replicas.active) == replicas.layout.size
        assert sorted((*replicas.active, *replicas.reserves)) == sorted(alive)
        if replicas.together:
            for block in replicas.layout.groups(replicas.together).tolist():
                assert len({hosts[replicas.active[rank]] for rank in block}) == 1
        if not lost & {*before.active}:
            assert replicas.active == before.active


@given(jobs())
def test_first_all_dims_that_shall_stay_together_do_where_hosts_can_hold_them(job):
    layout, hosts, _ = job
    everyone = range(len(hosts))
    most = largest(layout, (), hosts, everyone)
    together = ("tp", "ep")
    while largest(layout, together, hosts, everyone) < most:
        together = together[:-1]
    assert Replicas.first(Topology(layout, hosts)).together == together


@pytest.mark.parametrize(
    ("rule", "sizes", "hosts", "lost", "active", "reserves"), table("resiliency/holes.txt")
)
def test_who_takes_which_hole(rule, sizes, hosts, lost, active, reserves):
    size_of = eval(sizes)
    topology = Topology(RankLayout(tuple(size_of), tuple(size_of.values())), eval(hosts))
    replicas = Replicas.first(topology).without(eval(lost))
    assert replicas.active == eval(active)
    assert replicas.reserves == eval(reserves)


def test_numbers_of_replicas_that_cannot_train_are_not_taken():
    topology = Topology(RankLayout(("dp",), (8,)), [8])
    replicas = Replicas.first(topology, accepts=lambda count: 8 % count == 0).without({0})
    assert replicas.layout.size == 4
    assert len(replicas.reserves) == 3


def test_a_refusal_says_who_is_left_and_what_a_replica_needs():
    start = Replicas.first(Topology(RankLayout(("tp", "dp"), (4, 2)), [4, 4]))
    with pytest.raises(NoReplicaError) as error:
        start.without({0, 7})
    assert "processes 0,7 are lost, 6 are alive (host0: 3, host1: 3)" in str(error.value)
    assert "needs 4, 4 of them at a time on one host ('tp')" in str(error.value)


def test_what_cannot_be_placed_is_refused():
    with pytest.raises(LayoutError, match="must begin at rank 0"):
        Replicas.first(Topology(RankLayout(("dp",), (2,), 2), [4]))
    with pytest.raises(LayoutError, match="invalid dim 'dp'"):
        Replicas.first(Topology(RankLayout(("tp",), (2,)), [2]))
