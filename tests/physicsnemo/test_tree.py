"""Trees of groups: sizes, their refusals, and the names of orthogonal groups."""

import pytest

from compat.physicsnemo import ProcessGroupConfig, ProcessGroupNode
from compat.physicsnemo.groups import of_tree
from tests.support import table


def world(sizes=None, **orthogonal_groups):
    """world = (model = spatial x channel) x data; added level by level."""
    tree = ProcessGroupConfig(ProcessGroupNode("world"))
    for name, parent in (("model", "world"), ("data", "world"), ("spatial", "model")):
        orthogonal_group = orthogonal_groups.get(name)
        tree.add_node(ProcessGroupNode(name, orthogonal_group=orthogonal_group), parent=parent)
    tree.add_node(ProcessGroupNode("channel"), parent="model")
    if sizes:
        tree.set_leaf_group_sizes(sizes)
    return tree


def test_sizes_of_parents_are_products_of_the_leaves_whenever_they_are_set(capsys):
    tree = world()
    tree.set_leaf_group_sizes({"spatial": 2, "channel": 3, "data": 4}, update_parent_sizes=False)
    assert tree.get_node("model").size is None
    assert tree.update_parent_sizes(verbose=True) == 24
    assert "model: None -> 6" in capsys.readouterr().out
    assert tree.leaf_groups() == ["data", "spatial", "channel"]
    assert [child.name for child in tree.children("world")] == ["model", "data"]
    tree.set_leaf_group_sizes({"spatial": 4})
    assert (tree.get_node("model").size, tree.root.size) == (12, 48)


@pytest.mark.parametrize(("call", "says"), table("physicsnemo/refusals_of_trees.txt"))
def test_what_cannot_be_is_refused_and_sets_no_size(call, says):
    tree = world()
    with pytest.raises(AssertionError, match=says):
        eval(call, {"tree": tree, "ProcessGroupNode": ProcessGroupNode})
    assert tree.breadth_first() == ["world", "model", "data", "spatial", "channel"]
    assert [tree.get_node(name).size for name in tree.breadth_first()] == [None] * 5


def test_an_orthogonal_group_may_have_the_name_of_a_node_with_the_same_ranks():
    sizes = {"spatial": 2, "channel": 2, "data": 2}
    lists_of = of_tree(world(sizes, model="data"), 8)
    assert lists_of["data"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(AssertionError, match=r"have the name 'data' and other ranks: \[\[0, 2"):
        of_tree(world(sizes, spatial="data"), 8)
    with pytest.raises(AssertionError, match="have the name 'spatial' and other ranks"):
        of_tree(world(sizes, spatial="spatial"), 8)


def test_a_name_that_a_node_shares_with_an_orthogonal_group_leaves_siblings_as_they_are():
    # Orthogonal to the root are single ranks, as the groups of "b" are.
    tree = ProcessGroupConfig(ProcessGroupNode("world", orthogonal_group="b"))
    for name in ("a", "b", "c"):
        tree.add_node(ProcessGroupNode(name), parent="world")
    tree.set_leaf_group_sizes({"a": 2, "b": 1, "c": 2})
    assert of_tree(tree, 4)["c"] == [[0, 2], [1, 3]]
