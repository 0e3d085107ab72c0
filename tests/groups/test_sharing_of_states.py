"""States of equal layout that use one set of communicators, where the user asks for it."""

from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from compat.state import ParallelState
from hypergrid import AgreementError, CreationError, abort
from hypergrid.groups import creation
from tests.support import backends
from tests.support.forked import from_all, join, on_ranks, open_groups, total
from tests.support.groups import check_all_reduce

LAYOUT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def equal_states(count, share="states", **arguments):
    return [ParallelState.create(**LAYOUT, **arguments, share=share) for _ in range(count)]


def communicators(state):
    return {pooled.group for pooled in state.pool.groups}


def check_sums(state):
    assert total(state.get_tensor_model_parallel_group()) == 2
    assert total(state.get_data_parallel_group()) == 2
    assert total(state.get_data_parallel_group_gloo()) == 2
    assert total(state.get_pipeline_model_parallel_group()) == 2


@pytest.mark.parametrize("creation", ["members", "everyone"])
@on_ranks(8)
def test_three_equal_states_have_the_communicators_of_one(rank, creation):
    (alone,) = equal_states(1, share="all", creation=creation)
    count = len(communicators(alone))
    alone.destroy()
    before = len(open_groups())
    states = equal_states(3, creation=creation)
    assert len(open_groups()) == before + count
    for state in states:
        assert communicators(state) == communicators(states[0])
        check_sums(state)
    (apart,) = equal_states(1, share="all", creation=creation)
    assert not communicators(apart) & communicators(states[0])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@on_ranks(8)
def test_the_last_state_that_uses_a_communicator_closes_it(rank, order):
    before = len(open_groups())
    states = equal_states(3)
    count = len(open_groups())
    for place in order[:-1]:
        states[place].destroy()
        assert len(open_groups()) == count
        check_sums(states[order[-1]])
    (late,) = equal_states(1)  # which still shares, although the first owner went
    assert communicators(late) == communicators(states[order[-1]])
    late.destroy()
    states[order[-1]].destroy()
    assert len(open_groups()) == before


@on_ranks(8)
def test_states_of_different_layout_share_the_groups_that_are_equal(rank):
    (first,) = equal_states(1)
    other = ParallelState.create(tensor_model_parallel_size=2, share="states")
    assert other.get_tensor_model_parallel_group() is first.get_tensor_model_parallel_group()
    # Both have the same two neighbours, but another timeout is another communicator.
    patient = ParallelState.create(
        tensor_model_parallel_size=2, share="states", distributed_timeout_minutes=7
    )
    assert not communicators(patient) & communicators(first)
    assert first.get_data_parallel_group().size() == 2
    assert other.get_data_parallel_group().size() == 4
    check_all_reduce_of(other)
    first.destroy()
    check_all_reduce_of(other)


def check_all_reduce_of(state):
    with state.activate():
        check_all_reduce(dist.get_rank())


@on_ranks(4)
def test_a_rank_that_has_ended_an_earlier_state_says_so_on_all_ranks(rank):
    (first,) = equal_states(1)
    if rank == 2:
        first.destroy(abort=True)
    with pytest.raises(AgreementError) as caught:
        equal_states(1)
    (text,) = {*from_all(str(caught.value))}
    assert "states to share with, by epoch is None on rank 2 and '0..3/0' on rank 0" in text
    first.destroy(abort=True)
    (second,) = equal_states(1)
    check_sums_of_four(second)


def check_sums_of_four(state):
    assert total(state.get_tensor_model_parallel_group()) == 2
    assert total(state.get_pipeline_model_parallel_group()) == 2


@on_ranks(4)
def test_a_failed_creation_leaves_what_it_would_have_shared(rank):
    (first,) = equal_states(1)
    groups = open_groups()
    by_members = creation.by_members

    def failing(name, *arguments, **options):
        if name == "CONTEXT_PARALLEL_GROUP":
            raise RuntimeError("no memory")
        return by_members(name, *arguments, **options)

    with (
        mock.patch.object(creation, "by_members", failing),
        pytest.raises(CreationError, match="no memory"),
    ):
        ParallelState.create(tensor_model_parallel_size=2, context_parallel_size=2, share="states")
    assert open_groups() == groups
    check_sums_of_four(first)


@on_ranks(4)
def test_new_timeouts_stay_those_of_the_states_that_have_them(rank):
    first, _ = equal_states(2)
    with pytest.warns(
        RuntimeWarning, match="GROUP of ParallelState over .* and .* of ParallelState over"
    ):
        first.update_pg_timeout(timedelta(minutes=3), first.get_tensor_model_parallel_group())
    third, fourth = equal_states(2)
    assert not communicators(third) & communicators(first)
    assert communicators(fourth) == communicators(third)
    fourth.set_timeout(5)
    (fifth,) = equal_states(1)
    assert not communicators(fifth) & (communicators(first) | communicators(third))


@on_ranks(4, backend="")
def test_a_shared_group_sleeps_with_the_last_state_and_wakes_with_the_first(rank):
    calls = []
    backends.native(calls, [])
    join(rank, 4, backend="native")
    first, second = equal_states(2)
    assert "native" not in {
        name for name, report in first.suspend().items() if report.communicators
    }
    assert calls == []
    check_sums_of_four(second)
    assert second.suspend()["native"].communicators > 0
    slept = [number for _, number in calls]
    first.resume()
    assert [number for operation, number in calls if operation == "resume"] == slept
    check_sums_of_four(first)
    second.resume()
    assert len(calls) == 2 * len(slept)
    check_sums_of_four(second)


@on_ranks(4)
def test_a_state_whose_groups_sleep_lends_none(rank):
    (first,) = equal_states(1)
    first.suspend()
    (second,) = equal_states(1)
    assert not communicators(second) & communicators(first)


@on_ranks(2)
def test_abort_ends_a_shared_group_once_and_names_it_as_the_state_that_created_it(rank):
    states = [ParallelState.create(tensor_model_parallel_size=2, share="states")]
    # Of these the groups of tp are of one rank, as those of dp of the first state are.
    for _ in range(4):
        states.append(ParallelState.create(share="states"))
    created_for = []
    for state in states:
        for pooled in state.pool.groups:
            if pooled.shares is None:
                created_for.append(pooled.label)
    assert communicators(states[4]) & communicators(states[0])
    before = len(open_groups())
    assert sorted(abort().groups) == sorted(created_for)
    assert len(open_groups()) == before - len(created_for) == 1
    assert all(state.is_destroyed for state in states)
