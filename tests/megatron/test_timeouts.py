"""One timeout for all groups of a job, and one that changes while groups are in use."""

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from compat.state import ParallelState
from hypergrid.policy import timeout_of_all
from tests.support import table
from tests.support.forked import on_ranks, total

# Megatron leaves the timeout of these to torch.
OWN = {"HYBRID_DP_CP_GROUP_2", "EXPERT_DATA_PARALLEL_GROUP_GLOO"}


def timeout_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout


def timeouts(state):
    return {pooled.label: timeout_of(pooled.group) for pooled in state.pool.groups}


def one_timeout(minutes):
    return mock.patch.dict("os.environ", HYPERGRID_TIMEOUT=minutes)


@on_ranks(4)
def test_one_timeout_is_that_of_all_groups_and_of_the_default_group(rank):
    arguments = {"hybrid_context_parallel": True, "distributed_timeout_minutes": 7}
    before = ParallelState.create(**arguments)
    own = {label: each for label, each in timeouts(before).items() if each.seconds != 7 * 60}
    assert set(own) == OWN
    with one_timeout("2.5"):
        state = ParallelState.create(**arguments)
    assert {*timeouts(state).values()} == {timedelta(seconds=150)}
    assert timeout_of(dist.group.WORLD) == timedelta(seconds=150)


@on_ranks(2)
def test_a_timeout_that_is_set_later_holds_from_the_next_operation_on(rank):
    state = ParallelState.create()
    group = state.get_data_parallel_group()
    total(group)
    state.set_timeout(0.05)
    assert {*timeouts(state).values()} == {timedelta(seconds=3)}
    assert timeout_of(dist.group.WORLD) != timedelta(seconds=3)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
            total(group)
    else:
        time.sleep(5)
    with pytest.raises(ValueError, match="minutes must be a number above 0"):
        state.set_timeout(0)
    state.destroy(abort=True)
    with pytest.raises(RuntimeError, match="there are no groups"):
        state.set_timeout(1)


@pytest.mark.parametrize(("value", "text"), table("megatron/refusals_of_timeouts.txt"))
def test_a_timeout_that_is_none_is_refused(value, text):
    with one_timeout(value), pytest.raises(ValueError, match="HYPERGRID_TIMEOUT") as caught:
        timeout_of_all()
    assert text in str(caught.value)


@on_ranks(2)
def test_the_report_names_the_groups_with_another_timeout(rank):
    from compat.report import report

    state = ParallelState.create(distributed_timeout_minutes=7)
    assert "timeout 0:07:00 of groups; torch's own 0:30:00 of EXPERT_DATA_PARALLEL" in report(state)
    with one_timeout("2"):
        state = ParallelState.create()
    assert "timeout 0:02:00 of groups, the default group included" in report(state)
