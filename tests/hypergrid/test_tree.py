"""Trees of groups: sizes, declared order, and the algebra of orthogonal groups."""

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypergrid import GroupNode, GroupTree, HyperCommGrid, LayoutError
from hypergrid.tree import TreeError
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


def test_dims_are_the_leaves_in_declared_order_the_first_one_fastest():
    placed = world(spatial=2, channel=3, data=4).place()
    assert placed.layout.dims == ("spatial", "channel", "data")
    assert placed.group("spatial", 0) == [0, 1]
    assert placed.group("model", 0) == list(range(6))
    assert placed.group("data", 0) == [0, 6, 12, 18]


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


def test_one_leaf_takes_what_is_left():
    tree = world(spatial=2, channel=3, data=-1)
    assert (tree.get_node("model").size, tree.root.size) == (6, -1)
    assert tree.place(60).size("data") == 10
    tree = world(spatial=2, channel=-1, data=4)
    assert tree.place(24).layout.sizes == (2, 3, 4)
    tree.get_node("model").size = 8  # of its own: what is left inside it
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
        assert placed.size(name) == tree.get_node(name).size
        assert placed.size(name) == len(placed.group(name, 0))


@given(trees(), st.data())
def test_a_node_and_its_orthogonal_have_exactly_one_rank_in_common(case, data):
    tree, size = case
    node = data.draw(st.sampled_from(tree.breadth_first()))
    placed = tree.place(size)
    orthogonal = placed.orthogonal(node)
    assert placed.orthogonal(orthogonal) == placed.dims(node)
    assert placed.size(node) * placed.size(orthogonal) == size
    members = set(placed.group(node, data.draw(st.integers(0, size - 1))))
    for rank in range(size):
        assert len(members & set(placed.group(orthogonal, rank))) == 1


@pytest.mark.parametrize(
    ("node", "orthogonal", "says"),
    [
        ("spatial", "channel", r"'channel' cannot be orthogonal to 'spatial'.*over \['channel'\]"),
        ("world", "model", "'model' cannot be orthogonal to 'world'"),
    ],
)
def test_an_orthogonal_group_that_is_none_is_refused(node, orthogonal, says):
    tree = world(spatial=2, channel=3, data=4)
    tree.get_node(node).orthogonal_group = orthogonal
    with pytest.raises(TreeError, match=says):
        tree.place()


def test_a_node_that_must_stay_inside_a_host_does_or_is_refused():
    tree = world(spatial=2, channel=4, data=4)
    tree.get_node("model").within = "host"
    assert tree.place(hosts=8).topology.inside(tree.place(hosts=8).dims("model"))
    with pytest.raises(
        TreeError, match="'model' must stay inside a host, and the hosts are not known"
    ):
        tree.place()
    with pytest.raises(
        TreeError,
        match=r"'model' must stay inside a host and does not: 4 of its 4 groups cross hosts, the "
        "first with ranks 0..7 on host0, host1. Make it smaller",
    ):
        tree.place(hosts=4)
    with pytest.raises(TreeError, match=r"1 of its 4 groups cross hosts.*ranks 8\.\.15"):
        tree.place(hosts=[12, 12, 8])
    tree.get_node("data").within = "host"
    with pytest.raises(TreeError, match="'data' must stay inside a host and does not"):
        tree.place(hosts=8)


@pytest.mark.parametrize(("call", "says"), table("hypergrid/refusals_of_trees.txt"))
def test_what_cannot_be_is_refused_and_changes_nothing(call, says):
    tree = world()
    with pytest.raises(TreeError, match=says) as refused:
        eval(call, {"tree": tree, "GroupNode": GroupNode})
    assert isinstance(refused.value, LayoutError) and isinstance(refused.value, AssertionError)
    assert str(tree) == "world\n  model\n    spatial\n    channel\n  data"


@pytest.mark.parametrize(
    ("sizes", "size", "says"),
    [
        ((2, 3, 4), 32, "the world has 32 ranks, which spatial=2 x channel=3 x data=4 = 24 does"),
        ((2, 3, 4), 12, "leaves a remainder"),
        ((2, 3, -1), 32, "the world has 32 ranks, which spatial=2 x channel=3 = 6"),
        ((2, 3, -1), None, "'data' takes the rest of the ranks, whose number is not known"),
        ((2, 3, 4), 0, "size of the world must be at least 1, got 0"),
        ((2, 3, -1), -1, "size of the world must be at least 1, got -1"),
    ],
)
def test_a_world_that_the_tree_does_not_divide_is_refused(sizes, size, says):
    tree = world(**dict(zip(("spatial", "channel", "data"), sizes, strict=True)))
    with pytest.raises(TreeError, match=says):
        tree.place(size)


def test_unknown_groups_are_refused_with_the_known_ones():
    with pytest.raises(TreeError, match=r"no group 'tp'. Known: \['world', 'model', 'spatial'"):
        world(spatial=2, channel=3, data=4).place().dims(["model", "tp"])


def test_the_grid_over_a_placed_tree_has_its_dims():
    with mock.patch.dict("os.environ", WORLD_SIZE="24"):
        placed = world(spatial=2, channel=3, data=-1).place(24)
        grid = HyperCommGrid.over(placed.layout, backend="gloo")
    assert (grid.dim_names, grid.shape) == (["spatial", "channel", "data"], [2, 3, 4])
    assert grid.backend == "gloo"
