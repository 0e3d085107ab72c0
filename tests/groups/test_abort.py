"""hypergrid.abort(): one rank leaves its groups, whatever the others do, and can begin again."""

import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import hypergrid
from compat import members_only
from compat import parallel_state as ps
from compat.state import LEFT_BEHIND, SLOTS, ParallelState
from hypergrid import AbortedError, AgreementError, HyperCommGrid
from hypergrid.agreement import commit
from hypergrid.groups import creation, gloo
from hypergrid.groups.pool import GroupPool
from hypergrid.policy import Policy
from tests.support import forked
from tests.support.forked import from_all, on_ranks, open_groups, total


@contextmanager
def aborted_by_a_thread(after=0.5, within=15.0, **arguments):
    """Another thread calls abort() while what is inside waits; gives what it returns."""
    returned = []
    start = time.monotonic()

    def call():
        time.sleep(after)
        returned.append(hypergrid.abort(**arguments))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield returned
    finally:
        thread.join()
    assert time.monotonic() - start < after + within


# Torch's own report of an error fails with ValueError if the group is destroyed by then.
FREED = (RuntimeError, ValueError)


def known_to_torch():
    return {*c10d._world.pg_map} == {*c10d._world.pg_names} == {dist.group.WORLD}


@pytest.mark.parametrize(
    ("connect", "creation", "debug_level"),
    [
        ("torch", "members", "OFF"),
        ("torch", "members", "DETAIL"),  # torch checks the group's collectives in one more group
        ("torch", "split", "OFF"),
        ("lazy", "members", "OFF"),
        ("lazy", "everyone", "OFF"),
    ],
)
@on_ranks(3, backend="")
def test_a_rank_that_waits_in_a_collective_comes_out_with_torchs_error(
    rank, connect, creation, debug_level
):
    dist.set_debug_level(getattr(dist.DebugLevel, debug_level))
    forked.join(rank, 3)
    ps.initialize_model_parallel(connect=connect, creation=creation)
    group = ps.get_data_parallel_group()
    assert total(group) == 3  # connected
    from_all(None)
    if rank < 2:
        with aborted_by_a_thread() as returned, pytest.raises(FREED):
            total(group)
        assert "DATA_PARALLEL_GROUP" in returned[0].groups
        assert not ps.model_parallel_is_initialized() and known_to_torch()
        assert hypergrid.abort() == ((), 0)
    from_all(None)


@on_ranks(2)
def test_operations_in_progress_do_not_hold_up_the_destruction_of_their_group(rank):
    ps.initialize_model_parallel()
    if rank == 0:
        group = ps.get_data_parallel_group()
        works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(20)]
        start = time.monotonic()
        ps.destroy_model_parallel(abort=True)
        del group
        for work in works:
            with pytest.raises(RuntimeError):
                work.wait()
        works.clear()
        del work
        assert time.monotonic() - start < 2 and known_to_torch()
    from_all(None)


@on_ranks(3)
def test_a_rank_that_waits_for_others_to_reach_creation_comes_out_and_can_try_again(rank):
    environment = dict(os.environ)
    if rank < 2:
        says = r"while it created groups|rank [01] left before all had arrived: hypergrid.abort\(\)"
        with aborted_by_a_thread(), pytest.raises((AbortedError, AgreementError), match=says):
            ps.initialize_model_parallel()
    assert not ps.model_parallel_is_initialized() and known_to_torch()
    assert environment == os.environ
    from_all(None)
    time.sleep(rank < 2)  # the rank that has never been there arrives first
    ps.initialize_model_parallel()
    assert total(ps.get_data_parallel_group()) == 3


@on_ranks(3)
def test_a_rank_that_waits_for_others_to_finish_creation_comes_out_and_can_try_again(rank):
    class Commit(commit.Phase):
        def arrive(self, digest=0, *replaced):
            if digest:  # of the first phase
                return super().arrive(digest, *replaced)
            if rank < 2:
                threading.Timer(0.5, hypergrid.abort).start()
            else:
                from_all(None)  # the others are out
                hypergrid.abort()
            return super().arrive()

    with mock.patch("hypergrid.agreement.commit.Phase", Commit), pytest.raises(AbortedError):
        ps.initialize_model_parallel()
    assert not ps.model_parallel_is_initialized() and known_to_torch()
    if rank < 2:
        from_all(None)
    ps.initialize_model_parallel()
    assert total(ps.get_data_parallel_group()) == 3


@contextmanager
def creating():
    """A pool, and a function that creates one more group of three ranks in it."""
    pool = GroupPool(Policy())

    def make(label):
        return pool.make(label, {label: (0, 1, 2)}, lambda: [(0, 1, 2)])[0]

    with pool.two_phase_commit(range(3), {}, one_device=True):
        yield pool, make


@members_only
def fails(*args, **kwargs):
    from_all(None)  # the others are out
    hypergrid.abort()
    raise RuntimeError("this rank has failed")


@pytest.mark.parametrize("batches", [{}, {"GLOO_ENABLE_STORE_V2_API": "0"}], ids=str)
@on_ranks(3)
def test_a_rank_that_waits_in_torchs_creation_for_an_address_comes_out(rank, batches):
    os.environ.update(batches)
    before = dict(os.environ)
    with pytest.raises(AbortedError), creating() as (pool, make):
        make("first")
        pool.make("alone", {"alone": (rank,)}, lambda: [])
        with mock.patch.object(dist, "new_group", fails if rank == 2 else dist.new_group):
            if rank == 2:
                make("third")
            with aborted_by_a_thread(after=1, within=5):
                make("third")
    if rank < 2:
        from_all(None)
    assert known_to_torch() and not pool.groups and os.environ == before
    with creating() as (_, make):
        assert total(make("fourth")) == 3


@on_ranks(2)
def test_a_rank_that_waits_in_a_group_that_has_not_connected_comes_out_after_its_timeout(rank):
    os.environ["HYPERGRID_CONNECT"] = "lazy"
    grid = HyperCommGrid([2], ["dp"])
    # Gloo takes five times this timeout.
    a_second = mock.patch.object(creation, "creation_timeout", return_value=timedelta(seconds=1))
    with a_second:
        group = grid.create_pg("dp", timeout=timedelta(seconds=5))
    if rank == 0:
        start = time.monotonic()
        with aborted_by_a_thread(within=10) as returned, pytest.raises(FREED):
            total(group)
        # Where this rank is the one that connects, it has done so by then.
        connected = returned[0].connections == 1
        assert returned[0].groups == ("dp",) and connected == (time.monotonic() - start < 3)
    from_all(None)


@pytest.mark.parametrize("how", ["abort", "destroy"])
@on_ranks(2)
def test_an_abort_after_a_group_failed_to_connect_does_not_end_the_process(rank, how):
    os.environ["HYPERGRID_CONNECT"] = "lazy"
    for _ in range(2):
        grid = HyperCommGrid([2], ["dp"])
        group = grid.create_pg("dp", timeout=timedelta(seconds=1))
        if rank == 1:
            grid.destroy(abort=True)
        from_all(None)
        if rank == 0:
            with pytest.raises(RuntimeError):
                total(group)
            if how == "abort":
                hypergrid.abort()
            else:
                grid.destroy(abort=True)
            time.sleep(0.3)  # for gloo's thread
        from_all(None)


@on_ranks(2)
def test_sockets_that_are_not_those_of_its_groups_stay_open(rank):
    def group_of_outside_code():
        return dist.new_group([0, 1])._get_backend(torch.device("cpu"))

    def separate_group(name):
        store = dist.PrefixStore(name, forked._STORE)
        return dist.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=20))

    with socket.create_server(("127.0.0.1", 0)) as server, selectors.EpollSelector() as selector:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        for registered in (server, accepted):
            selector.register(registered, selectors.EVENT_READ)
        groups = [separate_group("before"), group_of_outside_code()]
        ps.initialize_model_parallel()
        groups += [separate_group("after"), group_of_outside_code()]
        from_all(None)
        assert "DATA_PARALLEL_GROUP" in hypergrid.abort(default=True).groups
        from_all(None)
        for group in groups:
            ones = torch.ones(1)
            group.allreduce([ones]).wait()
            assert ones.item() == 2
        client.sendall(b"here")
        assert accepted.recv(10) == b"here"
        assert len({*from_all(os.getpid())}) == 2  # through the store
        with pytest.raises(ValueError, match="not been initialized"):
            total()


def test_a_descriptor_that_is_now_another_socket_is_left_alone():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        inode = os.fstat(client.fileno()).st_ino
        assert not gloo._shut(client.fileno(), inode + 1)
        assert not gloo._shut(server.fileno(), os.fstat(server.fileno()).st_ino)
        client.sendall(b"here")
        assert accepted.recv(10) == b"here"
        assert gloo._shut(client.fileno(), inode)
        assert accepted.recv(10) == b""


@pytest.mark.parametrize("abort", [True, False])
@on_ranks(2)
def test_a_forked_child_ends_nothing_of_its_parents_groups_and_has_its_own(rank, abort):
    ps.initialize_model_parallel()
    total()

    def child():
        signal.alarm(20)
        ps.destroy_model_parallel(abort=abort)
        assert open_groups() == [dist.group.WORLD]
        assert hypergrid.abort(default=True) == ((), 0)
        assert not open_groups()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        HyperCommGrid([1], ["dp"]).create_pg("dp")
        assert hypergrid.abort(default=True).groups == ("dp",)

    with tempfile.NamedTemporaryFile() as log:
        process = forked.fork_logged(child, Path(log.name))
        assert os.waitpid(process, 0)[1] == 0, Path(log.name).read_text()
    for group in (None, ps.get_data_parallel_group()):
        assert total(group) == 2


@on_ranks(2)
def test_state_and_grids_are_as_before_the_first_initialisation_even_if_suspended(rank):
    def globals_of_module():
        # Lists of ranks stay, as upstream's.
        slots = [slot for slot in SLOTS if slot not in LEFT_BEHIND]
        return {slot: getattr(ps, slot) for slot in slots}, {*vars(ps)}

    before = globals_of_module()
    environment = dict(os.environ)
    expert = types.ModuleType("transformer_engine.pytorch.ep")
    grid = HyperCommGrid([2], ["dp"])
    with mock.patch.dict(sys.modules, {expert.__name__: expert}):
        ps.initialize_model_parallel(2)
        second = ParallelState.create()
        grid.create_pg("dp")
        for owner in (second, grid):
            owner.suspend()
        vars(expert).update(_EP_GROUP=ps.get_tensor_model_parallel_group(), _BOOTSTRAPPED=True)
        aborted = hypergrid.abort()
    assert len(aborted.groups) > 20 and known_to_torch() and not grid.groups
    assert globals_of_module() == before and environment == os.environ
    assert repr(second) == "ParallelState(destroyed)"
    assert expert._EP_GROUP is None
    dist.barrier()
    assert total(grid.create_pg("dp")) == 2  # which was suspended


def test_without_torchs_default_group_there_is_nothing_to_abort():
    assert hypergrid.abort(default=True) == ((), 0)
