"""EnvironmentTable: the proposal of ColossalAI issue 3051, and answers to its open questions."""

import json
import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import GroupMember
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

import hypergrid
from hypergrid import EnvironmentTable
from tests.support.forked import on_ranks, open_groups, run_ranks


def _ranks(group):
    return None if group is GroupMember.NON_GROUP_MEMBER else dist.get_process_group_ranks(group)


def _refused(attempt, *kinds):
    """The text of the refusal, which must leave torch's groups as they were."""
    before = set(open_groups())
    with pytest.raises(kinds or ValueError) as caught:
        attempt()
    assert set(open_groups()) == before
    return str(caught.value)


def _the_definition(rank, world):
    table = EnvironmentTable()
    assert isinstance(table.rank, int) and isinstance(table.world_size, int)
    assert isinstance(table.default_process_group, dist.ProcessGroup)
    assert isinstance(table.process_group_pool, dict) and isinstance(table.device_mesh_pool, dict)
    assert table.is_master() is table.is_master(process_group=None) is (rank == 0)
    assert table.get_rank(process_group=None) == table.rank == rank
    assert table.get_world_size(process_group=None) == table.world_size == world
    group = table.create_process_group("middle", [1, 2])
    assert table.get_process_group("middle") is group is table.process_group_pool["middle"]
    mesh = table.create_device_mesh("train", (2, world // 2), ("dp", "tp"))
    assert isinstance(mesh, DeviceMesh)
    assert table.get_device_mesh("train") is mesh is table.device_mesh_pool["train"]
    assert table.get_rank("middle") == table.get_rank(process_group=group)
    return (
        table.is_master(process_group=group),
        table.get_rank(process_group=group),
        table.get_world_size(process_group=group),
        table.is_master("train/tp"),
    )


@pytest.mark.parametrize("world", [4, 8])
def test_the_definition_in_the_proposal_runs(world):
    outside, first, second = (False, -1, -1), (True, 0, 2), (False, 1, 2)
    expected = [outside, first, second, *[outside] * (world - 3)]
    results = run_ranks(world, _the_definition, world)
    assert [result[:3] for result in results] == expected
    assert [result[3] for result in results] == [rank % (world // 2) == 0 for rank in range(world)]


@on_ranks(4)
def test_groups_are_found_by_meaningful_names_and_given_back(rank):
    table = EnvironmentTable()
    table.create_process_group("halves", [[1, 0], [2, 3]])
    table.create_process_group("io", [0, 3], timeout=timedelta(seconds=9))
    table.create_device_mesh("train", (2, 2), ("dp", "tp"))
    total = torch.tensor([rank])
    dist.all_reduce(total, group=table.get_process_group("halves"))
    described = {each["label"]: each["ranks"] for each in json.loads(hypergrid.dump())["groups"]}
    seen = {name: _ranks(group) for name, group in table.process_group_pool.items()}
    table.destroy()
    assert table.process_group_pool == table.device_mesh_pool == {}
    half, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    io = [0, 3] if rank in (0, 3) else None
    names = {"halves": half, "io": io, "train/dp": column, "train/tp": half}
    assert seen == names
    assert total.item() == sum(half) and len(open_groups()) == 1
    assert described["halves"] == half and described["train/dp"] == column


@pytest.mark.parametrize("environment", [{}, {"HYPERGRID_CREATION": "everyone"}])
@on_ranks(4)
def test_what_has_the_same_members_and_backend_is_created_once(rank, environment):
    os.environ.update(environment)
    table = EnvironmentTable()
    first = table.create_process_group("pairs", [[0, 1], [2, 3]])
    assert table.create_process_group("pairs", [[3, 2], [0, 1]]) is first
    again = table.create_process_group("again", [1, 0], backend="gloo")
    assert again is (first if rank < 2 else GroupMember.NON_GROUP_MEMBER)
    mesh = table.create_device_mesh("m", (2, 1, 1, 2), ("dp", "cp", "pp", "tp"))
    assert mesh.get_group("tp") is first is table.get_process_group("m/tp")
    assert mesh.get_group("cp") is mesh.get_group("pp")
    # Some of the groups exist: the others are created.
    mixed = table.create_process_group("mixed", [[0, 1], [2], [3]])
    assert mixed is (first if rank < 2 else mesh.get_group("cp"))
    texts = [
        _refused(lambda: table.create_process_group("pairs", [0, 2])),
        _refused(lambda: table.create_process_group("m/tp", [0, 2])),
        _refused(lambda: table.create_device_mesh("m", (2, 2), ("dp", "tp"))),
        _refused(lambda: table.create_process_group("x", [0, 1], timeout=timedelta(seconds=5))),
    ]
    assert list(table.process_group_pool) == [
        *("pairs", "again", "m/tp", "m/pp", "m/cp", "m/dp", "mixed")
    ]
    for name, expected in (("pairs", rank // 2 * 4 + 1), ("m/dp", rank % 2 * 2 + 2)):
        total = torch.tensor([rank])
        dist.all_reduce(total, group=table.get_process_group(name))
        assert total.item() == expected
    assert len(open_groups()) == 4  # default, pairs, dp, own
    assert "'pairs' means other groups on rank" in texts[0]
    assert "'m/tp' means other groups on rank" in texts[1] and "has a mesh 'm'" in texts[2]
    assert "exists as 'pairs'" in texts[3] and "leave them out" in texts[3]


@on_ranks(4)
def test_it_is_not_a_singleton(rank):
    one, two = EnvironmentTable(), EnvironmentTable()
    assert one is not two
    first, second = (table.create_process_group("x", [0, 1]) for table in (one, two))
    assert rank > 1 or first is not second
    one.create_process_group("y", [1, 2])
    assert list(two.process_group_pool) == ["x"]
    one.destroy()
    total = torch.tensor([rank])
    dist.all_reduce(total, group=second) if rank < 2 else None
    two.destroy()
    assert total.item() == [1, 1, 2, 3][rank] and len(open_groups()) == 1


@on_ranks(4)
def test_ranks_that_disagree_all_say_so_and_nothing_is_left(rank):
    table = EnvironmentTable()
    agreement = (hypergrid.AgreementError, ValueError)
    texts = [
        _refused(lambda: table.create_process_group("x", [0, 1 + rank // 3]), *agreement),
        _refused(lambda: table.create_process_group("x", [0, 9 if rank == 2 else 1]), *agreement),
        _refused(
            lambda: table.create_device_mesh("m", (2, 3 if rank == 1 else 2), ("a", "b")),
            *agreement,
        ),
    ]
    assert table.process_group_pool == table.device_mesh_pool == {}
    group = table.create_process_group("x", [0, 1])
    mesh = table.create_device_mesh("m", (2, 2), ("a", "b"))
    assert "ranks is ['0,2'] on rank 3 and ['0..1'] on rank 0" in texts[0]
    assert ("rank 2 refused" in texts[1]) == (rank != 2) and "of 0 to 3" in texts[1]
    assert ("rank 1 refused" in texts[2]) == (rank != 1) and "has 6 ranks" in texts[2]
    assert _ranks(group) == ([0, 1] if rank < 2 else None) and mesh.get_group("a").size() == 2


@mock.patch.object(c10d, "default_pg_timeout", timedelta(seconds=3))
@on_ranks(4)
def test_what_one_rank_cannot_create_is_left_on_none_and_can_be_asked_for_again(rank):
    table = EnvironmentTable()
    real, calls = dist.new_group, []

    def second_fails(*args, **options):
        calls.append(args)
        if rank == 2 and len(calls) % 2 == 0:
            raise RuntimeError("no route")
        return real(*args, **options)

    mesh = lambda: table.create_device_mesh("m", (2, 2), ("a", "b"))  # noqa: E731
    with mock.patch.object(dist, "new_group", second_fails):
        text = _refused(mesh, hypergrid.CreationError)
    assert table.process_group_pool == table.device_mesh_pool == {}
    total = torch.tensor([rank])
    dist.all_reduce(total, group=mesh().get_group("a"))
    assert "rank 2 could not create m/a" in text
    assert total.item() == (2 if rank % 2 == 0 else 4)


@pytest.mark.parametrize("ranks", [[], [0, 0], [4], [-1], ["a"], 3, [[0, 1], [1, 2]], [[0], []]])
def test_ranks_that_make_no_group_are_refused(fake_world, ranks):
    fake_world(4)
    table = EnvironmentTable()
    with pytest.raises(ValueError, match="the ranks of 'x' "):
        table.create_process_group("x", ranks)
    assert table.process_group_pool == {}


def test_other_refusals_are_sentences(fake_world):
    with pytest.raises(RuntimeError, match="init_process_group"):
        EnvironmentTable()
    fake_world(4, rank=3)
    table = EnvironmentTable()
    with pytest.raises(KeyError, match=r"no process group 'lost' on rank 3: call create_proc"):
        table.get_process_group("lost")
    with pytest.raises(KeyError, match=r"create_device_mesh\(\) on every rank first"):
        table.get_device_mesh("lost")
    for name in ("", 7, None):
        with pytest.raises(ValueError, match="the name of a group must be a text"):
            table.create_process_group(name, [0])
    for name in ("", "a/b", 7):
        with pytest.raises(ValueError, match="the name of a mesh must be a text"):
            table.create_device_mesh(name, (2, 2), ("a", "b"))
    with pytest.raises(ValueError, match="one size per name"):
        table.create_device_mesh("m", (2, 2), ())
    with pytest.raises(ValueError, match=r"has 2 ranks and the world has 4.*rank_offset"):
        table.create_device_mesh("m", (2,), ("a",))
    assert len(open_groups()) == 1 and table.device_mesh_pool == {}
