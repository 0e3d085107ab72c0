"""Plans of several grids, and the arithmetic of links."""

import json
import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypergrid import AssemblyPlan, GridPart, GroupPlan, GroupRow, LayoutError, Link, RankLayout

VISION = GridPart({"dp": 4}, range(4))
TEXT = GridPart({"tp": 2, "pp": 2}, range(4, 8))


@given(st.permutations(range(12)), st.permutations([("tp", 2), ("pp", 2), ("dp", 3)]))
def test_a_layout_over_listed_ranks_is_that_of_their_places(shuffled, sizes):
    ranks = sorted(rank * 7 % 40 for rank in shuffled[:12])
    plain = RankLayout(tuple(d for d, _ in sizes), tuple(s for _, s in sizes))
    listed = plain.on(ranks)
    assert list(listed.ranks) == ranks and listed.stop == ranks[-1] + 1
    for dims in ("tp", "pp-dp", "tp-pp-dp"):
        assert [[ranks[p] for p in g] for g in plain.groups(dims)] == listed.groups(dims).tolist()
    for place, rank in enumerate(ranks):
        assert listed.coordinate(rank) == plain.coordinate(place)
        assert listed.rank(**listed.coordinate(rank)) == rank
        assert listed.group(rank, "pp-dp") == [ranks[p] for p in plain.group(place, "pp-dp")]
        assert listed.shift(rank, "dp", 2) == ranks[plain.shift(place, "dp", 2)]
    assert (ranks[0] - 1 in listed) is False and "x" not in listed
    assert plain.on(range(3, 15)) == RankLayout(plain.dims, plain.sizes, 3)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ((0, 1, 2), "3 ranks were listed"),
        ((0, 2, 1, 3), "must ascend"),
        ((0, 1, 1, 2), "must ascend"),
        ((-1, 0, 1, 2), "must ascend from 0 on"),
        ((0, 1, 2, 3.0), "members must be whole numbers"),
        (4, "ranks must be several values"),
    ],
)
def test_ranks_that_cannot_be_are_refused(ranks, says):
    with pytest.raises(LayoutError, match=says):
        GridPart({"tp": 2, "dp": 2}, ranks)


@pytest.mark.parametrize(
    ("source", "target", "kind", "leaders", "pairs"),
    [
        ({"dp": 4}, {"tp": 4}, "fan-in 4 to 1", [[0, 1, 2, 3], [4]], [(i, 4) for i in range(4)]),
        (
            {"tp": 4},
            {"dp": 4},
            "fan-out 1 to 4",
            [[3], [4, 5, 6, 7]],
            [(3, i + 4) for i in range(4)],
        ),
        ({"tp": 2, "dp": 2}, {"dp": 2, "tp": 2}, "one to one", [[1, 3], [4, 5]], [(1, 4), (3, 5)]),
        ({"dp": 4}, {"tp": 2, "dp": 2}, "fan-in 2 to 1", [[0, 1, 2, 3], [4, 6]], None),
        ({"tp": 2, "pp": 2}, {"pp": 2, "tp": 2}, "one to one", [[3], [4]], [(3, 4)]),
    ],
)
def test_a_link_fans_in_or_out_between_leaders(source, target, kind, leaders, pairs):
    parts = {"a": GridPart(source, range(4)), "b": GridPart(target, range(4, 8))}
    ends = AssemblyPlan(parts, [Link("a", "b")]).ends["a->b"]
    assert (ends.kind, [list(each) for each in ends.leaders]) == (kind, leaders)
    assert ends.pairs == (pairs or [(0, 4), (1, 4), (2, 6), (3, 6)])
    for source, target in ends.pairs:
        assert target in ends.sends_to(source) and source in ends.receives_from(target)


def test_a_link_ends_where_it_is_told_to():
    part = GridPart({"tp": 2, "pp": 4, "dp": 2}, range(16))
    link = Link("a", "a", leave={"pp": 1}, enter={"pp": -2}, lead=("first", "last"))
    ends = AssemblyPlan({"a": part}, [link]).ends["a->a"]
    assert ends.leaving == ((2, 3), (10, 11)) and ends.entering == ((4, 5), (12, 13))
    assert ends.pairs == [(2, 5), (10, 13)]
    for over in (("dp", "tp"), "dp-tp"):
        parts = AssemblyPlan({"a": part}, [Link("a", "a", over=over)]).ends["a->a"].leaving
        assert parts == ((6,), (7,), (14,), (15,))


@pytest.mark.parametrize(
    ("link", "says"),
    [
        (Link("a", "c"), "the link a->c names the grid 'c'; there are a, b"),
        (Link("a", "b", leave={"pp": 0}), "link a->b cannot end at pp=0 of a: invalid dim 'pp'"),
        (Link("a", "b", enter={"pp": 2}), "cannot end at pp=2 of b: pp=2 is outside"),
        (Link("a", "b", leave={"dp": 0}), "cannot end at dp=0 of a: it is over dp"),
        ("a->b", "a link is a hypergrid.Link, got 'a->b'"),
    ],
)
def test_a_link_that_cannot_be_is_refused(link, says):
    with pytest.raises(LayoutError, match=says):
        AssemblyPlan({"a": VISION, "b": TEXT}, [link]).plan  # noqa: B018
    with pytest.raises(LayoutError, match="3 parts that leave a and 2 that enter b"):
        uneven = {"a": GridPart({"dp": 3}, range(3)), "b": GridPart({"dp": 2}, range(3, 5))}
        AssemblyPlan(uneven, [Link("a", "b")]).plan  # noqa: B018


@pytest.mark.parametrize(
    ("parts", "links", "says"),
    [
        ({}, [], "needs a grid"),
        ({"a/b": VISION}, [], "without '/' and '.'"),
        ({"a": []}, [], "pipeline a has no stage"),
        ({"a": {"dp": 4}}, [], "a is no GridPart"),
        ({"a": VISION}, [Link("a", "a"), Link("a", "a")], "two links are called a->a"),
        ([VISION], [], r"parts must be such as \{'vision': GridPart\(...\)\}, got \[GridPart"),
        ({"a": VISION}, Link("a", "a"), r"links must be several values, got Link\("),
    ],
)
def test_an_assembly_that_cannot_be_is_refused(parts, links, says):
    with pytest.raises(LayoutError, match=says):
        AssemblyPlan(parts, links)
    with pytest.raises(LayoutError, match=r"invalid lead=\('left', 'first'\)"):
        Link("a", "b", lead=("left", "first"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"groups": "dp"}, r"groups must be several, such as \['tp', 'tp-dp'\], got 'dp'"),
        ({"groups": 3}, "groups must be several values, got 3"),
        ({"groups": ["tp-dp", "dp-tp"]}, "the groups over dp-tp are listed twice"),
        ({"backend": 5}, "backend must be a name such as 'gloo', got 5"),
        *(
            ({"timeout": wrong}, "timeout must be a number of seconds above 0, got")
            for wrong in (timedelta(seconds=5), "5", 0, -1, math.nan, math.inf, True)
        ),
    ],
)
def test_groups_and_options_that_cannot_be_are_refused(given, says):
    with pytest.raises(LayoutError, match=says):
        GridPart({"tp": 2, "dp": 2}, range(4), **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"over": 5}, "over must be several values, got 5"),
        ({"over": (5,)}, r"over of the link a->b must be dims such as \('dp',\), got \(5,\)"),
        ({"lead": 3}, "invalid lead=3"),
        ({"leave": 1}, r"the end of a link is such as \{'pp': -1\}, got 1"),
        ({"enter": "pp"}, r"the end of a link is such as \{'pp': -1\}, got 'pp'"),
        ({"name": 3}, "name of a link must be a text, got 3"),
        ({"backend": 3}, "backend must be a name such as 'gloo', got 3"),
    ],
)
def test_options_of_a_link_that_cannot_be_are_refused(given, says):
    with pytest.raises(LayoutError, match=says):
        Link("a", "b", **given)


def test_stages_of_unequal_size_are_grids_in_a_row():
    stages = [GridPart({"tp": 2}, (0, 1)), GridPart({"tp": 1}, [2]), GridPart({"tp": 1}, [3])]
    assembly = AssemblyPlan({"lm": stages, "v": VISION}, [Link("v", "lm"), Link("lm", "v")])
    assert assembly.pipelines == {"lm": ("lm.0", "lm.1", "lm.2")}
    assert {name: ends.pairs for name, ends in assembly.ends.items()} == {
        "lm.0->lm.1": [(1, 2)],
        "lm.1->lm.2": [(2, 3)],
        "v->lm": [(0, 0), (1, 0), (2, 0), (3, 0)],
        "lm->v": [(3, 0), (3, 1), (3, 2), (3, 3)],
    }
    assert assembly.with_rank(2) == ["lm.1", "v"]


def test_a_plan_of_several_grids_is_schema_2_and_schema_1_is_read_and_written():
    assembly = AssemblyPlan({"v": GridPart({"dp": 2}, (0, 9)), "t": TEXT}, [Link("v", "t")])
    data = json.loads(assembly.plan.to_json())
    assert data["schema"] == 2 and data["layouts"]["v"]["ranks"] == [0, 9]
    assert data["grids"] == ["v", "t"] and data["links"][0]["name"] == "v->t"
    assert GroupPlan.from_json(assembly.plan.to_json()) == assembly.plan
    assert assembly.plan.window == range(10)
    assert assembly.plan.home(9) == ("v", assembly.layouts["v"]) and assembly.plan.home(3) is None
    layout = RankLayout(("tp", "dp"), (2, 2))
    plain = GroupPlan({"x": layout}, (GroupRow("DP", "x", ("dp",)),))
    old = json.loads(plain.to_json())
    assert old.keys() == {"schema", "layouts", "rows"} and old["schema"] == 1
    assert GroupPlan.from_json(json.dumps(old)) == plain
    data["links"][0]["target"] = "gone"
    with pytest.raises(LayoutError, match="the link v->t name 'gone'"):
        GroupPlan.from_json(json.dumps(data))
