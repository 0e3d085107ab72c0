"""A group of one rank has no communicator and no share in a split, until it is used."""

from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from compat import parallel_state as ps
from hypergrid import HyperCommGrid, of_torch
from hypergrid.groups.creation import expected
from hypergrid.policy import Policy
from tests.support import nccl_rules
from tests.support.backends import register
from tests.support.forked import from_all, join, on_ranks, total
from tests.support.nccl_rules import DEVICE, start

WAYS = pytest.mark.parametrize("way", ["split", "everyone"])
CUDA = torch.device("cuda", 0)


def connected(groups):
    return [len(pooled.group.communicators) for pooled in groups]


@WAYS
@pytest.mark.parametrize("connect", ["torch", "eager", "lazy"])
@on_ranks(4, backend="")
def test_beside_a_bound_default_group_only_groups_of_several_ranks_connect(rank, connect, way):
    world = start(rank, 4, kind="nccl, bound")
    ps.initialize_model_parallel(
        2, 2, connect=connect, creation=way, create_gloo_process_groups=False
    )
    pool = ps.current_state().pool
    alone = [pooled for pooled in pool.groups if len(pooled.ranks) == 1]
    several = [pooled for pooled in pool.groups if len(pooled.ranks) > 1]
    assert pool.agreement.way == way
    assert len(alone) >= 5 and {*connected(alone)} == {0}
    assert len(several) >= 10 and {*connected(several)} == {1}
    splits = from_all(world.splits)
    assert len({*splits}) == 1
    if way == "split":  # one for each name
        assert splits[0] == len(several)


@WAYS
@on_ranks(4, backend="")
def test_a_rank_alone_beside_a_group_of_others_takes_part_in_their_split_only(rank, way):
    world = start(rank, 4, kind="nccl, bound")
    groups = [(0, 1), (2,), (3,)]
    own = next(ranks for ranks in groups if rank in ranks)
    with HyperCommGrid([4], ["dp"]).two_phase_commit({"groups over": "all"}) as pool:
        pool.agreement = replace(pool.agreement, creation=way)
        pool.make("A", {"A": own}, lambda: groups)
    assert world.splits == 1 and connected(pool.groups) == [int(rank < 2)]
    assert nccl_rules.total(pool.groups[0].group) == len(own)


@on_ranks(2, backend="")
def test_what_is_sent_over_it_arrives_and_it_is_the_group_that_was_asked_for(rank):
    world = start(rank, 2, kind="nccl, bound")
    options = nccl_rules.Options()
    asked = {"timeout": timedelta(minutes=7), "group_desc": "mine", "pg_options": options}
    with HyperCommGrid([2], ["dp"]).two_phase_commit({"groups over": "all"}) as pool:
        pool.make("A", {"A": (rank,)}, lambda: [(0,), (1,)], **asked)
        pool.make("B", {"B": (rank,)}, lambda: [(0,), (1,)])
    group, other = (pooled.group for pooled in pool.groups)
    assert group is not other and group.group_name != other.group_name
    assert (group.group_desc, group.options._timeout) == ("mine", timedelta(minutes=7))
    assert options.group_name == ""  # it has a copy
    assert group.bound_device_id == world.bound_device_id == CUDA
    assert connected(pool.groups) == [0, 0]
    assert nccl_rules.total(group, 5) == 5
    dist.barrier(group)
    DEVICE.synchronize()
    assert connected(pool.groups) == [1, 0] and world.splits == 0
    from_all(None)


@on_ranks(2, backend="")
def test_with_two_backends_neither_half_connects_and_both_work(rank):
    parts = []
    calls = []
    register(
        "splitting",
        parts,
        devices=["cuda"],
        perform_nocolor_split=lambda self, device: calls.append("no color"),
        eager_connect_single_device=lambda self, device: calls.append("connect"),
    )
    join(rank, 2, backend="cpu:gloo,cuda:splitting")
    dist.group.WORLD.bound_device_id = CUDA
    assert expected(Policy()).way == "split"
    grid = HyperCommGrid([1, 2], ["tp", "dp"])
    group = grid.create_pg("tp", timeout=timedelta(minutes=7))
    assert calls == [] and dist.group.WORLD.bound_device_id == group.bound_device_id == CUDA
    assert [part.options._timeout for part in of_torch.parts_of(group)] == [
        timedelta(minutes=7)
    ] * 2
    assert total(group, 5) == 5  # gloo's half
    work = of_torch.part_of(group, CUDA).allreduce([torch.ones(1)])
    work.wait()
    several = grid.create_pg("dp")
    assert calls == ["connect"]
    # Torch itself gives each half of a split options of its own.
    of_gloo, of_cuda = of_torch.parts_of(several)
    assert of_gloo.options is not of_cuda.options


@on_ranks(2, backend="")
def test_the_default_group_is_bound_again_after_a_group_could_not_be_created(rank):
    world = start(rank, 2, kind="nccl, bound")
    with (
        mock.patch.object(nccl_rules.Group, "_set_group_desc", side_effect=MemoryError),
        pytest.raises(MemoryError),
    ):
        HyperCommGrid([1, 2], ["tp", "dp"]).create_pg("tp")
    assert world.bound_device_id == CUDA
    from_all(None)
