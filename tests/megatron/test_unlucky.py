"""Faults under load and in unlucky order; scripts/soak tries them longer."""

import os
import socket
import threading
import time
import warnings
from contextlib import contextmanager
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
from tests.support import soaking
from tests.support.counting import CountingStore
from tests.support.forked import from_all, on_ranks, run_ranks, run_scripts, total


def test_a_difference_is_told_by_all_when_the_host_of_the_store_leaves_with_it():
    soaking.hosts_that_leave(4).check()


def _ends_at_once(rank, odd, arguments):
    try:
        ps.initialize_model_parallel(**(arguments if rank == odd else {}))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)


@pytest.mark.parametrize("odd", [0, 3])
def test_a_refusal_is_told_by_all_when_the_host_of_the_store_leaves_with_it(odd):
    refused = {"tensor_model_parallel_size": 3}
    for texts in run_scripts(4, _ends_at_once, odd, refused, runs=4):
        for rank, text in enumerate(texts):
            assert "world size 4 is not divisible by tensor_model_parallel_size=3" in text
            assert text.startswith("RuntimeError" if rank == odd else f"AgreementError: rank {odd}")
            assert text.count("\n") == 1


def _cannot_create(rank):
    original, calls = dist.new_group, []

    @members_only
    def new_group(*args, **kwargs):
        calls.append(args)
        if rank == 2 and len(calls) == 5:
            raise RuntimeError("injected: no more communicators")
        return original(*args, **kwargs)

    dist.new_group = new_group
    _ends_at_once(rank, rank, {"distributed_timeout_minutes": 3 / 60})


def test_a_failed_creation_is_told_by_all_when_the_host_of_the_store_leaves():
    for texts in run_scripts(4, _cannot_create, runs=2):
        for text in texts:
            said = text.splitlines()[-1]  # torch tells of its own timeouts before
            assert said.startswith("CreationError"), text
            assert "injected: no more communicators" in said and "frame #" not in text, text


def _with_a_default_timeout(rank):
    store = c10d._get_default_store()
    socket.setdefaulttimeout(20)
    blocking = _blocking_sockets()
    with connection.noticing_a_dead_link(store, timedelta(seconds=8)):
        inside = _blocking_sockets()
    ps.initialize_model_parallel(2)
    ps.destroy_model_parallel()
    return blocking, inside, _blocking_sockets()


def _blocking_sockets():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[target] = os.get_blocking(int(name))
        except OSError:
            pass
    return found


@on_ranks(2)
def test_the_stores_connection_is_looked_for_once(rank):
    """Else each creation would call the system for every socket of the process."""
    ps.initialize_model_parallel(2)
    ps.destroy_model_parallel()
    pairs = [socket.socketpair() for _ in range(200)]
    with mock.patch.object(os, "dup", wraps=os.dup) as dup:
        ps.initialize_model_parallel(2)
    assert len(pairs) == 200 and dup.call_count < 200


def test_no_socket_of_the_process_changes_when_python_has_a_default_timeout():
    for before, inside, after in run_ranks(4, _with_a_default_timeout):
        assert inside == before and any(before.values())
        assert all(after[name] == before[name] for name in before.keys() & after.keys())


@on_ranks(2)
def test_a_connection_to_another_host_with_the_stores_port_is_left_alone(rank):
    store = c10d._get_default_store()
    with socket.create_server(("127.0.0.2", 0 if rank else connection.innermost(store).port)) as s:
        mine = socket.create_connection(s.getsockname())
        option = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        with connection.noticing_a_dead_link(store, timedelta(seconds=8)):
            inside = mine.getsockopt(*option)
        mine.close()
    assert rank or (inside == 0 and len(connection._connections(store)) > 0)


def test_of_two_threads_that_create_at_once_the_second_is_refused_on_all_ranks():
    soaking.threads_at_once(4).check()


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


def _windows_in_two_threads(rank):
    texts = {}

    def create(size):
        try:
            ParallelState.create(local_world_size=size, distributed_timeout_minutes=0.5).destroy()
            texts[size] = "works"
        except (AgreementError, CreationError) as error:
            texts[size] = str(error)

    sizes = [[4, 2], [2, 4], [4], [4]][rank]  # ranks 0 and 1 begin with different windows
    threads = [threading.Thread(target=create, args=(size,)) for size in sizes]
    start = time.monotonic()
    for thread in threads:
        thread.start()
        time.sleep(0.3 + 0.5 * (rank > 1))
    for thread in threads:
        thread.join()
    return texts, time.monotonic() - start


def test_threads_that_wait_for_each_other_in_opposite_order_do_not_deadlock():
    results = run_ranks(4, _windows_in_two_threads, timeout=100)
    assert all(seconds < 29 for _, seconds in results)
    for size in (2, 4):  # whether a thread still overlaps the other one is the machine's choice
        told = {texts[size] for texts, _ in results if size in texts}
        refused = all("two threads of rank" in text for text in told)
        assert refused or told == {"works"}, told


@contextmanager
def _counting():
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    counting = CountingStore(dist.PrefixStore("counting", store))
    with mock.patch("hypergrid.agreement.commit.shared_store", lambda: counting):
        yield counting


def _three_lives(rank):
    trips = []
    with _counting() as store:
        for _ in range(3):
            before, counted = store.trips, sum(store.counts.values())
            ps.initialize_model_parallel(2)
            trips.append((store.trips - before, sum(store.counts.values()) - counted))
            ps.destroy_model_parallel()
    return trips


def test_both_phases_cost_six_round_trips_and_a_process_one_more():
    results = run_ranks(8, _three_lives)
    for life in range(3):
        # Whoever arrives first or last does what is done once for all.
        usual = sorted(trips[life] for trips in results)[: 8 - 3]
        assert set(usual) == {(7, 8) if life == 0 else (6, 7)}  # one operation gets no answer
        assert sum(trips[life][0] for trips in results) < 8 * 7 + 30


def _two_are_missing(rank):
    with _counting() as store:
        dist.barrier()
        if rank in (3, 5):
            time.sleep(4)
            return 0, ""
        with pytest.raises(AgreementError) as caught:
            ps.initialize_model_parallel(distributed_timeout_minutes=2 / 60)
    return store.trips, str(caught.value)


def test_one_rank_reports_who_is_missing_and_each_answers_once():
    results = run_ranks(8, _two_are_missing)
    costs = sorted(trips for trips, text in results if text)
    assert costs[-2] <= 12 and costs[-1] <= 40  # the reporter looks ten times
    assert "2 of 8 ranks (3, 5" in results[0][1]


@on_ranks(2)
def test_groups_have_their_timeout_and_no_warning_where_torch_checks_in_detail(rank):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps.initialize_model_parallel(2, distributed_timeout_minutes=7)
    groups = [group.group for group in ps.current_state().pool.groups]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    backends = [backend.wrapped_pg for backend in backends]
    said = [str(w.message) for w in caught if "timeout" in str(w.message).lower()]
    timeouts = {backend.options._timeout for backend in backends}
    assert timeouts == {timedelta(minutes=7), c10d.default_pg_timeout} and said == []


@on_ranks(2, backend="")
def test_a_group_of_an_undefined_backend_ends_in_its_timeout_if_gloo_serves_it(rank):
    dist.init_process_group(
        store=dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False),
        rank=rank,
        world_size=2,
    )
    assert dist.get_backend() == "undefined"
    assert creation.creation_timeout(None, timedelta(seconds=60)) == timedelta(seconds=12)
    assert creation.creation_timeout("GLOO", None) == c10d.default_pg_timeout / 5


@on_ranks(2, backend="")
def test_without_agreement_a_fresh_process_counts_as_those_that_stayed(rank):
    os.environ["HYPERGRID_AGREEMENT"] = "0"

    def live(life):
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(f"life {life}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        ps.initialize_model_parallel(2, distributed_timeout_minutes=5 / 60)
        dist.all_reduce(torch.ones(1), group=ps.get_tensor_model_parallel_group())
        name = ps.get_tensor_model_parallel_group().group_name
        ps.destroy_model_parallel()
        dist.destroy_process_group()
        return name

    if rank == 0:
        live(1)
    else:  # a process of its own, which ends; this one takes its place
        pid = os.fork()
        if pid == 0:
            live(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    (name,) = {*from_all(live(2))}
    assert name.isdigit()


def _two_threads_without_agreement(rank):
    os.environ["HYPERGRID_AGREEMENT"] = "0"
    original, begun, refused = dist.new_group, threading.Event(), threading.Event()

    @members_only
    def new_group(*args, **kwargs):
        begun.set()
        assert rank == 3 or refused.wait(20)
        return original(*args, **kwargs)

    def create(size):
        sizes = {"tensor_model_parallel_size": size}
        return ParallelState.create(**sizes, distributed_timeout_minutes=5 / 60)

    def second():
        begun.wait(20)
        if rank == 3:  # where the threads do not overlap, nothing tells it of the others'
            first.join()
        with pytest.raises((AgreementError, CreationError)) as caught:
            create(4)
        told.append(f"{caught.type.__name__}: {caught.value}")
        refused.set()

    made, told, start = [], [], time.monotonic()
    with mock.patch.object(dist, "new_group", new_group):
        first = threading.Thread(target=lambda: made.append(create(2)))
        threads = [first, threading.Thread(target=second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    dist.barrier()
    made.append(create(4))
    sums = []
    for state in made:
        sums.append(total(state.get_tensor_model_parallel_group()))
    return told, sums, time.monotonic() - start


def test_without_agreement_a_second_thread_is_refused_on_its_rank_alone():
    results = run_ranks(4, _two_threads_without_agreement, timeout=60)
    for rank, ((told,), sums, seconds) in enumerate(results):
        assert sums == [2, 4] and seconds < 20
        if rank < 3:
            assert told.startswith(f"AgreementError: two threads of rank {rank} create groups")
            assert "Create them in one thread, or one after the other" in told
        else:  # no other rank could be told
            assert told.startswith("CreationError: rank 3 could not create")


def _one_rank_refuses_without_agreement(rank):
    os.environ["HYPERGRID_AGREEMENT"] = "0"
    with pytest.raises(RuntimeError):
        ps.initialize_model_parallel(3 if rank == 1 else 2, distributed_timeout_minutes=5 / 60)
    dist.barrier()
    ps.initialize_model_parallel(2, distributed_timeout_minutes=5 / 60)
    return total(ps.get_tensor_model_parallel_group())


def test_without_agreement_all_can_try_again_after_one_rank_refused_its_arguments():
    assert run_ranks(4, _one_rank_refuses_without_agreement) == [2] * 4


def test_missing_ranks_of_many_are_named_with_their_hosts_by_all_others():
    soaking.missing_ranks(1, world=32, seconds=4).check()
