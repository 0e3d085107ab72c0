"""megatron-core's HyperCommGrid over ours: its names, words and patches, release by release."""

from unittest import mock

import pytest
import torch.distributed as dist

from compat.hyper_comm_grid import HyperCommGrid
from compat.megatron.releases import RELEASE_HAS
from compat.state import ParallelState
from tests.parity.grids import GridCase, compare_grid, compare_grids
from tests.support import table
from tests.support.forked import on_ranks, open_groups, total
from tests.support.stock import RELEASES, have_stock, source

FUNCTION = "torch.distributed.new_subgroups_by_enumeration"
NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


def has_views(release):
    return "def register_view" in source(release, "hyper_comm_grid.py")


@pytest.fixture(params=RELEASES)
def release(request, monkeypatch):
    """A release, with ours speaking as it."""
    if not have_stock(request.param):
        pytest.skip(f"run scripts/fetch_megatron {request.param}")
    monkeypatch.setitem(RELEASE_HAS, "grid_views", has_views(request.param))
    return request.param


@pytest.fixture
def views(monkeypatch):
    monkeypatch.setitem(RELEASE_HAS, "grid_views", True)


@pytest.fixture
def eight(monkeypatch):
    """A world of eight ranks that torch does not know of."""
    monkeypatch.setenv("WORLD_SIZE", "8")


@pytest.fixture
def enumeration():
    """``new_subgroups_by_enumeration`` replaced; each call gives a group of its own."""
    with mock.patch(FUNCTION) as function:
        function.side_effect = lambda *_, **__: (mock.MagicMock(spec=dist.ProcessGroup), None)
        yield function


@pytest.mark.parametrize("name", ["shape", "dim_names", "rank_offset", "size", "_views"])
def test_what_would_make_another_grid_is_not_written(eight, name):
    grid = HyperCommGrid([2, 4], ["tp", "dp"])
    with pytest.raises(AttributeError):
        setattr(grid, name, None)
    with pytest.raises(TypeError, match="does not support item assignment"):
        grid._views["mine"] = grid._views["base"]


@pytest.mark.parametrize("name", ["_gen_rank_enum", "_order_dims", "_order_dims_for"])
def test_a_method_that_would_have_no_effect_is_not_replaced(eight, name):
    grid = HyperCommGrid([2, 4], ["tp", "dp"])
    setattr(grid, name, lambda *arguments: getattr(HyperCommGrid, name)(grid, *arguments))
    for call in (grid.create_pg, grid.get_pg, grid.get_rank_enum):
        with pytest.raises(TypeError, match=f"{name} of this grid has been replaced"):
            call("tp")


def test_ranks_keys_groups_and_refusals_are_stocks_over_random_grids(release):
    assert compare_grids(release, 25, seed=7) == []


@pytest.mark.parametrize(("call", "error", "says"), table("megatron/refusals_of_grids.txt"))
def test_what_is_wrong_is_said_in_words_that_stock_uses_too_and_no_view_is_kept(
    views, eight, enumeration, call, error, says
):
    grid = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"])
    grid.register_view("expert", [2, 2, 2], ["rest", "ep", "pp"], ["pp"])
    grid.create_pg(["tp", "dp"])
    grid.create_pg("ep", view="expert")
    with pytest.raises(eval(error), match=says):
        eval(call, {"grid": grid, "HyperCommGrid": HyperCommGrid})
    assert list(grid._views) == list(grid.core.views) == ["base", "expert"]


def test_a_name_may_have_a_dash(views, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    dims = [["expt-tp"], ["cp", "dp"], ["expt-tp", "dp"]]
    assert compare_grid("0.19.2", GridCase([2, 2, 2], ["expt-tp", "cp", "dp"], 0, dims, 8, 3)) == []


def test_the_environment_says_how_large_the_world_is_before_torch_does(fake_world, monkeypatch):
    fake_world(8)
    for world in (16, 4):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        assert HyperCommGrid([world], ["dp"]).size == world
    with pytest.raises(RuntimeError, match="world has 4"):
        HyperCommGrid([8], ["dp"])
    monkeypatch.delenv("WORLD_SIZE")
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="Cannot determine world size"):
        HyperCommGrid([1], ["dp"])


@on_ranks(8)
def test_a_rank_creates_only_its_own_groups(rank):
    new_group = mock.patch.object(dist, "new_group", side_effect=dist.new_group, autospec=True)
    with new_group as created:
        grid = HyperCommGrid([2, 4], ["tp", "dp"])
        dp = grid.create_pg("dp")
    members = [*range(rank % 2, 8, 2)]
    assert [call.args[0] for call in created.call_args_list] == [members]
    assert total(dp, rank) == sum(members)
    grid.destroy()
    assert len(open_groups()) == 1


def test_a_grid_beyond_the_real_world_is_refused_by_torch_as_with_stock(release, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert compare_grid(release, GridCase([4, 4], ["tp", "dp"], 0, [["tp"]], world=8, rank=0)) == []


def test_the_dict_of_groups_is_what_the_methods_and_destroy_go_by(fake_world):
    fake_world(8, rank=3)
    grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"])
    tp = grid.create_pg("tp")
    cp = grid.create_pg("cp")
    outside = dist.new_group([0, 3])
    del grid._pgs["cp"]
    with pytest.raises(KeyError, match="hasn't been created"):
        grid.get_pg("cp")
    grid._pgs |= {"dp": outside, "also": outside, "cp-tp": NON_MEMBER}
    assert grid.get_pg("dp") is outside is grid.core.get_pg("dp")
    destroy = dist.destroy_process_group
    with mock.patch("torch.distributed.destroy_process_group", side_effect=destroy) as closing:
        grid.destroy()
    assert {call.args[0] for call in closing.call_args_list} == {tp, outside}
    assert closing.call_count == 2  # each once
    assert grid._pgs == {} and cp in open_groups()
    assert grid.create_pg("tp") is not tp
    grid.core.destroy()
    assert cp not in open_groups()


@on_ranks(4)
def test_a_core_grid_is_given_to_megatrons_code_with_its_views_and_groups(rank):
    state = ParallelState.create(
        tensor_model_parallel_size=2, expert_model_parallel_size=2, order="tp-cp-ep-dp-pp"
    )
    grid = HyperCommGrid.from_core(state.grid)
    assert grid.core is state.grid
    assert grid.get_pg("tp") is state.get_tensor_model_parallel_group()
    assert grid.get_pg("ep", view="expert") is state.get_expert_model_parallel_group()
    assert grid._gen_rank_enum(["tp"]) == [[0, 1], [2, 3]] and grid.dim_names[0] == "tp"
    both = grid.create_pg(["cp", "pp"])
    assert state.grid.get_pg("pp-cp") is both
    state.destroy()
