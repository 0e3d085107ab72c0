"""ColossalAI's interface over our groups."""

from compat.colossalai.environment import EnvironmentTable as EnvironmentTable
from compat.colossalai.mesh import ProcessGroupMesh as ProcessGroupMesh
