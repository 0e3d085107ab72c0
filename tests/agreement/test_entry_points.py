"""The two promises of every call that creates groups, by entry point.

A rank that differs, or refuses its arguments, is named on all. A failure leaves nothing.
"""

import re
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from compat import parallel_state as ps
from compat.colossalai import EnvironmentTable, ProcessGroupMesh
from compat.hyper_comm_grid import HyperCommGrid as MegatronGrid
from compat.physicsnemo import DistributedManager
from compat.state import ParallelState
from hypergrid import CreationError, HyperCommGrid
from tests.support import table
from tests.support.faults import changes_since, happens_at_group, process_state
from tests.support.forked import from_all, on_ranks, open_groups, store, total

pytestmark = pytest.mark.usefixtures("no_pools_of_earlier_tests")

# Each function calls an entry point and gives what destroys the groups that it has created.


def initialize(*arguments, **options):
    ps.initialize_model_parallel(*arguments, **options)
    return ps.destroy_model_parallel


def initialize_with_a_function_replaced(is_replaced):
    original = ps.create_group
    wrapper = lambda *args, **kwargs: original(*args, **kwargs)  # noqa: E731
    with mock.patch.object(ps, "create_group", wrapper if is_replaced else original):
        return initialize(2)


def initialize_with_options(name, text):
    """With options of NCCL from a file; gloo ignores them."""
    nccl = mock.Mock(
        Options=lambda is_high_priority_stream: SimpleNamespace(config=SimpleNamespace())
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
    ):
        path = Path(folder, name)
        path.write_text(text)
        return initialize(2, nccl_communicator_config_path=str(path))


def create_state(**options):
    return ParallelState.create(**options).destroy


def grid(shape, kind=HyperCommGrid, backend=None):
    created = kind(shape, ["tp", "dp"], backend=backend)
    created.create_pg("tp")
    return created.destroy


def megatron_grid(shape):
    return grid(shape, MegatronGrid)


def colossalai_mesh(axis):
    mesh = ProcessGroupMesh(2, 2)
    mesh.create_group_along_axis(axis)
    return mesh.destroy_mesh_process_groups


def table_group(ranks):
    environment = EnvironmentTable()
    environment.create_process_group("x", ranks)
    return environment.destroy


def table_mesh(shape):
    environment = EnvironmentTable()
    environment.create_device_mesh("m", shape, ("a", "b"))
    return environment.destroy


def set_up_manager(rank):
    """It sets variables of the environment, which is before any creation."""
    DistributedManager.setup(rank=rank, world_size=4, local_rank=0)


def manager_subgroup(size, name):
    DistributedManager().create_process_subgroup(name, size)
    return lambda: None  # the manager keeps it


ENTRY_POINTS = {
    function.__name__: function
    for function in (
        *(initialize, initialize_with_a_function_replaced, initialize_with_options, create_state),
        *(grid, megatron_grid, colossalai_mesh, table_group, table_mesh, manager_subgroup),
    )
}
ROWS = table("agreement/entry_points.txt")


def check_row(rank, call, error_of_rank_2, says):
    """Rank 2 makes the call differently: all others say so, and the next call works."""
    before = process_state()
    start = time.monotonic()  # of 30 minutes
    with pytest.raises(Exception) as raised:
        eval(call, ENTRY_POINTS, {"odd": rank == 2})
    assert time.monotonic() - start < 20
    assert raised.type.__name__ == (error_of_rank_2 if rank == 2 else "AgreementError"), call
    assert not changes_since(before), call
    texts = from_all(str(raised.value))
    if error_of_rank_2 != "AgreementError":
        del texts[2]
    assert len({*texts}) == 1, texts
    assert re.search(says, texts[0]), (call, texts[0])
    destroy = eval(call, ENTRY_POINTS, {"odd": False})
    destroy()


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@on_ranks(4, timeout=90)
def test_a_rank_that_differs_or_refuses_is_named_on_all_and_the_next_call_works(rank, entry_point):
    set_up_manager(rank)
    rows = [row for row in ROWS if row[0].startswith(f"{entry_point}(")]
    assert rows
    for row in rows:
        check_row(rank, *row)


class MinimalStore(dist.Store):
    """A store in Python with no more than torch asks for."""

    def __init__(self, underlying_store):
        super().__init__()
        self.underlying_store = underlying_store


def passed_on(operation):
    def call(self, *arguments):
        return getattr(self.underlying_store, operation)(*arguments)

    return call


for operation in ("set", "get", "add", "check", "wait"):
    setattr(MinimalStore, operation, passed_on(operation))


@on_ranks(4)
def test_a_store_that_has_no_more_than_torch_asks_for_serves_too(rank):
    minimal = MinimalStore(dist.PrefixStore("minimal", store()))
    with mock.patch("hypergrid.agreement.commit.shared_store", lambda: minimal):
        for row in ROWS:
            if row[0].startswith("initialize(2"):
                check_row(rank, *row)


SOON = 3 / 60  # minutes


@pytest.mark.parametrize(
    ("call", "number"),
    [
        (lambda: initialize(2, 2, distributed_timeout_minutes=SOON), 2),
        (lambda: initialize(2, 2, distributed_timeout_minutes=SOON), 13),
        # The others wait for an address: for a fifth of three minutes, were they not told.
        (lambda: initialize(2, distributed_timeout_minutes=3), 3),
        (lambda: create_state(tensor_model_parallel_size=2, distributed_timeout_minutes=SOON), 5),
        (lambda: grid([2, 2]), 1),
        (lambda: megatron_grid([2, 2]), 1),
        (lambda: colossalai_mesh(1), 1),
        (lambda: table_group([0, 1, 2]), 1),
        (lambda: table_mesh((2, 2)), 2),
        (lambda: manager_subgroup(2, "pairs"), 1),
    ],
)
@on_ranks(4, timeout=90)
def test_where_one_rank_cannot_create_all_say_so_keep_nothing_and_can_try_again(rank, call, number):
    set_up_manager(rank)
    fault = mock.Mock(side_effect=RuntimeError("injected: no more communicators"))
    before = process_state()
    start = time.monotonic()
    with (
        happens_at_group(number if rank == 2 else None, fault),
        pytest.raises(CreationError, match=r"rank 2 could not create .*injected: no more"),
    ):
        call()
    assert time.monotonic() - start < 20
    # Lists of ranks stay behind, as upstream's.
    assert not changes_since(before | {"slots": process_state()["slots"]})
    dist.barrier()
    destroy = call()
    for group in open_groups():
        assert total(group) == group.size()
    dist.barrier()
    destroy()


@pytest.mark.parametrize("place", ["groups.pool.PooledGroup", "agreement.commit._tell_untold"])
@on_ranks(2)
def test_an_interrupt_before_or_after_all_ranks_have_their_groups_leaves_none(rank, place):
    pair = HyperCommGrid([2], ["dp"])
    before = open_groups()
    interrupted = mock.patch(f"hypergrid.{place}", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        pair.create_pg("dp")
    pair.destroy(abort=True)
    assert open_groups() == before
    from_all(None)
    assert total(pair.create_pg("dp")) == 2
