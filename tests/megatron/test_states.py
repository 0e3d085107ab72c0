"""Several parallel states in one process: side by side, made current, suspended."""

import inspect
import threading
from unittest import mock

import pytest
import torch

from compat import parallel_state as ps
from compat.megatron import getters
from compat.state import ParallelState, make_current
from tests.support.forked import on_ranks, open_groups, total

GETTERS = [
    name
    for name, function in getters.FUNCTIONS.items()
    if name.startswith(("get_", "is_"))
    and not [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
]


def _ask(source, name):
    try:
        return getattr(source, name)()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _answers(source):
    return {name: _ask(source, name) for name in GETTERS}


def _two(rank=0):
    actor = ParallelState.create(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    critic = ParallelState.create(
        tensor_model_parallel_size=4, order="tp-ep-dp-pp", expert_model_parallel_size=2
    )
    return actor, critic


@pytest.fixture
def two(fake_world):
    fake_world(8, rank=5)
    states = _two()
    yield states
    for state in states:
        state.destroy()


def test_activation_answers_for_the_module_nests_and_ends_on_error(two):
    actor, critic = two
    expected = _answers(actor), _answers(critic)
    with actor.activate():
        assert _answers(ps) == expected[0]
        with critic.activate():
            assert _answers(ps) == expected[1]
        assert _answers(ps) == expected[0]
        with pytest.raises(KeyError, match="the caller's"), critic.activate():
            raise KeyError("the caller's")
        assert _answers(ps) == expected[0]
    assert not ps.is_initialized()


def test_autograds_threads_see_the_activation(two):
    groups = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            ask = lambda: groups.append(ps.get_tensor_model_parallel_group())  # noqa: E731
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            return grad

    with two[1].activate():
        Look.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert groups == [two[1].get_tensor_model_parallel_group()]


def test_activations_that_do_not_nest_are_told(two):
    actor, critic = two
    first = actor.activate()
    first.__enter__()
    second = critic.activate()
    second.__enter__()
    with pytest.raises(RuntimeError, match="activations must nest"):
        first.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="activations must nest"):
        second.__exit__(None, None, None)
    make_current(ParallelState())


def test_in_no_thread_does_a_state_answer_with_anothers_group(two):
    expected = _answers(two[0])
    answers = []

    def ask():
        for _ in range(50):
            answers.append(_answers(two[0]))

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        for state in two:
            with state.activate():
                assert ps.get_model_parallel_group() is state._MODEL_PARALLEL_GROUP
    assert answers == [expected] * 50


def test_what_outside_code_writes_stays_with_the_state_that_was_current(two):
    actor, critic = two
    group_of_critic = critic.get_tensor_model_parallel_group()
    with actor.activate():
        vars(ps)["_TENSOR_MODEL_PARALLEL_GROUP"] = "written"
        exec("global _MPU_DATA_PARALLEL_RANK; _MPU_DATA_PARALLEL_RANK = 7", vars(ps))
        assert actor.get_tensor_model_parallel_group() == "written"
        with critic.activate():
            assert ps.get_tensor_model_parallel_group() is group_of_critic
            assert actor.get_tensor_model_parallel_group() == "written"
            actor.set_pipeline_model_parallel_rank(9)
        with mock.patch.object(ps, "get_pipeline_model_parallel_rank", lambda: 2):
            assert critic.is_pipeline_first_stage()  # which asks its own getter
        assert ps.get_data_parallel_rank() == actor.get_data_parallel_rank() == 7
        assert ps.get_pipeline_model_parallel_rank() == 9
    assert actor._TENSOR_MODEL_PARALLEL_GROUP == "written"
    assert ps._TENSOR_MODEL_PARALLEL_GROUP is None and ps._MPU_DATA_PARALLEL_RANK is None


@on_ranks(8)
def test_two_states_share_no_group_and_destroying_one_leaves_the_other_whole(rank):
    actor, critic = _two()
    groups = [{pooled.group for pooled in state.pool.groups} for state in (actor, critic)]
    assert not groups[0] & groups[1]
    assert not ps.is_initialized()
    actor.destroy()
    assert total(critic.get_tensor_model_parallel_group()) == 4
    assert len(open_groups()) == 1 + len(critic.pool.groups)
    critic.destroy()


@on_ranks(8)
def test_states_over_windows_are_for_the_ranks_in_them(rank):
    encoder = ParallelState.create(tensor_model_parallel_size=2, local_world_size=4)
    language = ParallelState.create(
        pipeline_model_parallel_size=2, local_world_size=4, rank_offset=4
    )
    inside, outside = (encoder, language) if rank < 4 else (language, encoder)
    assert total(inside.get_model_parallel_group()) == 2
    window = "4..7" if rank < 4 else "0..3"
    says = f"has groups on ranks {window} only, and rank {rank} is not one of them"
    with pytest.raises(AssertionError, match=says):
        outside.get_model_parallel_group()


def test_a_group_that_the_grid_of_a_state_created_closes_with_the_state(two):
    grid = two[1].grid
    assert grid.coordinate() == two[1].request.decoder.coordinate(5)
    with pytest.raises(KeyError, match=r"call create_pg\('dp-ep', view='expert'\)"):
        grid.get_pg("ep-dp", view="expert")
    extra = grid.create_pg("ep-dp", view="expert", group_desc="mine")
    two[1].destroy()
    assert extra not in open_groups()
