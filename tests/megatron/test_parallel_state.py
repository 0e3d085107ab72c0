"""compat.parallel_state: one state with upstream's names, in real and fake worlds."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import members_only
from compat import parallel_state as ps
from tests.support import table
from tests.support.forked import on_ranks, open_groups
from tests.support.groups import check_all_reduce, state_groups
from tests.support.stock import PUBLISHED

pytestmark = pytest.mark.usefixtures("clean_state")


@pytest.fixture
def initialized(fake_world):
    def start(world_size=8, rank=0, **arguments):
        fake_world(world_size, rank)
        arguments.setdefault("create_gloo_process_groups", False)
        ps.initialize_model_parallel(**arguments)

    return start


def layouts_of_eight():
    for (arguments,) in table("megatron/layouts_of_eight.txt"):
        of_newest = [pytest.mark.release(PUBLISHED[-1])] if "gtp_remat" in arguments else []
        yield pytest.param(arguments, marks=of_newest)


@pytest.mark.parametrize("arguments", layouts_of_eight())
@on_ranks(8)
def test_eight_real_ranks_pass_collectives_on_every_group(rank, arguments):
    ps.initialize_model_parallel(**eval(f"dict({arguments})"))
    check_all_reduce(rank)
    for group in state_groups().values():
        expected = dist.get_process_group_ranks(group).index(rank)
        assert (group.rank(), group.size()) == (expected, len(dist.get_process_group_ranks(group)))
    ps.destroy_model_parallel()
    assert len(open_groups()) == 1


@on_ranks(8, timeout=60)
def test_histories_that_differ_between_ranks_neither_hang_nor_cross_talk(rank):
    # Groups of its own, made between and before, must not change what others call theirs.
    if rank in (2, 3):
        dist.new_group([2, 3], use_local_synchronization=True)
    if rank in (0, 5, 7):
        dist.new_group([0, 5, 7], use_local_synchronization=True)
        c10d._world.group_count += rank
    ps.initialize_model_parallel(2, 2)
    check_all_reduce(rank)
    ps.destroy_model_parallel()
    dist.barrier()
    ps.initialize_model_parallel(4)
    check_all_reduce(rank)


def test_a_rank_makes_only_the_groups_that_it_belongs_to(fake_world):
    fake_world(4096, rank=77)
    calls = []
    original = dist.new_group

    @members_only
    def new_group(ranks, **options):
        calls.append(ranks)
        return original(ranks, **options)

    with mock.patch("torch.distributed.new_group", new_group):
        ps.initialize_model_parallel(8, 4, create_gloo_process_groups=False)
    assert all(77 in ranks for ranks in calls)
    assert len(calls) == len(ps._global_process_group_list) - 1 < 25


def test_private_globals_read_and_write_through_to_the_state(initialized):
    initialized(tensor_model_parallel_size=2)
    state = ps.current_state()
    written = SimpleNamespace(rank=lambda: 6)  # not hashable
    ps._TENSOR_MODEL_PARALLEL_GROUP = written
    assert state.get_tensor_model_parallel_group() is written
    state._TENSOR_MODEL_PARALLEL_GROUP = SimpleNamespace(rank=lambda: 7)
    assert ps.get_tensor_model_parallel_rank() == 7
    del ps._TENSOR_MODEL_PARALLEL_GROUP
    assert not hasattr(state, "_TENSOR_MODEL_PARALLEL_GROUP")
    # Each call through the module would take twice as long, and Python names no similar name.
    assert "__getattr__" not in vars(ps)


def test_destroying_twice_or_after_torch_is_quiet(initialized):
    initialized()
    ps.destroy_model_parallel()
    ps.destroy_model_parallel()
    assert len(open_groups()) == 1
    initialized()
    dist.destroy_process_group()
    ps.destroy_model_parallel()
    assert not ps.is_initialized() and not open_groups()


def test_groups_that_a_caller_made_stay_the_callers(initialized):
    initialized()
    group = ps.create_group([0, 1], group_desc="MINE")
    assert ps._global_process_group_list[-1] is group
    ps.destroy_model_parallel()
    assert group in open_groups()
