"""What megatron-core keeps over groups: buffers of fused token dispatch and others."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import hypergrid
from compat import parallel_state as ps
from compat.megatron.caches import CACHED_METHODS, CACHES
from compat.state import ParallelState
from tests.support import deep_ep, warm
from tests.support.forked import on_ranks
from tests.support.stock import MAIN, following, have_stock


def needs(release):
    """A mark: skipped where the source of a release is not in .cache."""
    reason = f"no source of {release}: scripts/fetch_megatron"
    return pytest.mark.skipif(not have_stock(release), reason=reason)


def sources(*releases):
    return [pytest.param(release, marks=needs(release)) for release in releases]


WITH_HYBRID_EP = ["0.16.1", "0.17.1", "0.18.2", "0.19.2", "main", "dev"]
TRAINED = [
    pytest.param(release, marks=[needs(release), *([] if release in MAIN else [pytest.mark.long])])
    for release in WITH_HYBRID_EP  # earlier ones have no context parallelism without a GPU
]


def dispatched(fused_a2a):
    """The sum of a one of each rank that Megatron's fused dispatch reaches."""
    group = ps.get_expert_model_parallel_group()
    hidden, *_ = fused_a2a.hybrid_ep_dispatch(torch.ones(2, 1), None, None, group, 1)
    return hidden[0].item()


@pytest.mark.parametrize("release", sources("0.14.0", "0.15.3", *WITH_HYBRID_EP))
@on_ranks(4)
def test_a_buffer_of_deep_ep_is_freed_before_its_group_closes(rank, release):
    fused_a2a = deep_ep.load_fused_a2a(release)
    ps.initialize_model_parallel(expert_model_parallel_size=4)
    group = ps.get_expert_model_parallel_group()
    fused_a2a.get_buffer(group, 8)
    ps.destroy_model_parallel()
    assert deep_ep.freed == [group]
    assert fused_a2a._buffer is None


@needs("dev")
@on_ranks(4)
def test_a_buffer_that_is_destroyed_explicitly_is_destroyed_before_its_group_closes(rank):
    fused_a2a = deep_ep.load_fused_a2a("dev")
    state = ParallelState.create(expert_model_parallel_size=4)
    group = state.get_expert_model_parallel_group()
    # Not while the state is current, as code that takes groups from a collection does.
    fused_a2a._buffer = deep_ep.Buffer(group, explicitly_destroy=True)
    fused_a2a._elastic_buffer = others = deep_ep.Buffer(dist.new_group([0, 1, 2, 3]))
    state.grid.destroy()
    assert deep_ep.freed == [group]
    assert fused_a2a._buffer is None
    assert fused_a2a._elastic_buffer is others  # its group stays open


@on_ranks(4)
def test_an_abort_waits_for_no_buffer(rank):
    fused_a2a = deep_ep.load_fused_a2a("0.19.2")
    ps.initialize_model_parallel(expert_model_parallel_size=4)
    fused_a2a.get_buffer(ps.get_expert_model_parallel_group(), 8)
    hypergrid.abort()
    assert fused_a2a._buffer is None
    assert deep_ep.freed == []


@pytest.mark.parametrize("release", sources(*WITH_HYBRID_EP))
@on_ranks(8)
def test_buffers_are_those_of_the_current_state(rank, release):
    fused_a2a = deep_ep.load_fused_a2a(release)
    wide = ParallelState.create(expert_model_parallel_size=4)
    narrow = ParallelState.create(expert_model_parallel_size=2)
    groups = [state.get_expert_model_parallel_group() for state in (wide, narrow)]
    with wide.activate():
        assert dispatched(fused_a2a) == 4
    assert fused_a2a._hybrid_ep_buffer is None
    with narrow.activate():
        assert dispatched(fused_a2a) == 2
        with wide.activate():
            assert fused_a2a._hybrid_ep_buffer.group is groups[0]  # the one that it had
        assert fused_a2a._hybrid_ep_buffer.group is groups[1]
    with wide.activate():
        narrow.destroy()  # not current: its buffer alone is freed
        assert deep_ep.freed == [groups[1]]
        assert dispatched(fused_a2a) == 4
    wide.destroy()
    assert deep_ep.freed == [groups[1], groups[0]]


@on_ranks(4)
def test_a_state_that_would_dispatch_over_the_ranks_of_another_is_refused(rank):
    wide = ParallelState.create(expert_model_parallel_size=4, name="actor")
    narrow = ParallelState.create(expert_model_parallel_size=2, name="critic")
    dense = ParallelState.create(expert_model_parallel_size=1)
    begun_over = wide.get_expert_tensor_and_model_parallel_group()
    module = SimpleNamespace(_EP_GROUP=begun_over, ep_finalize=lambda: None)
    sys.modules["transformer_engine.pytorch.ep"] = module
    for state in (wide, dense):
        with state.activate():
            pass
    ranks = [0, 1] if rank < 2 else [2, 3]
    with pytest.raises(RuntimeError) as caught, narrow.activate():
        pass
    assert f"rank {rank} cannot activate state 'critic'" in str(caught.value)
    assert f"over ranks [0, 1, 2, 3], and would dispatch tokens there instead of {ranks}" in str(
        caught.value
    )


@pytest.mark.parametrize("release", TRAINED)
def test_nothing_of_megatron_core_holds_a_group_that_a_state_cannot_free(release):
    done = warm.run("-m", "tests.support.holding", **following(release))
    assert done.returncode == 0, done.stderr
    holders = json.loads(done.stdout.splitlines()[-1])
    in_the_table = {f"{cache.module} {cache.path}" for cache in (*CACHES, *CACHED_METHODS)}
    assert set(holders["trained"]) - in_the_table == set()
    assert holders["trained"]  # else the search itself is at fault
    assert holders["destroyed"] == []
