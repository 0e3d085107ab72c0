"""One random fault at a random call; scripts/soak --only chaos tries 300 cases."""

import re
from unittest import mock

import pytest

from tests.support import chaos
from tests.support.chaos import Case, Seen
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
    with pytest.raises(chaos.Injected), chaos._at_call(1, mock.Mock(side_effect=chaos.Injected)):
        stock.model_parallel_is_initialized()


def test_seventy_two_cases_have_each_fault_in_each_operation_once():
    cases = [Case.of(7, number) for number in range(72)]
    assert len({(case.fault, case.operation) for case in cases}) == 72
    assert Case.of(7, 3) == cases[3] != Case.of(8, 3)


WELL = {"operation": [1.0, ""], "clean-up": 0.1, "left": {}, "end": True}
KILL = Case(4, "exception", "initialise", 2, 0.5, 2.0, False, 1)


@pytest.mark.parametrize(
    ("changed", "law"),
    [
        ({}, None),
        ({"operation": [17.0, "CreationError: rank 2 failed"]}, "in time"),
        ({"operation": [1.0, "CreationError: somebody failed"]}, "cause"),
        ({"operation": [1.0, "CreationError: ranks 0..3 did not finish"]}, None),
        ({"left": {"threads": 3}}, "nothing left"),
        ({"again": False}, "again"),
        ({"child": 6}, "survives"),
    ],
    ids=str,
)
def test_each_law_can_be_broken(changed, law):
    guilty = Seen(WELL | {"fault": True}, finished=True)
    world = [Seen(WELL | changed, finished=True), Seen(WELL, finished=True), guilty]
    assert [*chaos.broken_laws(KILL, [*world, Seen(WELL, finished=True)])] == ([law] if law else [])


def test_a_process_that_ends_or_hangs_is_noticed():
    well = [Seen(WELL | {"fault": True}, finished=True)] * 3
    ended = chaos.broken_laws(KILL, [*well, Seen({}, status=6, finished=True)])
    assert re.match("rank 3 ended with status 6", ended["survives"])
    assert "did not end" in chaos.broken_laws(KILL, [*well, Seen({})])["survives"]
