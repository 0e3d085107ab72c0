"""One random fault at a random call; scripts/soak --only chaos tries 300 cases."""

import json
import re
from unittest import mock

import pytest

from tests.support import chaos, table
from tests.support.chaos import Case, RankOutcome
from tests.support.soaking import Injected, at_call
from tests.support.stock import load_stock


@pytest.mark.parametrize(
    "case",
    [
        Case(4, "exception", "initialise", 2, 0.5, 2.0, False, 2),
        Case(4, "interrupt", "destroy", 3, 0.6, 2.0, True, 2),
        Case(4, "fork", "initialise", 0, 0.7, 2.0, True, 1),
        Case(4, "thread", "create", 1, 0.6, 2.0, False, 1),
    ],
    ids=lambda case: f"{case.fault} in {case.operation}",
)
def test_a_fault_obeys_the_laws(case):
    world = chaos.run(case)
    assert "fault" in world[case.rank].steps
    assert not chaos.broken_laws(case, world)


def test_a_fault_happens_at_a_call_of_stock_too():
    stock = load_stock("0.16.1")
    fault = mock.Mock(side_effect=Injected)
    with pytest.raises(Injected), at_call(1, fault, chaos.is_counted):
        stock.model_parallel_is_initialized()


def test_seventy_two_cases_have_each_fault_in_each_operation_once():
    cases = [Case.of(7, number) for number in range(72)]
    assert len({(case.fault, case.operation) for case in cases}) == 72
    assert Case.of(7, 3) == cases[3] != Case.of(8, 3)


WELL = {"operation": [1.0, ""], "clean-up": 0.1, "left": {}, "end": True}
CASE = Case(4, "exception", "initialise", 2, 0.5, 2.0, False, 1)


def laws_that_rank_0_breaks(outcome):
    """Of a world in which the others keep them."""
    world = [RankOutcome(dict(WELL), finished=True) for _ in range(4)]
    world[CASE.rank].steps["fault"] = True
    world[0] = outcome
    return chaos.broken_laws(CASE, world)


@pytest.mark.parametrize(("changed", "law"), table("megatron/laws_of_chaos.txt"))
def test_each_law_can_be_broken(changed, law):
    broken = laws_that_rank_0_breaks(RankOutcome(WELL | json.loads(changed), finished=True))
    assert [*broken] == [name for name in [law] if name != "none"]


def test_a_process_that_ends_or_hangs_is_noticed():
    ended = laws_that_rank_0_breaks(RankOutcome({}, status=6, finished=True))
    assert re.match("rank 0 ended with status 6", ended["survives"])
    assert "did not end" in laws_that_rank_0_breaks(RankOutcome({}))["survives"]
