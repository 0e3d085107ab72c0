"""After losses: the largest number of whole replicas, and on which processes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat.resiliency.replicas import NoReplicaError, active_processes
from hypergrid import RankLayout
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
    lost = draw(st.sets(st.integers(0, len(hosts) - 1), max_size=12))
    return layout, hosts, set(range(len(hosts))) - lost


def largest(layout, together, hosts, alive):
    """The largest number of replicas whose blocks over ``together`` have one host each."""
    free_processes = Counter(hosts[process] if together else "" for process in alive)
    block_size = layout.dim_size(together)
    blocks = sum(count // block_size for count in free_processes.values())
    blocks_of_replica = layout.dim_size(layout.orthogonal("dp")) // block_size
    return min(layout.size_of("dp"), blocks // blocks_of_replica)


@given(jobs())
def test_the_largest_number_of_whole_replicas_goes_on_with_their_blocks_on_one_host(job):
    layout, hosts, alive = job
    everyone = range(len(hosts))
    together = ("tp", "ep")
    while largest(layout, together, hosts, everyone) < layout.size_of("dp"):
        together = together[:-1]
    count = largest(layout, together, hosts, alive)
    if not count:
        with pytest.raises(NoReplicaError, match="not one whole replica is left"):
            active_processes(layout, hosts, alive)
        return
    active = active_processes(layout, hosts, alive)
    assert len(active) == count * layout.size // layout.size_of("dp")
    assert len(set(active)) == len(active) and set(active) <= alive
    sizes = [count if dim == "dp" else layout.size_of(dim) for dim in layout.dims]
    if together:
        for block in RankLayout(layout.dims, sizes).groups(together).tolist():
            assert len({hosts[active[rank]] for rank in block}) == 1


@pytest.mark.parametrize(
    ("rule", "sizes", "hosts", "lost", "active"), table("resiliency/holes.txt")
)
def test_which_process_has_which_rank(rule, sizes, hosts, lost, active):
    size_of = eval(sizes)
    layout = RankLayout(tuple(size_of), tuple(size_of.values()))
    alive = set(range(len(hosts))) - eval(lost)
    assert active_processes(layout, hosts, alive) == eval(active)


def test_numbers_of_replicas_that_cannot_train_are_not_taken():
    layout = RankLayout(("dp",), (8,))
    assert len(active_processes(layout, ["a"] * 8, range(1, 8), lambda n: 8 % n == 0)) == 4


def test_a_refusal_says_who_is_left_and_what_a_replica_needs():
    with pytest.raises(NoReplicaError) as error:
        active_processes(RankLayout(("tp", "dp"), (4, 2)), "aaaabbbb", range(1, 7))
    assert "6 of 8 processes are alive" in str(error.value)
    assert "needs 4, 4 of them at a time on one host" in str(error.value)
