"""After losses: the largest number of whole replicas, on which processes, and who is left over."""

import functools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypergrid import RankLayout, Topology
from hypergrid.layout import LayoutError
from hypergrid.replicas import NoReplicaError, Replicas


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


@functools.cache
def fit(blocks, size, free_processes):
    """Whether so many blocks fit into hosts with so many free processes, by trying every host."""
    if not blocks:
        return True
    for host, count in enumerate(free_processes):
        if count >= size:
            remaining = list(free_processes)
            remaining[host] -= size
            if fit(blocks - 1, size, tuple(sorted(remaining))):
                return True
    return False


def largest(layout, together, hosts, alive):
    """The largest number of replicas whose blocks over ``together`` have one host each."""
    free_processes = Counter(hosts[process] if together else "" for process in alive)
    size = layout.dim_size(together)
    blocks_of_replica = layout.dim_size(layout.orthogonal("dp")) // size
    for count in range(layout.size_of("dp"), 0, -1):
        if fit(count * blocks_of_replica, size, tuple(sorted(free_processes.values()))):
            return count
    return 0


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
    ("dims", "sizes", "hosts", "lost", "active", "reserves"),
    [
        # A spare of the same host takes the hole, and nobody else moves.
        (("tp", "pp", "dp"), (2, 2, 2), [5, 5], {6}, (0, 1, 2, 3, 5, 9, 7, 8), (4,)),
        # Also that of a rank without a block.
        (("pp", "dp"), (2, 2), [3, 3], {3}, (0, 1, 2, 4), (5,)),
        # A whole block keeps its room beside one with a hole.
        (("tp", "dp"), (2, 3), [4, 4], {0}, (6, 7, 2, 3, 4, 5), (1,)),
        # A block without a spare on its host moves as a whole.
        (("tp", "dp"), (2, 2), [2, 2, 2], {1}, (4, 5, 2, 3), (0,)),
        # A replica that is given up fills the others: the first rank of the broken one is left.
        (("pp", "dp"), (2, 2), [4], {1}, (2, 3), (0,)),
        (("pp", "dp"), (3, 3), [9], {2, 3}, (0, 1, 4, 6, 7, 8), (5,)),
    ],
)
def test_who_takes_which_hole(dims, sizes, hosts, lost, active, reserves):
    replicas = Replicas.first(Topology(RankLayout(dims, sizes), hosts)).without(lost)
    assert replicas.active == active
    assert replicas.reserves == reserves


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
