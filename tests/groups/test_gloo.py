"""Gloo groups of one creation: the device that they share, the store's batches, who waits."""

import os
import re
import resource
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import parallel_state as ps
from hypergrid import CreationError, HyperCommGrid
from hypergrid.agreement import store as stores
from hypergrid.groups import creation, gloo
from tests.support import table
from tests.support.forked import from_all, on_ranks, run_ranks, sockets
from tests.support.groups import check_pool

pytestmark = pytest.mark.usefixtures("clean_state")
LAYOUT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def _opened(rank, connect):
    """The sockets that one initialisation opens on this rank, after all have it."""
    from_all(rank)
    listening_before, connected_before = sockets()
    ps.initialize_model_parallel(**LAYOUT, connect=connect)
    from_all(rank)
    listening, connected = sockets()
    from_all(rank)  # a rank that uses a group connects to the others
    return listening - listening_before, connected - connected_before


def _sizes():
    return [len(pooled.ranks) for pooled in ps.current_state().pool.groups if not pooled.shares]


@pytest.mark.parametrize(("connect", "variable", "devices", "connects"), table("groups/gloo.txt"))
@on_ranks(8)
def test_groups_that_connect_at_once_share_a_device_unless_a_variable_forbids_it(
    rank, connect, variable, devices, connects
):
    os.environ.update([variable.split("=")])
    before = dict(os.environ)
    listening, connected = _opened(rank, connect=connect)
    assert os.environ == before
    sizes = _sizes()
    alone = sizes.count(1)  # have nobody to wait for, and connect at once
    expected = {"one": 1, "each": len(sizes), "each but alone": len(sizes) - alone + bool(alone)}
    assert listening == expected[devices]
    assert connected == (sum(sizes) - len(sizes) if connects == "yes" else 0)
    check_pool(rank)


def test_all_descriptors_that_are_listed_are_open():
    """With one too many the socket of a gloo device is missed, which torch 2.15 opens first."""
    for number in stores.descriptors():
        os.fstat(number)


@on_ranks(2)
def test_what_torch_gives_gloo_and_options_do_not_have_goes_to_torch_with_a_warning(rank):
    """Torch 2.14 calls it with enable_reconfigure=, which the options have too."""
    options = {"timeout": timedelta(seconds=9), "surprise": True}
    torchs = mock.Mock(side_effect=ZeroDivisionError)
    with (
        mock.patch.object(c10d.ProcessGroupGloo, "__init__", torchs),
        gloo.connecting(True),
        pytest.warns(RuntimeWarning, match="creates gloo groups with surprise, which hypergrid"),
        pytest.raises(ZeroDivisionError),
    ):
        c10d.ProcessGroupGloo(c10d._get_default_store(), rank, 2, **options)
    assert torchs.call_args.kwargs == options


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
    before = sockets()
    read = gloo._InTime.multi_get
    reads = []

    def late(store, keys):
        addresses = read(store, keys)
        reads.append(keys)
        if rank == 0 and len(reads) == 5:
            time.sleep(9)  # the others wait five times their second
        return addresses

    with (
        mock.patch.object(creation, "creation_timeout", return_value=timedelta(seconds=1)),
        mock.patch.object(gloo._InTime, "multi_get", late),
        pytest.raises(CreationError) as raised,
    ):
        ps.initialize_model_parallel(**LAYOUT)
    from_all(rank)
    assert sockets() == before, raised  # although the error and its traceback are held
    ps.initialize_model_parallel(**LAYOUT)
    check_pool(rank)


def _outcome_of_creation(rank, room):
    """Of a gloo group in a process that may take ``room`` bytes more of its address space."""
    status = Path("/proc/self/status").read_text()
    used = int(re.search(r"VmSize:\s+(\d+)", status)[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    try:
        with gloo.connecting():
            c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=5))
    except RuntimeError as error:
        return str(error)
    return "created"


@on_ranks(1)
def test_a_process_without_descriptors_for_a_group_says_so_and_lives(rank):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    with gloo.connecting(), pytest.raises(RuntimeError, match="ulimit -n"):
        c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=5))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("stacks", [1.5, 2.2, 2.7, 40])
def test_a_process_with_memory_for_some_of_a_groups_threads_says_so_and_lives(stacks):
    """Torch's constructor ends the process where one thread starts and the next does not."""
    room = int(stacks * resource.getrlimit(resource.RLIMIT_STACK)[0])
    (outcome,) = run_ranks(1, _outcome_of_creation, room, backend="", timeout=20)
    expected = "created" if stacks == 40 else "no room for a gloo group"
    assert expected in outcome
