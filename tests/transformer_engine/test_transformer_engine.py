"""Transformer Engine's groups: which ranks, under which names, and what its own classes do."""

import ast
import functools

import pytest
import torch.distributed as dist

from compat import transformer_engine as te
from compat.state import ParallelState
from compat.transformer_engine import process as te_process
from hypergrid import HyperCommGrid, RankLayout
from tests.support import te_on_cpu

PYTORCH = te_on_cpu.SOURCE / "transformer_engine" / "pytorch"
fetched = pytest.mark.skipif(
    not PYTORCH.is_dir(), reason="no source of transformer-engine: run scripts/fetch_forerunners"
)
ranks = dist.get_process_group_ranks


# Arithmetic: a world of one process.

LAYOUTS = {  # arguments of a state; sizes and names of the same grid, and of its expert view
    "dense": ({"tensor_model_parallel_size": 2}, {"tp": 2, "cp": 1, "dp": 8}, None),
    "context": (
        {"tensor_model_parallel_size": 2, "context_parallel_size": 4},
        {"tp": 2, "cp": 4, "dp": 2},
        None,
    ),
    "another order": (
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "order": "cp-dp-tp-pp"},
        {"cp": 2, "dp": 4, "tp": 2},
        {"dp": 8, "ep": 1, "tp": 2},
    ),
    "experts": (
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
        },
        {"tp": 2, "cp": 1, "dp": 4, "pp": 2},
        {"tp": 1, "ep": 4, "dp": 2, "pp": 2},
    ),
}


def a_grid(sizes, expert=None):
    grid = HyperCommGrid(list(sizes.values()), list(sizes))
    if expert:
        grid.register_view("expert", list(expert.values()), list(expert))
    return grid


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_grid_gives_the_ranks_of_a_state_of_the_same_layout(fake_world, layout):
    arguments, sizes, expert_sizes = LAYOUTS[layout]
    for rank in (0, 5, 15):
        fake_world(16, rank=rank)
        state = ParallelState.create(**arguments)
        grid = a_grid(sizes, expert_sizes)
        te_on_cpu.create_groups(grid)
        assert ranks(te.amax_group(grid)) == ranks(te.amax_group(state))
        tp_only = te.amax_group(grid, tp_only=True)
        assert ranks(tp_only) == ranks(te.amax_group(state, tp_only=True))
        context = te.cp_args(grid)
        context_of_state = te.cp_args(state)
        assert ranks(context["cp_group"]) == ranks(context_of_state["cp_group"])
        for name in ("cp_global_ranks", "cp_comm_type"):
            assert context[name] == context_of_state[name]
        for is_expert in (False, True) if expert_sizes else (False,):
            tensor = te.tp_args(grid, expert=is_expert)
            tensor_of_state = te.tp_args(state, expert=is_expert)
            assert ranks(tensor["tp_group"]) == ranks(tensor_of_state["tp_group"])
            assert tensor["tp_size"] == tensor_of_state["tp_size"] == tensor["tp_group"].size()
        state.destroy()
        grid.destroy()


def test_a_state_gives_the_very_groups_of_its_getters(fake_world):
    fake_world(16, rank=6)
    state = ParallelState.create(tensor_model_parallel_size=2, context_parallel_size=4)
    for tp_only in (False, True):
        amax = state.get_amax_reduction_group(True, tp_only_amax_red=tp_only)
        assert te.amax_group(state, tp_only) is te.amax_group(state, tp_only) is amax
    assert te.cp_args(state)["cp_group"] is state.get_context_parallel_group()
    assert te.tp_args(state)["tp_group"] is state.get_tensor_model_parallel_group()
    expert_group = te.tp_args(state, expert=True)["tp_group"]
    assert expert_group is state.get_expert_tensor_parallel_group()
    state.destroy()


def test_no_group_is_made_unasked_and_the_refusal_names_the_call(fake_world):
    fake_world(8)
    grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"])
    for ask, call in (
        (te.tp_args, r"create_pg\('tp'\)"),
        (te.cp_args, r"create_pg\('cp'\)"),
        (te.amax_group, r"create_pg\('dp-cp-tp'\)"),
        (lambda where: te.amax_group(where, tp_only=True), r"create_pg\('cp-tp'\)"),
    ):
        with pytest.raises(KeyError, match=call):
            ask(grid)
    assert grid.groups == {}
    te_on_cpu.create_groups(grid)
    assert te.amax_group(grid) is grid.get_pg("tp-cp-dp")
    with pytest.raises(TypeError, match="not from a dict"):
        te.tp_args({})
    grid.destroy()


def test_a_scope_of_one_rank_is_a_group_and_never_none_which_means_the_world(fake_world):
    fake_world(8, rank=3)
    grid = HyperCommGrid([1, 1, 8], ["tp", "cp", "pp"])
    te_on_cpu.create_groups(grid)
    assert ranks(te.amax_group(grid)) == ranks(te.amax_group(grid, tp_only=True)) == [3]
    bare = HyperCommGrid([8], ["pp"])
    with pytest.raises(ValueError, match="dim tp, cp or dp of size 1, and create_pg"):
        te.amax_group(bare)


def test_a_rank_outside_the_grid_gets_an_error_and_never_none(fake_world):
    fake_world(8, rank=7)
    grid = HyperCommGrid([2, 2], ["tp", "cp"])
    te_on_cpu.create_groups(grid)
    for ask in (te.tp_args, te.cp_args, te.amax_group):
        with pytest.raises(RuntimeError, match="rank 7 is outside"):
            ask(grid)


RINGS = {
    "cp innermost": ({"cp": 8, "tp": 2}, 2),
    "cp outermost": ({"dp": 2, "tp": 2, "cp": 4}, 2),
    "a2a over none": ({"tp": 2, "cp": 8}, 1),
}


@functools.cache
def ring_formula():
    """Where a rank sends to, as Transformer Engine's source computes it."""
    file = PYTORCH / "attention" / "dot_product_attention" / "context_parallel.py"
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "send_dst":
            return compile(ast.Expression(node.value), str(file), "eval")


def sends_to(context):
    a2a, p2p = context["cp_group"]
    known = {
        "cp_global_ranks": context["cp_global_ranks"],
        "rank": p2p.rank(),
        "cp_size": p2p.size(),
    }
    return eval(ring_formula(), {**known, "cp_size_a2a": a2a.size(), "rank_a2a": a2a.rank()})


@fetched
@pytest.mark.parametrize("name", RINGS)
def test_the_ring_of_transformer_engine_stays_inside_p2p_and_a2a_are_neighbours(fake_world, name):
    sizes, a2a = RINGS[name]
    destinations = []
    for rank in range(16):
        fake_world(16, rank=rank)
        grid_sizes = {}
        for dim, size in sizes.items():
            if dim == "cp":
                grid_sizes.update(a2a=a2a, p2p=size // a2a)
            else:
                grid_sizes[dim] = size
        grid = a_grid(grid_sizes)
        te_on_cpu.create_groups(grid)
        context = te.cp_args(grid, "a2a+p2p")
        neighbours, ring = (ranks(group) for group in context["cp_group"])
        cp_ranks = RankLayout(tuple(sizes), tuple(sizes.values())).group(rank, "cp")
        position = cp_ranks.index(rank)
        assert context["cp_global_ranks"] == cp_ranks
        first = position - position % a2a
        assert neighbours == cp_ranks[first : first + a2a]  # consecutive in cp
        assert ring == cp_ranks[position % a2a :: a2a]
        destinations.append(sends_to(context))
        assert destinations[-1] == ring[(ring.index(rank) + 1) % len(ring)]
        state = ParallelState.create(
            tensor_model_parallel_size=sizes.get("tp", 1),
            context_parallel_size=sizes["cp"],
            order="-".join([*sizes, *{"tp", "cp", "dp", "pp"}.difference(sizes)]),
            hierarchical_context_parallel_sizes=[a2a, len(ring)],
        )
        context = te.cp_args(state, "a2a+p2p")
        assert [ranks(group) for group in context["cp_group"]] == [neighbours, ring]
        assert sends_to(context) == destinations[-1]
        state.destroy()
        grid.destroy()
    assert sorted(destinations) == list(range(16))


def test_a_hierarchy_that_does_not_fit_is_refused(fake_world):
    fake_world(16)
    grid = a_grid({"tp": 2, "cp": 4, "dp": 2})
    for other in (grid, a_grid({"tp": 2, "p2p": 2, "a2a": 2, "dp": 2})):
        with pytest.raises(ValueError, match="with a2a and p2p in this order in its place"):
            te.cp_args(other, "a2a+p2p")
    with pytest.raises(ValueError, match="for comm_type: 'ring'; allowed: p2p, all_gather"):
        te.cp_args(grid, "ring")
    with pytest.raises(ValueError, match="needs a grid with a dim cp"):
        te.cp_args(HyperCommGrid([16], ["dp"]))
    state = ParallelState.create(
        context_parallel_size=8, hierarchical_context_parallel_sizes=[2, 2, 2]
    )
    with pytest.raises(ValueError, match=r"takes two levels .* this state has 3"):
        te.cp_args(state, "a2a+p2p")
    state.destroy()


# Parameters: Transformer Engine's source, read and not run.


def definition(file, path):
    node = ast.parse((PYTORCH / file).read_text(encoding="utf-8"))
    for name in path.split("."):
        (node,) = (child for child in node.body if getattr(child, "name", None) == name)
    return node


def parameters(file, path):
    arguments = definition(file, path).args
    names = [argument.arg for argument in arguments.args + arguments.kwonlyargs]
    return [name for name in names if name != "self"]


CP = ["cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type"]
ATTENTION = "attention/dot_product_attention/dot_product_attention.py", "DotProductAttention"
BUILT = {
    "module/linear.py": "Linear",
    "module/layernorm_linear.py": "LayerNormLinear",
    "module/layernorm_mlp.py": "LayerNormMLP",
    "module/grouped_linear.py": "GroupedLinear",
    "transformer.py": "TransformerLayer",
    "attention/multi_head_attention.py": "MultiheadAttention",
    ATTENTION[0]: ATTENTION[1],
}


@fetched
def test_every_module_takes_what_the_page_says_and_has_the_setters(fake_world):
    fake_world(1)
    grid = HyperCommGrid([1, 1], ["tp", "cp"])
    te_on_cpu.create_groups(grid)
    for file, name in BUILT.items():
        assert {"tp_group", "tp_size"} <= {*parameters(file, f"{name}.__init__")}, name
    setter = "set_tensor_parallel_group"
    bases = (
        ("module/base.py", "TransformerEngineBaseModule"),
        ("transformer.py", BUILT["transformer.py"]),
    )
    for file, name in bases:
        assert parameters(file, f"{name}.{setter}") == ["tp_group"]
    for file, name in list(BUILT.items())[-3:]:
        assert parameters(file, f"{name}.set_context_parallel_group")[:4] == CP
    assert [*te.cp_args(grid), "cp_stream"] == [CP[0], CP[1], CP[3], CP[2]]
    assert {*te.tp_args(grid)} == {"tp_group", "tp_size"}
    assert set(CP) <= set(parameters(ATTENTION[0], f"{ATTENTION[1]}.__init__"))


@fetched
def test_what_is_cleared_on_destroy_is_what_transformer_engine_caches():
    cached = set()
    for node in ast.parse((PYTORCH / "distributed.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if "lru_cache" in decorators and "group" in parameters("distributed.py", node.name):
                cached.add(node.name)
    assert cached == set(te_process._CACHED)
    assert parameters("ep.py", "ep_finalize") == []
    assert "_EP_GROUP = ep_group" in ast.unparse(definition("ep.py", "ep_bootstrap"))
