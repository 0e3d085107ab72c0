"""How groups are made: by whom, shared with whom, connected when."""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import parallel_state as ps
from hypergrid import AgreementError, of_torch
from hypergrid.groups import creation, gloo
from hypergrid.policy import WAYS, Abilities, Agreement, Policy
from tests.support import ROOT
from tests.support.forked import from_all, on_ranks
from tests.support.groups import check_all_reduce

pytestmark = pytest.mark.usefixtures("clean_state")
LAYOUT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


one_rank_cannot = pytest.mark.parametrize(
    ("of_one_rank", "of_others", "agreed"),
    [
        (
            Abilities("an old torch"),
            Abilities(),
            Agreement("", obstacle="an old torch", lazy=True),
        ),
        (
            Abilities(),
            Abilities(bound="a device"),
            # Gloo twins are created by their members, and a group of one rank by that rank.
            Agreement("", bound="a device", lazy=True),
        ),
        (
            Abilities(can_connect_lazily=False),
            Abilities(),
            Agreement("", lazy=False),
        ),
    ],
)


WORDS = {
    ("obstacle", True): "an obstacle",
    ("one_rank", True): "one rank",
    ("bound", True): "a bound default group",
    ("splits", True): "split by torch",
    ("splits", False): "not split by torch",
}


def test_the_page_has_the_table_of_who_creates_a_group():
    page = (ROOT / "docs" / "groups.md").read_text()
    table = page.partition("| Where | `creation` | Why |")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    for (where, creators, why), way in zip(rows, WAYS, strict=True):
        assert (creators, why) == (way.creators, way.why)
        conditions = way._asdict()
        words = [word for (name, value), word in WORDS.items() if conditions[name] is value]
        if way.asked is not None:
            words.append(f"asked for {way.asked}")
        assert where == (", ".join(words) or "else")


def test_the_last_way_is_for_every_group():
    assert WAYS[-1][2:] == (None,) * len(WAYS[-1][2:])


@one_rank_cannot
@on_ranks(8)
def test_one_rank_that_cannot_decides_for_all(rank, of_one_rank, of_others, agreed):
    abilities = of_one_rank if rank == 5 else of_others
    with mock.patch.object(creation, "abilities", return_value=abilities):
        ps.initialize_model_parallel(**LAYOUT, connect="lazy")
    check_all_reduce(rank)
    assert replace(ps.current_state().pool.agreement, epoch="") == agreed


@on_ranks(8)
def test_a_way_that_is_not_open_to_all_is_refused_by_all(rank):
    abilities = Abilities("an old torch" if rank == 5 else None)
    with (
        mock.patch.object(creation, "abilities", return_value=abilities),
        pytest.raises(AgreementError) as raised,
    ):
        ps.initialize_model_parallel(**LAYOUT, creation="members")
    (text,) = {*from_all(str(raised.value))}
    assert "creation='members' is not possible here: an old torch" in text


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
    groups = [creation.by_members("A", [0, 1], "1", backend="gloo")]
    groups += creation.by_world(
        "everyone", "B", [[0, 1], [1, 2]], "1", backend="cpu:gloo,cuda:nccl"
    )
    listening = mock.Mock(wraps=dist.new_group)
    with gloo.connecting(True), mock.patch.object(dist, "new_group", listening):
        groups.append(creation.by_members("C", [0, 1], "1", backend="gloo"))
    assert [dist.get_backend(group) for group in groups] == ["fake"] * 3
    # Outside code sees what the group is in a real job.
    backends = [call.kwargs["backend"] for call in listening.call_args_list]
    assert backends == ["gloo", "fake"]


def test_a_name_is_a_decimal_digest_of_label_ranks_and_epoch(fake_world):
    fake_world(4)
    names = set()
    for label, second, epoch in (("A", 1, "1"), ("B", 1, "1"), ("A", 2, "1"), ("A", 1, "2")):
        name = creation.by_members(label, [0, second], epoch).group_name
        assert name.isdigit() and len(name) > 30
        names.add(name)
    assert len(names) == 4


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


def test_choices_come_from_the_environment_then_arguments(monkeypatch):
    monkeypatch.setenv("HYPERGRID_SHARE", "all")
    assert Policy.resolve() == Policy(share="all")
    assert Policy.resolve(share="none", connect="lazy") == Policy("all", "lazy")
    with pytest.raises(ValueError, match="connect='later' is invalid: use one of torch, eager"):
        Policy.resolve(connect="later")
    monkeypatch.setenv("HYPERGRID_CONNECT", "later")
    with pytest.raises(ValueError, match="HYPERGRID_CONNECT='later' is invalid: use one of torch"):
        Policy.resolve()
