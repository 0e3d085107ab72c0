"""physicsnemo's tree of groups: sizes are set on the leaves, those of parents are products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod


@dataclass(eq=False)
class ProcessGroupNode:
    """One group of the tree.

    Parameters
    ----------
    name : str
        Unique in the tree.
    size : int, optional
        Number of ranks. The sizes of parents follow from those of the leaves.
    orthogonal_group : str, optional
        The name of the group orthogonal to this one, as in Modulus' pull request 153.
    """

    name: str
    size: int | None = None
    orthogonal_group: str | None = None

    @property
    def orthogonal_name(self) -> str:
        """The name of the group orthogonal to this one; upstream's if it was given none."""
        return self.orthogonal_group or f"__orthogonal_to_{self.name}"


class ProcessGroupConfig:
    """A model's groups as a tree, as in nvidia-physicsnemo 1.3; ``node`` is the root.

    Not a treelib tree: there is no ``config.tree``. What is refused raises AssertionError.

    Examples
    --------
    >>> config = ProcessGroupConfig(ProcessGroupNode("model", orthogonal_group="data"))
    >>> config.add_node(ProcessGroupNode("spatial"), parent="model")
    >>> config.add_node(ProcessGroupNode("channel"), parent="model")
    >>> config.set_leaf_group_sizes({"channel": 4, "spatial": 2})
    >>> config.get_node("model").size
    8
    """

    def __init__(self, node: ProcessGroupNode) -> None:
        self.root = node
        self.root_id = node.name
        self._nodes = {node.name: node}
        self._children: dict[str, list[ProcessGroupNode]] = {node.name: []}

    def add_node(self, node: ProcessGroupNode, parent: str | ProcessGroupNode) -> None:
        """Add ``node`` as the last child of ``parent``, a node or its name."""
        if isinstance(parent, ProcessGroupNode):
            parent = parent.name
        parent_node = self.get_node(parent)
        siblings = self._children[parent_node.name]
        if node.name in self._nodes:
            raise AssertionError(f"the tree has a group {node.name!r} already. Take another name.")
        siblings.append(node)
        self._nodes[node.name] = node
        self._children[node.name] = []

    def get_node(self, name: str) -> ProcessGroupNode:
        """The node of that name."""
        if name not in self._nodes:
            names = list(self._nodes)
            raise AssertionError(f"the tree has no group {name!r}. It has {names}.")
        return self._nodes[name]

    def children(self, name: str) -> list[ProcessGroupNode]:
        """The children of the node of that name, as they were added."""
        parent = self.get_node(name)
        children = self._children[parent.name]
        return list(children)

    def leaf_groups(self) -> list[str]:
        """The names of all leaves in the order in which they were added."""
        return [name for name in self._nodes if not self._children[name]]

    def breadth_first(self) -> list[str]:
        """All names, level by level."""
        nodes = [self.root]
        # The list grows behind the node that is looked at.
        for node in nodes:
            children = self._children[node.name]
            nodes.extend(children)
        return [node.name for node in nodes]

    def set_leaf_group_sizes(
        self, group_sizes: Mapping[str, int], update_parent_sizes: bool = True
    ) -> None:
        """Set sizes of leaves, by their names, and with ``update_parent_sizes`` of all parents."""
        for name in group_sizes:
            children = [child.name for child in self.children(name)]
            if children:
                raise AssertionError(
                    f"{name!r} is not a leaf: its size is the product of those of its children, "
                    f"{children}. Set theirs."
                )
        for name, size in group_sizes.items():
            self._nodes[name].size = size
        if update_parent_sizes:
            self.update_parent_sizes()

    def update_parent_sizes(self, verbose: bool = False) -> int:
        """Set each parent's size to the product of its children's; returns that of the root."""
        # From the last level to the root: the sizes of children are known before their parent's.
        for name in reversed(self.breadth_first()):
            node = self._nodes[name]
            children = self._children[name]
            size = node.size
            if children:
                sizes = [child.size or 0 for child in children]
                size = prod(sizes)
            if size is None:
                raise AssertionError(
                    f"leaf {name!r} has no size: call set_leaf_group_sizes() first."
                )
            if verbose and node.size != size:
                print(f"size of {name}: {node.size} -> {size}")
            node.size = size
        return self.root.size or 0
