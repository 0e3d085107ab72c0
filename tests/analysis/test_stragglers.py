"""Who comes last to the collectives."""

import pytest

from compat.megatron.job import from_sizes
from hypergrid.analysis.recording import read
from hypergrid.analysis.stragglers import last_arrivals
from tests.support.recorded import Rank, write

GROUPS = {"1": ("PIPE", [0, 2]), "2": ("PIPE", [1, 3]), "3": ("TENSOR", [0, 1])}


@pytest.fixture
def recording(tmp_path):
    """Ranks 2 and 3 are 50 ms late in every other call, rank 0 is late by 1 ms in the rest."""
    ranks = [Rank(rank, GROUPS) for rank in range(4)]
    for turn in range(10):
        for rank in range(4):
            late = 0.05 * (rank > 1) if turn % 2 else 0.001 * (rank < 2)
            ranks[rank].now = 10**18 + turn * 10**10
            ranks[rank].call("1" if rank in (0, 2) else "2", after=late)
    ranks[0].call("3")  # rank 1 is not in it: not counted
    found = read(write(tmp_path, ranks))
    for key in "12":
        found.groups[key].dims = ("pp",)
    return found


def test_a_coordinate_that_is_late_on_many_groups_is_one_row(recording):
    first, *_ = rows = last_arrivals(recording)
    assert (first.label, first.dim, first.at, first.last, first.calls) == ("PIPE", "pp", 1, 10, 20)
    assert first.share == 0.5 and first.seconds == pytest.approx(0.5)
    assert first.median == pytest.approx(0.05)
    by_rank = {row.at: (row.last, row.calls) for row in rows if row.dim is None}
    assert by_rank == {rank: (5, 10) for rank in range(4)}


def test_with_a_plan_coordinates_are_its_own(recording):
    plan = from_sizes(world_size=4, tp=2, pp=2).plan()
    rows = {(row.dim, row.at): row.last for row in last_arrivals(recording, plan)}
    assert rows["pp", 1] == rows["pp", 0] == 10


def test_calls_that_a_member_did_not_record_are_left_out(recording):
    assert not [row for row in last_arrivals(recording) if row.label == "TENSOR"]


def test_who_is_late_by_chance_does_not_stand_out(recording):
    rows = {(row.dim, row.at): row for row in last_arrivals(recording)}
    assert rows["pp", 1].chance == 0.5 and not rows["pp", 1].stands_out
    row = rows[None, 2]
    assert not row.stands_out
    assert row.__class__(**{**vars(row), "last": 91, "calls": 100}).stands_out
