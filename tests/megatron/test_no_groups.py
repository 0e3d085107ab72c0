"""A rank without groups says why: none were made yet, or they were destroyed."""

import pytest

from compat import parallel_state as ps
from compat.state import ParallelState
from tests.support.forked import on_ranks


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
    with pytest.raises(RuntimeError, match="reference cannot be activated, as it was destroyed"):
        state.activate().__enter__()
    ps.initialize_model_parallel(2)
