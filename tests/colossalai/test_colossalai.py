"""ProcessGroupMesh beside ColossalAI's own: equal inputs, equal groups; and what is better."""

import itertools
import json
import os
import re
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import GroupMember
from torch.distributed import distributed_c10d as c10d

import hypergrid
from compat.colossalai import ProcessGroupMesh
from tests.support.forerunners import colossalai_mesh
from tests.support.forked import descriptors, open_groups, run_ranks

SHAPES = {4: [(4,), (2, 2), (1, 2, 2)], 8: [(2, 2, 2), (4, 2), (2, 1, 4)]}

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple)


@given(shapes, st.data())
def test_unravel_is_row_major_as_numpys(shape, data):
    rank = data.draw(st.integers(0, int(np.prod(shape)) - 1))
    coordinate = ProcessGroupMesh.unravel(rank, shape)
    assert coordinate == np.unravel_index(rank, shape)
    assert ProcessGroupMesh.ravel(coordinate, shape) == rank
    assert {type(each) for each in coordinate} == {int}
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
    home = colossalai_mesh()

    @given(st.data())
    def same(data):
        base = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
        axes = data.draw(st.lists(st.integers(0, len(base) - 1), min_size=1, unique=True))
        some = st.lists(st.integers(0, 9), min_size=1, max_size=3)
        indices = [data.draw(some) for _ in axes]
        for arguments in ((base, axes, indices), (base, axes[0], indices[0])):
            theirs = home.get_coords_along_axis(*arguments)
            assert ProcessGroupMesh.get_coords_along_axis(*arguments) == theirs

    same()


def _requests(shape):
    """Every way to ask for groups: axes in every order, each subset at one axis, some at two."""
    axes = range(len(shape))
    for count in range(1, len(shape) + 1):
        for chosen in itertools.permutations(axes, count):
            yield list(chosen), None
    for axis in axes:
        yield axis, None
        for count in range(1, shape[axis] + 1):
            for some in itertools.combinations(range(shape[axis]), count):
                yield axis, list(some)[::-1]
    for first, second in itertools.combinations(axes, 2):
        yield (second, first), [[shape[second] - 1], list(range(shape[first]))]


def _members(group):
    if group is None or group is GroupMember.NON_GROUP_MEMBER:
        return None
    return dist.get_process_group_ranks(group)


def _beside_home(rank, home, environment):
    os.environ.update(environment)
    compared = 0
    for shape in SHAPES[dist.get_world_size()]:
        theirs, ours = home(*shape), ProcessGroupMesh(*shape)
        assert (ours.shape, ours.rank, ours.size()) == (theirs.shape, theirs.rank, theirs.size())
        assert ours.coordinate() == theirs.coordinate()
        for dim in range(-len(shape), len(shape)):
            assert ours.size(dim) == theirs.size(dim)
            assert ours.coordinate(dim) == theirs.coordinate(dim)
        for axis, indices in _requests(shape):
            for ask in ("create_group_along_axis", "get_group_along_axis"):
                expected = _members(getattr(theirs, ask)(axis, indices))
                group = getattr(ours, ask)(axis, indices)
                assert _members(group) == expected, (shape, axis, indices)
            assert (group is GroupMember.NON_GROUP_MEMBER) == (expected is None)
            if expected:
                assert ours.get_ranks_in_group(group) == expected
                total = torch.tensor([2**rank])
                dist.all_reduce(total, group=group)
                assert total.item() == sum(2**member for member in expected)
            compared += 1
        theirs.destroy_mesh_process_groups()
        ours.destroy_mesh_process_groups()
        assert len(open_groups()) == 1
    return compared


@pytest.mark.parametrize("environment", [{}, {"HYPERGRID_CREATION": "everyone"}])
@pytest.mark.parametrize("world", [4, 8])
def test_equal_inputs_give_equal_groups_to_colossalais_own(world, environment):
    compared = run_ranks(world, _beside_home, colossalai_mesh(), environment, timeout=120)
    assert min(compared) > 40


def _plugin(mesh_class, pp, dp, tp, sp, ring):
    """What ColossalAI's HybridParallelPlugin, its stage manager and its ring attention ask for."""
    dp_axis, pp_axis, tp_axis, sp_axis = (1, 0, 3, 2) if ring else (1, 0, 2, 3)
    mesh = mesh_class(pp, dp, sp, tp) if ring else mesh_class(pp, dp, tp, sp)
    here = mesh.coordinate()
    around = [
        mesh.ravel((*here[:pp_axis], here[pp_axis] + by, *here[pp_axis + 1 :]), mesh.shape, "wrap")
        for by in (-1, +1)
    ]
    groups = {
        "p2p": mesh.get_group_along_axis(pp_axis),
        "tp": mesh.get_group_along_axis(tp_axis),
        "dp": mesh.get_group_along_axis(dp_axis),
        "pp": mesh.get_group_along_axis(pp_axis),
        "sp": mesh.get_group_along_axis(sp_axis),
        "mixed_dp": mesh.create_group_along_axis([dp_axis, sp_axis]),
        "embedding": mesh.get_group_along_axis(pp_axis, [0, mesh.size(pp_axis) - 1]),
    }
    if ring:
        groups["inner"] = mesh.get_group_along_axis(sp_axis, list(range(sp // 2)))
        groups["inter"] = mesh.get_group_along_axis(sp_axis, list(range(0, sp, 2)))
    members = {name: _members(group) for name, group in groups.items()}
    sums = {}
    for name, group in groups.items():
        if members[name]:
            total = torch.tensor([mesh.rank])
            dist.all_reduce(total, group=group)
            sums[name] = (total.item(), dist.get_rank(group), dist.get_world_size(group))
    same = groups["p2p"] is groups["pp"], mesh.coordinate(pp_axis), mesh.size(pp_axis)
    mesh.destroy_mesh_process_groups()
    return members, sums, around, same, len(open_groups())


@pytest.mark.parametrize(
    ("sizes", "ring"),
    [((2, 1, 2, 1), False), ((2, 2, 2, 1), False), ((2, 2, 1, 2), False), ((2, 1, 1, 4), True)],
)
def test_a_3d_plugins_use_of_its_mesh_runs_unchanged(sizes, ring):
    world = int(np.prod(sizes))
    ours = run_ranks(world, lambda rank: _plugin(ProcessGroupMesh, *sizes, ring))
    members, sums, around, same, left = ours[1]
    assert members["tp"][0] <= 1 and len(members["mixed_dp"]) == sizes[1] * sizes[3]
    assert all(sums[name][0] == sum(members[name]) for name in sums)
    assert around == [(1 - world // 2) % world] * 2 and same == (True, 0, 2) and left == 1
    home = colossalai_mesh()
    assert run_ranks(world, lambda rank: _plugin(home, *sizes, ring)) == ours


def _backends(rank, mesh_class):
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    mesh, line = mesh_class(1, 2, 2), [rank % 2, rank % 2 + 2]
    default = mesh.get_group_along_axis(1)
    other = mesh.get_group_along_axis(1, backend="fake")
    asked_again = mesh.get_group_along_axis([0, 1], backend="fake")
    return (
        dist.get_backend(default),
        dist.get_backend(other),
        other is asked_again,
        mesh.get_group_along_axis([1, 0]) is default,
        mesh.get_group_along_axis(1, [1, 0], backend="gloo") is default,
        mesh.get_ranks_in_group(other) == mesh.get_ranks_in_group(default) == line,
    )


def test_a_group_is_known_by_members_and_backend_whichever_axes_led_to_it():
    ours = run_ranks(4, _backends, ProcessGroupMesh)
    assert ours == [("gloo", "fake", True, True, True, True)] * 4
    theirs = run_ranks(4, _backends, colossalai_mesh())
    assert theirs == [("gloo", "gloo", True, True, True, True)] * 4  # what there was before


def _only_members(rank):
    mesh = ProcessGroupMesh(2, 2, 2)
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        groups = [mesh.get_group_along_axis(axis) for axis in (0, 1, 2, [0, 2])]
        part = mesh.get_group_along_axis(0, [1])
    described = [each["description"] for each in json.loads(hypergrid.dump())["groups"]]
    assert mesh.grid.get_pg("axis0-axis2") is groups[3]
    return new_group.call_count, part is GroupMember.NON_GROUP_MEMBER, described[1:]


def test_a_rank_creates_its_own_groups_only_and_they_explain_themselves():
    names = ["axis0", "axis1", "axis2", "axis0-axis2"]
    outside, inside = (4, True, names), (5, False, [*names, "axis0[1]"])
    assert run_ranks(8, _only_members) == [outside] * 4 + [inside] * 4


def _given_back(rank):
    seen, kept = [], None
    for _ in range(3):
        mesh = ProcessGroupMesh(2, 2)
        first = mesh.get_group_along_axis(0)
        mesh.get_group_along_axis([0, 1]), mesh.get_group_along_axis(1, [0], backend="gloo")
        mesh.destroy_mesh_process_groups()
        assert mesh.grid.groups == {}
        del first
        anew = mesh.get_group_along_axis(0)
        dist.barrier(group=anew)
        del anew
        mesh.destroy_mesh_process_groups()
        mesh.destroy_mesh_process_groups()
        opened = descriptors(at_most=seen[1][1] if len(seen) == 2 else None)
        seen.append((len(open_groups()), opened))
        kept = mesh
    dist.destroy_process_group()
    kept.destroy_mesh_process_groups()
    return seen


def test_destroy_gives_everything_back_and_groups_can_be_made_anew():
    for seen in run_ranks(4, _given_back):
        assert [groups for groups, _ in seen] == [1, 1, 1]
        assert seen[2] <= seen[1]


@pytest.mark.parametrize(
    ("ask", "error", "says", "at_home"),
    [
        (lambda m: m(2, 3), AssertionError, "has 6 ranks and the world has 8", AssertionError),
        (lambda m: m(), TypeError, "at least one axis", TypeError),
        (lambda m: m.ravel((0,), (2,), "bounce"), AssertionError, "raise, wrap, clip", None),
        (lambda m: m.ravel((0, 2), (2, 2)), ValueError, "does not fit the shape", None),
        (lambda m: m.ravel((0,), (2, 2)), ValueError, "one index for each axis", None),
        (lambda m: m(2, 4).size(2), IndexError, "axis 2 does not exist.*axes 0 to 1", None),
        (lambda m: m(2, 4).coordinate(2), IndexError, "axis 2 does not exist", None),
        (lambda m: m(2, 4).get_ranks_in_group("x"), KeyError, "'x' is not a group of", None),
        (lambda m: m(2, 4).create_group_along_axis(2), IndexError, "axis 2 does not", None),
        (lambda m: m(2, 4).get_group_along_axis(-3), IndexError, "axis -3 does not", None),
        (lambda m: m(0, 4), AssertionError, "has 0 ranks and the world has 8", None),
        (lambda m: m(2, 4).get_group_along_axis(1, [4]), ValueError, r"\[4\] at axis 1", None),
        (lambda m: m(2, 4).get_group_along_axis(1, ["a"]), AssertionError, "whole number", None),
        (lambda m: m(2, 4).get_group_along_axis(1, []), IndexError, "at least one", None),
        (lambda m: m(2, 4).get_group_along_axis([0, 0]), ValueError, "must not repeat", None),
    ],
)
def test_refusals_are_sentences_of_colossalais_types(fake_world, ask, error, says, at_home):
    fake_world(8, rank=3)
    with pytest.raises(error, match=says):
        ask(ProcessGroupMesh)
    assert len(open_groups()) == 1
    with pytest.raises(at_home or error):
        ask(colossalai_mesh())


def test_without_a_world_it_says_what_to_do():
    with pytest.raises(AssertionError, match=r"call torch.distributed.init_process_group\(\)"):
        ProcessGroupMesh(2)


def _disagreeing(rank):
    mesh = ProcessGroupMesh(2, 2)
    texts = []
    for axis in (rank // 3, 7 if rank == 1 else 1):
        with pytest.raises((hypergrid.AgreementError, IndexError)) as caught:
            mesh.get_group_along_axis(axis)
        texts.append(str(caught.value))
        assert len(open_groups()) == 1
    total = torch.tensor([rank])
    dist.all_reduce(total, group=mesh.get_group_along_axis(1))
    return total.item(), texts


def test_ranks_that_ask_for_different_groups_all_say_so_and_the_next_call_works():
    results = run_ranks(4, _disagreeing)
    assert [total for total, _ in results] == [1, 1, 5, 5]
    assert {texts[0] for _, texts in results} == {results[0][1][0]}
    assert "group is 'axis1' on rank 3 and 'axis0' on rank 0" in results[0][1][0]
    assert results[1][1][1].startswith("axis 7 does not exist")
    assert "rank 1 refused its arguments" in results[0][1][1]


def _members_by_own_indices(rank, mesh_class, environment):
    os.environ.update(environment)
    mesh = mesh_class(2, 2)
    for axis in (0, 1, [0, 1]):
        mesh.get_group_along_axis(axis)
    alone = [mesh.get_group_along_axis([0, 1], [[i], [j]]) for i in (0, 1) for j in (0, 1)][rank]
    own = [([0, 1], [[0, 1], [0]]), ([0, 1], [[0], [1, 0]]), (1, [0, 1]), ((1, 0), [[1], [1]])]
    with mock.patch.object(dist, "new_group") as new_group:
        group = mesh.create_group_along_axis(*own[rank])
    assert rank != 3 or group is alone
    return _members(group), new_group.called


@pytest.mark.parametrize("environment", [{}, {"HYPERGRID_CREATION": "everyone"}])
def test_ranks_may_give_different_indices_where_every_group_exists(environment):
    expected = [([0, 2], False), ([0, 1], False), ([2, 3], False), ([3], False)]
    home = colossalai_mesh()
    assert run_ranks(4, _members_by_own_indices, home, environment) == expected
    assert run_ranks(4, _members_by_own_indices, ProcessGroupMesh, environment) == expected


def _some_miss_groups(rank):
    mesh = ProcessGroupMesh(2, 2)
    whole = mesh.get_group_along_axis(0), mesh.get_group_along_axis(1)
    texts = []
    for indices in ([0, 1] if rank else [0], [rank // 3]):
        with pytest.raises(hypergrid.AgreementError) as caught:
            mesh.create_group_along_axis(1, indices)
        texts.append(str(caught.value))
    assert len(open_groups()) == 3
    assert mesh.create_group_along_axis(1) is whole[1]
    return texts, _members(mesh.create_group_along_axis(1, [rank // 9]))


def test_ranks_with_different_indices_all_refuse_where_some_of_them_miss_groups():
    results = run_ranks(4, _some_miss_groups)  # within seconds: nobody waits for a timeout
    assert [members for _, members in results] == [[0], None, [2], None]
    (first, second), *others = (texts for texts, _ in results)
    assert all(texts == [first, second] for texts in others)
    told = r"group is 'one that exists' on rank [123] \(and 2 more\) and 'axis1\[0\]' on rank 0"
    assert re.search(told, first)
    assert "group is 'axis1[1]' on rank 3 and 'axis1[0]' on rank 0" in second


def _looked_up(rank):
    mesh = ProcessGroupMesh(1, 2, 2)
    group = mesh.get_group_along_axis(1)
    if rank == 2:  # alone: the others do not come
        assert mesh.get_group_along_axis([0, 1]) is group
        assert mesh.get_group_along_axis((0, 1), [[0], [0, 1]]) is group
        assert mesh.grid.get_pg("axis0-axis1") is group
    mesh.get_group_along_axis(1, [0])
    # Of these, ranks 0 and 1 have theirs already, and 2 and 3 have not.
    return _members(mesh.get_group_along_axis(2, [0])), _members(mesh.get_group_along_axis([]))


def test_what_exists_is_looked_up_and_what_only_some_ranks_miss_is_created_together():
    assert run_ranks(4, _looked_up) == [([0], [0]), (None, [1]), ([2], [2]), (None, [3])]


def _one_cannot_create(rank):
    mesh = ProcessGroupMesh(2, 2)
    mesh.get_group_along_axis(0)
    real = dist.new_group
    with mock.patch.object(dist, "new_group") as new_group:
        new_group.side_effect = RuntimeError("no route") if rank == 2 else real
        with pytest.raises(hypergrid.CreationError) as caught:
            mesh.get_group_along_axis(1)
    assert len(open_groups()) == 2 and list(mesh.grid.groups) == ["axis0"]
    total = torch.tensor([rank])
    dist.all_reduce(total, group=mesh.get_group_along_axis(1))
    return total.item(), str(caught.value)


def test_what_one_rank_cannot_create_is_left_on_none_and_can_be_asked_for_again():
    with mock.patch.object(c10d, "default_pg_timeout", timedelta(seconds=3)):
        results = run_ranks(4, _one_cannot_create)
    assert [total for total, _ in results] == [1, 1, 5, 5]
    assert all("rank 2 could not create axis1 of ranks 2..3" in text for _, text in results)
    # If rank 1 hears of it before rank 0 has connected, it closes the group that 0 is creating.
    own = ("rank 0 rolled back its groups", "rank 0 could not create axis1 of ranks 0..1")
    assert results[0][1].startswith(own)


def _cycles(rank):
    keys = []
    for _ in range(5):
        mesh = ProcessGroupMesh(2, 2)
        for axis in (0, rank and 9):
            with pytest.raises((ValueError, IndexError)):
                mesh.get_group_along_axis(axis, [9])
        mesh.get_group_along_axis(0), mesh.get_group_along_axis(1, [0])
        mesh.destroy_mesh_process_groups()
        dist.barrier()
        keys.append(sum("hypergrid" in str(key) for key in c10d._get_default_store().list_keys()))
        dist.barrier()
    return keys


@pytest.mark.skipif(not hasattr(dist.Store, "list_keys"), reason="this torch lists no keys")
def test_refusals_and_cycles_leave_the_keys_of_one_round_in_the_store():
    for keys in run_ranks(4, _cycles):
        assert max(keys) == keys[0] < 40
