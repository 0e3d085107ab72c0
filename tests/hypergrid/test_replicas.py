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
    order = draw(st.permutations(("tp", "ep", "pp", "dp")))
    layout = RankLayout(tuple(order), tuple(draw(st.integers(1, 3)) for _ in order))
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    hosts = [f"h{i}" for i, many in enumerate(sizes) for _ in range(many)]
    hosts += ["last"] * (layout.size - len(hosts))
    many = len(hosts)
    rounds = draw(st.lists(st.sets(st.integers(0, many - 1), max_size=4), max_size=4))
    return layout, hosts, rounds


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
    layout, hosts, rounds = job
    now = Replicas.first(Topology(layout, hosts))
    everyone = range(len(hosts))
    assert now.layout.size_of("dp") == largest(layout, (), hosts, everyone)
    dead = set()
    for lost in rounds:
        dead |= lost
        alive = [process for process in everyone if process not in dead]
        best = largest(layout, now.together, hosts, alive)
        if not best:
            with pytest.raises(NoReplicaError, match="not one whole replica is left"):
                now.without(lost)
            return
        before, now = now, now.without(lost)
        assert now.layout.size_of("dp") == best and len(now.active) == now.layout.size
        assert sorted((*now.active, *now.reserves)) == alive
        for block in now.layout.groups(now.together).tolist():
            if now.together:
                assert len({hosts[now.active[rank]] for rank in block}) == 1
        if not lost & {*before.active}:
            assert now.active == before.active


@given(jobs())
def test_first_all_dims_that_shall_stay_together_do_where_hosts_can_hold_them(job):
    layout, hosts, _ = job
    now = Replicas.first(Topology(layout, hosts))
    dims = ("tp", "ep")
    everyone = range(len(hosts))
    most = largest(layout, (), hosts, everyone)
    possible = [dims[:n] for n in (2, 1, 0) if largest(layout, dims[:n], hosts, everyone) == most]
    assert now.together == possible[0]


def test_a_spare_of_the_same_host_takes_the_hole_and_nobody_else_moves():
    layout = RankLayout(("tp", "pp", "dp"), (2, 2, 2))
    start = Replicas.first(Topology(layout, [5, 5]))
    assert (start.active, start.reserves) == ((0, 1, 2, 3, 5, 6, 7, 8), (4, 9))
    now = start.without({6})
    assert (now.active, now.reserves) == ((0, 1, 2, 3, 5, 9, 7, 8), (4,))


def test_a_spare_of_the_same_host_takes_the_hole_of_a_rank_without_a_block():
    start = Replicas.first(Topology(RankLayout(("pp", "dp"), (2, 2)), [3, 3]))
    assert (start.active, start.reserves) == ((0, 1, 2, 3), (4, 5))
    now = start.without({3})
    assert (now.active, now.reserves) == ((0, 1, 2, 4), (5,))


def test_a_whole_block_keeps_its_room_beside_one_with_a_hole():
    layout = RankLayout(("tp", "dp"), (2, 3))
    start = Replicas.first(Topology(layout, ["a", "a", "a", "a", "b", "b", "b", "b"]))
    now = start.without({0})
    assert (now.active, now.reserves) == ((6, 7, 2, 3, 4, 5), (1,))


def test_a_block_without_a_spare_on_its_host_moves_as_a_whole():
    layout = RankLayout(("tp", "dp"), (2, 2))
    start = Replicas.first(Topology(layout, ["a", "a", "b", "b", "c", "c"]))
    now = start.without({1})
    assert (now.active, now.reserves) == ((4, 5, 2, 3), (0,))


def test_a_replica_that_is_given_up_fills_the_others():
    layout = RankLayout(("pp", "dp"), (2, 2))
    now = Replicas.first(Topology(layout, [4])).without({1})
    # Each replica has lost one part or none: the first rank of the broken one is left over.
    assert (now.active, now.reserves) == ((2, 3), (0,))
    layout = RankLayout(("pp", "dp"), (3, 3))
    now = Replicas.first(Topology(layout, [9])).without({2, 3})
    assert now.layout.size_of("dp") == 2
    assert (now.active, now.reserves) == ((0, 1, 4, 6, 7, 8), (5,))


def test_numbers_of_replicas_that_cannot_train_are_not_taken():
    layout = RankLayout(("dp",), (8,))
    start = Replicas.first(Topology(layout, [8]), accepts=lambda n: 8 % n == 0)
    assert start.without({0}).layout.size == 4
    assert len(start.without({0}).reserves) == 3


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
