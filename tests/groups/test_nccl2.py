"""The NCCL of torch 2.15 and later, by the calls and options that torch gives it: no GPU is used.

Torch's own code runs up to the constructor of its class, in whose place stands one over gloo.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import parallel_state as ps
from compat.report import report
from hypergrid import AgreementError, of_torch
from hypergrid.groups import creation
from tests.support.forked import from_all, join, on_ranks
from tests.support.stock import PUBLISHED

pytestmark = pytest.mark.skipif(not of_torch.has("lazy NCCL"), reason="torch has one NCCL backend")

LAYOUT = {"tensor_model_parallel_size": 2, "create_gloo_process_groups": False}
calls: list[tuple] = []  # of this process


class Nccl2(dist.ProcessGroupGloo):
    """What torch constructs and splits in place of ``ProcessGroupNCCL2``."""

    def __init__(self, store, rank, size, options, device):
        super().__init__(store, rank, size, timeout=options._timeout)
        self.given_options = options
        calls.append(("new", tuple(options.global_ranks_in_group), options.lazy_init))

    @property
    def supports_splitting(self):  # as its header says
        return not self.given_options.lazy_init

    @property
    def options(self):
        return self.given_options

    def split(self, store, ranks, options):
        calls.append(("split", tuple(ranks)))
        place = ranks.index(self.rank())
        return dist.ProcessGroupGloo(store, place, len(ranks), timeout=options._timeout)

    def perform_nocolor_split(self, device):
        calls.append(("no color",))

    def eager_connect_single_device(self, device):
        calls.append(("connect", tuple(self.given_options.global_ranks_in_group)))


@pytest.fixture(autouse=True)
def _standing_in():
    def bind(opts):
        if opts.process_group.bound_device_id is None:  # as torch does, on a host with a GPU
            opts.process_group.bound_device_id = torch.device("cuda", 0)
        return opts.process_group.bound_device_id

    with (
        mock.patch.object(c10d, "ProcessGroupNCCL2", Nccl2),
        mock.patch.object(c10d, "_nccl2_device", bind),
    ):
        yield
    ps.destroy_model_parallel()


def start(rank, world):
    """The default group as torch 2.15 makes it of "nccl": bound by torch itself."""
    join(rank, world, backend="nccl")
    assert c10d._get_default_group().bound_device_id == torch.device("cuda", 0)
    calls.clear()


def ranks_by(how):
    return [call[1] for call in calls if call[0] == how]


@on_ranks(4, backend="")
def test_with_connect_torch_each_name_is_one_split_with_the_world_but_for_ranks_alone(rank):
    start(rank, 4)
    ps.initialize_model_parallel(**LAYOUT, pipeline_model_parallel_size=2)
    state = ps.current_state()
    assert state.pool.agreement.way == "split" and "connect='lazy'" in report(state)
    alone = [pooled.ranks for pooled in state.pool.groups if len(pooled.ranks) == 1]
    several = [pooled.ranks for pooled in state.pool.groups if len(pooled.ranks) > 1]
    assert len(alone) > 3 and len(several) > 3
    # A group of one rank is created unconnected, and is no split.
    assert [call for call in calls if call[0] == "new"] == [("new", ranks, True) for ranks in alone]
    assert ranks_by("split") == several
    shares = from_all(len(several) + calls.count(("no color",)))
    assert len({*shares}) == 1  # every rank takes part in each


@pytest.mark.release(PUBLISHED[-1])
@pytest.mark.parametrize("window", [4, 2])
@on_ranks(4, backend="")
def test_with_connect_lazy_members_alone_create_and_nothing_is_split_or_connected(rank, window):
    start(rank, 4)
    ranks = {"local_world_size": window, "rank_offset": rank // window * window}
    ps.initialize_model_parallel(**LAYOUT, **ranks, connect="lazy")
    state = ps.current_state()
    assert state.pool.agreement.way == "members"
    assert {how for how, *_ in calls} == {"new"} and {call[2] for call in calls} == {True}
    assert sorted(ranks_by("new")) == sorted(pooled.ranks for pooled in state.pool.groups)
    assert all(creation.is_lazy(p.group) == (len(p.ranks) > 1) for p in state.pool.groups)


@on_ranks(4, backend="")
def test_members_alone_are_refused_with_connect_torch_and_connected_with_eager(rank):
    start(rank, 4)
    with pytest.raises(
        AgreementError, match="every rank; with connect='lazy' members create alone"
    ):
        ps.initialize_model_parallel(**LAYOUT, creation="members")
    with mock.patch.object(creation, "connect") as connect:
        ps.initialize_model_parallel(**LAYOUT, creation="members", connect="eager")
    groups = [p.group for p in ps.current_state().pool.groups if len(p.ranks) > 1]
    assert [call.args[0] for call in connect.call_args_list] == groups
    assert {how for how, *_ in calls} == {"new"}


@on_ranks(4, backend="")
def test_off_an_unbound_default_group_several_connect_at_once_or_later_and_one_later(rank):
    join(rank, 4)
    half = [rank // 2 * 2, rank // 2 * 2 + 1]
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    how = {"backend": "nccl", "pg_options": options}
    at_once = creation.by_members("A", half, "epoch", **how)
    later = creation.by_members("B", half, "epoch", True, **how)
    creation.by_members("C", [rank], "epoch", **how)
    assert [call[2] for call in calls] == [False, True, True] and not ranks_by("split")
    assert [creation.is_lazy(group) for group in (at_once, later)] == [False, True]
    # Each group has a copy of the options that were given.
    copied = later._get_backend(torch.device("cuda")).given_options
    assert copied.lazy_init and copied.is_high_priority_stream
    assert not options.lazy_init and options.group_name == ""


@pytest.mark.parametrize("name", ["nccl", "NCCL", "nccl2", "nccl-lazy", "cpu:gloo,cuda:nccl2"])
def test_which_names_wait_is_asked_of_what_torch_would_call(fake_world, name):
    fake_world(1)
    assert creation.can_be_lazy(name)
    assert not creation.can_be_lazy("nccl-legacy") and not creation.can_be_lazy("gloo")
    plugin = c10d.Backend._plugins["NCCL"]
    legacy = plugin._replace(creator_fn=c10d._create_nccl_process_group)  # TORCH_DIST_USE_NCCL2=0
    with mock.patch.dict(c10d.Backend._plugins, NCCL=legacy):
        assert creation.can_be_lazy(name) == (name.lower() != "nccl")
