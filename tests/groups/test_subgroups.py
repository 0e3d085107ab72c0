"""Subgroups: asked for in any order they never wait, and members have the same group."""

import json
import time
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch

from compat.state import ParallelState
from hypergrid import AgreementError, GroupRow, HyperCommGrid, LayoutError, RankLayout, dump
from hypergrid.groups import gloo
from hypergrid.show.diff import against_dump
from tests.support.forked import descriptors, from_all, members, on_ranks, total
from tests.support.soaking import subgroups_in_any_order


def grid_of(shape, names, **options):
    grid = HyperCommGrid(shape, names, **options)
    grid.create_pg(names[0])
    return grid


def test_runs_are_those_that_a_plan_cuts():
    layout = RankLayout(("tp", "cp", "dp"), (2, 3, 2), offset=4)
    for dims in ("cp", "tp-dp", "tp-cp-dp"):
        for size in range(1, 14):
            row = GroupRow("", "", tuple(dims.split("-")), chunk=size)
            runs = row.cuts(layout.groups(dims).tolist())
            for rank in layout.ranks:
                (run,) = (each for each in runs if rank in each)
                assert tuple(layout.subgroup(rank, dims, size)) == run


def test_random_orders_on_each_rank_never_wait_and_sum_right():
    tally = subgroups_in_any_order(rounds=2, world=8)
    assert not tally.lost, tally


@on_ranks(6)
def test_six_ranks_in_runs_of_four_are_four_and_two_and_say_so(rank):
    grid = grid_of([6], ["cp"])
    group = grid.subgroup("cp", 4)
    assert members(group) == [[0, 1, 2, 3], [4, 5]][rank // 4]
    assert group.group_desc == "subgroup cp:4" + ", last run of 2" * (rank > 3)
    assert total(group) == len(members(group))
    whole = grid.subgroup("cp", 6)
    assert whole is grid.subgroup("cp", 9) is not grid.get_pg("cp")
    assert total(whole) == 6
    named = [each for each in json.loads(dump())["groups"] if each["label"] == "subgroup cp:4"]
    assert [each["ranks"] for each in named] == [members(group)]
    grid.destroy()


@on_ranks(3)
def test_asked_for_in_a_circle_nobody_waits(rank):
    grids = [HyperCommGrid([2], ["x"]), HyperCommGrid([2], ["x"], rank_offset=1)]
    for grid in grids:
        if rank in grid.layout:
            grid.create_pg("x")
    apart = grid_of([3], ["x"])
    asks = [lambda: grids[0].subgroup("x", 2), lambda: grids[1].subgroup("x", 2)]
    asks.append(lambda: apart.subgroup("x", 3))
    groups = {i: asks[i]() for i in [(rank + k) % 3 for k in range(3)]}
    sums = [total(groups[i], float(rank)) for i in range(3) if groups[i] is not None]
    assert sums == [[1, 3], [1, 3, 3], [3, 3]][rank]
    assert groups[1 - rank // 2] is None or rank == 1  # outside of the grid there is none


@on_ranks(4)
def test_names_do_not_depend_on_what_each_rank_asked_or_created_before(rank):
    grid = grid_of([4], ["x"])
    if rank % 2:
        grid.subgroup("x", 2)
    start = time.monotonic()
    early = grid.subgroup("x", 3) if rank == 0 else None
    assert time.monotonic() - start < 5
    other = grid_of([2, 2], ["a", "b"])
    grid.register_view("two", [2, 2], ["a", "b"])
    grid.create_pg("b", view="two")
    late = grid.subgroup("x", 3)
    assert early in (None, late)
    names = from_all(late.group_name)
    assert names[0] == names[1] == names[2] != names[3]
    assert total(late) == len(members(late)) == (3 if rank < 3 else 1)
    assert grid.subgroup("x", 2).group_name != other.get_pg("a").group_name


@on_ranks(4)
def test_after_release_and_suspension_members_agree_on_a_new_name(rank):
    grid = grid_of([4], ["x"])
    first = grid.subgroup("x", 4)
    assert total(first) == 4
    grid.release(first)
    with pytest.raises(ValueError, match=rf"rank {rank} cannot release .* Give what subgroup"):
        grid.release(first)
    second = grid.subgroup("x", 4)
    assert total(second) == 4 and first.group_name != second.group_name
    if rank == 1:
        grid.subgroup("x", 2)  # the others never do
    grid.suspend("recreate")
    with pytest.raises(RuntimeError, match=f"rank {rank} cannot have subgroup x:2.*resume"):
        grid.subgroup("x", 2)
    grid.resume()
    assert total(grid.subgroup("x", 2)) == 2
    assert grid.subgroup("x", 4) is not second and total(grid.subgroup("x", 4)) == 4


@on_ranks(4)
def test_the_limit_refuses_and_evicts_nothing(rank):
    grid = grid_of([4], ["x"])
    kept = [grid.subgroup("x", size, limit=2) for size in (2, 4)]
    with pytest.raises(RuntimeError, match=rf"rank {rank} .* with limit=2: call release\(\)"):
        grid.subgroup("x", 3, limit=2)
    assert [grid.subgroup("x", size, limit=2) for size in (2, 4)] == kept
    grid.release(kept[0])
    assert total(grid.subgroup("x", 3, limit=2)) == (3 if rank < 3 else 1)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "2", True, None])
def test_an_invalid_size_or_limit_is_refused(wrong, fake_world):
    fake_world(4)
    grid = grid_of([4], ["x"])
    with pytest.raises(LayoutError, match=r"size|limit"):
        grid.subgroup("x", wrong)
    with pytest.raises(LayoutError, match=r"invalid dim 'y'\. Valid dims are"):
        grid.subgroup("y", 2)
    if wrong is not None:
        with pytest.raises(LayoutError, match="limit must be a whole number from 1 on"):
            grid.subgroup("x", 2, limit=wrong)
    with pytest.raises(LayoutError, match="sizes must be several values, got 2"):
        grid.create_subgroups("x", 2)
    for ask in (grid.subgroup, lambda dims, size, **given: grid.create_pg((), **given)):
        with pytest.raises(TypeError, match=r"timeout must be a datetime.timedelta, got 5\."):
            ask("x", 2, timeout=5)
    assert grid.subgroup("x", np.int64(3)) is grid.subgroup("x", 3)


def test_without_a_group_of_the_grid_there_is_no_epoch(fake_world):
    fake_world(4)
    grid = HyperCommGrid([4], ["x"])
    with pytest.raises(RuntimeError, match=r"rank 0 asks for subgroup x:2.*call create_pg\(\)"):
        grid.subgroup("x", 2)
    with pytest.raises(ValueError, match="rank 0 has no subgroup"):
        grid.release(grid.create_pg("x"))
    assert grid.subgroup("x", 2) is not None


@on_ranks(4)
def test_where_torch_connects_at_once_they_are_planned_or_refused(rank):
    grid = grid_of([4], ["x"])
    with mock.patch.object(gloo, "can_connect_lazily", return_value=False):
        with pytest.raises(RuntimeError, match=r"gloo connects at once\. Plan it: call create_sub"):
            grid.subgroup("x", 3)
        grid.create_subgroups("x", [3, 2])
        assert members(grid.subgroup("x", 3)) == [[0, 1, 2], [3]][rank // 3]
        assert total(grid.subgroup("x", 2)) == 2
        grid.suspend("recreate")
        grid.resume()
        assert total(grid.subgroup("x", 2)) == 2
        grid.release(grid.subgroup("x", 2))
        with pytest.raises(RuntimeError, match="cannot be created on demand"):
            grid.subgroup("x", 2)
    assert total(grid.subgroup("x", 2)) == 2


@on_ranks(4)
def test_where_every_rank_must_take_part_they_are_planned(rank):
    with mock.patch.dict("os.environ", HYPERGRID_CREATION="everyone"):
        grid = grid_of([2], ["x"], rank_offset=1)
        grid.create_subgroups("x", [1])
        if rank in grid.layout:
            assert members(grid.subgroup("x", 1)) == [rank]
            with pytest.raises(RuntimeError, match="creation was set so"):
                grid.subgroup("x", 2)
        else:
            assert grid.subgroup("x", 1) is None


@on_ranks(2)
def test_planned_subgroups_are_agreed_on(rank):
    grid = grid_of([2], ["x"])
    with pytest.raises(AgreementError, match="groups over is"):
        grid.create_subgroups("x", [1 + rank])
    with pytest.raises((AgreementError, LayoutError), match="at least one member"):
        grid.create_subgroups("x", [1 - rank])
    grid.create_subgroups("x", [1])
    with pytest.raises(KeyError, match=f"rank {rank}: subgroup x:1 has been created"):
        grid.create_subgroups("x", [1])
    assert members(grid.subgroup("x", 1)) == [rank]


@on_ranks(8)
def test_a_state_has_subgroups_of_its_dims_and_its_timeout_and_leaves_none(rank):
    opened = descriptors()
    state = ParallelState.create(
        tensor_model_parallel_size=2, expert_model_parallel_size=4, distributed_timeout_minutes=3
    )
    groups = [
        state.subgroup("dp-cp", 3),
        state.subgroup("ep", 2, view="expert", limit=4),
    ]
    column = [*range(rank % 2, 8, 2)]
    assert members(groups[0]) == (column[:3] if rank < 6 else column[3:])
    assert all(total(group) == len(members(group)) for group in groups)
    assert {group._get_backend(torch.device("cpu")).options._timeout for group in groups} == {
        timedelta(minutes=3)
    }
    assert against_dump(state.plan, json.loads(dump())) == []
    state.release(groups[0])
    state.destroy()
    del groups
    with pytest.raises(RuntimeError, match="needs an initialized state"):
        state.subgroup("dp", 2)
    assert descriptors(opened) <= opened


@on_ranks(4)
def test_a_new_timeout_of_all_groups_reaches_subgroups(rank):
    state = ParallelState.create()
    asked = state.subgroup("dp", 2)
    minutes = timedelta(minutes=7)
    state.update_pg_timeout(minutes)
    assert asked._get_backend(torch.device("cpu")).options._timeout == minutes
    state.destroy()
