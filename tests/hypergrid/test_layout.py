"""RankLayout: checked by properties and against an independent oracle, never against itself."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypergrid import LayoutError, RankLayout
from tests.support import table

NAMES = ["tp", "cp", "ep", "dp", "pp", "gtp_remat"]


@st.composite
def layouts(draw):
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, 5))]
    sizes = draw(st.lists(st.integers(1, 5), min_size=len(names), max_size=len(names)))
    return RankLayout(tuple(names), tuple(sizes), draw(st.integers(0, 50)))


@st.composite
def layouts_and_dims(draw):
    layout = draw(layouts())
    dims = draw(st.lists(st.sampled_from(layout.dims), min_size=1, unique=True))
    return layout, dims


def oracle(layout, dims):
    """Groups by definition: ranks that agree on every other coordinate, in order of appearance."""
    # The last range of a product is its fastest.
    coordinates = itertools.product(*(range(size) for size in reversed(layout.sizes)))
    groups = {}
    for rank, slowest_first in enumerate(coordinates, start=layout.offset):
        at = dict(zip(reversed(layout.dims), slowest_first, strict=True))
        elsewhere = tuple(at[dim] for dim in layout.dims if dim not in dims)
        groups.setdefault(elsewhere, []).append(rank)
    return list(groups.values())


@given(layouts_and_dims())
def test_the_enumeration_and_what_each_rank_finds_alone_are_the_definition_of_a_group(case):
    layout, dims = case
    expected = oracle(layout, dims)
    assert layout.groups(dims).tolist() == expected
    for group in expected:
        for rank in group:
            assert layout.group(rank, dims) == group


@given(layouts())
def test_coordinates_and_ranks_are_inverse(layout):
    for rank in layout.ranks:
        coordinates = layout.coordinate(rank)
        assert layout.rank(**coordinates) == rank
        for dim, size in zip(layout.dims, layout.sizes, strict=True):
            assert 0 <= coordinates[dim] < size


@given(layouts())
def test_shifts_go_around_the_group_of_a_dim(layout):
    rank = layout.ranks[-1]
    for dim in layout.dims:
        group = layout.group(rank, dim)
        size = len(group)
        for steps in range(-size, size + 1):  # from its last place
            assert layout.shift(rank, dim, steps) == group[(steps - 1) % size]


@given(layouts_and_dims())
def test_a_group_and_its_orthogonal_share_exactly_one_rank(case):
    layout, dims = case
    orthogonal = layout.orthogonal(dims)
    assert set(orthogonal) | set(dims) == set(layout.dims)
    for rank in layout.ranks:
        common = set(layout.group(rank, dims)) & set(layout.group(rank, orthogonal))
        assert common == {rank}


@given(layouts(), st.data())
def test_splitting_a_dim_keeps_every_group_over_the_whole_of_it(layout, data):
    dim = data.draw(st.sampled_from(layout.dims))
    size = layout.dim_size(dim)
    near = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    split = layout.split(dim, {"near": near, "far": size // near})
    assert split.groups(("near", "far")).tolist() == layout.groups(dim).tolist()


def test_the_order_of_the_dims_asked_for_changes_nothing_unless_asked():
    layout = RankLayout(("a", "b", "c"), (2, 2, 2))
    assert layout.groups("b-a").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.groups(["b", "a"], as_given=True).tolist() == [[0, 2, 1, 3], [4, 6, 5, 7]]


def test_an_order_may_leave_out_what_has_size_one():
    layout = RankLayout.from_order("TP-pp", {"tp": 2, "dp": 1, "pp": 3})
    assert (layout.dims, layout.sizes) == (("tp", "pp", "dp"), (2, 3, 1))


@pytest.mark.parametrize(("call", "says"), table("hypergrid/refusals_of_layouts.txt"))
def test_what_makes_no_sense_is_refused_with_what_would_have_been_right(call, says):
    layout = RankLayout(("tp", "dp"), (2, 4), 8)
    with pytest.raises(LayoutError, match=says):
        eval(call, {"RankLayout": RankLayout, "layout": layout})


def test_a_rank_among_a_million_finds_its_group():
    layout = RankLayout(("tp", "cp", "dp", "pp"), (8, 2, 4096, 16))
    assert layout.group(1_000_000, "tp-cp") == list(range(1_000_000, 1_000_016))


def test_a_layout_shows_the_dims_that_part_ranks():
    layout = RankLayout(("tp", "gtp_remat", "cp", "dp"), (2, 1, 1, 3), offset=4)
    assert repr(layout) == "RankLayout(tp=2-dp=3, ranks 4..9)"
    alone = RankLayout(("tp", "dp"), (1, 1), offset=4)
    assert repr(alone) == "RankLayout(rank 4)"
    assert (alone.trimmed.coordinate(4), alone.trimmed.strides) == ({}, ())


def test_equal_layouts_are_equal_and_can_be_keys():
    assert {RankLayout(("tp",), (2,)): 1}[RankLayout(("tp",), (2,))] == 1
    assert RankLayout(("tp",), (2,)) != RankLayout(("tp",), (2,), 1)


def test_coordinates_and_steps_may_be_numpys():
    layout = RankLayout(("tp", "pp"), (2, 2))
    assert layout.rank(tp=np.int64(1), pp=1) == 3 == layout.shift(2, "tp", np.int64(3))
