"""The stand-in for NCCL: that it keeps its rules, and that each rule stands in torch's sources."""

import os
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.support import ROOT, forked, nccl_rules
from tests.support.forked import from_all, join, on_ranks
from tests.support.nccl_rules import ALL, DEVICE, OWN, RULES, SENDS

SOURCES = sorted(ROOT.glob(".cache/torch/*/lib/python*/site-packages/torch"))


def readable():
    folder = Path(torch.__file__).parent
    yield torch.__version__, folder
    for source in SOURCES:
        yield source.parents[3].name, source


@pytest.mark.parametrize(("release", "folder"), readable(), ids=lambda value: str(value)[-12:])
def test_each_rule_stands_in_the_files_of_torch(release, folder):
    rules = [*RULES.values(), *(sends.source for sends in SENDS.values())]
    line = tuple(map(int, release.split(".")[:2]))
    assert all(rule.words for rule in rules)
    installed = ("include/", "distributed/")
    if (folder / "../nvidia/nccl").exists():
        installed += ("../nvidia/",)
    checked = [r for r in rules if r.since <= line <= r.until and r.file.startswith(installed)]
    assert [rule for rule in checked if not nccl_rules.stands_in(rule, str(folder))] == []
    assert len(checked) >= 11


def hangs(call):
    """Whether a call in a thread of its own has not returned after a while."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.5)
    return thread.is_alive()


def start(rank, world, **options):
    nccl_rules.register(**options)
    join(rank, world, backend=nccl_rules.NAME)
    return dist.group.WORLD


@on_ranks(2, backend="")
def test_wait_blocks_no_cpu_and_kernels_that_are_aborted_raise_nothing(rank):
    world = start(rank, 2)
    total = torch.ones(1)
    dist.all_reduce(total)
    DEVICE.synchronize()
    assert total.item() == 2
    if rank == 0:
        dist.all_reduce(total)  # returns: it orders the stream
        assert hangs(DEVICE.synchronize)
        world.abort()
        DEVICE.synchronize()
        with pytest.raises(dist.DistBackendError, match="was aborted"):
            dist.all_reduce(total)
    from_all(None)


@on_ranks(2, backend="")
def test_connecting_has_no_limit_but_for_one_that_does_not_block(rank):
    world = start(rank, 2)
    assert not world._is_initialized()
    if rank == 0:
        assert hangs(lambda: dist.all_reduce(torch.ones(1)))
        os.environ.update(TORCH_NCCL_USE_COMM_NONBLOCKING="1", TORCH_NCCL_NONBLOCKING_TIMEOUT="1")
        with pytest.raises(dist.DistBackendError, match="timeout"):
            dist.all_reduce(torch.ones(1))
    from_all(None)


@on_ranks(3, backend="")
def test_a_split_needs_every_rank_holds_the_parents_lock_and_goes_by_colour(rank):
    world = start(rank, 3, kind="nccl, bound")
    world.bound_device_id = torch.device("cpu", 0)
    world.eager_connect_single_device(world.bound_device_id)
    split = world.split_group([0, 1], group_name="a")
    assert (split is None) == (rank == 2)
    with mock.patch.object(c10d, "_process_group_color", return_value=7):
        merged = world.split_group([[0, 1], [2]][rank // 2], group_name="b" + str(rank // 2))
    summand = torch.ones(1)
    merged.allreduce([summand]).wait()
    DEVICE.synchronize()
    assert merged.size() < summand.item() == 3
    from_all(None)
    if rank == 0:
        thread = threading.Thread(target=world.split_group, args=([0, 1],), daemon=True)
        thread.start()
        time.sleep(0.2)
        assert hangs(world.abort)
    from_all(None)


@on_ranks(2, backend="")
def test_an_abort_waits_for_the_kernels_of_other_groups(rank):
    world = start(rank, 2)
    other = dist.new_group([0, 1])
    for group in (world, other):
        dist.all_reduce(torch.ones(1), group=group)
    DEVICE.synchronize()
    from_all(None)
    if rank == 0:
        for group in (world, other):
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
        time.sleep(0.1)
        first = threading.Thread(target=world.abort)
        first.start()
        first.join(0.5)
        assert first.is_alive()
        other.abort()
        first.join()
    from_all(None)


@on_ranks(2, backend="")
def test_suspend_waits_for_all_members_and_needs_a_communicator(rank):
    world = start(rank, 2)
    with pytest.raises(RuntimeError, match="not initialized"):
        world.suspend()
    dist.barrier()
    if rank == 0:
        assert hangs(world.suspend)
    from_all(None)


@pytest.mark.parametrize("kind", SENDS)
@on_ranks(4, backend="")
def test_sends_have_the_communicator_of_the_matrix(rank, kind):
    world = start(rank, 4, kind=kind)
    if "bound" in kind.split() or kind == "nccl2":
        world.eager_connect_single_device(torch.device("cpu", 0))
    payload = torch.ones(1)

    def exchange():
        if rank < 2:
            (dist.send if rank == 0 else dist.recv)(payload, 1 - rank)
            DEVICE.synchronize()

    sends = SENDS[kind]
    if sends.unbatched == ALL:
        first = threading.Thread(target=exchange)
        first.start()
        first.join(0.5)
        assert first.is_alive() == (rank < 2)
        from_all(None)
        if rank > 1:
            world.communicator()
        first.join()
    else:
        exchange()
        keys = set(world.communicators)
        assert keys == ({"all"} if sends.unbatched == OWN else {"0:1"} if rank < 2 else set())
    with world.batched():
        world.communicator()
        exchange()
    assert "all" in world.communicators
    from_all(None)


def _outlives(rank, handling):
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = handling
    world = start(rank, 2)
    dist.all_reduce(torch.ones(1))
    DEVICE.synchronize()
    from_all(None)
    if rank == 0:
        world.timeout /= 100_000
        dist.all_reduce(torch.ones(1))
        time.sleep(1)
    from_all(None)


@pytest.mark.parametrize(("handling", "ends"), [("0", False), ("2", False), ("3", True)])
def test_the_watchdog_ends_the_process_unless_it_is_told_not_to(handling, ends):
    if not ends:
        forked.run_ranks(2, _outlives, handling, backend="")
        return
    with pytest.raises(forked.RankFailure, match=f"rank 0 ended with status {134 << 8}"):
        forked.run_ranks(2, _outlives, handling, backend="")
