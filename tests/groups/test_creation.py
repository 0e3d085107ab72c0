"""How groups are made: by whom, shared with whom, connected when."""

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import parallel_state as ps
from compat.report import report
from hypergrid import AgreementError, HyperCommGrid, of_torch
from hypergrid.groups import creation, gloo
from hypergrid.policy import Policy
from tests.support.backends import SPLITS
from tests.support.forked import (
    descriptors,
    from_all,
    join,
    on_ranks,
    open_groups,
    run_ranks,
    sockets,
    total,
)
from tests.support.groups import check_all_reduce, state_groups

pytestmark = pytest.mark.usefixtures("clean_state")
LAYOUT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def members_of_slots():
    return {slot: dist.get_process_group_ranks(group) for slot, group in state_groups().items()}


def members_created(rank, way):
    join(rank, 8)
    ps.initialize_model_parallel(**LAYOUT, expert_model_parallel_size=2, creation=way)
    assert ps.current_state().pool.agreement.way == way
    check_all_reduce(rank)
    return members_of_slots()


@SPLITS
def test_all_three_ways_give_the_same_membership():
    expected = run_ranks(8, members_created, "members", backend="")
    for way in ("split", "everyone"):
        assert run_ranks(8, members_created, way, backend="") == expected


def old_torch_on(odd, rank):
    """Rank ``odd`` alone cannot create by members."""
    abilities = creation.Abilities("an old torch" if rank == odd else None)
    return mock.patch("hypergrid.groups.creation.abilities", return_value=abilities)


@on_ranks(8)
def test_one_rank_that_cannot_decides_for_all(rank):
    with old_torch_on(5, rank):
        ps.initialize_model_parallel(**LAYOUT)
    check_all_reduce(rank)
    agreed = ps.current_state().pool.agreement
    assert (agreed.way, agreed.unsplit_way, agreed.why) == ("everyone", "everyone", "an old torch")


@on_ranks(8)
def test_a_way_that_is_not_open_to_all_is_refused_by_all(rank):
    with old_torch_on(5, rank), pytest.raises(AgreementError) as raised:
        ps.initialize_model_parallel(**LAYOUT, creation="members")
    (text,) = {*from_all(str(raised.value))}
    assert "creation='members' is not possible here: an old torch" in text


@on_ranks(8)
def test_where_only_some_are_bound_everyone_creates_but_gloo_twins_go_by_members(rank):
    can = creation.Abilities(bound="a device" if rank else None, can_split=bool(rank))
    with mock.patch("hypergrid.groups.creation.abilities", return_value=can):
        ps.initialize_model_parallel(**LAYOUT)
    check_all_reduce(rank)
    agreed = ps.current_state().pool.agreement
    assert (agreed.way, agreed.unsplit_way) == ("everyone", "members")


BRINGS_NEW_GROUP = mock.Mock(new_group=lambda: None, bound_device_id=None)


@pytest.mark.parametrize(
    ("fake", "says"),
    [
        (mock.patch("torch.distributed.get_backend", return_value="mpi"), "MPI"),
        (mock.patch.dict("os.environ", TORCH_DIST_INIT_BARRIER="1"), "TORCH_DIST_INIT_BARRIER"),
        (
            mock.patch.multiple(
                of_torch, torchcomms=lambda: True, has=lambda part: part != "torchcomms by members"
            ),
            "torchcomms",
        ),
        (mock.patch.object(of_torch, "has", lambda part: part != "names"), "running group number"),
        (
            mock.patch.object(of_torch, "default_group", lambda: BRINGS_NEW_GROUP),
            "brings its own new_group",
        ),
    ],
)
def test_each_obstacle_is_noticed_and_named(fake_world, fake, says):
    fake_world(4)
    assert creation.abilities() == creation.Abilities()
    with fake:
        assert says in creation.abilities().obstacle


def test_the_running_number_is_put_back_also_after_a_failure(fake_world):
    fake_world(4)
    before = c10d._world.group_count
    creation.by_members("A", [0, 1], "epoch")
    with pytest.raises(ValueError):
        creation.by_members("B", [0, 99], "epoch")
    assert c10d._world.group_count == before


def test_in_a_dry_run_every_group_is_fake_and_torch_is_not_asked_for_another(fake_world):
    """Torch 2.15 ends the process when it creates a gloo group on a fake default group."""
    fake_world(8)
    backends = []
    new_group = dist.new_group

    def listening(*args, **options):
        backends.append(options["backend"])
        return new_group(*args, **options)

    groups = [creation.by_members("A", [0, 1], "1", backend="gloo")]
    groups += creation.by_everyone("B", [[0, 1], [2, 3]], "1", backend="gloo")
    groups += creation.by_everyone("C", [[0, 1], [1, 2]], "1", backend="cpu:gloo,cuda:nccl")
    with gloo.connecting(True), mock.patch.object(dist, "new_group", listening):
        groups.append(creation.by_members("D", [0, 1], "1", backend="gloo"))
    assert [dist.get_backend(group) for group in groups] == ["fake"] * 4
    assert backends == ["gloo", "fake"]  # outside code sees what the group is in a real job


def test_a_name_is_a_decimal_digest_of_what_the_group_is(fake_world):
    fake_world(4)
    names = {
        creation.by_members(*group).group_name
        for group in (
            ("A", [0, 1], "1"),
            ("B", [0, 1], "1"),
            ("A", [0, 2], "1"),
            ("A", [0, 1], "2"),
        )
    }
    assert len(names) == 4 and all(name.isdigit() and len(name) > 30 for name in names)
    assert str(creation.group_name("A", [0, 1], "1")) in names


def shared_on(rank, share, creation):
    """Which label has whose communicator, and what each name answers."""
    ps.initialize_model_parallel(**LAYOUT, share=share, creation=creation)
    check_all_reduce(rank)
    pool = ps.current_state().pool
    sharing = {pooled.label: pooled.shares for pooled in pool.groups if pooled.shares}
    assert len(open_groups()) - 1 == len(pool.groups) - len(sharing)
    answers = {"src": ps.get_data_parallel_src_rank(), "all": ps.get_all_ranks()}
    for slot, group in state_groups().items():
        ranks = dist.get_process_group_ranks(group)
        assert (group.rank(), group.size()) == (ranks.index(rank), len(ranks))
        answers[slot] = ranks
    ps.destroy_model_parallel()
    assert len(open_groups()) == 1
    return sharing, answers


def test_sharing_gives_every_name_the_same_answers_on_fewer_communicators():
    apart = run_ranks(8, shared_on, "none", "auto")
    shared = run_ranks(8, shared_on, "all", "auto")
    # Also where every rank takes part in creating each group.
    assert run_ranks(8, shared_on, "all", "everyone") == shared
    for (nothing, expected), (sharing, answers) in zip(apart, shared, strict=True):
        assert nothing == {} and answers == expected
        assert sharing["DATA_PARALLEL_GROUP"] == "DATA_PARALLEL_GROUP_WITH_CP"
        alone = ("PIPELINE_MODEL_PARALLEL_GROUP", "_GLOO", "_AG")
        assert not any(label.endswith(alone) for label in (*sharing, *sharing.values()))


def test_groups_that_are_served_by_sharp_share_with_nobody(fake_world):
    fake_world(8)
    with (
        mock.patch("torch.distributed.barrier") as barrier,
        mock.patch.multiple(torch.cuda, current_device=lambda: 0, synchronize=lambda: None),
    ):
        ps.initialize_model_parallel(
            2, use_sharp=True, share="all", create_gloo_process_groups=False
        )
    sharp = ps.get_data_parallel_group(with_context_parallel=True)
    assert barrier.call_args.kwargs["group"] is sharp is not ps.get_data_parallel_group()
    assert "NCCL_COLLNET_ENABLE" not in os.environ


def connections_opened(rank, connect, environment=None):
    if environment is not None:
        os.environ["TORCH_GLOO_LAZY_INIT"] = environment
    _, before = sockets()
    ps.initialize_model_parallel(**LAYOUT, connect=connect)
    _, after = sockets()
    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == environment
    assert ps.current_state().pool.agreement.lazy == (connect == "lazy")
    dist.barrier()
    check_all_reduce(rank)
    return after - before


def test_lazy_groups_connect_when_they_are_used():
    lazy = run_ranks(8, connections_opened, "lazy")
    # Also where torch's own choice is another.
    for arguments in (("torch",), ("eager",), ("eager", "1")):
        assert max(lazy) < min(run_ranks(8, connections_opened, *arguments))


@on_ranks(4)
def test_a_barrier_connects_what_is_not_connected_and_is_given_up_after_the_timeout(rank):
    with gloo.connecting(True):
        group = creation.by_members("A", range(4), "epoch")
    before = descriptors()
    dist.barrier()  # a rank that connects opens descriptors of the others too
    creation.connect(group, timedelta(seconds=20))
    connected = descriptors()
    assert before < connected
    assert total(group) == 4
    assert descriptors() == connected
    broken = mock.patch.object(dist, "barrier", side_effect=RuntimeError("no way there"))
    with broken, pytest.raises(RuntimeError, match="no way there"):
        creation.connect(group, timedelta(seconds=20))
    if rank < 3:
        with pytest.raises(RuntimeError, match="did not connect within 0:00:01"):
            creation.connect(group, timedelta(seconds=1))  # rank 3 does not come


def _late(store, rank, size, timeout):
    """A backend that connects when first used, as NCCL does; rank 3 may then meet nobody."""
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_default_device(lazy_init=True)]
    options._threads, options._timeout = 2, timeout
    if dist.get_rank() == 3 and os.environ["BROKEN"] == "1":
        store = dist.PrefixStore("elsewhere", store)
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _eager(rank, how, broken):
    os.environ.update(HYPERGRID_CONNECT=how, BROKEN=str(int(broken)))
    dist.Backend.register_backend("late", _late, devices=["cpu"])
    grid = HyperCommGrid([1, 2, 2], ["ep", "tp", "dp"], backend="late")
    with (
        mock.patch.object(creation, "connect", wraps=creation.connect) as connect,
        mock.patch.object(dist, "destroy_process_group", side_effect=AssertionError("waits")),
    ):
        for dims in ("ep", "tp"):
            grid.create_pg(dims, timeout=timedelta(seconds=3))
    return [call.args[0].size() for call in connect.call_args_list]


def test_eager_connects_every_backend_in_creation_but_no_rank_alone():
    assert run_ranks(4, _eager, "eager", False) == [[2]] * 4
    assert run_ranks(4, _eager, "torch", False) == [[]] * 4


def test_what_cannot_connect_is_a_creation_error_on_all_only_where_it_is_tried():
    assert run_ranks(4, _eager, "torch", True) == [[]] * 4
    for kind, text in run_ranks(4, _eager, "eager", True, expect="errors"):
        assert kind == "CreationError" and "tp of ranks 2..3 with late" in text


@on_ranks(4)
def test_a_torch_that_cannot_wait_makes_all_connect_at_once_and_is_reported(rank):
    can = creation.Abilities(can_connect_lazily=rank != 2)
    with mock.patch("hypergrid.groups.creation.abilities", return_value=can):
        ps.initialize_model_parallel(**LAYOUT, connect="lazy")
    assert not ps.current_state().pool.agreement.lazy
    text = report(ps.current_state())
    assert "connected at once: not every rank's torch can connect on first use" in text


def test_choices_come_from_the_environment_then_arguments(monkeypatch):
    monkeypatch.setenv("HYPERGRID_SHARE", "all")
    assert Policy.resolve() == Policy(share="all")
    assert Policy.resolve(share="none", connect="lazy") == Policy("all", "lazy")
    for value in ("later", "auto"):
        with pytest.raises(ValueError, match=f"connect='{value}' is invalid: use one of torch, ea"):
            Policy.resolve(connect=value)
    monkeypatch.setenv("HYPERGRID_CONNECT", "later")
    with pytest.raises(ValueError, match="HYPERGRID_CONNECT='later' is invalid: use one of torch"):
        Policy.resolve()


def test_custom_embedding_ranks_are_evaluated_only_when_they_are_not_the_default(fake_world):
    fake_world(8)
    ps.initialize_model_parallel(
        2, 2, create_gloo_process_groups=False, get_embedding_ranks=ps.default_embedding_ranks
    )
    (row,) = (r for r in ps.current_state().plan.rows if r.label == "EMBEDDING_GROUP")
    assert row.explicit is None and row.pick == "ends"


class _Options:
    """Of a backend that is registered with torch, which passes them on as it does NCCL's."""

    def __init__(self):
        self.config = {"max_ctas": 8}
        self.group_name = ""


@on_ranks(4, backend="")
def test_options_that_torch_writes_a_groups_name_into_are_each_groups_own(rank):
    written = []

    def create(group, options):
        if options is not None:
            assert (options.config, options.group_name) == ({"max_ctas": 8}, "")
            options.group_name = group.group_id  # as torch itself does with NCCL's
            written.append(options)
        return dist.ProcessGroupGloo(
            group.store, group.group_rank, group.group_size, timeout=group.timeout
        )

    dist.Backend.register_backend("writing", create, extended_api=True, devices=["cpu"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("writing", rank=rank, world_size=4, store=store)
    options = _Options()
    world = [0, 1, 2, 3]
    halves = [[0, 1], [2, 3]]
    ps.create_hybrid_dp_cp_groups(rank, world, pg_options=options)
    ps.create_hierarchical_groups(rank, world, [2, 2], pg_options=options)
    creation.by_members("A", world, "1", pg_options=options)
    creation.by_members("B", world, "1", pg_options=options)
    creation.by_everyone("C", [world, *halves], "1", pg_options=options)
    creation.by_everyone("D", halves, "1", pg_options=options)
    assert options.group_name == ""
    assert len(written) == len({options.group_name for options in written}) == 8
