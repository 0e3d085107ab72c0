"""Gloo groups of one creation: the device that they share, the store's batches, who waits."""

import os
import re
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import parallel_state as ps
from hypergrid import CreationError, HyperCommGrid
from hypergrid.groups import creation, gloo
from tests.support.forked import from_all, on_ranks, sockets
from tests.support.groups import check_pool

pytestmark = pytest.mark.usefixtures("clean_state")
LAYOUT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def _opened(rank, **how):
    """The descriptors that one initialisation opens on this rank, after all have it."""
    from_all(rank)
    before = sockets()
    ps.initialize_model_parallel(**LAYOUT, **how)
    from_all(rank)
    listening, connected = (after - b for after, b in zip(sockets(), before, strict=True))
    from_all(rank)  # a rank that uses a group connects to the others
    return listening, connected


def _sizes():
    return [len(pooled.ranks) for pooled in ps.current_state().pool.groups if not pooled.shares]


@pytest.mark.parametrize("connect", ["torch", "eager"])
@on_ranks(8)
def test_groups_that_connect_at_once_have_one_device_and_a_connection_per_member(rank, connect):
    listening, connected = _opened(rank, connect=connect)
    assert (listening, connected) == (1, sum(n - 1 for n in _sizes()))
    check_pool(rank)


@on_ranks(8)
def test_a_group_that_connects_on_first_use_has_its_own_device_and_no_connection(rank):
    listening, connected = _opened(rank, connect="lazy")
    alone = _sizes().count(1)  # have nobody to wait for
    assert (listening, connected) == (len(_sizes()) - alone + bool(alone), 0)
    check_pool(rank)


@pytest.mark.parametrize(
    "variables",
    [
        {"TORCH_GLOO_LAZY_INIT": "1"},
        {"GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"},
        {"GLOO_DEVICE_TRANSPORT": "TCP"},
    ],
    ids=str,
)
@on_ranks(4)
def test_where_a_variable_forbids_it_no_device_is_shared(rank, variables):
    with mock.patch.dict(os.environ, variables):
        before = dict(os.environ)
        listening, connected = _opened(rank)
        assert os.environ == before
    assert listening == len(_sizes())
    assert (connected == 0) == ("TORCH_GLOO_LAZY_INIT" in variables)
    check_pool(rank)


@on_ranks(2)
def test_what_torch_gives_gloo_and_options_do_not_have_goes_to_torch_with_a_warning(rank):
    """Torch 2.14 calls it with enable_reconfigure=, which the options have too."""
    store = dist.PrefixStore("theirs", c10d._get_default_store())
    torchs_options = []

    def torchs(group, *args, **named):
        torchs_options.append(named)
        raise ZeroDivisionError

    with (
        mock.patch.object(c10d.ProcessGroupGloo, "__init__", torchs),
        gloo.connecting(True),
        pytest.warns(
            RuntimeWarning, match="creates gloo groups with surprise, which hypergrid does"
        ),
        pytest.raises(ZeroDivisionError),
    ):
        c10d.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=9), surprise=True)
    assert torchs_options == [{"timeout": timedelta(seconds=9), "surprise": True}]


@on_ranks(4)
def test_reads_of_the_store_wait_for_the_groups_timeout_and_change_no_other(rank):
    store = c10d._get_default_store()
    store.set_timeout(timedelta(minutes=9))
    grid = HyperCommGrid([4], ["tp"])
    create = c10d.ProcessGroupGloo.__init__
    late = mock.Mock(side_effect=RuntimeError("this rank fails"))
    with mock.patch.object(c10d.ProcessGroupGloo, "__init__", late if rank == 3 else create):
        start = time.monotonic()
        with pytest.raises(CreationError, match="rank 3 could not create tp"):
            grid.create_pg("tp", timeout=timedelta(seconds=2))
    assert time.monotonic() - start < 20
    assert store.timeout == timedelta(minutes=9)
    assert c10d.ProcessGroupGloo.__init__ is create and "GLOO_ENABLE_STORE_V2_API" not in os.environ
    grid.create_pg("tp")


@on_ranks(4, timeout=90)
def test_a_member_that_is_late_finds_the_device_closed_and_no_process_ends(rank):
    """Gloo's device still holds a callback of the group that has failed."""
    before, read, reads = sockets(), gloo._InTime.multi_get, []

    def late(store, keys):
        addresses = read(store, keys)
        reads.append(keys)
        if rank == 0 and len(reads) == 5:
            time.sleep(9)  # the others wait five times their second
        return addresses

    second = mock.patch.object(creation, "creation_timeout", return_value=timedelta(seconds=1))
    with (
        second,
        mock.patch.object(gloo._InTime, "multi_get", late),
        pytest.raises(CreationError) as raised,
    ):
        ps.initialize_model_parallel(**LAYOUT)
    from_all(rank)
    assert sockets() == before, raised  # although the error and its traceback are held
    ps.initialize_model_parallel(**LAYOUT)
    check_pool(rank)


def _outcome_of_creation(room):
    """Of a gloo group in a process that may take ``room`` bytes more of its address space."""
    status = Path("/proc/self/status").read_text()
    used = int(re.search(r"VmSize:\s+(\d+)", status)[1]) * 1024
    store = dist.HashStore()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    try:
        with gloo.connecting():
            c10d.ProcessGroupGloo(store, 0, 1, timeout=timedelta(seconds=5))
    except RuntimeError as error:
        return str(error)
    return "created"


@pytest.mark.parametrize("stacks", [1.5, 2.2, 2.7, 40])
@on_ranks(1)
def test_a_process_with_memory_for_some_of_a_groups_threads_says_so_and_lives(rank, stacks):
    """Torch's constructor ends the process where one thread starts and the next does not."""
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # or it waits for the thread without an end
        os.write(write, _outcome_of_creation(int(stacks * stack)).encode())
        os._exit(0)
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0
    outcome = os.read(read, 10_000).decode()
    enough = stacks == 40
    assert outcome == "created" if enough else "no room for a gloo group" in outcome
