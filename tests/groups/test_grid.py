"""The core's HyperCommGrid: enumerations, refusals, and groups of real processes."""

import gc
import itertools
import threading

import pytest
import torch
import torch.distributed as dist

import hypergrid
from hypergrid import HyperCommGrid
from hypergrid.groups.pool import live_pools
from tests.support.forked import from_all, on_ranks, open_groups, total

pytestmark = pytest.mark.usefixtures("world_without_torch")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([2], ["tp", "dp"]), "one size per name"),
        (([64, 65], ["tp", "dp"]), "needs 4160 ranks from rank 0 on"),
        (([2, 2], ["tp", "dp"], 4093), "the world has 4096"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(arguments, says):
    with pytest.raises((ValueError, RuntimeError), match=says):
        HyperCommGrid(*arguments)


def test_without_a_world_the_refusal_says_how_to_have_one(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(RuntimeError, match="or set WORLD_SIZE"):
        HyperCommGrid([2], ["tp"])


def test_the_process_group_outranks_the_environment(fake_world):
    fake_world(8)
    with pytest.raises(RuntimeError, match="the world has 8"):
        HyperCommGrid([16], ["tp"])


def test_groups_need_torch_distributed_and_a_layout_does_not():
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    assert grid.get_rank_enum("dp") == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="init_process_group"):
        grid.create_pg("dp")
    assert grid.groups == {}


def test_a_combination_is_created_once_whatever_the_order_of_its_dims(fake_world):
    fake_world(8, rank=3)
    grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"])
    with pytest.raises(KeyError, match=r"call create_pg\('dp-tp'\) on every rank"):
        grid.get_pg(["tp", "dp"])
    group = grid.create_pg(["tp", "dp"])
    assert grid.get_pg(["dp", "tp"]) is group is grid.get_pg("tp-dp")
    with pytest.raises(KeyError, match="already been created"):
        grid.create_pg(["dp", "tp"])
    for wrong in ("pp", ["tp", "pp"], ["tp", "tp"]):
        with pytest.raises(ValueError):
            grid.create_pg(wrong)
    with pytest.raises(TypeError, match=r"timeout must be a .*, got 'soon'"):
        grid.create_pg("tp", timeout="soon")
    assert grid.groups == {"dp-tp": group}
    assert dist.get_process_group_ranks(group) == [2, 3, 6, 7]
    grid.destroy()
    assert grid.create_pg(["dp", "tp"]) is not group


@on_ranks(8)
def test_collectives_over_every_combination_of_dims(rank):
    grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"])
    for count in (1, 2, 3):
        for dims in itertools.combinations(grid.dim_names, count):
            group = grid.create_pg(list(dims))
            expected = grid.layout.group(rank, dims)
            assert total(group, 2.0**rank) == sum(2.0**member for member in expected)
    grid.destroy()
    assert len(open_groups()) == 1


@pytest.mark.usefixtures("no_pools_of_earlier_tests")
@on_ranks(2)
def test_groups_of_a_grid_that_nobody_holds_are_known_as_long_as_torch_knows_them(rank):
    group = HyperCommGrid([2], ["tp"]).create_pg("tp")
    gc.collect()
    assert [pooled.label for pool in live_pools() for pooled in pool.groups] == ["tp"]
    if rank == 0:
        threading.Timer(0.5, hypergrid.abort).start()
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_reduce(torch.ones(1), group=group)
    from_all(None)
    HyperCommGrid([2], ["dp"]).create_pg("dp")
    dist.destroy_process_group()
    live_pools()
    gc.collect()
    assert live_pools() == []
