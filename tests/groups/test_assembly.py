"""Assemblies: several grids and the links between them, agreed on once and created together."""

import json
from datetime import timedelta

import pytest

from hypergrid import (
    AgreementError,
    Assembly,
    CreationError,
    GridPart,
    GroupPlan,
    LayoutError,
    Link,
    dump,
)
from hypergrid.groups import creation
from hypergrid.show.diff import against_dump
from tests.support.forked import descriptors, from_all, members, on_ranks, open_groups, total

PARTS = {
    "vision": GridPart({"dp": 3}, (0, 1, 5)),
    "text": GridPart({"tp": 2, "pp": 2}, (2, 3, 4, 6), groups=["tp", "pp", "tp-pp"]),
    "lm": [GridPart({"tp": 2}, (2, 3)), GridPart({"tp": 1}, [4]), GridPart({"tp": 1}, [6])],
}
LINKS = [Link("vision", "text"), Link("vision", "lm", lead=("first", "last"))]


@on_ranks(8)
def test_every_group_of_grids_and_links_is_as_planned_and_communicates(rank):
    opened = descriptors()
    assembly = Assembly(PARTS, LINKS).create()
    assert against_dump(assembly.plan, json.loads(dump())) == []
    assert assembly.plan == GroupPlan.from_json(assembly.plan.to_json())
    for row in assembly.plan.rows:
        for planned in assembly.plan.mine(row, rank).values():
            grid, _, dims = row.label.partition("/")
            if dims:
                group = assembly[grid].get_pg(dims)
                assert group.group_desc == row.label
            else:
                link, side = row.label.split()
                group = getattr(assembly.link(link), side)
            assert tuple(members(group)) == planned
            assert total(group) == len(planned)
    vision = assembly.link("vision", "text")
    assert vision.sends_to == ([2] if rank in (0, 1, 5) else [])
    assert vision.receives_from == ([0, 1, 5] if rank == 2 else [])
    assert assembly.link("vision->lm").ends.leaders == ((0, 1, 5), (3,))
    assert [grid.size for grid in assembly["lm"]] == [2, 1, 1]
    assert assembly["lm.0"] is assembly["lm"][0] is assembly.grid("lm.0")
    assembly.destroy()
    group = vision = None
    assert descriptors(opened) <= opened
    with pytest.raises(RuntimeError, match=r"call create\(\) on every rank before asking for text"):
        assembly["text"]
    assert members(assembly.create().link("vision", "text").leaders) == (
        [0, 1, 2, 5] if rank in (0, 1, 2, 5) else None
    )


@on_ranks(4)
def test_grids_on_the_same_ranks_have_groups_and_names_of_their_own(rank):
    part = GridPart({"tp": 2, "dp": 2}, range(4))
    assembly = Assembly({"a": part, "b": part}, [Link("a", "b"), Link("b", "a")]).create()
    groups = [assembly[name].get_pg("tp") for name in ("a", "b")]
    assert groups[0].group_name != groups[1].group_name
    assert members(groups[0]) == members(groups[1])
    assert total(groups[1]) == total(groups[0]) == 2
    runs = [assembly[name].subgroup("tp-dp", 3) for name in ("a", "b")]
    names = from_all([run.group_name for run in runs])
    assert names[0] == names[2] and len({*names[0]}) == 2
    assert total(runs[0]) == total(runs[1]) == len(members(runs[0]))
    assembly["a"].suspend("recreate")
    assert total(assembly["b"].get_pg("dp")) == 2
    assembly["a"].resume()
    assert total(assembly["a"].get_pg("dp")) == 2
    # A link from a rank to itself has its leader on both sides.
    back = Assembly({"a": part}, [Link("a", "a", lead=("first", "first"))]).create()
    assert back.link("a", "a").sends_to == back.link("a", "a").receives_from
    back.destroy()


@on_ranks(4)
def test_ranks_that_declare_something_else_all_say_so_and_nothing_is_left(rank):
    alive = len(open_groups())
    sizes = {"dp": 4} if rank == 3 else {"tp": 4}
    with pytest.raises(AgreementError, match=r"the grid a is 'RankLayout\(dp=4.* on rank 3"):
        Assembly({"a": GridPart(sizes, range(4))}).create()
    links = [Link("a", "a", lead=("first", "first"))] if rank else []
    with pytest.raises(AgreementError, match="the link a->a is"):
        Assembly({"a": GridPart({"dp": 4}, range(4))}, links).create()
    links = [Link("a", "a", leave={"pp": 0} if rank == 2 else None)]
    with pytest.raises(
        AgreementError, match=r"leave=\(\('pp', 0.* on rank 2 and .*leave=None.* rank 0"
    ):
        Assembly({"a": GridPart({"dp": 2, "pp": 2}, range(4))}, links).create()
    for given in ({"backend": "gloo"}, {"timeout": 5.0}):
        ((name, value),) = given.items()
        with pytest.raises(
            AgreementError, match=f"{name} of a/dp is '?{value}'? on rank 1 and None"
        ):
            Assembly({"a": GridPart({"dp": 4}, range(4), **given if rank == 1 else {})}).create()
    with pytest.raises(TypeError, match=r"timeout must be a datetime.timedelta, got 5\."):
        Assembly({"a": GridPart({"dp": 4}, range(4))}, timeout=5)
    with pytest.raises((AgreementError, LayoutError), match="names the grid 'b'; there are a"):
        links = [Link("a", "b")] if rank == 2 else []
        Assembly({"a": GridPart({"dp": 4}, range(4))}, links).create()
    with pytest.raises(RuntimeError, match=r"the grid a is .* and the world has 4 ranks"):
        Assembly({"a": GridPart({"dp": 2}, (0, 9))}).create()
    assert len(open_groups()) == alive


@on_ranks(4)
def test_a_failure_on_one_rank_leaves_no_group_on_any(rank):
    opened, before = descriptors(), creation.by_members

    def fails(label, *args, **options):
        if rank == 1 and label.endswith("leaders#0"):
            raise RuntimeError("no more sockets")
        return before(label, *args, **options)

    creation.by_members = fails
    parts = {"a": GridPart({"dp": 2}, range(2)), "b": GridPart({"tp": 2}, range(2, 4))}
    with pytest.raises(CreationError, match=r"no more sockets|could not create a->b leaders"):
        Assembly(parts, [Link("a", "b")], timeout=timedelta(seconds=3)).create()
    creation.by_members = lambda *args, **options: fails("leaders#0")
    alone = {"text": GridPart({"tp": 1}, [1])}
    with pytest.raises(CreationError, match="rank 1 could not create text/tp of ranks 1 with gloo"):
        Assembly(alone).create()
    creation.by_members = before
    assert json.loads(dump())["groups"][1:] == []
    assert descriptors(opened) <= opened
    assembly = Assembly(parts, [Link("a", "b")]).create()
    assert assembly.link("a", "b").sends_to == ([2] if rank < 2 else [])


@on_ranks(4)
def test_where_every_rank_must_take_part_they_do(rank, monkeypatch):
    monkeypatch.setenv("HYPERGRID_CREATION", "everyone")
    parts = {"a": GridPart({"dp": 2}, (0, 3)), "b": GridPart({"tp": 1}, [1])}
    assembly = Assembly(parts, [Link("a", "b")]).create()
    if rank in (0, 3):
        assert total(assembly["a"].get_pg("dp")) == 2
    assert members(assembly.link("a", "b").leaders) == ([0, 1, 3] if rank != 2 else None)


@on_ranks(3, timeout=15)
def test_a_rank_outside_a_grid_may_resume_it_too_and_waits_for_nobody(rank):
    assembly = Assembly({"a": GridPart({"dp": 2}, range(2))}).create()
    for _ in range(2):
        assembly["a"].suspend("recreate")
        renewed = assembly["a"].resume() if rank == 2 else {}
        from_all("the rank outside is first")
        renewed |= assembly["a"].resume() if rank < 2 else {}
        assert len(renewed) == (rank < 2)
    assert rank == 2 or total(assembly["a"].get_pg("dp")) == 2


@on_ranks(2)
def test_ranks_that_create_groups_of_different_grids_of_an_assembly_say_so(rank):
    part = GridPart({"tp": 2, "dp": 1}, range(2))
    assembly = Assembly({"a": part, "b": part}).create()
    mine = assembly["ab"[rank]]
    says = "grid of the assembly is 'b' on rank 1 and 'a' on rank 0"
    with pytest.raises(AgreementError, match=says):
        mine.create_pg("tp-dp")
    for grid in (assembly["a"], assembly["b"]):
        grid.suspend("recreate")
    with pytest.raises(AgreementError, match=says):
        mine.resume()
    assert [len(assembly[name].resume()) for name in "ab"] == [2, 2]
