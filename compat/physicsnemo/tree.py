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
        self._children: dict[str, list[str]] = {node.name: []}

    def add_node(self, node: ProcessGroupNode, parent: str | ProcessGroupNode) -> None:
        """Add ``node`` as the last child of ``parent``, a node or its name."""
        if isinstance(parent, ProcessGroupNode):
            parent = parent.name
        siblings = self._children[self.get_node(parent).name]
        if node.name in self._nodes:
            raise AssertionError(f"the tree has a group {node.name!r} already. Take another name.")
        siblings.append(node.name)
        self._nodes[node.name] = node
        self._children[node.name] = []

    def get_node(self, name: str) -> ProcessGroupNode:
        """The node of that name."""
        if name not in self._nodes:
            raise AssertionError(f"the tree has no group {name!r}. It has {list(self._nodes)}.")
        return self._nodes[name]

    def children(self, name: str) -> list[ProcessGroupNode]:
        """The children of the node of that name, as they were added."""
        parent = self.get_node(name)
        return [self._nodes[child] for child in self._children[parent.name]]

    def leaf_groups(self) -> list[str]:
        """The names of all leaves in the order in which they were added."""
        return [name for name in self._nodes if not self._children[name]]

    def breadth_first(self) -> list[str]:
        """All names, level by level."""
        names = [self.root_id]
        for name in names:
            names.extend(self._children[name])
        return names

    def set_leaf_group_sizes(
        self, group_sizes: Mapping[str, int], update_parent_sizes: bool = True
    ) -> None:
        """Set sizes of leaves, by their names, and with ``update_parent_sizes`` of all parents."""
        for name in group_sizes:
            if self.children(name):
                raise AssertionError(
                    f"{name!r} is not a leaf: its size is the product of those of its children, "
                    f"{self._children[name]}. Set theirs."
                )
        for name, size in group_sizes.items():
            self._nodes[name].size = size
        if update_parent_sizes:
            self.update_parent_sizes()

    def update_parent_sizes(self, verbose: bool = False) -> int:
        """Set each parent's size to the product of its children's; returns that of the root."""
        return self._update_size(self.root, verbose)

    def _update_size(self, node: ProcessGroupNode, verbose: bool) -> int:
        children = self.children(node.name)
        if not children:
            if node.size is None:
                raise AssertionError(
                    f"leaf {node.name!r} has no size: call set_leaf_group_sizes() first."
                )
            return node.size
        size = prod(self._update_size(child, verbose) for child in children)
        if verbose and node.size != size:
            print(f"size of {node.name}: {node.size} -> {size}")
        node.size = size
        return size
