"""megatron-core's ProcessGroupCollection from a state and from a grid."""

import dataclasses
import importlib.util
import sys
from types import ModuleType

import pytest

from compat import parallel_state as ps
from compat.collection import build, from_grid, from_state
from compat.state import ParallelState
from hypergrid import HyperCommGrid
from tests.support import stock, table
from tests.support.forked import open_groups

LAYOUTS = {}
for name, arguments in table("megatron/layouts_of_collections.txt"):
    LAYOUTS[name] = eval(f"dict({arguments})")


@pytest.fixture(params=[pytest.param(each, marks=pytest.mark.release(each)) for each in stock.MAIN])
def collection(request, monkeypatch):
    """The release's genuine class over our module, without the rest of its package."""
    if not stock.have_stock(request.param):
        pytest.skip(f"the source of megatron-core {request.param} is not here")
    core = ModuleType("megatron.core")
    core.parallel_state = ps
    name = "megatron.core.process_groups_config"
    file = stock.source_dir(request.param) / "process_groups_config.py"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    for imported in (ModuleType("megatron"), core, module):
        monkeypatch.setitem(sys.modules, imported.__name__, imported)
    spec.loader.exec_module(module)
    return module.ProcessGroupCollection


def fields(collection):
    return [field.name for field in dataclasses.fields(collection)]


def filled(groups):
    return {name for name in fields(groups) if getattr(groups, name, None) is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_call_builds_what_upstreams_collection_takes_from_the_module_and_touches_no_global(
    collection, fake_world, layout
):
    if "gtp_remat" not in fields(collection) and "GTP" in layout:
        pytest.skip("this release has no GTP")
    has_twins = "GTP" not in layout  # as upstream
    before = dict(vars(ps))
    for rank in (0, 5, 15):
        fake_world(16, rank=rank)
        built = build(**LAYOUTS[layout], hybrid_context_parallel=has_twins)
        assert dict(vars(ps)) == before
        state = built.parallel_state
        with state.activate():
            expected = collection.use_mpu_process_groups()
        for field in fields(collection):
            assert getattr(built, field) is getattr(expected, field), field
            assert getattr(from_state(state), field) is getattr(expected, field), field
        assert {"tp", "pp", "mp", "dp", "dp_cp", "expt_dp", "intra_dp_cp"} <= filled(built)
        assert ("hcp" in filled(built)) == ("hierarchical" in layout)
        assert built.dp_gloo is state._DATA_PARALLEL_GROUP_GLOO
        assert (built.dp_gloo is not None) == has_twins
        assert built.hybrid_dp_cp == state._HYBRID_DP_CP_GROUPS
        state.destroy()


def test_fields_that_hypergrid_cannot_fill_are_refused_by_name(collection, fake_world, monkeypatch):
    fake_world(8)
    state = ParallelState.create()
    router = ("router", object, dataclasses.field(init=False))
    more = dataclasses.make_dataclass("More", [router], bases=(collection,), init=False)
    monkeypatch.setattr(sys.modules[collection.__module__], "ProcessGroupCollection", more)
    groups = open_groups()
    with pytest.raises(ValueError, match="fields that hypergrid cannot fill: router"):
        build()
    assert open_groups() == groups
    assert from_state(state, ["tp"]).tp is state.get_tensor_model_parallel_group()
    state.destroy()


@pytest.mark.parametrize(("call", "error", "says"), table("megatron/refusals_of_collections.txt"))
def test_a_field_that_cannot_be_filled_is_refused_with_what_to_do(
    collection, fake_world, call, error, says
):
    fake_world(16)
    state = ParallelState.create(**LAYOUTS["experts"])
    names = {"from_state": from_state, "from_grid": from_grid, "state": state}
    names["grid"] = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"])
    with pytest.raises(eval(error), match=says):
        eval(call, names)
    state.destroy()


def test_a_dim_that_the_grid_lacks_has_size_one(collection, fake_world):
    fake_world(8, rank=3)
    grid = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"])
    assert not filled(from_grid(grid))
    tp = grid.create_pg("tp")
    # Over tp and cp is over tp.
    assert filled(from_grid(grid)) == {"tp", "tp_cp", "expt_tp", "tp_ep"}
    assert from_grid(grid).tp is from_grid(grid).tp_cp is tp
    grid.destroy()


@pytest.mark.parametrize("rank", [0, 6, 15])
def test_the_grid_of_a_state_gives_the_states_own_groups(collection, fake_world, rank):
    fake_world(16, rank=rank)
    state = ParallelState.create(**LAYOUTS["experts"])
    of_grid = from_grid(state.grid)
    of_state = from_state(state)
    over_dims = {"tp", "pp", "cp", "dp", "mp", "tp_cp", "dp_cp", "tp_dp_cp"}
    over_dims |= {"ep", "expt_tp", "expt_dp", "tp_ep", "tp_ep_pp"}
    assert filled(of_grid) >= over_dims
    for field in over_dims:
        assert getattr(of_grid, field) is getattr(of_state, field), field
    state.destroy()
