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
from hypergrid import EnvironmentTable, HyperCommGrid
from tests.support.forked import on_ranks, run_ranks


def _ranks(group):
    return None if group is GroupMember.NON_GROUP_MEMBER else dist.get_process_group_ranks(group)


def _refused(attempt, *kinds):
    """The text of the refusal, which must leave torch's groups as they were."""
    before = set(c10d._world.pg_map)
    with pytest.raises(kinds or ValueError) as caught:
        attempt()
    assert set(c10d._world.pg_map) == before
    return str(caught.value)


def _the_definition(rank, world):
    table = EnvironmentTable()
    assert isinstance(table.rank, int) and isinstance(table.world_size, int)
    assert isinstance(table.default_process_group, dist.ProcessGroup)
    assert isinstance(table.process_group_pool, dict) and isinstance(table.device_mesh_pool, dict)
    assert table.is_master() is table.is_master(process_group=None) is (rank == 0)
    assert table.get_rank(process_group=None) == table.rank == table.local_rank == rank
    assert table.get_world_size(process_group=None) == table.world_size == world
    group = table.create_process_group("middle", [1, 2])
    assert table.get_process_group("middle") is group is table.process_group_pool["middle"]
    mesh = table.create_device_mesh("train", (2, world // 2), ("dp", "tp"))
    assert isinstance(mesh, DeviceMesh)
    assert table.get_device_mesh("train") is mesh is table.device_mesh_pool["train"]
    assert table.get_rank("middle") == table.get_rank(group) == table.get_rank(group=group)
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
    table.create_device_mesh("train", (2, 2), ("dp", "tp"), share=True)
    whole = table.create_process_group("train/tp-dp")
    assert table.get_process_group("train/dp-tp") is whole
    total = torch.tensor([rank])
    dist.all_reduce(total, group=table.get_process_group("halves"))
    described = {each["label"]: each["ranks"] for each in json.loads(hypergrid.dump())["groups"]}
    seen = {name: _ranks(group) for name, group in table.process_group_pool.items()}
    table.destroy()
    assert table.process_group_pool == table.device_mesh_pool == {}
    half, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    io = [0, 3] if rank in (0, 3) else None
    names = {"halves": half, "io": io, "train/dp": column, "train/tp": half}
    assert seen == {**names, "train/dp-tp": [0, 1, 2, 3]}
    assert total.item() == sum(half) and len(c10d._world.pg_map) == 1
    assert described["halves"] == half and described["dp"] == column


@pytest.mark.parametrize("environment", [{}, {"HYPERGRID_CREATION": "everyone"}])
@on_ranks(4)
def test_duplicates_are_refused_with_the_name_of_the_one_that_exists_or_shared(rank, environment):
    os.environ.update(environment)
    table, texts = EnvironmentTable(), []
    first = table.create_process_group("pairs", [[0, 1], [2, 3]])
    texts.append(_refused(lambda: table.create_process_group("again", [1, 0])))
    texts.append(_refused(lambda: table.create_process_group("pairs", [0, 2])))
    mesh = lambda **options: table.create_device_mesh("m", (2, 2), ("dp", "tp"), **options)  # noqa: E731
    texts.append(_refused(mesh))
    assert list(table.process_group_pool) == ["pairs"] and table.device_mesh_pool == {}
    again = table.create_process_group("again", [1, 0], share=True)
    assert again is (first if rank < 2 else GroupMember.NON_GROUP_MEMBER)
    assert table.create_process_group("pairs", [[0, 1], [2, 3]], share=True) is first
    shared = mesh(share=True)
    assert shared.get_group("tp") is first is table.get_process_group("m/tp")
    texts.append(_refused(mesh))
    texts.append(_refused(lambda: table.create_process_group("m/tp")))
    late = timedelta(seconds=5)
    texts.append(
        _refused(lambda: table.create_process_group("x", [0, 1], timeout=late, share=True))
    )
    # Some of the groups exist: the others are made.
    mixed = table.create_process_group("mixed", [[0, 1], [2], [3]], share=True)
    assert (mixed is first) == (rank < 2) and _ranks(mixed) == ([0, 1] if rank < 2 else [rank])
    total = torch.tensor([rank])
    dist.all_reduce(total, group=mixed)
    dist.all_reduce(total, group=shared.get_group("dp"))
    assert total.item() == (3 if rank % 2 == 0 else 4)
    assert len(c10d._world.pg_map) == (3 if rank < 2 else 4)  # default, pairs, dp, own
    assert "'again' of ranks 0..1 exists already as 'pairs'" in texts[0]
    assert "give share=True" in texts[0] and "'pairs' is taken" in texts[1]
    assert "'m/tp' of ranks 0..1 exists already as 'pairs'" in texts[2]
    assert "'m' is taken" in texts[3] and "get_process_group('m/tp')" in texts[4]
    assert "leave them out" in texts[5]


@on_ranks(4)
def test_a_mesh_and_the_pool_own_the_same_groups(rank):
    grid = HyperCommGrid([2, 1, 2], ["tp", "cp", "dp"])
    table = EnvironmentTable.from_grid(grid)
    tp = grid.create_pg("tp")
    assert table.get_process_group("tp") is tp and list(table.process_group_pool) == ["tp"]
    mesh = table.create_device_mesh(["dp", "tp", "cp"])
    assert table.get_device_mesh("tp-cp-dp") is mesh is table.device_mesh_pool["dp-cp-tp"]
    assert mesh.mesh_dim_names == ("dp", "cp", "tp")
    for dim in grid.dim_names:
        assert mesh.get_group(dim) is table.get_process_group(dim) is grid.get_pg(dim)
    both = table.create_process_group(("dp", "tp"))
    assert both is grid.get_pg("tp-dp") is table.get_process_group("dp-tp")
    count = len(c10d._world.pg_map)
    assert count == 5 and len(grid.pool.groups) == 4
    texts = [
        _refused(lambda: table.create_process_group("tp-cp")),  # cp=1: as tp alone
        _refused(lambda: table.create_process_group("dp", backend="nccl")),
        _refused(lambda: table.create_process_group("tp", [0, 1])),
        _refused(lambda: table.create_device_mesh("dp-tp-cp")),
        _refused(lambda: table.create_process_group("pp"), KeyError),
        _refused(lambda: table.get_process_group("cp-dp"), KeyError),
        _refused(lambda: table.get_process_group("lost"), KeyError),
        _refused(lambda: table.get_device_mesh("lost"), KeyError),
    ]
    assert table.create_process_group("tp-cp", share=True) is tp is grid.get_pg("cp-tp")
    total = torch.tensor([rank])
    dist.all_reduce(total, group=mesh.get_group("dp"))
    table.destroy()
    assert len(c10d._world.pg_map) == count  # they are the grid's
    grid.destroy()
    assert total.item() == (2 if rank % 2 == 0 else 4) and len(c10d._world.pg_map) == 1
    assert "exists already as 'tp'" in texts[0]
    assert "backend of their grid" in texts[1]
    assert "'tp' is taken" in texts[2] and "'dp-cp-tp' is taken" in texts[3]
    assert "'pp' names no dims that rank" in texts[4] and "['tp', 'cp', 'dp']" in texts[4]
    assert "call create_process_group('cp-dp') on every rank" in texts[5]
    assert "create_process_group('lost', ranks)" in texts[6] and "create_device_mesh" in texts[7]


@on_ranks(4)
def test_dims_of_size_one_share_without_being_asked_and_explicit_groups_do_not(rank):
    table = EnvironmentTable()
    table.create_device_mesh("a", (4, 1), ("x", "y"))
    mesh = table.create_device_mesh("b", (2, 1, 2), ("x", "y", "z"))
    assert mesh.get_group("y") is table.get_process_group("a/y")
    assert len(c10d._world.pg_map) == 5
    text = _refused(lambda: table.create_process_group("own", [0]))
    assert "'own' of ranks 0 exists already as 'a/y'" in text


@on_ranks(4)
def test_from_a_state_by_its_labels_and_by_its_dims(rank):
    from compat.state import ParallelState

    not_yet = _refused(lambda: EnvironmentTable.from_state(ParallelState()), RuntimeError)
    assert "has no groups" in not_yet
    state = ParallelState.create(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    table = EnvironmentTable.from_state(state)
    tp = state.get_tensor_model_parallel_group()
    assert table.get_process_group("TENSOR_MODEL_PARALLEL_GROUP") is tp
    assert table.get_process_group("tp") is tp and table.is_master("tp") is (rank % 2 == 0)
    assert table.get_process_group("expert/tp-ep") is state.grid.get_pg("tp-ep", view="expert")
    ends = table.get_process_group("EMBEDDING_GROUP")
    assert _ranks(ends) == state._EMBEDDING_GLOBAL_RANKS
    pos = table.get_process_group("POSITION_EMBEDDING_GROUP")
    assert (pos is GroupMember.NON_GROUP_MEMBER) == (rank >= 2)
    text = _refused(lambda: table.create_process_group("first", [0, 1]))
    mesh = table.create_device_mesh("pp-dp-tp")
    assert mesh.get_group("tp") is tp
    before = len(c10d._world.pg_map)
    table.create_process_group("mine", [0, 1, 3])
    table.destroy()
    assert len(c10d._world.pg_map) == before
    state.suspend("recreate")
    assert table.process_group_pool == {}
    state.resume()
    assert table.get_process_group("tp") is state.get_tensor_model_parallel_group() is not tp
    state.destroy()
    state = ParallelState.create(pipeline_model_parallel_size=4)
    table = EnvironmentTable.from_state(state)
    text += _refused(lambda: table.create_process_group("ends", [0, 3]))
    ends = table.create_process_group("ends", [0, 3], share=True)
    assert ends is table.get_process_group("EMBEDDING_GROUP")
    table.destroy()
    state.destroy()
    assert "ranks 0..1 exists already as" in text and len(c10d._world.pg_map) == 1
    assert "'ends' of ranks 0,3 exists already as 'EMBEDDING_GROUP'" in text


@on_ranks(4)
def test_ranks_outside_a_window_get_torchs_marker(rank):
    grid = HyperCommGrid([2], ["tp"], rank_offset=2)
    table = EnvironmentTable.from_grid(grid)
    group = table.create_process_group("tp")
    assert table.get_process_group("tp") is group
    seen = _ranks(group), table.get_rank("tp")
    assert seen == (([2, 3], rank - 2) if rank > 1 else (None, -1))
    assert table.create_process_group("all", range(4)).size() == 4


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
    assert total.item() == [1, 1, 2, 3][rank] and len(c10d._world.pg_map) == 1


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
    mesh = table.create_device_mesh("m", (2, 2), ("a", "b"), share=True)
    assert "ranks is ['0,2'] on rank 3 and ['0..1'] on rank 0" in texts[0]
    assert ("rank 2 refused" in texts[1]) == (rank != 2) and "of 0 to 3" in texts[1]
    assert ("rank 1 refused" in texts[2]) == (rank != 1) and "has 6 ranks" in texts[2]
    assert _ranks(group) == ([0, 1] if rank < 2 else None) and mesh.get_group("a").size() == 2


@mock.patch.object(c10d, "default_pg_timeout", timedelta(seconds=3))
@on_ranks(4)
def test_what_one_rank_cannot_create_is_left_on_none_and_can_be_asked_for_again(rank):
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    table = EnvironmentTable.from_grid(grid)
    real, calls = dist.new_group, []

    def second_fails(*args, **options):
        calls.append(args)
        if rank == 2 and len(calls) % 2 == 0:
            raise RuntimeError("no route")
        return real(*args, **options)

    mesh = lambda **options: table.create_device_mesh("m", (2, 2), ("a", "b"), **options)  # noqa: E731
    with mock.patch.object(dist, "new_group", second_fails):
        texts = [
            _refused(mesh, hypergrid.CreationError),
            _refused(lambda: table.create_device_mesh("dp-tp"), hypergrid.CreationError),
        ]
    assert table.process_group_pool == table.device_mesh_pool == {} and grid.pool is None
    own, other = mesh(), table.create_device_mesh("dp-tp", share=True)
    total = torch.tensor([rank])
    dist.all_reduce(total, group=own.get_group("a"))
    assert all("rank 2 could not create" in text for text in texts)
    assert total.item() == (2 if rank % 2 == 0 else 4)
    assert own.get_group("a") is other.get_group("dp")


@mock.patch.object(c10d, "default_pg_timeout", timedelta(seconds=5))
@on_ranks(4)
def test_ranks_that_write_the_dims_of_a_mesh_in_different_orders_do_not_wait_for_each_other(rank):
    table = EnvironmentTable.from_grid(HyperCommGrid([2, 2], ["tp", "dp"]))
    mesh = table.create_device_mesh("tp-dp" if rank in (0, 3) else "dp-tp")
    assert mesh.mesh_dim_names == ("dp", "tp")
    assert _ranks(mesh.get_group("tp")) == [rank // 2 * 2, rank // 2 * 2 + 1]


@pytest.mark.parametrize("ranks", [[], [0, 0], [4], [-1], ["a"], 3, [[0, 1], [1, 2]], [[0], []]])
def test_ranks_that_make_no_group_are_refused(fake_world, ranks):
    fake_world(4)
    table = EnvironmentTable()
    with pytest.raises(ValueError, match="the ranks of 'x' "):
        table.create_process_group("x", ranks)
    assert table.process_group_pool == {}


def test_other_refusals_are_sentences(fake_world, monkeypatch):
    with pytest.raises(RuntimeError, match="init_process_group"):
        EnvironmentTable()
    fake_world(4, rank=3)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    table = EnvironmentTable()
    with pytest.raises(
        RuntimeError, match="local rank of rank 3 is not known: start with torchrun"
    ):
        _ = table.local_rank
    assert EnvironmentTable(local_rank=1).local_rank == 1
    for name in ("", 7, None):
        with pytest.raises(ValueError, match="the name of a group must be a text"):
            table.create_process_group(name, [0])
    for name in ("", "a/b", 7):
        with pytest.raises(ValueError, match="the name of a mesh must be a text"):
            table.create_device_mesh(name, (2, 2), ("a", "b"))
    with pytest.raises(ValueError, match="one size per name"):
        table.create_device_mesh("m", (2, 2))
    with pytest.raises(ValueError, match=r"has 2 ranks and the world has 4.*rank_offset"):
        table.create_device_mesh("m", (2,), ("a",))
    assert len(c10d._world.pg_map) == 1 and table.device_mesh_pool == {}
