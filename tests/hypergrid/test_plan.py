"""GroupPlan: the groups as data."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from hypergrid import GroupPlan, GroupRow, RankLayout
from tests.support import table

LAYOUT = RankLayout(("tp", "dp", "pp"), (2, 3, 2), 4)
ROWS = (
    GroupRow("TP", "decoder", ("tp",), timeout=timedelta(minutes=1)),
    GroupRow("HALF", "decoder", ("tp", "dp"), chunk=4, options=(("max_ctas", 8),)),
    GroupRow("ENDS", "decoder", ("dp",), pick="ends", backend="gloo"),
    GroupRow("FIRST", "decoder", ("pp",), pick="first", separate=True),
    GroupRow("CHOSEN", "decoder", ("pp",), explicit=((4, 9), (9, 5), (4, 9))),
)
PLAN = GroupPlan({"decoder": LAYOUT}, ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_what_a_rank_computes_alone_is_what_the_whole_enumeration_says(row):
    everything = PLAN.all(row)
    for rank in PLAN.window:
        assert list(PLAN.mine(row, rank).values()) == [g for g in everything if rank in g]


def test_a_group_is_cut_into_runs_and_the_last_may_be_shorter():
    assert PLAN.all(ROWS[1]) == [(4, 5, 6, 7), (8, 9), (10, 11, 12, 13), (14, 15)]


def test_groups_that_a_caller_chose_have_names_that_all_their_members_agree_on():
    assert PLAN.mine(ROWS[4], 9) == {"CHOSEN#0": (4, 9), "CHOSEN#1": (9, 5), "CHOSEN#2": (4, 9)}
    assert PLAN.mine(ROWS[4], 5) == {"CHOSEN#1": (9, 5)}


def test_ranks_outside_the_window_have_no_groups():
    assert list(PLAN.groups_of(3)) == []


def test_a_plan_survives_json():
    assert GroupPlan.from_json(PLAN.to_json()) == PLAN
    assert GroupPlan.from_json(PLAN.to_json()).fingerprint() == PLAN.fingerprint()
    assert json.loads(PLAN.to_json())["rows"][0]["timeout"] == 60  # seconds
    with pytest.raises(ValueError, match="the plan is not JSON"):
        GroupPlan.from_json(PLAN.to_json().replace("60.0", "1e300"))
    with pytest.raises(ValueError, match="schema 99 cannot be read"):
        GroupPlan.from_json(json.dumps({"schema": 99}))


@pytest.mark.parametrize(("field", "value"), table("hypergrid/changes_of_rows.txt"))
def test_any_difference_changes_the_fingerprint(field, value):
    fingerprints = set()
    for row in (ROWS[0], replace(ROWS[0], **{field: eval(value)})):
        fingerprints.add(GroupPlan({"decoder": LAYOUT}, (row,)).fingerprint())
    assert len(fingerprints) == 2
