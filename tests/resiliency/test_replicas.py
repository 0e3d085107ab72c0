"""After losses: the largest number of whole replicas, and on which processes."""

import pytest

from compat.resiliency.replicas import NoReplicaError, active_processes
from hypergrid import RankLayout
from tests.support import table


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
