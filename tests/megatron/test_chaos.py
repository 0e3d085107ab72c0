"""One fault, on one rank, in one operation: the laws hold; scripts/soak draws hundreds of cases."""

import pytest

from tests.support.faults import Case, broken_laws, run


@pytest.mark.parametrize(
    "case",
    [
        Case("exception"),
        Case("interrupt", "destroy", rank=3, store_on_rank_0=True),
        Case("late", "abort", rank=1),
        Case("fork", rank=0, store_on_rank_0=True),
        Case("thread", "create", rank=1),
        # The host of the store leaves as soon as it has failed: all others still say why.
        Case("argument", store_on_rank_0=True, leaves=True),
        Case("exception", rank=0, store_on_rank_0=True, leaves=True),
    ],
    ids=str,
)
def test_a_fault_obeys_the_laws(case):
    world = run(case)
    assert "fault" in world[case.rank].steps
    assert not broken_laws(case, world)
