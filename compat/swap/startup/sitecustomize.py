"""The swap for launchers whose command line is fixed: put this directory on PYTHONPATH.

Python runs this file as it starts. ``python -m compat.launch --startup-path`` prints the directory.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_directory = os.path.dirname(os.path.abspath(__file__))


def _end(sentence: str) -> None:
    if sentence:
        print(f"hypergrid: {sentence}", file=sys.stderr, flush=True)
    os._exit(2)  # Python would print an exception in a line, and continue without the swap


def _swap() -> None:
    try:
        # From beside this file: sys.path may have other packages of these names, or none.
        sys.path.insert(0, os.path.abspath(os.path.join(_directory, "..", "..", "..")))
        import hypergrid  # noqa: F401, order imports more of it when it is called
        from compat import swap
        from compat.swap import order, shadow

        del sys.path[0]
        if shadow.is_wanted():
            shadow.install()
        else:
            swap.install()
    except Exception as error:
        _end(
            f"the start-up directory {_directory} cannot replace megatron's parallel_state: "
            f"{type(error).__name__}: {error}. Repair the installation; to run stock, remove "
            f"it from PYTHONPATH or set HYPERGRID_SWAP=0."
        )
    try:
        order.check_choices()
    except ValueError as error:
        sentence = ""
        if order.first_of_host():  # one rank of each host says it
            sentence = str(error)
        _end(sentence)


if os.environ.get("HYPERGRID_SWAP", "1") != "0":
    _swap()

# Python runs only the first sitecustomize on the path: run the next one too.
_other_folders = [folder for folder in sys.path if os.path.abspath(folder) != _directory]
_next = PathFinder.find_spec("sitecustomize", _other_folders)
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(module_from_spec(_next))
