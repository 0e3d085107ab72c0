"""ProcessGroupMesh beside ColossalAI's own: equal inputs, equal groups; and what is better."""

import json
import os
from math import prod
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import GroupMember

import hypergrid
from compat.colossalai import ProcessGroupMesh
from tests.support import table
from tests.support.forerunners import colossalai_mesh
from tests.support.forked import from_all, on_ranks, open_groups, run_ranks, total


@pytest.mark.parametrize("call", [call for (call,) in table("colossalai/arithmetic.txt")])
def test_ranks_and_coordinates_are_colossalais(call):
    stock_answer = eval(call, {"ProcessGroupMesh": colossalai_mesh()})
    assert eval(call) == stock_answer


def members(group):
    if group is None or group is GroupMember.NON_GROUP_MEMBER:
        return None
    return dist.get_process_group_ranks(group)


def answer(mesh, call):
    """What a call of the table gives this rank."""
    names = {
        "rank": mesh.rank,
        "group": mesh.get_group_along_axis,
        "create": mesh.create_group_along_axis,
    }
    return eval(call, names)


def beside_colossalais(rank, stock_class, creation):
    os.environ["HYPERGRID_CREATION"] = creation
    for text, calls in table("colossalai/groups.txt"):
        shape = eval(text)
        if prod(shape) != dist.get_world_size():
            continue
        stock = stock_class(*shape)
        mesh = ProcessGroupMesh(*shape)
        assert (mesh.shape, mesh.rank, mesh.size()) == (stock.shape, stock.rank, stock.size())
        assert mesh.coordinate() == stock.coordinate()
        assert (mesh.size(-1), mesh.coordinate(-1)) == (stock.size(-1), stock.coordinate(-1))
        for call in calls.split("; "):
            expected = members(answer(stock, call))
            group = answer(mesh, call)
            assert members(group) == expected, (shape, call)
            if expected:
                assert mesh.get_ranks_in_group(group) == expected
            # Members of one group add up their ranks over it; the others may hold other groups.
            lists_of_ranks = from_all(expected)
            if expected and all(lists_of_ranks[member] == expected for member in expected):
                assert total(group, rank) == sum(expected)
        assert len(open_groups()) == 1 + 2 * len(stock._group_to_ranks)
        stock.destroy_mesh_process_groups()
        mesh.destroy_mesh_process_groups()
        assert len(open_groups()) == 1


@pytest.mark.parametrize("creation", ["auto", "everyone"])
@pytest.mark.parametrize("world", [4, 8])
def test_equal_inputs_give_equal_groups_to_colossalais_own(world, creation):
    run_ranks(world, beside_colossalais, colossalai_mesh(), creation)


@on_ranks(4)
def test_a_group_is_known_by_members_and_backend_whichever_axes_led_to_it(rank):
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    mesh = ProcessGroupMesh(1, 2, 2)
    default = mesh.get_group_along_axis(1)
    # ColossalAI gives the group that it has, whatever backend is asked for.
    fake = mesh.get_group_along_axis(1, backend="fake")
    assert (dist.get_backend(default), dist.get_backend(fake)) == ("gloo", "fake")
    assert mesh.get_group_along_axis([0, 1], backend="fake") is fake
    assert mesh.get_group_along_axis([1, 0]) is default
    assert mesh.get_group_along_axis(1, [1, 0], backend="gloo") is default


@on_ranks(8)
def test_a_rank_creates_its_own_groups_only_and_they_explain_themselves(rank):
    mesh = ProcessGroupMesh(2, 2, 2)
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        groups = [mesh.get_group_along_axis(axis) for axis in (0, 1, 2, [0, 2])]
        mesh.get_group_along_axis(0, [1])  # on ranks 4 to 7
    assert mesh.grid.get_pg("axis0-axis2") is groups[3]
    names = ["axis0", "axis1", "axis2", "axis0-axis2"]
    if rank > 3:
        names.append("axis0 at [[1]]")
    _, *created = json.loads(hypergrid.dump())["groups"]
    assert [group["description"] for group in created] == names
    assert new_group.call_count == len(names)


@on_ranks(4)
def test_what_only_some_ranks_miss_is_created_together(rank):
    mesh = ProcessGroupMesh(1, 2, 2)
    mesh.get_group_along_axis(1, [0])
    # Of these, ranks 0 and 1 have theirs already, and 2 and 3 have not.
    group = mesh.get_group_along_axis(2, [0])
    assert members(group) == (None if rank % 2 else [rank])
    assert members(mesh.get_group_along_axis([])) == [rank]


@on_ranks(4)
def test_destroyed_groups_can_be_created_again_and_destroy_is_idempotent(rank):
    mesh = ProcessGroupMesh(2, 2)
    mesh.get_group_along_axis(0)
    mesh.destroy_mesh_process_groups()
    assert mesh.grid.groups == {}
    dist.barrier(group=mesh.get_group_along_axis(0))
    mesh.destroy_mesh_process_groups()
    mesh.destroy_mesh_process_groups()
    assert len(open_groups()) == 1
    dist.destroy_process_group()
    mesh.destroy_mesh_process_groups()


@pytest.mark.parametrize(("call", "error", "says"), table("colossalai/refusals.txt"))
def test_refusals_are_sentences_of_colossalais_types(fake_world, call, error, says):
    fake_world(8, rank=3)
    with pytest.raises(eval(error), match=says):
        eval(call)
    assert len(open_groups()) == 1
    with pytest.raises(eval(error)):
        eval(call, {"ProcessGroupMesh": colossalai_mesh()})


def test_without_a_world_it_says_what_to_do():
    with pytest.raises(AssertionError, match=r"call torch.distributed.init_process_group\(\)"):
        ProcessGroupMesh(2)
