"""ProcessGroupMesh beside ColossalAI's own: equal inputs, equal groups; and what is better."""

import itertools
import json
import os
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import GroupMember

import hypergrid
from compat.colossalai import ProcessGroupMesh
from tests.support import table
from tests.support.forerunners import colossalai_mesh
from tests.support.forked import descriptors, open_groups, run_ranks, total

SHAPES = {4: [(4,), (2, 2), (1, 2, 2)], 8: [(2, 2, 2), (4, 2), (2, 1, 4)]}

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple)


@given(shapes, st.data())
def test_unravel_is_row_major_as_numpys(shape, data):
    rank = data.draw(st.integers(0, int(np.prod(shape)) - 1))
    coordinate = ProcessGroupMesh.unravel(rank, shape)
    assert coordinate == np.unravel_index(rank, shape)
    assert ProcessGroupMesh.ravel(coordinate, shape) == rank
    assert {type(index) for index in coordinate} == {int}
    for outside in (-1, int(np.prod(shape))):
        with pytest.raises(ValueError, match=f"rank {outside} is outside"):
            ProcessGroupMesh.unravel(outside, shape)


@given(shapes, st.sampled_from(["raise", "wrap", "clip"]), st.data())
def test_ravel_is_numpys_in_all_modes(shape, mode, data):
    numbers = st.integers(-20, 20)
    coordinate = tuple(data.draw(st.one_of(st.integers(0, size - 1), numbers)) for size in shape)
    try:
        expected = int(np.ravel_multi_index(coordinate, shape, mode))
    except ValueError:
        with pytest.raises(ValueError, match="does not fit the shape"):
            ProcessGroupMesh.ravel(coordinate, shape, mode)
        return
    assert ProcessGroupMesh.ravel(coordinate, shape, mode) == expected


def test_coordinates_along_axes_are_as_colossalais():
    stock = colossalai_mesh()

    @given(st.data())
    def same(data):
        base = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
        axes = data.draw(st.lists(st.integers(0, len(base) - 1), min_size=1, unique=True))
        drawn_indices = st.lists(st.integers(0, 9), min_size=1, max_size=3)
        indices = [data.draw(drawn_indices) for _ in axes]
        for arguments in ((base, axes, indices), (base, axes[0], indices[0])):
            coordinates = stock.get_coords_along_axis(*arguments)
            assert ProcessGroupMesh.get_coords_along_axis(*arguments) == coordinates

    same()


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


def use_of_a_plugin(mesh_class, pp, dp, tp, sp, has_ring):
    """What ColossalAI's HybridParallelPlugin, its stage manager and its ring attention ask for."""
    dp_axis, pp_axis, tp_axis, sp_axis = (1, 0, 3, 2) if has_ring else (1, 0, 2, 3)
    mesh = mesh_class(pp, dp, sp, tp) if has_ring else mesh_class(pp, dp, tp, sp)
    neighbours = []
    for step in (-1, 1):
        coordinate = list(mesh.coordinate())
        coordinate[pp_axis] += step
        neighbours.append(mesh.ravel(coordinate, mesh.shape, "wrap"))
    groups = {
        "p2p": mesh.get_group_along_axis(pp_axis),
        "tp": mesh.get_group_along_axis(tp_axis),
        "dp": mesh.get_group_along_axis(dp_axis),
        "pp": mesh.get_group_along_axis(pp_axis),
        "sp": mesh.get_group_along_axis(sp_axis),
        "mixed_dp": mesh.create_group_along_axis([dp_axis, sp_axis]),
        "embedding": mesh.get_group_along_axis(pp_axis, [0, mesh.size(pp_axis) - 1]),
    }
    if has_ring:
        groups["inner"] = mesh.get_group_along_axis(sp_axis, list(range(sp // 2)))
        groups["inter"] = mesh.get_group_along_axis(sp_axis, list(range(0, sp, 2)))
    outcome = {"neighbours": neighbours, "one pp group": groups["p2p"] is groups["pp"]}
    for name, group in groups.items():
        outcome[name] = members(group)
        if outcome[name]:
            outcome[f"sum over {name}"] = total(group, float(mesh.rank))
            outcome[f"place in {name}"] = dist.get_rank(group)
    mesh.destroy_mesh_process_groups()
    outcome["open groups"] = len(open_groups())
    return outcome


@pytest.mark.parametrize(("sizes", "has_ring"), [((2, 2, 2, 1), False), ((2, 1, 1, 4), True)])
def test_a_3d_plugins_use_of_its_mesh_runs_unchanged(sizes, has_ring):
    world = int(np.prod(sizes))
    outcomes = run_ranks(world, lambda _: use_of_a_plugin(ProcessGroupMesh, *sizes, has_ring))
    stock_class = colossalai_mesh()
    stock_outcomes = run_ranks(world, lambda _: use_of_a_plugin(stock_class, *sizes, has_ring))
    assert outcomes == stock_outcomes
    outcome = outcomes[1]
    assert outcome["one pp group"]
    assert outcome["open groups"] == 1
    assert len(outcome["mixed_dp"]) == sizes[1] * sizes[3]
    assert outcome["sum over mixed_dp"] == sum(outcome["mixed_dp"])


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
    inside = (5, [*names, "axis0[1]"])
    assert run_ranks(8, created_groups) == [outside] * 4 + [inside] * 4


def after_each_mesh(rank):
    """By mesh: open groups after its destruction, and open descriptors."""
    counts = []
    for _ in range(3):
        mesh = ProcessGroupMesh(2, 2)
        mesh.get_group_along_axis(0)
        mesh.get_group_along_axis(1, [0], backend="gloo")
        mesh.destroy_mesh_process_groups()
        assert mesh.grid.groups == {}
        dist.barrier(group=mesh.get_group_along_axis(0))
        mesh.destroy_mesh_process_groups()
        mesh.destroy_mesh_process_groups()
        # The first one's sockets may be those of gloo's own threads, which stay.
        most = counts[1][1] if len(counts) == 2 else None
        counts.append((len(open_groups()), descriptors(at_most=most)))
    dist.destroy_process_group()
    mesh.destroy_mesh_process_groups()
    return counts


def test_destroy_leaves_nothing_and_groups_can_be_created_again():
    for counts in run_ranks(4, after_each_mesh):
        assert [groups for groups, _ in counts] == [1, 1, 1]
        assert counts[2][1] <= counts[1][1]


@pytest.mark.parametrize(("call", "error", "says"), table("colossalai/refusals.txt"))
def test_refusals_are_sentences_of_colossalais_types(fake_world, call, error, says):
    fake_world(8, rank=3)
    with pytest.raises(eval(error), match=says):
        eval(call)
    assert len(open_groups()) == 1
    with pytest.raises(eval(error)):
        eval(call, {"ProcessGroupMesh": colossalai_mesh()})


def test_true_is_no_whole_number(fake_world):
    fake_world(8)
    with pytest.raises(AssertionError, match="axis must be a whole number, got True"):
        ProcessGroupMesh(2, 4).size(True)


def test_without_a_world_it_says_what_to_do():
    with pytest.raises(AssertionError, match=r"call torch.distributed.init_process_group\(\)"):
        ProcessGroupMesh(2)


def asks_for_another_group(rank):
    """The sum over a group that all ask for at last, and the errors from before."""
    mesh = ProcessGroupMesh(2, 2)
    errors = []
    for axis in (rank // 3, 7 if rank == 1 else 1):
        with pytest.raises((hypergrid.AgreementError, IndexError)) as caught:
            mesh.get_group_along_axis(axis)
        errors.append(str(caught.value))
        assert len(open_groups()) == 1
    return total(mesh.get_group_along_axis(1), float(rank)), errors


def test_ranks_that_ask_for_different_groups_all_say_so_and_the_next_call_works():
    results = run_ranks(4, asks_for_another_group)
    assert [summed for summed, _ in results] == [1, 1, 5, 5]
    (disagreement,) = {errors[0] for _, errors in results}
    assert "group is 'axis1' on rank 3 and 'axis0' on rank 0" in disagreement
    assert results[1][1][1].startswith("axis 7 does not exist")
    assert "rank 1 refused its arguments" in results[0][1][1]


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
