"""ProcessGroupMesh beside ColossalAI's own: equal inputs, equal groups; and what is better."""

import itertools
import json
import os
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import GroupMember

import hypergrid
from compat.colossalai import ProcessGroupMesh
from tests.support import table
from tests.support.forerunners import colossalai_mesh
from tests.support.forked import open_groups, run_ranks, total

SHAPES = {4: [(4,), (2, 2), (1, 2, 2)], 8: [(2, 2, 2), (4, 2), (2, 1, 4)]}


@pytest.mark.parametrize("call", [call for (call,) in table("colossalai/arithmetic.txt")])
def test_ranks_and_coordinates_are_colossalais(call):
    stock_answer = eval(call, {"ProcessGroupMesh": colossalai_mesh()})
    assert eval(call) == stock_answer


def requests(shape):
    """Every way to ask for groups: axes in every order, each subset at one axis, some at two."""
    axes = range(len(shape))
    for count in range(1, len(shape) + 1):
        for chosen_axes in itertools.permutations(axes, count):
            yield list(chosen_axes), None
    for axis in axes:
        yield axis, None
        for count in range(1, shape[axis] + 1):
            for indices in itertools.combinations(range(shape[axis]), count):
                yield axis, list(indices)[::-1]
    for first, second in itertools.combinations(axes, 2):
        yield (second, first), [[shape[second] - 1], list(range(shape[first]))]


def members(group):
    if group is None or group is GroupMember.NON_GROUP_MEMBER:
        return None
    return dist.get_process_group_ranks(group)


def beside_colossalais(rank, stock_class, environment):
    """How many requests this rank compared."""
    os.environ.update(environment)
    compared = 0
    for shape in SHAPES[dist.get_world_size()]:
        stock = stock_class(*shape)
        mesh = ProcessGroupMesh(*shape)
        assert (mesh.shape, mesh.rank, mesh.size()) == (stock.shape, stock.rank, stock.size())
        assert mesh.coordinate() == stock.coordinate()
        for dim in range(-len(shape), len(shape)):
            assert mesh.size(dim) == stock.size(dim)
            assert mesh.coordinate(dim) == stock.coordinate(dim)
        for axis, indices in requests(shape):
            for ask in ("create_group_along_axis", "get_group_along_axis"):
                expected = members(getattr(stock, ask)(axis, indices))
                group = getattr(mesh, ask)(axis, indices)
                assert members(group) == expected, (shape, axis, indices)
            assert (group is GroupMember.NON_GROUP_MEMBER) == (expected is None)
            if expected:
                assert mesh.get_ranks_in_group(group) == expected
                assert total(group, 2**rank) == sum(2**member for member in expected)
            compared += 1
        stock.destroy_mesh_process_groups()
        mesh.destroy_mesh_process_groups()
        assert len(open_groups()) == 1
    return compared


@pytest.mark.parametrize("environment", [{}, {"HYPERGRID_CREATION": "everyone"}])
@pytest.mark.parametrize("world", [4, 8])
def test_equal_inputs_give_equal_groups_to_colossalais_own(world, environment):
    compared = run_ranks(world, beside_colossalais, colossalai_mesh(), environment, timeout=120)
    assert min(compared) > 40


def groups_by_backend(rank, mesh_class):
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    mesh = mesh_class(1, 2, 2)
    default = mesh.get_group_along_axis(1)
    fake = mesh.get_group_along_axis(1, backend="fake")
    assert mesh.get_group_along_axis([0, 1], backend="fake") is fake
    assert mesh.get_group_along_axis([1, 0]) is default
    assert mesh.get_group_along_axis(1, [1, 0], backend="gloo") is default
    line = [rank % 2, rank % 2 + 2]
    assert mesh.get_ranks_in_group(fake) == mesh.get_ranks_in_group(default) == line
    return dist.get_backend(default), dist.get_backend(fake)


def test_a_group_is_known_by_members_and_backend_whichever_axes_led_to_it():
    assert run_ranks(4, groups_by_backend, ProcessGroupMesh) == [("gloo", "fake")] * 4
    # ColossalAI gives the group that it has, whatever backend is asked for.
    assert run_ranks(4, groups_by_backend, colossalai_mesh()) == [("gloo", "gloo")] * 4


def created_groups(rank):
    """How many groups a rank created of those that were asked for, and their descriptions."""
    mesh = ProcessGroupMesh(2, 2, 2)
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        groups = [mesh.get_group_along_axis(axis) for axis in (0, 1, 2, [0, 2])]
        mesh.get_group_along_axis(0, [1])  # on ranks 4 to 7
    assert mesh.grid.get_pg("axis0-axis2") is groups[3]
    _, *live = json.loads(hypergrid.dump())["groups"]
    return new_group.call_count, [group["description"] for group in live]


def test_a_rank_creates_its_own_groups_only_and_they_explain_themselves():
    names = ["axis0", "axis1", "axis2", "axis0-axis2"]
    outside = (4, names)
    inside = (5, [*names, "axis0 at [[1]]"])
    assert run_ranks(8, created_groups) == [outside] * 4 + [inside] * 4


def open_after_destruction(rank):
    """Groups that are open after the destruction of a mesh that is used again."""
    mesh = ProcessGroupMesh(2, 2)
    mesh.get_group_along_axis(0)
    mesh.get_group_along_axis(1, [0], backend="gloo")
    mesh.destroy_mesh_process_groups()
    assert mesh.grid.groups == {}
    dist.barrier(group=mesh.get_group_along_axis(0))
    mesh.destroy_mesh_process_groups()
    mesh.destroy_mesh_process_groups()
    remaining = len(open_groups())
    dist.destroy_process_group()
    mesh.destroy_mesh_process_groups()
    return remaining


def test_destroy_leaves_nothing_and_groups_can_be_created_again():
    assert run_ranks(4, open_after_destruction) == [1] * 4


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


def asks_for_another_group(rank):
    """The error where rank 3 asks for another group, and the sum over one that all ask for."""
    mesh = ProcessGroupMesh(2, 2)
    with pytest.raises(hypergrid.AgreementError) as caught:
        mesh.get_group_along_axis(rank // 3)
    assert len(open_groups()) == 1
    mesh.get_group_along_axis(0)
    with pytest.raises(hypergrid.AgreementError, match="'one that exists'"):
        mesh.create_group_along_axis(rank // 3)
    axis, says = (7, "out of range") if rank == 1 else (1, "rank 1 refused its arguments")
    with pytest.raises((hypergrid.AgreementError, IndexError), match=says):
        mesh.get_group_along_axis(axis)
    return str(caught.value), total(mesh.get_group_along_axis(1), float(rank))


def test_ranks_that_ask_for_different_groups_all_say_so_and_the_next_call_works():
    disagreements, sums = zip(*run_ranks(4, asks_for_another_group), strict=True)
    assert len({*disagreements}) == 1
    assert "group is 'axis1' on rank 3 and 'axis0' on rank 0" in disagreements[0]
    assert sums == (1, 1, 5, 5)


def asks_by_indices_of_its_own(rank, mesh_class, environment):
    os.environ.update(environment)
    mesh = mesh_class(2, 2)
    for axis in (0, 1, [0, 1]):
        mesh.get_group_along_axis(axis)
    for first in (0, 1):
        for second in (0, 1):
            mesh.get_group_along_axis([0, 1], [[first], [second]])
    requests_of_ranks = [
        ([0, 1], [[0, 1], [0]]),
        ([0, 1], [[0], [1, 0]]),
        (1, [0, 1]),
        ((1, 0), [[1], [1]]),
    ]
    with mock.patch.object(dist, "new_group") as new_group:
        group = mesh.create_group_along_axis(*requests_of_ranks[rank])
    assert not new_group.called
    return members(group)


@pytest.mark.parametrize("mesh_class", [ProcessGroupMesh, "ColossalAI's"])
def test_ranks_may_give_different_indices_where_every_group_exists(mesh_class):
    if mesh_class == "ColossalAI's":
        mesh_class = colossalai_mesh()
    for environment in ({}, {"HYPERGRID_CREATION": "everyone"}):
        groups = run_ranks(4, asks_by_indices_of_its_own, mesh_class, environment)
        assert groups == [[0, 2], [0, 1], [2, 3], [3]]


def looks_up_and_creates(rank):
    mesh = ProcessGroupMesh(1, 2, 2)
    group = mesh.get_group_along_axis(1)
    if rank == 2:  # alone: the others do not come
        assert mesh.get_group_along_axis([0, 1]) is group
        assert mesh.get_group_along_axis((0, 1), [[0], [0, 1]]) is group
        assert mesh.grid.get_pg("axis0-axis1") is group
    mesh.get_group_along_axis(1, [0])
    # Of these, ranks 0 and 1 have theirs already, and 2 and 3 have not.
    return members(mesh.get_group_along_axis(2, [0])), members(mesh.get_group_along_axis([]))


def test_what_exists_is_looked_up_and_what_only_some_ranks_miss_is_created_together():
    expected = [([0], [0]), (None, [1]), ([2], [2]), (None, [3])]
    assert run_ranks(4, looks_up_and_creates) == expected
