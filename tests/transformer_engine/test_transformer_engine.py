"""Transformer Engine's groups: which ranks, under which names, and what its own classes do."""

import pytest
import torch.distributed as dist

from compat import transformer_engine as te
from compat.state import ParallelState
from hypergrid import HyperCommGrid, RankLayout
from tests.support import table, te_on_cpu

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
def test_a_state_gives_its_getters_groups_and_a_grid_of_its_layout_the_same_ranks(fake_world, row):
    arguments, sizes, expert_sizes = (eval(cell) for cell in row)
    for rank in (0, 5, 15):
        fake_world(16, rank=rank)
        state = ParallelState.create(**arguments)
        grid = with_groups(sizes, expert_sizes)
        for tp_only in (False, True):
            amax = state.get_amax_reduction_group(True, tp_only_amax_red=tp_only)
            assert te.amax_group(state, tp_only) is amax
            assert ranks(te.amax_group(grid, tp_only)) == ranks(amax)
        cp = state.get_context_parallel_group()
        context = te.cp_args(grid)
        assert ranks(context.pop("cp_group")) == ranks(cp)
        assert te.cp_args(state) == {"cp_group": cp, **context}
        tp_groups = {False: state.get_tensor_model_parallel_group()}
        if expert_sizes:
            tp_groups[True] = state.get_expert_tensor_parallel_group()
        for is_expert, tp in tp_groups.items():
            tensor = te.tp_args(grid, expert=is_expert)
            assert ranks(tensor.pop("tp_group")) == ranks(tp)
            assert te.tp_args(state, expert=is_expert) == {"tp_group": tp, **tensor}
            assert tensor == {"tp_size": tp.size()}
        state.destroy()
        grid.destroy()


@pytest.mark.parametrize(("call", "error", "says"), table("transformer_engine/refusals.txt"))
def test_what_cannot_be_given_is_refused_in_a_sentence(fake_world, call, error, says):
    fake_world(16, rank=15)
    with pytest.raises(eval(error), match=says):
        eval(call)


def test_a_scope_of_one_rank_is_a_group_and_never_none_which_means_the_world(fake_world):
    fake_world(8, rank=3)
    grid = with_groups({"tp": 1, "cp": 1, "pp": 8})
    assert ranks(te.amax_group(grid)) == ranks(te.amax_group(grid, tp_only=True)) == [3]


@pytest.mark.parametrize("row", table("transformer_engine/rings.txt"))
def test_a2a_are_neighbours_and_p2p_is_the_ring_of_every_such_rank(fake_world, row):
    """Transformer Engine finds whom to send to in cp_global_ranks, size of a2a places further."""
    arguments, sizes, layout = (eval(cell) for cell in row)
    for rank in range(16):
        fake_world(16, rank=rank)
        state = ParallelState.create(**arguments)
        grid = with_groups(sizes)
        cp_ranks = RankLayout(tuple(layout), tuple(layout.values())).group(rank, "cp")
        position = cp_ranks.index(rank) % sizes["a2a"]
        for source in (grid, state):
            context = te.cp_args(source, "a2a+p2p")
            assert context["cp_global_ranks"] == cp_ranks
            neighbours, ring = (ranks(group) for group in context["cp_group"])
            first = cp_ranks.index(neighbours[0])
            assert neighbours == cp_ranks[first : first + sizes["a2a"]]
            assert ring == cp_ranks[position :: sizes["a2a"]]
        state.destroy()
        grid.destroy()
