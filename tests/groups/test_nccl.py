"""Promises where NCCL is less kind than gloo, on the stand-in with its rules."""

import os
import threading
import time
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import hypergrid
from compat import parallel_state as ps
from hypergrid import AbortedError, HyperCommGrid
from tests.support import nccl_rules
from tests.support.forked import from_all, on_ranks, open_groups
from tests.support.nccl_rules import DEVICE, HAVE_PAIRS, start


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
    world = start(rank, 2)
    ps.initialize_model_parallel(create_gloo_process_groups=False)
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
    for getter in (ps.get_data_parallel_group, ps.get_context_parallel_world_size):
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
    start(rank, 2, kind="nccl2")
    ps.initialize_model_parallel(create_gloo_process_groups=False)
    used_groups()[1].abort_as_the_watchdog_does()
    with pytest.raises(AbortedError, match="or NCCL's watchdog"):
        hypergrid.raise_if_aborted()


@pytest.mark.parametrize("kind", ["nccl, unbound", "nccl, bound", "nccl2", "nccl-lazy"])
@on_ranks(2, backend="")
def test_eager_connects_the_pipeline_but_not_unbatched_sends_that_have_own_pairs(rank, kind):
    start(rank, 2, kind=kind)
    ps.initialize_model_parallel(1, 2, connect="eager", create_gloo_process_groups=False)
    group = ps.get_pipeline_model_parallel_group()
    activation = torch.ones(1)
    assert {*group.communicators} == {"all"}
    for batched in (True, False):
        group.batching = batched
        (dist.send if rank == 0 else dist.recv)(activation, 1 - rank, group)
        DEVICE.synchronize()
        pair = {"0:1"} if kind in HAVE_PAIRS and not batched else set()
        assert {*group.communicators} == {"all"} | pair
    from_all(None)


@on_ranks(3, backend="")
def test_a_rank_that_fails_before_its_split_fails_all_if_connecting_does_not_block(rank):
    start(rank, 3, kind="nccl, bound")
    os.environ.update(TORCH_NCCL_USE_COMM_NONBLOCKING="1", TORCH_NCCL_NONBLOCKING_TIMEOUT="3")
    connect = nccl_rules.Group.eager_connect_single_device
    if rank == 1:
        connect = mock.Mock(side_effect=MemoryError("this rank's own"))
    splits = mock.patch.object(nccl_rules.Group, "eager_connect_single_device", connect)
    with splits, pytest.raises((hypergrid.CreationError, MemoryError)) as caught:
        ps.initialize_model_parallel(creation="split", create_gloo_process_groups=False)
    assert (caught.type is MemoryError) == (rank == 1)
    assert rank == 1 or "NCCL timeout" in str(caught.value) or "rank 1" in str(caught.value)
    assert {*open_groups()} == {dist.group.WORLD}
    from_all(None)


@on_ranks(2, backend="")
def test_what_cannot_connect_is_a_creation_error_on_all(rank):
    start(rank, 2)
    os.environ["HYPERGRID_CONNECT"] = "eager"
    barrier = nccl_rules.Group.barrier
    if rank == 1:
        barrier = mock.Mock(side_effect=RuntimeError("no route"))
    with (
        mock.patch.object(nccl_rules.Group, "barrier", barrier),
        pytest.raises(hypergrid.CreationError, match=r"rank 1 could not create tp .*no route"),
    ):
        HyperCommGrid([2], ["tp"]).create_pg("tp", timeout=timedelta(seconds=3))
