"""The faces that others' code expects, on hypergrid's core. Importing it loads neither torch nor
megatron; ``compat.install()`` puts ``compat.parallel_state`` in megatron's place.
"""

from compat.swap import install as install
from compat.swap import uninstall as uninstall

__all__ = ["install", "uninstall"]
