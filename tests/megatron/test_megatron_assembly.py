"""Models of Megatron in an assembly: states over listed ranks, created together."""

import json

import pytest

from compat import parallel_state
from compat.assembly import MegatronPart, grids_of
from compat.state import ParallelState
from hypergrid import AgreementError, Assembly, AssemblyPlan, GridPart, LayoutError, Link, dump
from hypergrid.show.diff import against_dump
from tests.support.forked import descriptors, members, on_ranks, total


@on_ranks(8)
def test_states_over_listed_ranks_live_side_by_side_and_activate(rank):
    opened = descriptors()
    parts = {
        "vision": MegatronPart((0, 2, 4, 6)),
        "text": MegatronPart(
            (1, 3, 5, 7), tensor_model_parallel_size=2, pipeline_model_parallel_size=2
        ),
        "critic": MegatronPart(
            range(8), tensor_model_parallel_size=4, expert_model_parallel_size=2
        ),
    }
    assembly = Assembly(parts, [Link("vision", "text")]).create()
    assert against_dump(assembly.plan, json.loads(dump())) == []
    name, other = ("text", "vision") if rank % 2 else ("vision", "text")
    with assembly[name].activate():
        group = parallel_state.get_tensor_model_parallel_group()
        assert members(group) == ([rank // 4 * 4 + 1, rank // 4 * 4 + 3] if rank % 2 else [rank])
        assert total(group) == parallel_state.get_tensor_model_parallel_world_size()
        assert parallel_state.is_pipeline_last_stage() == (rank not in (1, 3))
        assert group.group_desc == f"{name}/TENSOR_MODEL_PARALLEL_GROUP"
    with assembly["critic"].activate():
        assert members(parallel_state.get_tensor_model_parallel_group())[0] == rank // 4 * 4
    assert not assembly[other].is_in_use or assembly[other].pool is None
    assert assembly.grid(name) is assembly[name].grid
    assert total(assembly[name].subgroup("tp-pp" if rank % 2 else "dp", 4)) == 4
    assembly[name].suspend("recreate")
    assembly[name].resume()
    assert against_dump(assembly.plan, json.loads(dump())) == []
    assembly.destroy()
    del group
    assert descriptors(opened) <= opened


@on_ranks(4)
def test_a_part_has_the_groups_of_a_state_of_its_own(rank):
    arguments = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    alone = ParallelState.create(**arguments)
    together = Assembly({"m": MegatronPart(range(4), **arguments)}).create()["m"]
    for name in ("tensor_model", "data", "context", "pipeline_model", "model"):
        ours, theirs = (
            getattr(state, f"get_{name}_parallel_group")() for state in (together, alone)
        )
        assert members(ours) == members(theirs) and total(ours) == len(members(ours))
    assert together.plan == alone.plan


@on_ranks(4)
def test_parts_that_differ_are_named_on_every_rank(rank):
    tp = 2 if rank == 2 else 1
    with pytest.raises(AgreementError, match=r"the grid m is 'RankLayout\(tp=2.*on rank 2"):
        Assembly({"m": MegatronPart(range(4), tensor_model_parallel_size=tp)}).create()
    with pytest.raises(AgreementError, match=r"timeout_minutes of m is 5.* on rank 2"):
        part = MegatronPart(range(4), distributed_timeout_minutes=5 if rank == 2 else 6)
        Assembly({"m": part}).create()
    with pytest.raises(ValueError, match="needs consecutive ranks"):
        grids_of(Assembly({"m": GridPart({"dp": 2}, (0, 3))}).create())


@pytest.mark.parametrize(
    ("ranks", "arguments", "error", "says"),
    [
        (range(4), {"rank_offset": 2}, TypeError, "takes no rank_offset"),
        ((3, 1), {}, LayoutError, "must ascend"),
        (
            (0, 2, 4),
            {"tensor_model_parallel_size": 2},
            RuntimeError,
            "world size 3 is not div",
        ),
        (range(4), {"tensor_model_parallel_size": "two"}, TypeError, "must be a whole number"),
        (range(4), {"order": "tp-xx"}, RuntimeError, "xx"),
    ],
)
def test_a_part_that_cannot_be_is_refused_before_any_rank_creates(ranks, arguments, error, says):
    with pytest.raises(error, match=says):
        MegatronPart(ranks, **arguments)


def test_a_part_is_planned_without_a_world():
    part = MegatronPart((1, 5), tensor_model_parallel_size=2)
    plan = AssemblyPlan({"text": part}).plan
    (row,) = (each for each in plan.rows if each.label == "text/TENSOR_MODEL_PARALLEL_GROUP")
    assert plan.all(row) == [(1, 5)] and "text/expert" in plan.layouts
