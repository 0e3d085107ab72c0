"""Differences between two plans, and between a plan and the live groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat.planned.job import from_sizes
from compat.planned.layouts import shards_of
from hypergrid.policy import Policy
from hypergrid.show.diff import against_dump
from hypergrid.show.diff import difference as difference_of
from hypergrid.summary import communicators, summaries
from hypergrid.topology import Topology

SIZES = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4]),
        "cp": st.sampled_from([1, 2]),
        "pp": st.sampled_from([1, 2, 4]),
        "ep": st.sampled_from([1, 2]),
        "order": st.sampled_from(["tp-cp-ep-dp-pp", "tp-ep-dp-cp-pp", "dp-tp-cp-ep-pp"]),
        "instances": st.sampled_from([1, 2]),
    }
)


def plan(world=64, **sizes):
    return from_sizes(world_size=world, **sizes).plan()


def difference(before, after):
    return difference_of(before, after, shards_of(before, after))


def test_a_plan_is_not_different_from_itself():
    found = difference(plan(tp=4, pp=2), plan(tp=4, pp=2))
    assert found.is_empty and found.common == 64


@settings(max_examples=25, deadline=None)
@given(SIZES, SIZES)
def test_ranks_and_groups_that_change_are_those_found_one_by_one(before, after):
    one, other = plan(**before), plan(**after)
    found = difference(one, other)
    for name in ("decoder", "expert"):
        moved = {each.dim: each.ranks for each in found.moved if each.layout == name}
        for dim, ranks in moved.items():
            grids = one.layouts[name], other.layouts[name]
            places = [[grid.coordinate(rank)[dim] for rank in range(64)] for grid in grids]
            assert ranks == sum(a != b for a, b in zip(*places, strict=True))
    mine = [
        {(row.label, rank, ranks) for rank in range(64) for row, ranks in each.groups_of(rank)}
        for each in (one, other)
    ]
    changed = {}
    for label, rank, _ in mine[0] ^ mine[1]:
        changed.setdefault(label, set()).add(rank)
    assert {e.label: e.ranks for e in found.regrouped if e.ranks} == {
        label: len(ranks) for label, ranks in changed.items()
    }


def test_weights_are_cut_anew_or_move():
    (dense,) = difference(plan(tp=4), plan(tp=8)).resharded[:1]
    assert dense.is_cut_anew and dense.ranks == 64
    (dense,) = difference(
        plan(tp=4, pp=2, order="tp-cp-ep-dp-pp"), plan(tp=4, pp=2, order="tp-cp-ep-pp-dp")
    ).resharded
    assert not dense.is_cut_anew and dense.ranks == 32
    assert difference(plan(tp=4, cp=2), plan(tp=4)).resharded == ()


def test_worlds_of_different_sizes_are_compared_where_they_overlap():
    found = difference(plan(64, tp=4), plan(32, tp=4))
    assert (found.ranks, found.common, found.is_empty) == ((64, 32), 32, False)
    assert not found.moved or {each.dim for each in found.moved} == {"dp"}


def test_a_dump_is_held_against_the_plan():
    planned = plan(8, tp=2)
    groups = [{"label": None, "ranks": list(range(8))}]
    groups += [{"label": row.label, "ranks": list(r)} for row, r in planned.groups_of(3)]
    assert against_dump(planned, {"rank": 3, "groups": groups}) == []
    groups[1] = {"label": groups[1]["label"], "ranks": [3, 4]}
    (lost,) = (g for g in groups if g["label"] == "TENSOR_MODEL_PARALLEL_GROUP")
    groups.remove(lost)
    groups.append({"label": "mine", "ranks": [3]})
    said = "\n".join(against_dump(planned, {"rank": 3, "groups": groups}))
    assert "has the ranks [3, 4], planned were [1, 3, 5, 7]" in said
    assert "TENSOR_MODEL_PARALLEL_GROUP was planned but not created" in said
    assert "mine exists but was not planned" in said
    assert "outside the plan" in against_dump(planned, {"rank": 9, "groups": []})[0]


@settings(max_examples=25, deadline=None)
@given(SIZES, st.sampled_from([3, 4, 8]))
def test_the_summary_is_that_of_listing_every_group(sizes, per_host):
    planned = plan(**sizes)
    for row, line in zip(
        planned.rows,
        summaries(planned, Topology(planned.layouts["decoder"], per_host)),
        strict=True,
    ):
        everyone = planned.all(row)
        hosts = [len({rank // per_host for rank in ranks}) for ranks in everyone]
        assert line.groups == len(everyone)
        assert line.size == (min(map(len, everyone)), max(map(len, everyone)))
        assert line.hosts == (min(hosts), max(hosts))
        assert line.crossing == sum(each > 1 for each in hosts)
        arrays = [ranks for part in planned.arrays(row) for ranks in part.tolist()]
        assert sorted(map(tuple, arrays)) == sorted(everyone)
        same = next(
            each.label
            for each in planned.rows
            if each is row
            or (
                (row.kind and each.kind and {*planned.all(each)} == {*everyone})
                and each.kind.among(line.size[1]) == row.kind.among(line.size[1])
            )
        )
        assert line.same_as == (None if same == row.label else same)


@settings(max_examples=25, deadline=None)
@given(SIZES)
def test_the_number_of_communicators_is_that_of_every_rank(sizes):
    planned = plan(**sizes)
    counts = [sum(1 for _ in planned.groups_of(rank)) for rank in range(64)]
    assert communicators(planned)["none"] == (min(counts), max(counts))
    for share, span in communicators(planned).items():
        made = [
            sum(owner is None for *_, owner in planned.sharing(rank, Policy(share=share)))
            for rank in range(64)
        ]
        assert span == (min(made), max(made))


def test_arrays_of_groups_that_are_cut_into_parts_of_unequal_length():
    from hypergrid import GroupPlan, GroupRow, RankLayout

    layout = RankLayout(("dp", "tp"), (5, 2))
    planned = GroupPlan({"decoder": layout}, (GroupRow("X", "decoder", ("dp",), chunk=2),))
    parts = [part.tolist() for part in planned.arrays(planned.rows[0])]
    assert parts == [[[0, 1], [2, 3], [5, 6], [7, 8]], [[4], [9]]]
    assert isinstance(planned.arrays(planned.rows[0])[0], np.ndarray)


@pytest.mark.parametrize("share", ["none", "all"])
def test_the_pool_shares_as_the_plan_says(share, fake_world):
    from compat.state import ParallelState

    fake_world(16, 5)
    state = ParallelState.create(tensor_model_parallel_size=4, share=share)
    owners = {each.label: each.shares for each in state.pool.groups}
    sharing = state.plan.sharing(5, Policy(share=share))
    assert {row.label: owner for row, _, owner in sharing} == owners
    state.destroy()


def test_equal_groups_of_one_name_count_each():
    from hypergrid import GroupPlan, GroupRow, RankLayout

    layouts = {"decoder": RankLayout(("dp",), (4,))}
    one, other = (
        GroupPlan(layouts, (GroupRow("X", "decoder", ("dp",), explicit=(ranks, ranks)),))
        for ranks in ((0, 1), (0, 2))
    )
    (changed,) = difference(one, other).regrouped
    assert (changed.label, changed.groups, changed.ranks) == ("X", (2, 2), 3)
    assert difference(one, one).is_empty
