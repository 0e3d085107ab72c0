"""Faults under load and in unlucky order; scripts/soak tries them longer."""

import os
import socket
import threading
import time
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import members_only
from compat import parallel_state as ps
from compat.state import ParallelState
from hypergrid import AgreementError, CreationError
from hypergrid.agreement import store as connection
from hypergrid.groups import creation
from tests.support import own_keys, soaking
from tests.support.counting import CountingStore
from tests.support.forked import from_all, on_ranks, total


def test_a_failure_of_one_rank_is_told_by_all_when_the_host_of_the_store_leaves_with_it():
    soaking.hosts_that_leave(4).check()


def test_of_two_threads_that_create_at_once_the_second_is_refused_on_all_ranks():
    soaking.threads_at_once(4).check()


def test_missing_ranks_of_many_are_named_by_all_others():
    soaking.missing_ranks(1, world=32, seconds=4).check()


@on_ranks(4, timeout=100)
def test_threads_that_wait_for_each_other_in_opposite_order_do_not_deadlock(rank):
    text_of_size = {}

    def create(size):
        try:
            ParallelState.create(local_world_size=size, distributed_timeout_minutes=0.5).destroy()
            text_of_size[size] = "works"
        except (AgreementError, CreationError) as error:
            text_of_size[size] = str(error)

    sizes = [[4, 2], [2, 4], [4], [4]][rank]  # ranks 0 and 1 begin with different windows
    threads = [threading.Thread(target=create, args=(size,)) for size in sizes]
    start = time.monotonic()
    for thread in threads:
        thread.start()
        time.sleep(0.3 + 0.5 * (rank > 1))
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < 29
    for size in (2, 4):  # whether a thread still overlaps the other one is the machine's choice
        texts = {texts[size] for texts in from_all(text_of_size) if size in texts}
        assert texts == {"works"} or all("two threads of rank" in text for text in texts), texts


@on_ranks(8)
def test_both_phases_cost_six_round_trips_and_a_process_one_more(rank):
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
        assert {*usual} == {(7, 8) if life == 0 else (6, 7)}  # one operation gets no answer
        assert sum(trips for trips, _ in costs) < 8 * 7 + 30


# The connection to the store.


def blocking_sockets():
    blocking = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                blocking[target] = os.get_blocking(int(name))
        except OSError:
            pass
    return blocking


@on_ranks(4)
def test_no_socket_of_the_process_changes_when_python_has_a_default_timeout(rank):
    socket.setdefaulttimeout(20)
    before = blocking_sockets()
    with connection.noticing_a_dead_link(c10d._get_default_store(), timedelta(seconds=8)):
        assert blocking_sockets() == before and any(before.values())
    ps.initialize_model_parallel(2)
    ps.destroy_model_parallel()
    after = blocking_sockets()
    assert all(after[name] == before[name] for name in before.keys() & after.keys())


@on_ranks(2)
def test_a_connection_to_another_host_with_the_stores_port_is_left_alone(rank):
    store = c10d._get_default_store()
    port = 0 if rank else connection.innermost(store).port
    option = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    with (
        socket.create_server(("127.0.0.2", port)) as server,
        socket.create_connection(server.getsockname()) as client,
        connection.noticing_a_dead_link(store, timedelta(seconds=8)),
    ):
        limit = client.getsockopt(*option)
    assert rank or (limit == 0 and len(connection._connections(store)) > 0)


# Timeouts of groups, where torch sees their backend in its own way.


@on_ranks(2)
def test_groups_have_their_timeout_and_no_warning_where_torch_checks_in_detail(rank):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps.initialize_model_parallel(2, distributed_timeout_minutes=7)
    assert not [str(w.message) for w in caught if "timeout" in str(w.message).lower()]
    timeouts = set()
    for pooled in ps.current_state().pool.groups:
        checked = pooled.group._get_backend(torch.device("cpu"))
        timeouts.add(checked.wrapped_pg.options._timeout)
    assert timeouts == {timedelta(minutes=7), c10d.default_pg_timeout}


@on_ranks(2, backend="")
def test_a_group_of_an_undefined_backend_ends_in_its_timeout_if_gloo_serves_it(rank):
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(store=store, rank=rank, world_size=2)
    assert dist.get_backend() == "undefined"
    assert creation.creation_timeout(None, timedelta(seconds=60)) == timedelta(seconds=12)
    assert creation.creation_timeout("GLOO", None) == c10d.default_pg_timeout / 5


# Without agreement.


@pytest.fixture
def without_agreement(monkeypatch):
    monkeypatch.setenv("HYPERGRID_AGREEMENT", "0")


@on_ranks(2, backend="")
def test_without_agreement_a_fresh_process_counts_as_those_that_stayed(rank, without_agreement):
    def live(life):
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(f"life {life}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        ps.initialize_model_parallel(2, distributed_timeout_minutes=5 / 60)
        group = ps.get_tensor_model_parallel_group()
        assert total(group) == 2
        name = group.group_name
        ps.destroy_model_parallel()
        dist.destroy_process_group()
        return name

    if rank == 0:
        live(1)
    else:  # a process of its own, which ends; this one takes its place
        child = os.fork()
        if child == 0:
            live(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    (name,) = {*from_all(live(2))}
    assert name.isdigit()


@on_ranks(4, timeout=60)
def test_without_agreement_a_second_thread_is_refused_on_its_rank_alone(rank, without_agreement):
    new_group = dist.new_group
    begun = threading.Event()
    refused = threading.Event()
    states = []
    errors = []

    @members_only
    def slow_new_group(*args, **kwargs):
        begun.set()
        assert rank == 3 or refused.wait(20)
        return new_group(*args, **kwargs)

    def create(size):
        state = ParallelState.create(
            tensor_model_parallel_size=size, distributed_timeout_minutes=5 / 60
        )
        states.append(state)

    def create_in_the_second_thread():
        begun.wait(20)
        if rank == 3:  # where the threads do not overlap, nothing tells it of the others'
            first.join()
        with pytest.raises((AgreementError, CreationError)) as caught:
            create(4)
        errors.append(caught.value)
        refused.set()

    start = time.monotonic()
    with mock.patch.object(dist, "new_group", slow_new_group):
        first = threading.Thread(target=create, args=(2,))
        second = threading.Thread(target=create_in_the_second_thread)
        first.start()
        second.start()
        first.join()
        second.join()
    (error,) = errors
    if rank < 3:
        assert type(error) is AgreementError
        assert str(error).startswith(f"two threads of rank {rank} create groups")
        assert "Create them in one thread, or one after the other" in str(error)
    else:  # no other rank could be told
        assert str(error).startswith("rank 3 could not create")
    dist.barrier()
    create(4)
    assert [total(state.get_tensor_model_parallel_group()) for state in states] == [2, 4]
    assert time.monotonic() - start < 20


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


@on_ranks(2)
def test_the_stores_connection_is_looked_for_once(rank):
    """Else each creation would call the system for every socket of the process."""
    ps.initialize_model_parallel(2)
    ps.destroy_model_parallel()
    pairs = [socket.socketpair() for _ in range(200)]
    with mock.patch.object(os, "dup", wraps=os.dup) as dup:
        ps.initialize_model_parallel(2)
    assert len(pairs) == 200 and dup.call_count < 200


@on_ranks(2)
def test_a_second_thread_is_refused_at_once_and_the_other_ranks_are_told(rank):
    def create():
        return ParallelState.create(distributed_timeout_minutes=1)

    states = []
    if rank == 0:
        first = threading.Thread(target=lambda: states.append(create()))
        first.start()
        time.sleep(1)  # it waits for rank 1
        start = time.monotonic()
        with pytest.raises(AgreementError, match="two threads of rank 0 create groups"):
            create()
        assert time.monotonic() - start < 2
        from_all(None)
        first.join()
    else:
        from_all(None)
        states.append(create())
        start = time.monotonic()
        with pytest.raises(AgreementError, match=r"rank 0 refused .*two threads of rank 0"):
            create()
        assert time.monotonic() - start < 10
    states.append(create())
    assert [total(state.get_data_parallel_group()) for state in states] == [2, 2]
