"""physicsnemo.distributed's tree of groups and its manager, on hypergrid; also Modulus' names."""

from __future__ import annotations

from compat.physicsnemo.manager import DistributedManager as DistributedManager
from compat.physicsnemo.manager import (
    PhysicsNeMoUndefinedGroupError,
    PhysicsNeMoUninitializedDistributedManagerWarning,
)
from compat.physicsnemo.tree import ProcessGroupConfig as ProcessGroupConfig
from compat.physicsnemo.tree import ProcessGroupNode as ProcessGroupNode

ModulusUndefinedGroupError = PhysicsNeMoUndefinedGroupError
ModulusUninitializedDistributedManagerWarning = PhysicsNeMoUninitializedDistributedManagerWarning
