"""The swap for launchers whose command line is fixed: put this directory on PYTHONPATH.

Python runs this file as it starts. ``python -m compat.launch --startup-path`` prints the directory.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

if os.environ.get("HYPERGRID_SWAP", "1") != "0":
    import compat

    compat.install()

# Python runs one sitecustomize only, the first on the path: the next one must not go missing.
_here = os.path.dirname(os.path.abspath(__file__))
_others = [entry for entry in sys.path if os.path.abspath(entry) != _here]
_next = PathFinder.find_spec("sitecustomize", _others)
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(module_from_spec(_next))
