"""Suspended groups: the same objects stay, on all ranks or on none."""

import time
from datetime import timedelta
from unittest import mock

import pytest

from compat.state import ParallelState
from hypergrid import AgreementError, HyperCommGrid
from hypergrid.groups.suspension import Suspended
from tests.support import backends
from tests.support.forked import join, on_ranks, open_groups, total


def refusal_of(call, kind=RuntimeError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@on_ranks(4)
def test_if_one_rank_cannot_all_raise_and_what_was_suspended_is_awake(rank):
    calls, broken = [], {(2, 1)}
    backends.native(calls, [], lambda number: (rank, number) in broken and "out of order")
    grid = HyperCommGrid([2, 2], ["tp", "dp"], backend="native")
    tp = grid.create_pg("tp")
    grid.create_pg("dp")
    text = refusal_of(grid.suspend, RuntimeError if rank == 2 else AgreementError)
    assert "rank 2 could not suspend dp with native: RuntimeError: out of order." in text
    assert "destroy them, and initialise again" in text
    suspended = [0] if rank == 2 else [0, 1]
    assert [number for operation, number in calls if operation == "suspend"] == suspended
    assert [number for operation, number in calls if operation == "resume"] == suspended
    assert grid.pool.suspended is None and grid.get_pg("tp") is tp and total(tp) == 2
    # All can try again.
    broken.clear()
    calls.clear()
    assert grid.suspend() == {"native": Suspended("native", 2, 2000)}
    assert "suspended already" in refusal_of(grid.suspend)
    assert "suspended. Call resume()" in refusal_of(lambda: grid.create_pg("tp-dp"))
    grid.resume()
    assert "are not suspended" in refusal_of(grid.resume)
    assert calls == [("suspend", 0), ("suspend", 1), ("resume", 0), ("resume", 1)]


@on_ranks(4)
def test_ranks_that_ask_for_different_things_say_so_before_a_group_is_suspended(rank):
    calls = []
    backends.native(calls, [])
    grids = []
    for dims in ("tp", "tp", "dp"):
        grids.append(HyperCommGrid([2, 2], ["tp", "dp"], backend="native"))
        grids[-1].create_pg(dims)
    for number_on_rank_3, says in (
        (1, "epoch is '0..3/1' on rank 3"),  # an equal label, and another group
        (2, "groups is 'dp' on rank 3 and 'tp' on rank 0"),
    ):
        grid = grids[number_on_rank_3 if rank == 3 else 0]
        assert says in refusal_of(grid.suspend, AgreementError)
        assert calls == [] and grid.pool.suspended is None


@on_ranks(2)
def test_a_group_that_one_rank_has_never_used_frees_nothing_there_and_is_no_error(rank):
    calls = []
    never_used = "NCCL communicator not initialized."  # torch's words
    backends.native(calls, [], lambda number: rank == 1 and never_used)
    grid = HyperCommGrid([2], ["dp"], backend="native")
    dp = grid.create_pg("dp")
    count = 1 - rank
    assert grid.suspend() == {"native": Suspended("native", count, 1000 * count)}
    grid.resume()
    assert len(calls) == 2 * count and total(dp) == 2


@on_ranks(2)
def test_a_backend_that_cannot_resume_is_an_error_and_resume_goes_on_with_it(rank):
    calls = []
    parts = []
    backends.native(calls, parts)
    grid = HyperCommGrid([2], ["dp"], backend="native")
    dp = grid.create_pg("dp")
    grid.suspend()
    with mock.patch.object(type(parts[0]), "resume", side_effect=RuntimeError("out of memory")):
        assert refusal_of(grid.resume) == "out of memory"
    assert grid.pool.suspended is not None
    grid.resume()
    assert calls == [("suspend", 0), ("resume", 0)] and total(dp) == 2


@on_ranks(4)
def test_ranks_without_a_group_of_some_labels_agree_with_those_that_have_one(rank):
    state = ParallelState.create(pipeline_model_parallel_size=4)
    assert (state._EMBEDDING_GROUP is not None) == (rank in (0, 3))
    state.create_all_gather_groups()
    state.grid.create_pg("tp-pp-dp")
    assert state.suspend()["gloo"].how == "keep"
    state.destroy()


@on_ranks(4, backend="")
def test_a_backend_without_suspension_is_an_error_on_all_and_the_groups_work_on(rank):
    backends.register("plain", [])
    join(rank, 4, backend="plain")
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    tp = grid.create_pg("tp")
    text = refusal_of(grid.suspend)
    assert "could not suspend tp" in text and "destroy them, and initialise again" in text
    assert grid.get_pg("tp") is tp and total(tp) == 2


@on_ranks(4, backend="")
def test_a_native_state_answers_with_the_same_groups_meanwhile_and_afterwards(rank):
    calls = []
    backends.native(calls, [])
    join(rank, 4, backend="native")
    state = ParallelState.create(tensor_model_parallel_size=2)
    other_state = ParallelState.create()
    groups = open_groups()
    tp = state.get_tensor_model_parallel_group()
    for _ in range(2):
        calls.clear()
        report = state.suspend()
        assert report["native"].how == "native" and report["gloo"].how == "keep"
        assert report["native"].freed == 1000 * report["native"].communicators == 1000 * len(calls)
        assert repr(state).endswith("ranks 0..3), suspended)")
        assert state.get_tensor_model_parallel_group() is tp and open_groups() == groups
        assert state.get_tensor_model_parallel_rank() == rank % 2
        assert total(state.get_data_parallel_group_gloo()) == 2
        assert "is not suspended" in refusal_of(other_state.resume)
        state.resume()
        assert state.get_tensor_model_parallel_group() is tp and total(tp) == 2
        suspended = [number for operation, number in calls if operation == "suspend"]
        resumed = [number for operation, number in calls if operation == "resume"]
        assert suspended == resumed
    state.suspend()
    state.destroy()
    assert "no groups to suspend" in refusal_of(state.suspend)


@on_ranks(2)
def test_a_rank_that_suspends_alone_waits_as_long_as_its_groups_do(rank):
    grid = HyperCommGrid([2], ["tp"])
    grid.create_pg("tp", timeout=timedelta(seconds=3))
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(AgreementError, match="1 of 2 ranks"):
            grid.suspend()
        assert time.monotonic() - start < 20
