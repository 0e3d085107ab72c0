"""Differences between two plans, and a plan's summary beside its groups."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat.planned.job import from_sizes
from compat.planned.layouts import shards_of
from compat.state import ParallelState
from hypergrid import GroupPlan, GroupRow, RankLayout
from hypergrid.policy import Policy
from hypergrid.show.diff import difference as difference_of
from hypergrid.summary import communicators, summaries
from hypergrid.topology import Topology

WORLD = 64
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


def plan(world=WORLD, **sizes):
    return from_sizes(world_size=world, **sizes).plan()


def difference(before, after):
    return difference_of(before, after, shards_of(before.layouts, after.layouts))


def test_a_plan_is_not_different_from_itself():
    changes = difference(plan(tp=4, pp=2), plan(tp=4, pp=2))
    assert changes.is_empty
    assert changes.common == WORLD


@settings(max_examples=25, deadline=None)
@given(SIZES, SIZES)
def test_ranks_and_groups_that_change_are_those_found_one_by_one(sizes_before, sizes_after):
    before = plan(**sizes_before)
    after = plan(**sizes_after)
    changes = difference(before, after)
    for moved in changes.moved:
        old = before.layouts[moved.layout]
        new = after.layouts[moved.layout]
        ranks = 0
        for rank in range(WORLD):
            ranks += old.coordinate(rank)[moved.dim] != new.coordinate(rank)[moved.dim]
        assert moved.ranks == ranks
    ranks_of_label = {}
    for rank in range(WORLD):
        old_groups = {(row.label, ranks) for row, ranks in before.groups_of(rank)}
        new_groups = {(row.label, ranks) for row, ranks in after.groups_of(rank)}
        for label, _ in old_groups ^ new_groups:
            ranks_of_label.setdefault(label, set()).add(rank)
    regrouped = {change.label: change.ranks for change in changes.regrouped if change.ranks}
    assert regrouped == {label: len(ranks) for label, ranks in ranks_of_label.items()}


def test_weights_are_cut_anew_or_move():
    cut = difference(plan(tp=4), plan(tp=8)).resharded[0]
    assert (cut.is_cut_anew, cut.ranks) == (True, WORLD)
    pp_last = plan(tp=4, pp=2, order="tp-cp-ep-dp-pp")
    dp_last = plan(tp=4, pp=2, order="tp-cp-ep-pp-dp")
    (moved,) = difference(pp_last, dp_last).resharded
    assert (moved.is_cut_anew, moved.ranks) == (False, WORLD / 2)
    assert difference(plan(tp=4, cp=2), plan(tp=4)).resharded == ()


def test_worlds_of_different_sizes_are_compared_where_they_overlap():
    changes = difference(plan(64, tp=4), plan(32, tp=4))
    assert changes.ranks == (64, 32)
    assert changes.common == 32
    assert not changes.is_empty
    assert {moved.dim for moved in changes.moved} <= {"dp"}


@settings(max_examples=25, deadline=None)
@given(SIZES, st.sampled_from([3, 4, 8]))
def test_the_summary_is_that_of_listing_every_group(sizes, per_host):
    planned = plan(**sizes)
    topology = Topology(planned.layouts["decoder"], per_host)
    for row, line in zip(planned.rows, summaries(planned, topology), strict=True):
        groups = planned.all(row)
        group_sizes = [len(ranks) for ranks in groups]
        host_counts = [len({rank // per_host for rank in ranks}) for ranks in groups]
        assert line.groups == len(groups)
        assert line.size == (min(group_sizes), max(group_sizes))
        assert line.hosts == (min(host_counts), max(host_counts))
        assert line.crossing == sum(count > 1 for count in host_counts)


@settings(max_examples=25, deadline=None)
@given(SIZES)
def test_the_number_of_communicators_is_that_of_every_rank(sizes):
    planned = plan(**sizes)
    for share, span in communicators(planned).items():
        counts = []
        alone = []
        for rank in range(WORLD):
            sharing = [*planned.sharing(rank, Policy(share=share))]
            counts.append(sum(owner is None for _, _, owner in sharing))
            alone.append(sum(owner is None and len(ranks) == 1 for _, ranks, owner in sharing))
        assert span == (min(counts), max(counts))
        assert communicators(planned, True)[share] == (min(alone), max(alone))


@pytest.mark.parametrize("share", ["none", "all"])
def test_the_pool_shares_as_the_plan_says(share, fake_world):
    fake_world(16, 5)
    state = ParallelState.create(tensor_model_parallel_size=4, share=share)
    live_owners = {pooled.label: pooled.shares for pooled in state.pool.groups}
    sharing = state.plan.sharing(5, Policy(share=share))
    assert {row.label: owner for row, _, owner in sharing} == live_owners
    state.destroy()


def test_equal_groups_of_one_name_count_each():
    def twice(ranks):
        row = GroupRow("X", "decoder", ("dp",), explicit=(ranks, ranks))
        return GroupPlan({"decoder": RankLayout(("dp",), (4,))}, (row,))

    (changed,) = difference(twice((0, 1)), twice((0, 2))).regrouped
    assert (changed.label, changed.groups, changed.ranks) == ("X", (2, 2), 3)
    assert difference(twice((0, 1)), twice((0, 1))).is_empty
