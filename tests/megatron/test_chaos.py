"""One random fault at a random call; scripts/soak --only chaos tries 300 cases."""

import re

import pytest

from tests.support import chaos, table
from tests.support.chaos import Case, Seen


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


WELL = {"operation": [1.0, ""], "clean-up": 0.1, "left": {}, "end": True}
KILL = Case(4, "exception", "initialise", 2, 0.5, 2.0, False, 1)


@pytest.mark.parametrize(("changed", "law"), table("megatron/laws_of_chaos.txt"))
def test_each_law_can_be_broken(changed, law):
    guilty = Seen(WELL | {"fault": True}, finished=True)
    well = Seen(WELL, finished=True)
    world = [Seen(WELL | eval(changed), finished=True), well, guilty, well]
    broken = [*chaos.broken_laws(KILL, world)]
    assert broken == [name for name in [law] if name != "none"]


def test_a_process_that_ends_or_hangs_is_noticed():
    well = [Seen(WELL | {"fault": True}, finished=True)] * 3
    ended = chaos.broken_laws(KILL, [*well, Seen({}, status=6, finished=True)])
    assert re.match("rank 3 ended with status 6", ended["survives"])
    assert "did not end" in chaos.broken_laws(KILL, [*well, Seen({})])["survives"]
