"""ColossalAI's interface over our groups."""

from compat.colossalai.mesh import ProcessGroupMesh as ProcessGroupMesh
