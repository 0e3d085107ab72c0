"""A rank without groups says why: none were made yet, they were destroyed, or it is outside."""

import re

import pytest
import torch
import torch.distributed as dist

from compat import parallel_state as ps
from compat.hyper_comm_grid import HyperCommGrid as MegatronGrid
from compat.state import ParallelState
from hypergrid import HyperCommGrid
from tests.support.forked import on_ranks
from tests.support.stock import PUBLISHED


def error_of(call):
    with pytest.raises(AssertionError) as raised:
        call()
    return str(raised.value)


@on_ranks(2)
def test_a_getter_of_a_destroyed_state_says_that_it_was_destroyed(rank):
    of_new_state = error_of(ParallelState().get_tensor_model_parallel_group)
    assert "Call initialize_model_parallel() first" in of_new_state
    ps.initialize_model_parallel(2)
    state = ParallelState.create(tensor_model_parallel_size=2, name="reference")
    ps.destroy_model_parallel()
    for _ in range(2):
        state.destroy()
        for call in (state.get_tensor_model_parallel_group, ps.get_tensor_model_parallel_group):
            text = error_of(call)
            assert "was destroyed, and its groups with it" in text and "first" not in text
        assert "reference" in error_of(state.get_tensor_model_parallel_group)
    assert repr(state) == "ParallelState(destroyed)"
    ps.initialize_model_parallel(2)
    assert ps.get_tensor_model_parallel_world_size() == 2


@on_ranks(2)
def test_a_destroyed_state_cannot_be_activated(rank):
    state = ParallelState.create(name="reference")
    with state.activate():
        assert ps.current_state() is state
    state.destroy()
    with pytest.raises(RuntimeError, match="reference cannot be activated, as it was destroyed"):
        state.activate().__enter__()
    assert ps.current_state() is not state


@pytest.mark.release(PUBLISHED[-1])
@on_ranks(4)
def test_a_getter_outside_of_the_window_says_which_ranks_it_has(rank):
    ps.initialize_model_parallel(2, local_world_size=2)
    if rank >= 2:
        text = error_of(ps.get_tensor_model_parallel_group)
        assert f"has groups on ranks 0..1 only, and rank {rank} is not one of them" in text
    else:
        assert ps.get_tensor_model_parallel_world_size() == 2
    dist.barrier()


@on_ranks(2)
def test_a_handle_of_a_destroyed_group_still_reduces_on_gloo_as_with_plain_torch(rank):
    """docs/states.md says so: torch itself does not refuse it."""
    ps.initialize_model_parallel(2)
    groups = [ps.get_tensor_model_parallel_group(), dist.new_group([0, 1])]
    ps.destroy_model_parallel()
    dist.destroy_process_group(groups[1])
    for group in groups:
        summand = torch.ones(1)
        dist.all_reduce(summand, group=group)
        assert summand.item() == 2
        with pytest.raises(ValueError, match="is not registered"):
            dist.get_rank(group)


@pytest.mark.parametrize("grid", [HyperCommGrid, MegatronGrid])
@on_ranks(2)
def test_the_key_error_of_a_second_creation_is_a_sentence(rank, grid):
    grid = grid((2,), ("tp",))
    grid.create_pg("tp")
    with pytest.raises(KeyError) as raised:
        grid.create_pg("tp")
    assert type(raised.value) is KeyError
    assert re.match(r"(the groups over|Process group) .*already been created", str(raised.value))
    assert "compared" not in str(raised.value)
