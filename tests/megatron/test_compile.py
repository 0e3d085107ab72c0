"""Compiled code reads parallel states: ``torch.compile(fullgraph=True)`` answers as uncompiled."""

import pytest
import torch
from torch.distributed import ProcessGroup

from compat import parallel_state as ps
from compat.state import ParallelState
from tests.megatron.test_states import GETTERS

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="torch.compile of this torch cannot look a group up in a dict",
)
NUMBERS = ("get_tensor_model_parallel_rank", "get_data_parallel_world_size")


@pytest.fixture
def two(fake_world):
    fake_world(8, rank=5)
    torch._dynamo.reset()
    states = [ParallelState.create(tensor_model_parallel_size=size) for size in (2, 4)]
    yield states
    for state in states:
        state.destroy()


def _sum(values):
    """One number of everything that a getter may give."""
    total = 0
    for value in values:
        if isinstance(value, ProcessGroup):
            value = value.rank() + 10 * value.size()
        total += sum(value) if isinstance(value, list) else value
    return total


def _compiled(ask):
    return torch.compile(lambda x: x + ask(), backend="eager", fullgraph=True)


def _answered(source):
    """Getters that give numbers and groups here."""
    names = []
    for name in GETTERS:
        try:
            _sum([getattr(source, name)()])
            names.append(name)
        except (AssertionError, DeprecationWarning, KeyError, TypeError):
            pass
    return names


@pytest.mark.filterwarnings("error::DeprecationWarning")
@pytest.mark.parametrize("of", ["module", "current state", "another state"])
def test_every_getter_compiles_into_one_graph(two, of):
    source = {"module": ps, "current state": two[0], "another state": two[1]}[of]
    with two[0].activate():
        names = _answered(source)
        assert len(names) > 40
        ask = lambda: _sum([getattr(source, name)() for name in names])  # noqa: E731
        assert _compiled(ask)(torch.zeros(1)) == ask()
        ask = lambda: source._MODEL_PARALLEL_GROUP.size()  # noqa: E731
        assert _compiled(ask)(torch.zeros(1)) == ask()


def test_compiled_code_follows_activations_and_what_is_written(two):
    def ask():
        numbers = [[getattr(each, name)() for name in NUMBERS] for each in (ps, *two)]
        return sum(100**i * (10 * rank + size) for i, (rank, size) in enumerate(numbers))

    compiled = _compiled(ask)
    for state in (*two, *two):
        with state.activate():
            assert compiled(torch.zeros(1, dtype=torch.long)) == ask()
    with two[0].activate():
        before = ask()
        ps._MPU_DATA_PARALLEL_WORLD_SIZE = 7
        two[1].set_tensor_model_parallel_rank(3)
        assert compiled(torch.zeros(1, dtype=torch.long)) == ask() != before
