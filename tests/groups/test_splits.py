"""Groups that are split off the default one: by torch's real gloo split, on real ranks."""

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import parallel_state as ps
from compat.hyper_comm_grid import HyperCommGrid as MegatronGrid
from compat.state import ParallelState
from hypergrid import EnvironmentTable, HyperCommGrid
from hypergrid.groups import creation
from hypergrid.groups.pool import before_closing
from tests.support.forked import join, run_ranks

LAYOUT = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
}


def _use(groups):
    """An all_reduce on each, which tells who took part; their names by label and ranks."""
    for pooled in groups:
        total = torch.tensor([2.0 ** dist.get_rank()])
        dist.all_reduce(total, group=pooled.group)
        assert total.item() == sum(2.0**r for r in pooled.ranks), pooled.label
    return {(p.label, p.ranks): p.group.group_name for p in groups}


def _uneven_histories(rank):
    join(rank, 8)
    if rank < 3:
        dist.new_group([0, 1, 2], use_local_synchronization=True)
    known, lives = len(c10d._world.pg_map), []
    for _ in range(2):
        ps.initialize_model_parallel(**LAYOUT, creation="split")
        pool = ps.current_state().pool
        assert pool.agreement.way == "split"
        lives.append(_use(pool.groups))
        ps.destroy_model_parallel()
        assert len(c10d._world.pg_map) == known
    return lives


def test_every_member_knows_a_split_by_the_same_name_and_no_name_comes_twice():
    results = run_ranks(8, _uneven_histories, backend="", timeout=80)
    named = {}
    for life in (0, 1):
        for names in (lives[life] for lives in results):
            for what, name in names.items():
                assert named.setdefault((life, what), name) == name, what
    assert len(named) == len(set(named.values()))
    assert len(results[0][0]) > len(results[7][0])  # the position embedding's: stage 0 alone


def _registered(rank):
    join(rank, 4)
    theirs = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    told = {"timeout": timedelta(minutes=7), "group_desc": "ours"}
    ours = creation.by_split("A", [(0, 1), (2, 3)], "epoch", **told)
    world = c10d._world
    default = c10d._get_default_group()._get_backend(torch.device("cpu")).options
    assert default._timeout == timedelta(minutes=30) and default.group_name == "0"
    assert ours.group_name == str(
        creation.group_name("A", [rank // 2 * 2, rank // 2 * 2 + 1], "epoch")
    )
    assert c10d._resolve_process_group(ours.group_name) == ours
    assert (ours.group_desc, ours.rank(), ours.size()) == ("ours", rank % 2, 2)
    for table in (world.pg_group_ranks, world.pg_backend_config):
        assert table[ours] == table[theirs]
    assert world.pg_map[ours][0] == world.pg_map[theirs][0]
    assert world.pg_names[ours] == ours.group_name
    tag = f"ptd:{ours.group_name}"
    assert world.pg_to_tag[ours] == tag and world.tags_to_pg[tag] == [ours]
    assert sorted(map(str, ours._device_types)) == sorted(map(str, theirs._device_types))
    options = [g._get_backend(torch.device("cpu")).options for g in (ours, theirs)]
    assert options[0].global_ranks_in_group == options[1].global_ranks_in_group
    assert options[0]._threads == options[1]._threads and options[0].group_name == ours.group_name
    assert [each._timeout for each in options] == [timedelta(minutes=7), timedelta(minutes=30)]
    assert ours._get_backend(torch.device("cuda")) is ours._get_backend(torch.device("cpu"))
    if rank == 0:
        assert creation.close([ours]) == []
        assert ours not in world.pg_map and tag not in world.tags_to_pg
    return True


def test_a_split_has_the_options_and_entries_of_new_group_and_leaves_the_default_groups_alone():
    assert run_ranks(4, _registered, backend="") == [True] * 4


def _second_life(rank):
    for life in (0, 1):
        join(rank, 4, life)
        ps.initialize_model_parallel(2, creation="split")
        _use(ps.current_state().pool.groups)
        dist.destroy_process_group()
        ps.destroy_model_parallel()
    return len(c10d._world.pg_map)


def test_after_a_bare_destroy_process_group_a_second_life_can_be_split_too():
    assert run_ranks(4, _second_life, backend="") == [0] * 4


def _parsed(rank):
    default = c10d._get_default_group()
    default.bound_device_id = torch.device("cuda", 0)
    off = {b: creation.split_off(b) for b in (None, "gloo", "GLOO", "cpu:gloo", "nccl", "cpu:nccl")}
    with mock.patch.dict(c10d._world.pg_map):  # the configuration of another default group
        for name in ("nccl", "cpu:gloo,cuda:nccl", "CPU:gloo,cuda:NCCL"):
            c10d._world.pg_map[default] = (name, None)
            for backend in (None, "nccl", "NCCL", "cpu:gloo,cuda:nccl", "cuda:NCCL"):
                assert creation.split_off(backend), (name, backend)
            for backend in ("gloo", "Gloo", "cpu:gloo", "ucc", "cpu:gloo,cuda:gloo"):
                assert not creation.split_off(backend), (name, backend)
    return off, creation.abilities()


def test_whether_torch_would_split_is_read_from_the_parsed_backends():
    ((off, can),) = run_ranks(1, _parsed)
    assert off == {
        **dict.fromkeys((None, "gloo", "GLOO", "cpu:gloo"), True),
        **dict.fromkeys(("nccl", "cpu:nccl"), False),
    }
    # Torch splits NCCL alone off a default group that is bound.
    assert can == creation.Abilities(can_split=True)


def _outside(rank, variables):
    join(rank, 4)
    os.environ.update(variables)
    grid = HyperCommGrid([2], ["tp"], rank_offset=1)
    group = grid.create_pg("tp")
    assert (group is None) == (rank in (0, 3))
    if group is not None:
        _use(grid.pool.groups)
    table = EnvironmentTable.from_grid(HyperCommGrid([2, 1], ["a", "b"]))
    made = table.create_process_group("a")
    assert (made is dist.GroupMember.NON_GROUP_MEMBER) == (rank > 1)
    grid.destroy()
    again = grid.create_pg("tp")
    return group is not None and again is not None


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
def test_ranks_outside_a_grid_take_part_where_every_rank_must(variables):
    results = run_ranks(4, _outside, variables, backend="", timeout=20)
    assert results == [False, True, True, False]


def _refused_inside(rank):
    join(rank, 4)
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    HyperCommGrid([2], ["tp"], backend="nccl" if rank == 1 else None).create_pg("tp")


def test_what_is_refused_inside_a_grid_is_heard_outside_of_it():
    errors = run_ranks(4, _refused_inside, backend="", timeout=20, expect="errors")
    assert {kind for kind, _ in errors} == {"AgreementError"}
    assert all("backend is 'nccl' on rank 1" in text for _, text in errors)


def _closing_order(rank, bare):
    join(rank, 8)
    ps.initialize_model_parallel(**LAYOUT)
    closed = []

    def watched(group, shutdown=dist.ProcessGroup.shutdown):
        closed.append(group.group_name)
        shutdown(group)

    with mock.patch.object(dist.ProcessGroup, "shutdown", watched):
        dist.destroy_process_group() if bare else ps.destroy_model_parallel()
    return closed


def test_all_members_close_groups_in_one_order_which_is_that_of_a_bare_destroy():
    for bare in (False, True):
        orders = run_ranks(8, _closing_order, bare, backend="", timeout=60)
        assert all(len(order) > 15 for order in orders)
        assert all(order == sorted(order, reverse=True) for order in orders)


def _closing(rank, abort):
    ps.initialize_model_parallel(**LAYOUT)

    def broken(groups, abort):
        raise RuntimeError("the hook's own")

    before_closing.add(broken)
    try:
        if rank == 2:
            with pytest.warns(RuntimeWarning, match="the hook's own"):
                ps.destroy_model_parallel(abort=abort)
    finally:
        before_closing.discard(broken)
    left = len(c10d._world.pg_map)
    dist.barrier()  # rank 2 has closed its groups while the others had all of theirs
    ps.destroy_model_parallel(abort=abort)
    return left, len(c10d._world.pg_map), set(c10d._world.tags_to_pg) <= {"", "ptd:0"}


@pytest.mark.parametrize("abort", [False, True])
def test_a_hook_that_raises_keeps_no_group_alive_and_abort_waits_for_no_rank(abort):
    results = run_ranks(8, _closing, abort)
    assert [left == 1 for left, _, _ in results] == [rank == 2 for rank in range(8)]
    assert all((end, tidy) == (1, True) for _, end, tidy in results)


def _every_class(rank):
    state = ParallelState.create(tensor_model_parallel_size=2)
    grid, theirs = HyperCommGrid([2, 2], ["tp", "dp"]), MegatronGrid([2, 2], ["tp", "dp"])
    grid.create_pg("tp"), theirs.create_pg("tp")
    state.pool.destroy(3, abort=True)
    assert len(state.pool.groups) == 3
    for each in (state, grid, theirs):
        each.destroy(abort=True)
        each.destroy(abort=True)
    return len(c10d._world.pg_map)


def test_states_grids_and_pools_can_be_closed_without_waiting():
    assert run_ranks(4, _every_class) == [1] * 4
