"""Trees of groups: sizes, declared order, and the algebra of orthogonal groups."""

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat.physicsnemo.tree import GroupNode, GroupTree, TreeError
from hypergrid import HyperCommGrid, LayoutError
from tests.support import table


def world(**sizes):
    """world = (model = spatial x channel) x data; added level by level."""
    tree = GroupTree(GroupNode("world"))
    tree.add_node(GroupNode("model"), parent="world")
    tree.add_node(GroupNode("data"), parent="world")
    tree.add_node(GroupNode("spatial"), parent="model")
    tree.add_node(GroupNode("channel"), parent="model")
    if sizes:
        tree.set_leaf_group_sizes(sizes)
    return tree


@st.composite
def trees(draw):
    """A tree with a size on every leaf, and a multiple of its size."""
    tree = GroupTree(GroupNode("n0"))
    for i in range(1, draw(st.integers(1, 7))):
        tree.add_node(GroupNode(f"n{i}"), parent=f"n{draw(st.integers(0, i - 1))}")
    tree.set_leaf_group_sizes({leaf: draw(st.integers(1, 3)) for leaf in tree.leaf_groups()})
    return tree, tree.root.size * draw(st.integers(1, 3))


def test_sizes_of_parents_are_products_of_the_leaves_whenever_they_are_set(capsys):
    tree = world()
    tree.set_leaf_group_sizes({"spatial": 2}, update_parent_sizes=False)
    tree.set_leaf_group_sizes({"channel": 3, "data": 4}, update_parent_sizes=False)
    assert tree.get_node("model").size is None
    assert tree.update_parent_sizes(verbose=True) == 24
    assert "model: None -> 6" in capsys.readouterr().out
    assert str(tree) == "world=24\n  model=6\n    spatial=2\n    channel=3\n  data=4"
    assert tree.leaf_groups() == ["data", "spatial", "channel"]
    assert tree.children("world") == ["model", "data"] and tree.children("data") == []
    tree.set_leaf_group_sizes({"spatial": 4})
    assert (tree.get_node("model").size, tree.root.size) == (12, 48)


def test_what_the_tree_does_not_fill_is_the_slowest_dim():
    tree = GroupTree(GroupNode("model", 8, orthogonal_group="data"))
    placed = tree.place(32)
    assert placed.layout.dims == ("model", "data")
    assert placed.group("data", 3) == [3, 11, 19, 27]
    assert tree.place(8).dims("data") == () and tree.place(8).layout.size == 8
    assert GroupTree(GroupNode("m", 4)).place(8).layout.dims == ("m", "outside")


def test_a_parent_may_be_larger_than_its_children():
    tree = GroupTree(GroupNode("world", 16))
    tree.add_node(GroupNode("model", 8), parent="world")
    tree.add_node(GroupNode("tensor", 2), parent="model")
    placed = tree.place()
    assert placed.layout.dims == ("tensor", "rest of model", "rest of world")
    assert placed.group("model", 9) == list(range(8, 16)) and placed.size("model") == 8
    tree = world(spatial=2, channel=-1, data=4)
    tree.get_node("model").size = 8  # the channel takes what is left inside it
    assert tree.place(64).layout.sizes == (2, 4, 4, 2)


@given(trees(), st.data())
def test_what_is_left_is_what_the_size_would_have_been(case, data):
    tree, size = case
    leaf = data.draw(st.sampled_from(tree.leaf_groups()))
    before = tree.place(tree.root.size).layout
    tree.set_leaf_group_sizes({leaf: -1})
    assert tree.place(before.size).layout == before
    assert tree.place(size).layout.size == size


@given(trees())
def test_every_node_is_a_combination_of_dims_and_leaves_keep_their_order(case):
    tree, size = case
    placed = tree.place(size)

    def leaves(name):
        return [x for child in tree.children(name) for x in leaves(child)] or [name]

    assert list(placed.layout.dims)[: len(tree.leaf_groups())] == leaves("n0")
    assert size == placed.layout.size
    for name in tree.breadth_first():
        assert list(placed.dims(name)) == leaves(name)
        assert placed.size(name) == tree.get_node(name).size == len(placed.group(name, 0))
        orthogonal = placed.orthogonal(name)
        assert sorted(placed.dims(name) + orthogonal) == sorted(placed.layout.dims)
        assert placed.orthogonal(orthogonal) == placed.dims(name)


def with_node(name, sizes=(2, 4, 4), **changes):
    """A tree one of whose nodes is changed."""
    tree = world(**dict(zip(("spatial", "channel", "data"), sizes, strict=True)))
    vars(tree.get_node(name)).update(changes)
    return tree


def test_a_node_that_must_stay_inside_a_host_does():
    placed = with_node("model", within="host").place(hosts=8)
    assert placed.topology.inside(placed.dims("model"))


@pytest.mark.parametrize(("call", "says"), table("physicsnemo/refusals_of_placements.txt"))
def test_a_tree_that_cannot_be_placed_is_refused(call, says):
    with pytest.raises(TreeError, match=says):
        eval(call, {"with_node": with_node})


@pytest.mark.parametrize(("call", "says"), table("physicsnemo/refusals_of_trees.txt"))
def test_what_cannot_be_is_refused_and_changes_nothing(call, says):
    tree = world()
    with pytest.raises(TreeError, match=says) as refused:
        eval(call, {"tree": tree, "GroupNode": GroupNode})
    assert isinstance(refused.value, LayoutError) and isinstance(refused.value, AssertionError)
    assert str(tree) == "world\n  model\n    spatial\n    channel\n  data"


def test_the_grid_over_a_placed_tree_has_its_dims():
    with mock.patch.dict("os.environ", WORLD_SIZE="24"):
        placed = world(spatial=2, channel=3, data=-1).place(24)
        grid = HyperCommGrid.over(placed.layout, backend="gloo")
    assert (grid.dim_names, grid.shape) == (["spatial", "channel", "data"], [2, 3, 4])
    assert grid.backend == "gloo"
