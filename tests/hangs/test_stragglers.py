"""Stragglers: ranks that make others wait in collectives, and for how long."""

import random

import pytest

from compat.planned.job import from_sizes
from hypergrid.hangs.reading import read
from hypergrid.hangs.stragglers import stragglers
from tests.support.recorded import Rank, write

GROUPS = {
    "0": ("default_pg", [0, 1, 2, 3]),
    "1": ("PIPE", [0, 2]),
    "2": ("PIPE", [1, 3]),
    "3": ("TENSOR", [0, 1]),
    "4": ("TENSOR", [2, 3]),
}


def recorded(directory, late, steps=20, noise=0.001):
    """Steps of a call of TENSOR and one of the world; ``late(step, rank)``: seconds before it."""
    source = random.Random(0)
    ranks = [Rank(rank, GROUPS) for rank in range(4)]

    def meet(group):
        inside = [ranks[rank] for rank in GROUPS[group][1]]
        end = max(rank.now for rank in inside)
        for rank in inside:
            rank.call(group, after=0)
            rank.now = end + 1_000_000

    for step in range(steps):
        for rank in ranks:
            rank.now += int(1e9 * (0.05 + source.random() * noise + late(step, rank.rank)))
        for group in "340":
            meet(group)
    found = read(write(directory, ranks))
    for key in "12":
        found.groups[key].dims = ("pp",)
    for key in "34":
        found.groups[key].dims = ("tp",)
    return found


def test_the_one_that_costs_most_is_first_though_others_come_last_more_often(tmp_path):
    """Rank 3 takes 20 times as long in one step of five; rank 0 is a little late in all others."""

    def late(step, rank):
        return {3: 1.0 * (step % 5 == 4), 0: 0.01 * (step % 5 != 4)}.get(rank, 0)

    rows = stragglers(recorded(tmp_path, late))
    assert [(row.dim, row.at) for row in rows[:2]] == [(None, 3), (None, 0)]
    first = rows[0]
    assert first.seconds == pytest.approx(4, rel=0.05) and first.calls < 10
    assert (first.label, first.operation) == ("TENSOR", "all_reduce")
    assert first.share == pytest.approx(4 / 5.2, rel=0.05)
    assert first.per_step == pytest.approx(4 / 20, rel=0.05)
    assert rows[1].stands_out and not any(row.stands_out for row in rows[2:])


def test_one_that_costs_nearly_all_of_each_step_is_named_under_noise(tmp_path):
    rows = stragglers(recorded(tmp_path, lambda step, rank: rank == 2, 100, noise=0.05))
    assert rows[0].at == 2 and rows[0].share > 0.9
    assert not any(row.stands_out for row in rows[1:] if row.dim is None)


def test_who_is_late_because_it_waited_itself_is_no_straggler(tmp_path):
    """Rank 2 comes late to the world with rank 3, for which it had to wait."""
    rows = stragglers(recorded(tmp_path, lambda step, rank: 0.5 * (rank == 3)))
    assert rows[0].at == 3 and [row.at for row in rows if row.stands_out] == [3]


def test_a_coordinate_whose_ranks_are_all_late_is_one_row(tmp_path):
    found = recorded(tmp_path, lambda step, rank: 0.2 * (rank in (1, 3)))
    first, *_ = stragglers(found)
    assert (first.dim, first.at) == ("tp", 1) and first.seconds == pytest.approx(3.8, rel=0.05)
    plan = from_sizes(world_size=4, tp=2, pp=2).plan()
    first, *_ = stragglers(found, plan)
    assert (first.dim, first.at) == ("tp", 1)


def test_nobody_stands_out_where_all_are_alike(tmp_path):
    assert not any(row.stands_out for row in stragglers(recorded(tmp_path, lambda *_: 0)))


def test_calls_that_a_member_did_not_record_are_left_out(tmp_path):
    found = recorded(tmp_path, lambda step, rank: 0.5 * (rank == 3))
    found.ranks[3].calls = found.ranks[3].calls.at(slice(0, 0))
    found.ranks[0].calls = found.ranks[0].calls.at(slice(9, None))
    assert {row.label for row in stragglers(found)} <= {"TENSOR"}
