"""megatron-core's ProcessGroupCollection from a state and from a grid; a GPT built with it."""

import dataclasses
import importlib.util
import json
import sys
from types import ModuleType

import pytest
import torch.distributed as dist

from compat import parallel_state as ps
from compat.collection import build, from_grid, from_state
from compat.state import ParallelState
from hypergrid import HyperCommGrid
from tests.support import stock, table, warm

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


def skip_gtp_without_it(collection, layout):
    if "gtp_remat" not in fields(collection) and "GTP" in layout:
        pytest.skip("this release has no GTP")


def filled(groups):
    return {name for name in fields(groups) if getattr(groups, name, None) is not None}


@pytest.fixture
def initialized(fake_world):
    """Start a world and what ``layout`` says in it, for the module."""

    def start(layout, rank=5):
        fake_world(16, rank=rank)
        ps.initialize_model_parallel(**LAYOUTS[layout])
        return ps.current_state()

    yield start
    ps.destroy_model_parallel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_state_gives_what_upstreams_collection_takes_from_the_module(
    collection, initialized, layout
):
    skip_gtp_without_it(collection, layout)
    for rank in (0, 5, 15):
        state = initialized(layout, rank)
        groups = from_state(state)
        expected = collection.use_mpu_process_groups()
        for field in fields(collection):
            assert getattr(groups, field) is getattr(expected, field), field
        assert {"tp", "pp", "mp", "dp", "dp_cp", "expt_dp", "intra_dp_cp"} <= filled(groups)
        assert ("hcp" in filled(groups)) == ("hierarchical" in layout)
        ps.destroy_model_parallel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_call_builds_a_complete_collection_and_touches_no_global(
    collection, fake_world, layout
):
    skip_gtp_without_it(collection, layout)
    fake_world(16, rank=5)
    before = dict(vars(ps))
    pipeline = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3}
    built = build(**LAYOUTS[layout] | pipeline, hybrid_context_parallel="GTP" not in layout)
    state = built.parallel_state
    for field in fields(collection):
        assert getattr(built, field) is getattr(from_state(state), field), field
    for field, twin in {
        "dp": state._DATA_PARALLEL_GROUP_GLOO,
        "dp_cp": state._DATA_PARALLEL_GROUP_WITH_CP_GLOO,
        "intra_dp_cp": state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO,
        "expt_dp": state._EXPERT_DATA_PARALLEL_GROUP_GLOO,
    }.items():
        assert getattr(built, f"{field}_gloo") is twin
        assert (twin is None) == ("GTP" in layout)  # as upstream
    assert built.hybrid_dp_cp == state._HYBRID_DP_CP_GROUPS
    assert bool(built.hybrid_dp_cp) == ("GTP" not in layout)
    assert built.virtual_pipeline_stages == 3
    assert dict(vars(ps)) == before and not ps.model_parallel_is_initialized()
    state.destroy()


def test_fields_that_hypergrid_cannot_fill_are_refused_by_name(collection, fake_world, monkeypatch):
    fake_world(8)
    state = ParallelState.create()
    router = dataclasses.field(init=False)
    more = dataclasses.make_dataclass(
        "More", [("router", object, router)], bases=(collection,), init=False, repr=False
    )
    monkeypatch.setattr(sys.modules[collection.__module__], "ProcessGroupCollection", more)
    groups = len(dist.distributed_c10d._world.pg_map)
    for attempt in (build, lambda: from_state(state)):
        with pytest.raises(ValueError, match="fields that hypergrid cannot fill: router"):
            attempt()
    assert len(dist.distributed_c10d._world.pg_map) == groups
    assert from_state(state, ["tp"]).tp is state.get_tensor_model_parallel_group()
    state.destroy()


@pytest.mark.parametrize(("call", "error", "says"), table("megatron/refusals_of_collections.txt"))
def test_a_field_that_cannot_be_filled_is_refused_with_what_to_do(
    collection, initialized, call, error, says
):
    names = {"from_state": from_state, "from_grid": from_grid, "state": initialized("experts")}
    names["grid"] = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"])
    with pytest.raises(eval(error), match=says):
        eval(call, names)


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


# What megatron-core 0.16 asks its module for even where it was handed a collection.
STILL_ASKED = (
    "get_tensor_model_parallel_group",  # all by vocab_parallel_cross_entropy, which takes no group
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_global_memory_buffer",  # by layers.py, mappings.py and dot_product_attention.py; no group
    "is_initialized",  # by get_tensor_model_parallel_group_if_none: whether to look for a default
)
TRAIN = """
import json, sys
from types import FunctionType
import compat
compat.install()
from scripts import train_gpt
from tests.support import forked
from compat import parallel_state
from compat.megatron import getters

still_asked, layouts = json.loads(sys.argv[1])
names = vars(parallel_state)


def forbid(asked):
    # Inside the functions, since callers have imported them by name.
    def guard(name, args, kwargs):
        asked.add(name)
        if name not in still_asked:
            raise AssertionError(f"the module was asked {name}()")
        return own[name](*args, **kwargs)

    names["_guard"], own = guard, {}
    for name in getters.FUNCTIONS:
        if name.startswith(("get_", "is_", "has_", "model_parallel_is")):
            function = getattr(names[name], "__wrapped__", names[name])
            own[name] = FunctionType(function.__code__, names, name, function.__defaults__)
            guarded = eval(f"lambda *args, **kwargs: _guard({name!r}, args, kwargs)")
            function.__code__, function.__defaults__ = guarded.__code__, None


def train(arguments, forbidden):
    asked = set()
    if forbidden:
        forbid(asked)
    results = train_gpt.main(f"{arguments} --steps 2 --seq-length 32".split()) or {}
    losses = [step["loss_hex"] for step in results.get("steps", [])]
    return losses, results.get("rank_digests"), sorted(asked)


def run(arguments, forbidden, **options):
    body = lambda rank: train(arguments, forbidden)
    return forked.run_ranks(4, body, timeout=60, **options)


print(json.dumps([
    (run(each, False), run(f"{each} --explicit-groups", True)) for each in layouts
]))
print(json.dumps(run(layouts[0], True, expect="errors")))
"""
TRAININGS = {
    "tensor and pipeline": "--tp 2 --pp 2",
    "tensor and data": "--tp 2 --use-distributed-optimizer",
    "virtual pipeline": "--pp 2 --vp 2",
    "context parallel": "--tp 2 --cp 2",
    "experts": "--tp 2 --ep 2 --num-experts 4 --sequence-parallel",
}


@pytest.fixture(scope="module")
def trained():
    """Per layout the ordinary and the explicit training of each rank; and who was refused."""
    arguments = json.dumps([STILL_ASKED, list(TRAININGS.values())])
    done = warm.run("-c", TRAIN, arguments, timeout=300)
    assert done.returncode == 0, done.stderr
    *_, pairs, refused = (line for line in done.stdout.splitlines() if line.startswith("["))
    return dict(zip(TRAININGS, json.loads(pairs), strict=True)), json.loads(refused)


@pytest.mark.parametrize("name", TRAININGS)
def test_a_gpt_with_explicit_groups_trains_to_the_same_bits_and_asks_no_global_one(trained, name):
    ordinary, explicit = trained[0][name]
    losses, digests, _ = explicit[0]
    assert (losses, digests) == tuple(ordinary[0][:2])
    assert len(losses) == 2 and len(set(digests)) > 1
    # The list above says no more than is true.
    assert {name for *_, asked in explicit for name in asked} == set(STILL_ASKED)


def test_the_ordinary_training_asks_the_module_for_groups(trained):
    assert all("the module was asked get_" in text for _, text in trained[1])
