"""check_gradients: what it finds out from sums of any dtype, what it refuses, what it leaves."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compat import audit
from compat.audit.gradients import _BITS, _summands
from compat.state import ParallelState
from tests.support import forked, warm


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    ranks=st.integers(1, 64),
    data=st.data(),
)
def test_the_ranks_of_a_mean_are_known_in_every_dtype(dtype, ranks, data):
    members = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    scaled_first = data.draw(st.booleans())

    def mean(values):
        total = torch.zeros((), dtype=dtype)
        for value in values:
            each = torch.tensor(value, dtype=dtype)
            total += each / len(members) if scaled_first else each
        return float(total if scaled_first else total / len(members))

    rounds = [
        mean([2.0 ** (r - start) if 0 <= r - start < _BITS else 0.0 for r in members])
        for start in range(0, ranks, _BITS)
    ]
    found = _summands(mean([1.0] * len(members)), rounds, [*range(ranks)])
    assert found == members


@pytest.fixture(scope="module")
def said():
    done = warm.run("-W", "ignore", "-m", "tests.support.audited", "", "between_steps")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["between_steps"]


def test_a_step_after_the_check_has_the_gradients_that_it_had_without(said):
    assert [found for found, *_ in said] == [[[], [], []]] * 3
    assert [same for _, same, _ in said] == [[True] * 3] * 3


def test_a_model_without_a_parameter_to_train_has_nothing_wrong(said):
    assert [frozen for *_, frozen in said] == [[]] * 3


class Chunk(torch.nn.Linear):
    """What is asked of a DistributedDataParallel before anything is reduced."""

    def __init__(self):
        super().__init__(2, 2)

    def finish_grad_sync(self):
        raise AssertionError("it is refused before")


@forked.on_ranks(1)
def test_what_is_no_model_no_state_or_no_optimizer_is_named(rank):
    state, chunk = ParallelState.create(), Chunk()
    for arguments, kind, text in [
        ((chunk, None), TypeError, "needs a ParallelState, not None: of the module's groups it"),
        ((chunk, ParallelState()), ValueError, "needs a state with groups on this rank"),
        ((torch.nn.Linear(2, 2), state), TypeError, "wraps it, .* not Linear"),
        (([], state), TypeError, "not an empty list"),
        ((object(), state), TypeError, "not object"),
        (([chunk], state, torch.optim.SGD(chunk.parameters())), TypeError, "gave, not SGD"),
        ((chunk, state), ValueError, "weight has no main_grad: .* require gradients when"),
    ]:
        with pytest.raises(kind, match=text):
            audit.check_gradients(*arguments)
