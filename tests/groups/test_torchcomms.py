"""Torchcomms under torch 2.15, by the calls that torch gives it: it is not installed here."""

import os
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import parallel_state as ps
from compat.report import report
from hypergrid import of_torch
from tests.support.forked import from_all, join, on_ranks

pytestmark = pytest.mark.skipif(
    not of_torch.has("torchcomms by members"), reason="torch splits with torchcomms"
)


created: list[tuple[str, int]] = []  # name and rank of each communicator of this process


class Comm:
    """What ``torchcomms.new_comm`` returns."""

    def __init__(self, backend, device, *, name, store, hints):
        self.store, self.rank = store, int(os.environ["TORCHCOMM_RANK"])
        self.size, self.backend = int(os.environ["TORCHCOMM_SIZE"]), backend
        created.append((name, self.rank))

    def finalize(self):
        pass


class Wrapper(dist.ProcessGroupGloo):
    """Torchcomms' backend of a group, over gloo."""

    def __init__(self, comm):
        super().__init__(comm.store, comm.rank, comm.size)
        self.comm = comm

    def get_comm(self):
        return self.comm


@pytest.fixture(autouse=True)
def _torchcomms():
    names = {
        "_TORCHCOMM_AVAILABLE": True,
        "new_comm": Comm,
        "_BackendWrapper": Wrapper,
        "_TorchCommsFlightRecorderHook": mock.Mock(),
        "_torchcomms_is_backend_built": lambda name: name in ("gloo", "nccl"),
    }
    with (
        mock.patch.multiple(c10d, create=True, **names),
        dist.config.patch(use_torchcomms=True),
    ):
        yield
    ps.destroy_model_parallel()


@on_ranks(4, backend="")
def test_members_alone_create_each_group_under_our_name_and_nothing_is_split(rank):
    join(rank, 4)
    created.clear()
    split = mock.patch.object(dist.ProcessGroup, "split_group", side_effect=AssertionError)
    with split:
        ps.initialize_model_parallel(2, create_gloo_process_groups=False, connect="lazy")
    state = ps.current_state()
    assert state.pool.agreement.way == "members"
    expected = [(p.group.group_name, p.ranks.index(rank)) for p in state.pool.groups]
    assert created == expected and len({name for name, _ in expected}) == len(expected)
    assert "connected at once: not every rank's torch can connect on first use" in report(state)
    totals = from_all({p.label: p.ranks for p in state.pool.groups})
    assert totals[0] != totals[1]  # of different members
    ps.destroy_model_parallel()
    assert list(c10d._world.pg_names.values()) == ["0"]
