"""Transformer Engine's groups: which ranks, under which names, and what its own classes do."""

import ast
import functools

import pytest
import torch.distributed as dist

from compat import transformer_engine as te
from compat.state import ParallelState
from compat.transformer_engine import process as te_process
from hypergrid import HyperCommGrid, RankLayout
from tests.support import table, te_on_cpu

PYTORCH = te_on_cpu.SOURCE / "transformer_engine" / "pytorch"
fetched = pytest.mark.skipif(
    not PYTORCH.is_dir(), reason="no source of transformer-engine: run scripts/fetch_forerunners"
)
ranks = dist.get_process_group_ranks


# Arithmetic: a world of one process.


def a_grid(sizes, expert=None):
    grid = HyperCommGrid(list(sizes.values()), list(sizes))
    if expert:
        grid.register_view("expert", list(expert.values()), list(expert))
    return grid


def with_groups(sizes, expert=None):
    grid = a_grid(sizes, expert)
    te_on_cpu.create_groups(grid)
    return grid


@pytest.mark.parametrize("row", table("transformer_engine/layouts.txt"))
def test_a_grid_gives_the_ranks_of_a_state_of_the_same_layout(fake_world, row):
    arguments, sizes, expert_sizes = (eval(cell) for cell in row)
    for rank in (0, 5, 15):
        fake_world(16, rank=rank)
        state = ParallelState.create(**arguments)
        grid = with_groups(sizes, expert_sizes)
        for tp_only in (False, True):
            assert ranks(te.amax_group(grid, tp_only)) == ranks(te.amax_group(state, tp_only))
        context = te.cp_args(grid)
        context_of_state = te.cp_args(state)
        assert ranks(context.pop("cp_group")) == ranks(context_of_state.pop("cp_group"))
        assert context == context_of_state
        for is_expert in {False, expert_sizes is not None}:
            tensor = te.tp_args(grid, expert=is_expert)
            tensor_of_state = te.tp_args(state, expert=is_expert)
            group = tensor.pop("tp_group")
            assert ranks(group) == ranks(tensor_of_state.pop("tp_group"))
            assert tensor == tensor_of_state == {"tp_size": group.size()}
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


@pytest.mark.parametrize(("call", "error", "says"), table("transformer_engine/refusals.txt"))
def test_what_cannot_be_given_is_refused_in_a_sentence(fake_world, call, error, says):
    fake_world(16, rank=15)
    with pytest.raises(eval(error), match=says):
        eval(call)


def test_no_group_is_made_unasked(fake_world):
    fake_world(8)
    grid = a_grid({"tp": 2, "cp": 2, "dp": 2})
    with pytest.raises(KeyError):
        te.amax_group(grid)
    assert grid.groups == {}
    te_on_cpu.create_groups(grid)
    assert te.amax_group(grid) is grid.get_pg("tp-cp-dp")
    grid.destroy()


def test_a_scope_of_one_rank_is_a_group_and_never_none_which_means_the_world(fake_world):
    fake_world(8, rank=3)
    grid = with_groups({"tp": 1, "cp": 1, "pp": 8})
    assert ranks(te.amax_group(grid)) == ranks(te.amax_group(grid, tp_only=True)) == [3]


@functools.cache
def ring_formula():
    """Where a rank sends to, as Transformer Engine's source computes it."""
    file = PYTORCH / "attention" / "dot_product_attention" / "context_parallel.py"
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "send_dst":
            return compile(ast.Expression(node.value), str(file), "eval")


def sends_to(context):
    a2a, p2p = context["cp_group"]
    names = {"cp_global_ranks": context["cp_global_ranks"], "rank": p2p.rank()}
    names |= {"cp_size": p2p.size(), "cp_size_a2a": a2a.size(), "rank_a2a": a2a.rank()}
    return eval(ring_formula(), names)


@fetched
@pytest.mark.parametrize("row", table("transformer_engine/rings.txt"))
def test_the_ring_of_transformer_engine_stays_inside_p2p_and_a2a_are_neighbours(fake_world, row):
    arguments, sizes, layout = (eval(cell) for cell in row)
    for rank in range(16):
        fake_world(16, rank=rank)
        state = ParallelState.create(**arguments)
        grid = with_groups(sizes)
        cp_ranks = RankLayout(tuple(layout), tuple(layout.values())).group(rank, "cp")
        for source in (grid, state):
            context = te.cp_args(source, "a2a+p2p")
            assert context["cp_global_ranks"] == cp_ranks
            neighbours, ring = (ranks(group) for group in context["cp_group"])
            first = cp_ranks.index(neighbours[0])
            assert neighbours == cp_ranks[first : first + sizes["a2a"]]
            assert sends_to(context) == ring[(ring.index(rank) + 1) % sizes["p2p"]]
        state.destroy()
        grid.destroy()


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


@fetched
@pytest.mark.parametrize(("file", "path", "names"), table("transformer_engine/parameters.txt"))
def test_transformer_engines_functions_take_our_arguments(file, path, names):
    assert {*names.split()} <= {*parameters(file, path)}


def test_our_arguments_have_transformer_engines_names(fake_world):
    fake_world(1)
    grid = with_groups({"tp": 1, "cp": 1})
    assert {*te.cp_args(grid)} == {"cp_group", "cp_global_ranks", "cp_comm_type"}
    assert {*te.tp_args(grid)} == {"tp_group", "tp_size"}


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
