"""compat.parallel_state: one state with upstream's names, in real and fake worlds."""

import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import members_only
from compat import parallel_state as ps
from tests.support import ROOT, table, warm
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
    fake = mock.Mock(rank=lambda: 5, size=lambda: 7)
    ps._TENSOR_MODEL_PARALLEL_GROUP = fake
    assert ps.get_tensor_model_parallel_group() is fake
    assert ps.get_tensor_model_parallel_rank() == 5
    assert ps.get_tensor_model_parallel_world_size() == 7
    assert state._TENSOR_MODEL_PARALLEL_GROUP is fake is state.get_tensor_model_parallel_group()
    state._TENSOR_MODEL_PARALLEL_GROUP = SimpleNamespace(rank=lambda: 6)  # not hashable
    assert ps.get_tensor_model_parallel_rank() == 6 == state.get_tensor_model_parallel_rank()
    del ps._TENSOR_MODEL_PARALLEL_GROUP
    assert not hasattr(state, "_TENSOR_MODEL_PARALLEL_GROUP")
    ps.set_tensor_model_parallel_rank(1)
    assert ps._MPU_TENSOR_MODEL_PARALLEL_RANK == 1 == ps.get_tensor_model_parallel_rank()
    with pytest.raises(AttributeError, match="_NO_SUCH_GROUP"):
        _ = ps._NO_SUCH_GROUP


def test_a_patched_getter_is_seen_by_the_getters_built_on_it(initialized):
    initialized(pipeline_model_parallel_size=4)
    assert ps.is_pipeline_first_stage() and not ps.is_pipeline_last_stage()
    with mock.patch("compat.parallel_state.get_pipeline_model_parallel_rank", return_value=3):
        assert ps.is_pipeline_last_stage() and not ps.is_pipeline_first_stage()
        assert ps.get_pipeline_model_parallel_next_rank() == 0
    assert ps.is_pipeline_first_stage()


def test_a_second_initialisation_is_refused_and_the_first_stays(initialized):
    initialized(tensor_model_parallel_size=2)
    group = ps.get_tensor_model_parallel_group()
    with pytest.raises(AssertionError, match=r"already initialized.*destroy_model_parallel"):
        ps.initialize_model_parallel(4)
    with pytest.raises(RuntimeError, match="world size 8 is not divisible by"):
        ps.initialize_model_parallel(3)  # refused before it looks whether there is a state
    assert ps.get_tensor_model_parallel_group() is group


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


@pytest.mark.release(PUBLISHED[-1])
def test_second_all_gather_groups_follow_the_order_and_window_of_the_state(initialized):
    initialized(
        16,
        rank=13,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        order="tp-pp-ep-dp-cp",
        rank_offset=8,
        local_world_size=8,
        expert_model_parallel_size=1,
    )
    dense, expert = ps.create_all_gather_groups(for_expert_parallelism=True)
    assert dist.get_process_group_ranks(dense) == [9, 13] and expert is None
    assert dense.group_desc == "DATA_PARALLEL_GROUP_WITH_CP_AG"
    assert dense is not ps.get_data_parallel_group(with_context_parallel=True)
    with pytest.raises(RuntimeError, match="needs an initialized state"):
        ps.destroy_model_parallel()
        ps.create_all_gather_groups()


def test_code_reaches_torch_and_a_logger_through_the_module(monkeypatch):
    monkeypatch.setattr("compat.parallel_state.torch.distributed.is_initialized", lambda: "asked")
    assert dist.is_initialized() == "asked" and ps.logger.name == ps.__name__


def test_importing_it_imports_no_megatron():
    code = "import sys, compat.parallel_state as _; print('megatron' in sys.modules)"
    out = warm.run("-c", code)
    assert out.stdout.strip() == "False"


@pytest.mark.release(PUBLISHED[-1])
def test_a_rank_outside_the_window_that_a_function_named_has_no_group_for_sharp(fake_world):
    fake_world(9)
    with mock.patch("torch.cuda.synchronize"), mock.patch("torch.cuda.current_device"):
        ps.initialize_model_parallel(
            pipeline_model_parallel_size=3,
            use_sharp=True,
            rank_offset=2,
            local_world_size=3,
            get_embedding_ranks=lambda ranks: sorted({0, ranks[-1]}),
        )
    assert dist.get_process_group_ranks(ps.get_embedding_group()) == [0, 4]
    assert ps._DATA_PARALLEL_GROUP_WITH_CP is None
    ps.destroy_model_parallel()


def test_a_name_that_there_never_was_says_which_is_similar_and_no_call_pays_for_it():
    code = "import compat.parallel_state as ps; ps.get_tensor_model_paralel_rank"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "Did you mean: 'get_tensor_model_parallel_rank'?" in done.stderr
    assert "__getattr__" not in vars(ps)  # each call through the module would take twice as long
