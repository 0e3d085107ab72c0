"""Promises where NCCL is less kind than gloo, on the stand-in with its rules."""

import os
import threading
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import hypergrid
from compat import parallel_state as ps
from hypergrid import AbortedError, HyperCommGrid
from hypergrid.groups.suspension import Suspended
from tests.support import nccl_rules
from tests.support.backends import SPLITS
from tests.support.forked import from_all, join, on_ranks, open_groups
from tests.support.nccl_rules import DEVICE, PAIR, SENDS


def start(rank, world, life=0, **options):
    if life == 0:
        nccl_rules.register(**options)
    join(rank, world, life, backend=nccl_rules.NAME)


def used_groups():
    """This rank's groups of several ranks; they and the default group are used once."""
    groups = [pooled.group for pooled in ps.current_state().pool.groups if pooled.group.size() > 1]
    for group in [dist.group.WORLD, *groups]:
        dist.all_reduce(torch.ones(1), group=group)
    DEVICE.synchronize()
    from_all(None)
    return groups


@on_ranks(2, backend="")
def test_an_abort_ends_all_groups_at_the_same_time(rank):
    start(rank, 2)
    ps.initialize_model_parallel(create_gloo_process_groups=False)
    groups = used_groups()
    assert len(groups) >= 6
    if rank == 0:
        for group in [*groups, dist.group.WORLD]:
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
        freed = threading.Thread(target=DEVICE.synchronize)
        freed.start()
        begin = time.monotonic()
        with warnings.catch_warnings(action="error"):
            hypergrid.abort(default=True)
        assert time.monotonic() - begin < 3
        freed.join(1)
        assert not freed.is_alive() and not DEVICE.running
        assert not dist.is_initialized() and not open_groups() and not c10d._world.tags_to_pg
    from_all(None)


@on_ranks(2, backend="")
def test_what_abort_cannot_end_in_time_is_named_unregistered_and_left_to_the_next(rank):
    start(rank, 2)
    ps.initialize_model_parallel(create_gloo_process_groups=False)
    world = dist.group.WORLD
    groups = used_groups()
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)  # not ours: its kernel holds up our aborts
        dist.all_reduce(torch.ones(1), group=groups[0], async_op=True)
        with pytest.warns(RuntimeWarning, match="could not abort DATA_PARALLEL_GROUP: its abort"):
            hypergrid.abort(timeout=timedelta(seconds=1))
        assert {*open_groups()} == {world} and not ps.model_parallel_is_initialized()
        with warnings.catch_warnings(action="error"):
            hypergrid.abort(default=True)
        assert not DEVICE.running and not open_groups()
        assert hypergrid.abort(default=True) == ((), 0)
    from_all(None)


@on_ranks(2, backend="")
def test_after_an_abort_the_step_is_refused_until_there_are_new_groups(rank):
    start(rank, 2)
    hypergrid.raise_if_aborted()
    ps.initialize_model_parallel(create_gloo_process_groups=False)
    group = ps.get_data_parallel_group()
    used_groups()
    hypergrid.raise_if_aborted()
    gpu = mock.patch.multiple(
        torch.accelerator, is_available=lambda: True, current_stream=lambda: DEVICE
    )
    if rank == 0:
        gradient = torch.ones(1)
        dist.all_reduce(gradient, group=group)  # raises nothing, and is never done
        threading.Timer(0.5, hypergrid.abort, kwargs={"default": True}).start()
        with gpu, pytest.raises(AbortedError, match="load the last checkpoint"):
            hypergrid.raise_if_aborted()  # waits for the device first
        assert gradient.item() == 1
    else:
        hypergrid.abort(default=True)
    while dist.is_initialized():
        time.sleep(0.01)
    for getter in (
        ps.get_data_parallel_group,
        ps.get_tensor_model_parallel_rank,
        ps.get_context_parallel_world_size,
        ps.get_expert_model_parallel_rank,
    ):
        with pytest.raises(AbortedError, match=r"hypergrid.abort\(\) has ended") as caught:
            getter()
        assert isinstance(caught.value, AssertionError)
    assert not ps.model_parallel_is_initialized() and not ps.is_initialized()
    assert ps.get_tensor_model_parallel_group(check_initialized=False) is None
    from_all(None)
    start(rank, 2, life=1)
    with pytest.raises(AbortedError):
        hypergrid.raise_if_aborted()
    ps.initialize_model_parallel(create_gloo_process_groups=False)
    hypergrid.raise_if_aborted()
    assert ps.get_context_parallel_world_size() == 1
    ps.destroy_model_parallel()
    with pytest.raises(AssertionError, match="Call initialize_model_parallel"):
        ps.get_data_parallel_group()
    from_all(None)


@on_ranks(2, backend="")
def test_a_group_that_the_watchdog_has_aborted_is_noticed_where_torch_tells(rank):
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    start(rank, 2, kind="nccl2")
    ps.initialize_model_parallel(create_gloo_process_groups=False)
    group = used_groups()[1]
    if rank == 0:
        group.timeout /= 100_000
        dist.all_reduce(torch.ones(1), group=group)
        DEVICE.synchronize()
        with pytest.raises(AbortedError, match="or NCCL's watchdog"):
            hypergrid.raise_if_aborted()
    from_all(None)


@pytest.mark.parametrize("suspends", [False, True])
@on_ranks(4, backend="")
def test_suspend_ends_alike_on_all_ranks_also_on_those_that_used_no_communicator(rank, suspends):
    start(rank, 4)
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    tp = grid.create_pg("tp")
    if rank < 2:
        dist.all_reduce(torch.ones(1), group=tp)
        DEVICE.synchronize()
    with mock.patch.object(nccl_rules, "SUSPENDS", suspends):
        if suspends:
            report = grid.suspend()
            assert report == {"nccl_rules": Suspended("native", int(rank < 2), 1000 * (rank < 2))}
            grid.resume()
        else:
            with pytest.raises(RuntimeError, match=r"could not suspend tp.*requires NCCL 2\.29\.7"):
                grid.suspend()
    assert grid.get_pg("tp") is tp
    total = torch.ones(1)
    dist.all_reduce(total, group=tp)
    DEVICE.synchronize()
    assert total.item() == 2
    from_all(None)


def by_splits():
    ps.initialize_model_parallel(creation="split", create_gloo_process_groups=False)


def bind(world):
    """As ``init_process_group(device_id=...)`` does, which connects it."""
    world.bound_device_id = torch.device("cpu", 0)
    world.eager_connect_single_device(world.bound_device_id)


@SPLITS
@on_ranks(2, backend="")
def test_each_split_has_its_own_options_so_that_no_timeout_changes_another_groups(rank):
    start(rank, 2, kind="nccl, bound")
    world = dist.group.WORLD
    bind(world)
    shared = nccl_rules.Options()
    with HyperCommGrid([2], ["dp"]).two_phase_commit({"groups over": "all"}) as pool:
        pool.agreement = replace(pool.agreement, way="split", unsplit_way="split")
        for minutes in (1, 2, 3, 4):
            options = {"timeout": timedelta(minutes=minutes)}
            if minutes > 2:
                options["pg_options"] = shared
            pool.make(f"{minutes}", {"": (0, 1)}, lambda: [(0, 1)], **options)
    for minutes, pooled in enumerate(pool.groups, start=1):
        assert pooled.group.options._timeout == timedelta(minutes=minutes)
        assert pooled.group.options.group_name == pooled.group.group_name
    assert world.options._timeout == timedelta(minutes=30) and shared.group_name == ""
    from_all(None)


@pytest.mark.parametrize("kind", SENDS)
@on_ranks(2, backend="")
def test_eager_connects_the_pipeline_but_not_unbatched_sends_that_have_own_pairs(rank, kind):
    start(rank, 2, kind=kind)
    ps.initialize_model_parallel(1, 2, connect="eager", create_gloo_process_groups=False)
    group = ps.get_pipeline_model_parallel_group()
    activation = torch.ones(1)
    assert {*group.communicators} == {"all"}
    for batched in (True, False):
        with group.batched() if batched else nullcontext():
            (dist.send if rank == 0 else dist.recv)(activation, 1 - rank, group)
        DEVICE.synchronize()
        pair = {"0:1"} if SENDS[kind].unbatched == PAIR and not batched else set()
        assert {*group.communicators} == {"all"} | pair
    from_all(None)


@SPLITS
@on_ranks(3, backend="")
def test_a_rank_that_fails_before_its_split_fails_all_if_connecting_does_not_block(rank):
    start(rank, 3, kind="nccl, bound")
    bind(dist.group.WORLD)
    os.environ.update(TORCH_NCCL_USE_COMM_NONBLOCKING="1", TORCH_NCCL_NONBLOCKING_TIMEOUT="3")
    split_group = nccl_rules.Group.split_group
    if rank == 1:
        split_group = mock.Mock(side_effect=MemoryError("this rank's own"))
    splits = mock.patch.object(nccl_rules.Group, "split_group", split_group)
    with splits, pytest.raises((hypergrid.CreationError, MemoryError)) as caught:
        by_splits()
    assert (caught.type is MemoryError) == (rank == 1)
    assert rank == 1 or "NCCL timeout" in str(caught.value) or "rank 1" in str(caught.value)
    assert {*open_groups()} == {dist.group.WORLD}
    from_all(None)


@on_ranks(2, backend="")
def test_a_rank_that_is_stuck_in_a_split_holds_up_no_abort_beyond_its_limit(rank):
    start(rank, 2, kind="nccl, bound")
    world = dist.group.WORLD
    world.bound_device_id = torch.device("cpu", 0)
    world.eager_connect_single_device(world.bound_device_id)
    if rank == 0:
        stuck = threading.Thread(target=world.split_group, args=([0, 1],), daemon=True)
        stuck.start()
        time.sleep(0.2)
        with pytest.warns(RuntimeWarning, match="could not abort the default group"):
            hypergrid.abort(default=True, timeout=timedelta(seconds=1))
        assert not dist.is_initialized()
        from_all(None)  # the other rank splits too, which lets go of the lock
        stuck.join(5)
        with warnings.catch_warnings(action="error"):
            hypergrid.abort()
    else:
        from_all(None)
        world.split_group([0, 1])
    from_all(None)


@SPLITS
@on_ranks(2, backend="")
def test_if_connecting_blocks_a_rank_waits_in_its_split_and_no_abort_ends_the_wait(rank):
    start(rank, 2, kind="nccl, bound")
    bind(dist.group.WORLD)
    if rank == 0:
        waits = threading.Thread(target=by_splits, daemon=True)
        waits.start()
        threading.Thread(target=from_all, args=(None,), daemon=True).start()
        waits.join(1)
        with pytest.warns(RuntimeWarning, match="could not abort the default group"):
            hypergrid.abort(default=True, timeout=timedelta(seconds=1))
        waits.join(1)
        assert waits.is_alive()
    else:
        with mock.patch.object(nccl_rules.Group, "split_group", lambda *_, **__: time.sleep(8)):
            threading.Thread(target=by_splits, daemon=True).start()
            from_all(None)
            time.sleep(4)
