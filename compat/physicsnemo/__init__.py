"""physicsnemo.distributed's tree of groups and its manager, on hypergrid; also Modulus' names."""

from __future__ import annotations

from compat.physicsnemo.manager import DistributedManager as DistributedManager
from compat.physicsnemo.manager import (
    PhysicsNeMoUndefinedGroupError,
    PhysicsNeMoUninitializedDistributedManagerWarning,
)
from compat.physicsnemo.tree import GroupNode, GroupTree

ModulusUndefinedGroupError = PhysicsNeMoUndefinedGroupError
ModulusUninitializedDistributedManagerWarning = PhysicsNeMoUninitializedDistributedManagerWarning


class ProcessGroupNode(GroupNode):
    """One group of the tree: ``compat.physicsnemo.tree.GroupNode`` by upstream's name."""


class ProcessGroupConfig(GroupTree[ProcessGroupNode]):
    """A model's tree of groups: ``compat.physicsnemo.tree.GroupTree`` by upstream's name.

    As in nvidia-physicsnemo 1.3, but not a treelib tree: there is no ``config.tree``.
    """
