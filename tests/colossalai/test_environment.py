"""EnvironmentTable: the proposal of ColossalAI issue 3051, and answers to its open questions."""

import json
import os

import pytest
import torch.distributed as dist
from torch.distributed import GroupMember
from torch.distributed.device_mesh import DeviceMesh

import hypergrid
from compat.colossalai import EnvironmentTable
from tests.support import table as rows_of
from tests.support.forked import on_ranks, open_groups, total

OUTSIDE = GroupMember.NON_GROUP_MEMBER


@on_ranks(4)
def test_the_definition_in_the_proposal_runs(rank):
    table = EnvironmentTable()
    assert table.default_process_group is dist.group.WORLD
    assert table.is_master() is (rank == 0)
    assert table.get_rank() == table.rank == rank
    assert table.get_world_size() == table.world_size == 4
    group = table.create_process_group("middle", [2, 1])
    assert table.get_process_group("middle") is group is table.process_group_pool["middle"]
    place = {1: 0, 2: 1}.get(rank, -1)
    assert (group is OUTSIDE) == (place == -1)
    assert table.get_rank(process_group=group) == place
    assert table.get_world_size(process_group=group) == (-1 if place == -1 else 2)
    assert table.is_master(process_group=group) == (rank == 1)
    mesh = table.create_device_mesh("train", (2, 2), ("dp", "tp"))
    assert isinstance(mesh, DeviceMesh)
    assert table.get_device_mesh("train") is mesh is table.device_mesh_pool["train"]
    assert total(table.get_process_group("train/tp"), rank) == rank // 2 * 4 + 1
    groups = json.loads(hypergrid.dump())["groups"]
    ranks_of_label = {group["label"]: group["ranks"] for group in groups}
    assert ranks_of_label["train/dp"] == [rank % 2, rank % 2 + 2]


@pytest.mark.parametrize("creation", ["auto", "everyone"])
@on_ranks(4)
def test_what_has_the_same_members_and_backend_is_created_once(rank, creation):
    os.environ["HYPERGRID_CREATION"] = creation
    table = EnvironmentTable()
    pair = table.create_process_group("pair", [0, 1])
    again = table.create_process_group("again", [1, 0], backend="gloo")
    assert again is pair
    # Some of the groups exist: the others are created.
    mesh = table.create_device_mesh("m", (2, 1, 1, 2), ("dp", "cp", "pp", "tp"))
    assert mesh.get_group("tp") is table.get_process_group("m/tp")
    assert rank > 1 or mesh.get_group("tp") is pair
    assert mesh.get_group("cp") is mesh.get_group("pp")
    assert list(table.process_group_pool) == ["pair", "again", "m/tp", "m/pp", "m/cp", "m/dp"]
    assert total(mesh.get_group("tp"), rank) == rank // 2 * 4 + 1
    assert total(table.get_process_group("m/dp"), rank) == rank % 2 * 2 + 2
    assert len(open_groups()) == 4  # default, tp, dp, alone
    for name in ("pair", "m"):
        says = f"'{name}' is no text, or a name that rank . has already"
        with pytest.raises(ValueError, match=says):
            table.create_device_mesh(name, (2, 2), ("x", "y"))


@on_ranks(4)
def test_each_table_destroys_its_own_groups(rank):
    first_table = EnvironmentTable()
    second_table = EnvironmentTable()
    first = first_table.create_process_group("x", [0, 1])
    second = second_table.create_process_group("x", [0, 1])
    assert rank > 1 or first is not second
    first_table.destroy()
    assert first_table.process_group_pool == first_table.device_mesh_pool == {}
    assert rank > 1 or total(second) == 2
    second_table.destroy()
    assert len(open_groups()) == 1


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
