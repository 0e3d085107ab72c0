"""compat.parallel_state: one state with upstream's names, in real and fake worlds."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import members_only
from compat import parallel_state as ps
from compat.megatron.releases import PUBLISHED, RELEASE
from tests.support import warm
from tests.support.forked import on_ranks, open_groups
from tests.support.groups import check_all_reduce, state_groups
from tests.support.stock import load_stock

pytestmark = pytest.mark.usefixtures("clean_state")


@pytest.fixture
def initialized(fake_world):
    def start(world_size=8, rank=0, **arguments):
        fake_world(world_size, rank)
        arguments.setdefault("create_gloo_process_groups", False)
        ps.initialize_model_parallel(**arguments)

    return start


CONFIGURATIONS = [
    dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    dict(tensor_model_parallel_size=2, expert_model_parallel_size=4, expert_tensor_parallel_size=1),
    dict(context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2]),
    dict(num_distributed_optimizer_instances=2, expert_model_parallel_size=2),
    dict(hybrid_context_parallel=True, context_parallel_size=2),
    dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, order="tp-cp-pp-dp"),
    dict(gtp_remat_size=2, tensor_model_parallel_size=2),
    dict(
        pipeline_model_parallel_size=4,
        get_embedding_ranks=lambda ranks: [ranks[-1], ranks[1], ranks[0]],
        get_position_embedding_ranks=lambda ranks: [0, ranks[0]] if ranks[0] else [0],
    ),
    dict(create_all_gather_group=True),
]


@pytest.mark.parametrize("arguments", CONFIGURATIONS, ids=lambda a: "-".join(a))
@on_ranks(8)
def test_eight_real_ranks_pass_collectives_on_every_group(rank, arguments):
    ps.initialize_model_parallel(**arguments)
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


def test_the_memory_buffer_is_megatrons(initialized):
    initialized()
    assert ps.get_global_memory_buffer().buffer == {}
    assert type(ps.get_global_memory_buffer()).__name__ == "GlobalMemoryBuffer"
    assert ps.get_global_memory_buffer() is ps._GLOBAL_MEMORY_BUFFER
    ps.destroy_global_memory_buffer()
    with pytest.raises(AssertionError, match="global memory buffer is not initialized"):
        ps.get_global_memory_buffer()


def test_code_reaches_torch_and_a_logger_through_the_module(monkeypatch):
    monkeypatch.setattr("compat.parallel_state.torch.distributed.is_initialized", lambda: "asked")
    assert dist.is_initialized() == "asked" and ps.logger.name == ps.__name__


def test_a_missing_group_for_scaling_factors_is_named_as_such():
    for cp, tp_only in ((False, False), (False, True), (True, False), (True, True)):
        with pytest.raises(AssertionError, match=r"^fp8 amax reduction group is not initialized"):
            ps.get_amax_reduction_group(cp, tp_only)


def test_importing_it_imports_no_megatron():
    code = "import sys, compat.parallel_state as _; print('megatron' in sys.modules)"
    out = warm.run("-c", code)
    assert out.stdout.strip() == "False"


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


def answers_to_what_is_written_before(module):
    """State that was written before an initialisation, and after a destroy."""
    answers = []
    module.set_tensor_model_parallel_world_size(16)
    module.set_virtual_pipeline_model_parallel_world_size(3)
    module.set_virtual_pipeline_model_parallel_rank(2)
    for description in ("ONE", "TWO"):
        module.create_group([0, 1], group_desc=description)
    module.initialize_model_parallel(2, 2, create_gloo_process_groups=False)
    for _ in range(2):
        groups = module._global_process_group_list or ()
        answers.append([group and group.group_desc for group in groups])
        answers.append(module.get_virtual_pipeline_model_parallel_world_size())
        answers.append(module.get_virtual_pipeline_model_parallel_rank())
        answers.append(module._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE)
        module.destroy_model_parallel()
    module._set_global_memory_buffer()
    with pytest.raises(RuntimeError):
        module.initialize_model_parallel(3)
    with pytest.raises(AssertionError):
        module.initialize_model_parallel(2, create_gloo_process_groups=False)
    module.destroy_model_parallel()
    module.initialize_model_parallel(2, create_gloo_process_groups=False)
    module.destroy_model_parallel()
    return answers


def test_what_is_written_before_initialisation_counts_as_on_stock(fake_world):
    line = "{}.{}.".format(*RELEASE)
    release = next(release for release in PUBLISHED if release.startswith(line))
    fake_world(8)
    expected = answers_to_what_is_written_before(load_stock(release))
    fake_world(8)
    answers = answers_to_what_is_written_before(ps)
    assert answers == expected
    assert answers[0][:3] == [None, "ONE", "TWO"] and answers[1:4] == [3, 2, 16]
