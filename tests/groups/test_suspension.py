"""Suspended groups: kept, suspended by their backend, or closed and created anew."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from compat.state import ParallelState
from hypergrid import AgreementError, HyperCommGrid
from hypergrid.groups.suspension import Suspended
from tests.support import backends
from tests.support.forked import descriptors, join, on_ranks, open_groups, total

KEPT = {"gloo": Suspended("keep", 2, 0)}


def _text(use, kind=Exception):
    with pytest.raises(kind) as caught:
        use()
    return str(caught.value)


@on_ranks(4)
def test_groups_of_gloo_are_kept_open_and_are_the_same_objects(rank):
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    tp, dp = grid.create_pg("tp"), grid.create_pg("dp")
    assert grid.suspend() == KEPT
    assert grid.get_pg("tp") is tp and total(tp) == 2
    assert "suspended already" in _text(grid.suspend, RuntimeError)
    assert "are suspended. Call resume()" in _text(lambda: grid.create_pg("tp-dp"), RuntimeError)
    assert grid.resume() == {tp.group_name: tp, dp.group_name: dp}
    assert "no suspended groups" in _text(grid.resume, RuntimeError)
    assert grid.create_pg("tp-dp").size() == 4
    grid.suspend()
    grid.destroy()
    assert "no groups to suspend" in _text(grid.suspend, RuntimeError)
    assert grid.create_pg("tp").size() == 2


@on_ranks(4)
def test_closed_groups_are_created_again_and_the_old_ones_say_so(rank):
    start = descriptors()
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    tp, dp = grid.create_pg("tp"), grid.create_pg("dp", group_desc="mine")
    assert grid.suspend("recreate") == {"gloo": Suspended("recreate", 2)}
    assert grid.groups == {} and len(open_groups()) == 1
    assert "call resume() on every rank" in _text(lambda: grid.get_pg("tp"), RuntimeError)
    renewed = grid.resume()
    assert renewed == {tp.group_name: grid.get_pg("tp"), dp.group_name: grid.get_pg("dp")}
    assert grid.get_pg("dp").group_desc == "mine" and total(grid.get_pg("tp")) == 2
    says = "tp, closed by suspend(): use the group that resume() returned under the name"
    one = torch.ones(1)
    for use in (
        lambda: dist.all_reduce(one, group=tp),
        lambda: dist.all_gather([one, one], one, group=tp),
        lambda: dist.barrier(tp),
        lambda: dist.all_gather_object([None, None], 1, tp),
        lambda: dist.reduce_scatter_tensor(one, torch.ones(2), group=tp),
        lambda: dist.get_rank(tp),
    ):
        assert f"{says} {tp.group_name!r}" in _text(use, RuntimeError)
    for use in (  # to which torch translates a global rank
        lambda: dist.broadcast(one, 0, tp),
        lambda: dist.send(one, 0, tp),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, one, 0, tp)]),
    ):
        assert "is not registered" in _text(use, ValueError)
    renewed = use = tp = dp = None
    grid.destroy()
    assert descriptors(at_most=start) == start


@on_ranks(4)
def test_a_backend_that_suspends_is_called_in_one_order_and_the_objects_stay(rank):
    calls, made = [], []
    backends.native(calls, made, lambda number: number == 1 and "NCCL communicator not initialized")
    grid = HyperCommGrid([2, 2], ["tp", "dp"], backend="native")
    groups = [grid.create_pg(dims) for dims in ("tp", "dp", "tp-dp")]
    extra = HyperCommGrid([4], ["all"], backend="gloo")
    extra.create_pg("all")
    assert grid.suspend() == {"native": Suspended("native", 2, 2000)}
    assert calls == [("suspend", 0), ("suspend", 2)]
    assert "call resume()" in _text(lambda: grid.get_pg("tp"), RuntimeError)
    assert grid.get_pg("dp") is groups[1]  # it has no memory
    assert grid.resume() == {group.group_name: group for group in groups}
    assert calls[2:] == [("resume", 0), ("resume", 2)]
    assert [grid.get_pg(dims) for dims in ("tp", "dp", "tp-dp")] == groups
    assert total(groups[0]) == 2 and len(made) == 3


@on_ranks(4)
def test_a_first_refusal_means_unsupported_and_changes_nothing_a_later_is_an_error(rank):
    calls, made, broken = [], [], {0}
    backends.native(calls, made, lambda number: number in broken and "out of order")
    grid = HyperCommGrid([2, 2], ["tp", "dp"], backend="native")
    tp, dp = grid.create_pg("tp"), grid.create_pg("dp")
    text = _text(lambda: grid.suspend("native"), RuntimeError)
    assert text == f"rank {rank} could not suspend tp with native: RuntimeError: out of order."
    assert calls == [] and grid.get_pg("tp") is tp and grid.pool.suspended is None
    broken.symmetric_difference_update({0, 1})
    text = _text(grid.suspend, RuntimeError)
    assert "could not suspend dp" in text and "1 others are suspended: call resume()" in text
    assert grid.resume()[tp.group_name] is tp and calls == [("suspend", 0), ("resume", 0)]
    broken.symmetric_difference_update({0, 1})
    assert grid.suspend() == {"native": Suspended("recreate", 2)}
    assert grid.resume()[dp.group_name] is grid.get_pg("dp") is not dp
    assert "allowed: auto, native" in _text(lambda: grid.suspend("never"), ValueError)
    assert grid.suspend("keep") == {"native": Suspended("keep", 2)}


@on_ranks(4)
def test_a_rank_that_fails_is_an_error_on_all_and_resume_wakes_what_is_suspended(rank):
    calls = []
    backends.native(calls, [], lambda number: (rank, number) == (2, 1) and "out of order")
    grid = HyperCommGrid([2, 2], ["tp", "dp"], backend="native")
    tp, dp = grid.create_pg("tp"), grid.create_pg("dp")
    text = _text(grid.suspend, (RuntimeError, AgreementError))
    assert "rank 2 could not suspend dp" in text and (rank == 2 or "refused" in text)
    assert calls == [("suspend", 0), ("suspend", 1)][: 1 + (rank != 2)]
    assert grid.resume() == {tp.group_name: tp, dp.group_name: dp}
    assert len(calls) == 2 + 2 * (rank != 2) and total(tp) == 2


@on_ranks(4)
def test_a_group_that_sleeps_is_woken_before_all_are_closed_because_of_another(rank):
    calls = []
    backends.native(calls, [])
    backends.register("plain", [])
    grid = HyperCommGrid([2, 2], ["tp", "dp"], backend="native")
    tp, world = grid.create_pg("tp"), tuple(range(4))
    with grid.agreed({"groups over": "all"}) as pool:
        pool.make("all", {"all": world}, lambda: [world], backend="plain")
    report = grid.suspend()
    assert calls == [("suspend", 0), ("resume", 0)]
    assert report == {kind: Suspended("recreate", 1) for kind in ("native", "plain")}
    assert grid.resume()[tp.group_name] is grid.get_pg("tp") is not tp
    assert total(grid.get_pg("tp")) == 2


@on_ranks(4, backend="")
def test_if_one_backend_cannot_suspend_all_are_created_again_gloos_groups_too(rank):
    backends.register("plain", [])
    join(rank, 4, backend="plain")
    state = ParallelState.create(tensor_model_parallel_size=2)
    extra = state.grid.create_pg("tp-pp-dp", group_desc="mine")
    twin, tp = state.get_data_parallel_group_gloo(), state.get_tensor_model_parallel_group()
    text = _text(lambda: state.suspend("native"), RuntimeError)
    assert "could not suspend" in text and state.get_tensor_model_parallel_group() is tp
    for _ in range(2):
        listed = len(state._global_process_group_list)
        report = state.suspend()
        assert report["gloo"].how == report["plain"].how == "recreate"
        assert len(open_groups()) == 1
        for get in (state.get_data_parallel_group_gloo, state.get_tensor_model_parallel_group):
            assert "suspended: call resume()" in repr(get())
        with mock.patch("torch.distributed.new_group", side_effect=MemoryError):
            _text(state.resume, MemoryError)
        assert len(open_groups()) == 1 and "suspended" in repr(state)
        renewed = state.resume()
        assert len(state._global_process_group_list) == listed
        assert renewed[twin.group_name] is state.get_data_parallel_group_gloo() is not twin
        assert renewed[tp.group_name] is state.get_tensor_model_parallel_group() is not tp
        assert renewed[extra.group_name] is state.grid.get_pg("tp-pp-dp") is not extra
        tp, extra, twin = (renewed[each.group_name] for each in (tp, extra, twin))
        assert total(tp) == 2 and total(extra) == 4 and total(twin) == 2
        assert tp in state._global_process_group_list
    state.destroy()
    assert len(open_groups()) == 1


@on_ranks(4, backend="")
def test_a_native_state_has_placeholders_meanwhile_and_then_the_same_groups(rank):
    calls, made = [], []
    backends.native(calls, made)
    join(rank, 4, backend="native")
    state = ParallelState.create(tensor_model_parallel_size=2)
    tp, mp = state.get_tensor_model_parallel_group(), state.get_model_parallel_group()
    listed = [*state._global_process_group_list]
    for how in ("auto", "native"):
        calls.clear()
        report = state.suspend(how)
        assert report["native"].how == "native" and report["gloo"].how == "keep"
        assert report["native"].freed == 1000 * report["native"].communicators == 1000 * len(calls)
        assert "was used while it is suspended" in _text(
            lambda: state.get_tensor_model_parallel_group().size(), RuntimeError
        )
        assert state.get_tensor_model_parallel_rank() == rank % 2
        renewed = state.resume()
        assert renewed[tp.group_name] is tp is state.get_tensor_model_parallel_group()
        assert state.get_model_parallel_group() is mp and total(tp) == 2
        assert state._global_process_group_list == listed
        half = len(calls) // 2
        assert [number for _, number in calls[:half]] == [number for _, number in calls[half:]]
    state.destroy()
    assert len(open_groups()) == 1
