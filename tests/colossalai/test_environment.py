"""EnvironmentTable: the proposal of ColossalAI issue 3051, and answers to its open questions."""

import json
import os
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import GroupMember
from torch.distributed.device_mesh import DeviceMesh

import hypergrid
from compat.colossalai import EnvironmentTable
from tests.support import table as rows_of
from tests.support.forked import on_ranks, open_groups, total

OUTSIDE = GroupMember.NON_GROUP_MEMBER


@on_ranks(8)
def test_the_definition_in_the_proposal_runs(rank):
    table = EnvironmentTable()
    assert table.default_process_group is dist.group.WORLD
    assert table.is_master() is (rank == 0)
    assert table.get_rank() == table.rank == rank
    assert table.get_world_size() == table.world_size == 8
    group = table.create_process_group("middle", [1, 2])
    assert table.get_process_group("middle") is group is table.process_group_pool["middle"]
    place = {1: 0, 2: 1}.get(rank, -1)
    assert table.get_rank(process_group=group) == place
    assert table.get_world_size(process_group=group) == (-1 if place == -1 else 2)
    assert table.is_master(process_group=group) == (rank == 1)
    mesh = table.create_device_mesh("train", (2, 4), ("dp", "tp"))
    assert isinstance(mesh, DeviceMesh)
    assert table.get_device_mesh("train") is mesh is table.device_mesh_pool["train"]
    assert table.is_master(table.get_process_group("train/tp")) == (rank % 4 == 0)


@on_ranks(4)
def test_groups_are_found_by_meaningful_names_and_given_back(rank):
    table = EnvironmentTable()
    table.create_process_group("first", [1, 0])
    table.create_process_group("io", [0, 3])
    table.create_device_mesh("train", (2, 2), ("dp", "tp"))
    half = [rank // 2 * 2, rank // 2 * 2 + 1]
    column = [rank % 2, rank % 2 + 2]
    expected = {"first": [0, 1], "io": [0, 3], "train/dp": column, "train/tp": half}
    groups = table.process_group_pool
    assert groups.keys() == expected.keys()
    assert groups["first"] is (groups["train/tp"] if rank < 2 else OUTSIDE)
    assert (groups["io"] is OUTSIDE) == (rank in (1, 2))
    for name, group in groups.items():
        if group is not OUTSIDE:
            assert dist.get_process_group_ranks(group) == expected[name]
    assert total(table.get_process_group("train/tp"), rank) == sum(half)
    dumped = json.loads(hypergrid.dump())["groups"]
    ranks_of_label = {group["label"]: group["ranks"] for group in dumped}
    assert ranks_of_label["train/dp"] == column
    assert ranks_of_label["first" if rank < 2 else "train/tp"] == half
    table.destroy()
    assert table.process_group_pool == table.device_mesh_pool == {}
    assert len(open_groups()) == 1


@pytest.mark.parametrize("creation", ["auto", "everyone"])
@on_ranks(4)
def test_what_has_the_same_members_and_backend_is_created_once(rank, creation):
    os.environ["HYPERGRID_CREATION"] = creation
    table = EnvironmentTable()
    pair = table.create_process_group("pair", [0, 1])
    again = table.create_process_group("again", [1, 0], backend="gloo")
    assert again is pair and (pair is OUTSIDE) == (rank > 1)
    # Some of the groups exist: the others are created.
    mesh = table.create_device_mesh("m", (2, 1, 1, 2), ("dp", "cp", "pp", "tp"))
    assert mesh.get_group("tp") is table.get_process_group("m/tp")
    assert rank > 1 or mesh.get_group("tp") is pair
    assert mesh.get_group("cp") is mesh.get_group("pp")
    other = table.create_device_mesh("n", (4, 1), ("a", "b"))
    assert other.get_group("b") is mesh.get_group("cp")
    names = ["pair", "again", "m/tp", "m/pp", "m/cp", "m/dp", "n/b", "n/a"]
    assert list(table.process_group_pool) == names
    assert total(mesh.get_group("tp"), rank) == rank // 2 * 4 + 1
    assert total(table.get_process_group("m/dp"), rank) == rank % 2 * 2 + 2
    assert len(open_groups()) == 5  # default, tp, dp, alone, a
    with pytest.raises(ValueError, match=r"'pair' is no text, or a name that rank . has already"):
        table.create_process_group("pair", [0, 2])
    with pytest.raises(ValueError, match=r"'m' is no text, or a name that rank . has already"):
        table.create_device_mesh("m", (2, 2), ("x", "y"))
    assert len(open_groups()) == 5


@on_ranks(4)
def test_names_of_one_group_that_exists_are_compared_too(rank):
    table = EnvironmentTable()
    table.create_process_group("pair", [0, 1])
    names = ["again", "again", "again", "other"]
    with pytest.raises(hypergrid.AgreementError, match="group is 'other' on rank 3"):
        table.create_process_group(names[rank], [0, 1])
    assert list(table.process_group_pool) == ["pair"]


@on_ranks(4)
def test_it_is_not_a_singleton(rank):
    first_table = EnvironmentTable()
    second_table = EnvironmentTable()
    first = first_table.create_process_group("x", [0, 1])
    second = second_table.create_process_group("x", [0, 1])
    assert rank > 1 or first is not second
    first_table.create_process_group("y", [1, 2])
    assert list(second_table.process_group_pool) == ["x"]
    first_table.destroy()
    assert rank > 1 or total(second) == 2
    second_table.destroy()
    assert len(open_groups()) == 1


@on_ranks(4)
def test_what_one_rank_cannot_create_is_left_on_none_and_can_be_asked_for_again(rank):
    table = EnvironmentTable()
    new_group = dist.new_group

    def fails_over_the_second_dim(ranks, **options):
        if rank == 2 and ranks == [0, 2]:
            raise RuntimeError("no route")
        return new_group(ranks, **options)

    with (
        mock.patch.object(dist, "new_group", fails_over_the_second_dim),
        pytest.raises(hypergrid.CreationError, match="rank 2 could not create m/a"),
    ):
        table.create_device_mesh("m", (2, 2), ("a", "b"))
    assert table.process_group_pool == table.device_mesh_pool == {}
    assert len(open_groups()) == 1
    mesh = table.create_device_mesh("m", (2, 2), ("a", "b"))
    assert total(mesh.get_group("a"), rank) == (2 if rank % 2 == 0 else 4)


@pytest.mark.parametrize(("call", "error", "says"), rows_of("colossalai/refusals_of_tables.txt"))
def test_refusals_are_sentences_and_create_nothing(fake_world, call, error, says):
    fake_world(4, rank=3)
    environment = EnvironmentTable()
    with pytest.raises(eval(error), match=says):
        eval(call, {"table": environment})
    assert environment.process_group_pool == environment.device_mesh_pool == {}
    assert len(open_groups()) == 1


def test_without_a_world_the_refusal_says_how_to_have_one():
    with pytest.raises(ValueError, match="init_process_group"):
        EnvironmentTable()
