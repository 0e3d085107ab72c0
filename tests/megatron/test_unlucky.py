"""Faults under load and in unlucky order; scripts/soak tries them longer."""

import os
import threading
import time
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import parallel_state as ps
from compat.state import ParallelState
from hypergrid import AgreementError, CreationError, of_torch
from hypergrid.groups import creation
from tests.support import own_keys
from tests.support.counting import CountingStore
from tests.support.forked import from_all, on_ranks, total


@pytest.mark.parametrize("turned", [False, True])
@on_ranks(2, timeout=60)
def test_of_two_threads_that_create_at_once_the_second_is_refused_on_all_ranks(rank, turned):
    """In one order on both ranks the first threads work; in opposite orders none, in time."""
    text_of_size = {}

    def create(size):
        arguments = {"tensor_model_parallel_size": size, "distributed_timeout_minutes": 0.5}
        try:
            state = ParallelState.create(**arguments)
            sum_of_ones = total(state.get_tensor_model_parallel_group())
            text_of_size[size] = f"works with {sum_of_ones:.0f}"
        except (AgreementError, CreationError) as error:
            text_of_size[size] = str(error)

    sizes = [2, 1] if turned and rank == 1 else [1, 2]
    threads = [threading.Thread(target=create, args=(size,)) for size in sizes]
    time.sleep(rank)
    start = time.monotonic()
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < 20
    assert "two threads of rank" in " ".join(text_of_size.values())
    working = {size: text for size, text in text_of_size.items() if text.startswith("works")}
    assert working == ({} if turned else {1: "works with 1"})
    dist.barrier()
    ParallelState.create(tensor_model_parallel_size=2).destroy()


@on_ranks(8)
def test_both_phases_cost_two_round_trips_besides_looks_and_a_process_one_more(rank):
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    counting = CountingStore(dist.PrefixStore("counting", store))
    for life in range(3):
        trips = counting.trips
        operations = sum(counting.counts.values())
        with mock.patch("hypergrid.agreement.commit.shared_store", lambda: counting):
            ps.initialize_model_parallel(2)
        costs = from_all((counting.trips - trips, sum(counting.counts.values()) - operations))
        ps.destroy_model_parallel()
        # Whoever arrives first or last does what is done once for all.
        usual = sorted(costs)[: 8 - 3]
        assert {*usual} == {(3, 4) if life == 0 else (2, 3)}  # one operation gets no answer
        assert sum(trips for trips, _ in costs) < 8 * 3 + 30
        # Each phase takes one look at least, and more of a rank that waits for others.
        assert counting.looks >= 2 * (life + 1)


# Timeouts of groups, where torch sees their backend in its own way.


@pytest.mark.parametrize("debug_level", ["OFF", "DETAIL"])
@on_ranks(2)
def test_groups_are_created_in_a_fifth_of_their_timeout_and_then_have_all_of_it(rank, debug_level):
    dist.set_debug_level(getattr(dist.DebugLevel, debug_level))
    with (
        mock.patch.object(of_torch, "gloo_options", wraps=of_torch.gloo_options) as options,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        ps.initialize_model_parallel(2, distributed_timeout_minutes=1)
    assert not [str(w.message) for w in caught if "timeout" in str(w.message).lower()]
    if debug_level == "OFF":
        creation_timeouts = [call.args[1] for call in options.call_args_list if call.args[1:]]
        assert max(creation_timeouts) == timedelta(seconds=12)
        assert creation.creation_timeout(None, timedelta(seconds=9)) == timedelta(seconds=2)
        assert creation.creation_timeout("nccl", timedelta(seconds=60)) is None
    timeouts = set()
    for pooled in ps.current_state().pool.groups:
        backend = pooled.group._get_backend(torch.device("cpu"))
        backend = getattr(backend, "wrapped_pg", backend)  # torch wraps what it checks
        timeouts.add(backend.options._timeout)
    # The second one is that of the expert twin, as megatron-core has it.
    assert timeouts == {timedelta(minutes=1), c10d.default_pg_timeout}


# Without agreement.


@pytest.fixture
def without_agreement(monkeypatch):
    monkeypatch.setenv("HYPERGRID_AGREEMENT", "0")


@on_ranks(4)
def test_without_agreement_all_can_try_again_after_one_rank_refused_its_arguments(
    rank, without_agreement
):
    with pytest.raises(RuntimeError):
        ps.initialize_model_parallel(3 if rank == 1 else 2, distributed_timeout_minutes=2 / 60)
    dist.barrier()
    ps.initialize_model_parallel(2, distributed_timeout_minutes=5 / 60)
    assert total(ps.get_tensor_model_parallel_group()) == 2
    assert own_keys(c10d._get_default_store()) == []
