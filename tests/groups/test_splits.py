"""Groups for which every rank of the world is needed, and who takes part in creating which."""

import os
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import members_only
from compat import parallel_state as ps
from compat.colossalai import EnvironmentTable
from compat.state import ParallelState
from hypergrid import HyperCommGrid
from hypergrid.groups import creation
from hypergrid.groups.pool import GroupPool, live_pools
from hypergrid.policy import Policy
from tests.support import nccl_rules
from tests.support.forked import from_all, join, on_ranks, open_groups, total
from tests.support.nccl_rules import start

LAYOUT = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
}


def name_of_working_groups(groups):
    """By label and ranks, the name of each of these groups; each adds up its members."""
    name_of = {}
    for pooled in groups:
        assert total(pooled.group, 2.0 ** dist.get_rank()) == sum(2.0**r for r in pooled.ranks)
        name_of[pooled.label, pooled.ranks] = pooled.group.group_name
    return name_of


@on_ranks(8, backend="", timeout=80)
def test_every_member_knows_a_split_by_the_same_name_and_no_name_comes_twice(rank):
    join(rank, 8)
    if rank < 3:
        dist.new_group([0, 1, 2], use_local_synchronization=True)
    before = open_groups()
    name_of = {}
    for life in (0, 1):
        ps.initialize_model_parallel(**LAYOUT, creation="split")
        pool = ps.current_state().pool
        assert pool.agreement.way == "split"
        for names in from_all(name_of_working_groups(pool.groups)):
            for group, name in names.items():
                assert name_of.setdefault((life, group), name) == name, group
        ps.destroy_model_parallel()
        assert open_groups() == before
    assert len(name_of) == len({*name_of.values()})


@pytest.mark.parametrize(
    ("groups", "same_color", "rounds"),
    [
        ([(0, 1), (2, 3)], False, [[(0, 1), (2, 3)]]),
        ([(0, 1), (2,)], False, [[(0, 1), (2,)]]),
        ([(0, 1), (1, 2), (0, 3)], False, [[(0, 1)], [(1, 2), (0, 3)]]),  # no rank has two colors
        ([(0, 1), (2, 3)], True, [[(0, 1)], [(2, 3)]]),
        ([(0, 1), (0, 1)], False, [[(0, 1)], [(0, 1)]]),
    ],
)
@on_ranks(4, backend="")
def test_a_split_has_the_groups_that_share_neither_ranks_nor_a_color(
    rank, groups, same_color, rounds
):
    world = start(rank, 4, kind="nccl, bound")
    color = mock.Mock(return_value=7) if same_color else c10d._process_group_color
    with mock.patch.object(c10d, "_process_group_color", color):
        created = creation.by_world("split", "A", groups, "epoch")
    assert world.splits == len(rounds)
    own = [ranks for ranks in groups if rank in ranks]
    for group, ranks in zip(created, own, strict=True):
        assert nccl_rules.total(group, 2.0**rank) == sum(2.0**member for member in ranks)


@pytest.mark.parametrize("interrupted", ["pool.PooledGroup", "pool.GroupPool._take_into_use"])
@pytest.mark.parametrize("way", ["split", "everyone"])
@on_ranks(3)
def test_where_the_first_of_several_groups_fails_the_others_are_closed_too(rank, way, interrupted):
    pairs = [(0, 1), (1, 2), (0, 2)]
    before = open_groups()
    pool = GroupPool(Policy(creation=way))
    ranks_of = {f"pair {number}": pair for number, pair in enumerate(pairs) if rank in pair}
    with (
        pytest.raises(KeyboardInterrupt),
        mock.patch(f"hypergrid.groups.{interrupted}", side_effect=KeyboardInterrupt),
        pool.two_phase_commit(range(3), {}, timedelta(seconds=8)),
    ):
        pool.make("PAIRS", ranks_of, lambda: pairs)
    assert open_groups() == before


@pytest.mark.parametrize(
    "variables",
    [
        {"TORCH_DIST_INIT_BARRIER": "1"},
        {"HYPERGRID_CREATION": "split"},
        {"HYPERGRID_CREATION": "everyone"},
        {"TORCH_DIST_INIT_BARRIER": "1", "HYPERGRID_AGREEMENT": "0"},
        {},
    ],
    ids=str,
)
@on_ranks(4, backend="", timeout=20)
def test_ranks_outside_a_grid_take_part_where_every_rank_must(rank, variables):
    join(rank, 4)
    os.environ.update(variables)
    grid = HyperCommGrid([2], ["tp"], rank_offset=1)
    group = grid.create_pg("tp")
    assert (group is None) == (rank in (0, 3)) != grid.is_current_rank_in_grid()
    if group is not None:
        name_of_working_groups(grid.pool.groups)
    group_of_table = EnvironmentTable().create_process_group("a", [0, 1])
    assert (group_of_table is dist.GroupMember.NON_GROUP_MEMBER) == (rank > 1)
    grid.destroy()
    again = grid.create_pg("tp")
    assert (again is None) == (rank in (0, 3))


@pytest.mark.parametrize(
    ("variable", "why"),
    [
        ("TORCH_DIST_INIT_BARRIER=1", "TORCH_DIST_INIT_BARRIER=1 makes torch wait"),
        ("HYPERGRID_CREATION=split", "creation was set so"),
        ("HYPERGRID_CREATION=everyone", "creation was set so"),
    ],
)
@pytest.mark.usefixtures("no_pools_of_earlier_tests")
@on_ranks(4, timeout=30)
def test_a_window_whose_groups_need_every_rank_is_refused_by_all_before_creation(
    rank, variable, why
):
    os.environ.update([variable.split("=")])
    window = {"local_world_size": 2, "rank_offset": rank // 2 * 2}
    new_group = mock.Mock()
    start = time.monotonic()
    with (
        mock.patch.object(dist, "new_group", members_only(new_group)),
        pytest.raises(RuntimeError) as caught,
    ):
        ParallelState.create(**window, distributed_timeout_minutes=0.5)
    assert time.monotonic() - start < 5 and not new_group.called
    assert open_groups() == [dist.group.WORLD] and live_pools() == []
    text = str(caught.value)
    assert "a window of 2 of 4 ranks is only possible where the members of a group create" in text
    assert why in text and "Change that, or use the whole world." in text


@pytest.mark.parametrize("bare", [False, True])
@on_ranks(8, backend="", timeout=60)
def test_all_members_close_groups_in_one_order_which_is_that_of_a_bare_destroy(rank, bare):
    join(rank, 8)
    ps.initialize_model_parallel(**LAYOUT)
    closed = []

    def watched(group, shutdown=dist.ProcessGroup.shutdown):
        closed.append(group.group_name)
        shutdown(group)

    with mock.patch.object(dist.ProcessGroup, "shutdown", watched):
        dist.destroy_process_group() if bare else ps.destroy_model_parallel()
    assert len(closed) > 15 and closed == sorted(closed, reverse=True)


@pytest.mark.parametrize("abort", [False, True])
@on_ranks(8)
def test_a_hook_that_raises_keeps_no_group_alive_and_abort_waits_for_no_rank(rank, abort):
    ps.initialize_model_parallel(**LAYOUT)
    if rank == 2:
        broken = mock.Mock(side_effect=RuntimeError("the hook's own"))
        with (
            mock.patch("hypergrid.groups.pool.before_closing", {broken}),
            pytest.warns(RuntimeWarning, match="the hook's own"),
        ):
            ps.destroy_model_parallel(abort=abort)
        assert broken.call_args.args[1] == abort and len(open_groups()) == 1
    dist.barrier()  # rank 2 has closed its groups while the others had all of theirs
    ps.destroy_model_parallel(abort=abort)
    assert len(open_groups()) == 1 and {*c10d._world.tags_to_pg} <= {"", "ptd:0"}
