"""install() and uninstall(): one module object, under megatron's name and under ours."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from compat.swap import own_orders
from compat.transformer_engine.process import warn_of_an_empty_package

# By Megatron's name: the module that replaces it.
REPLACEMENTS = {
    "megatron.core.parallel_state": "compat.parallel_state",
    "megatron.core.hyper_comm_grid": "compat.hyper_comm_grid",
}


class _Finder(MetaPathFinder, Loader):
    """Finds our modules under megatron's names, and warns of what ``own_orders`` lists.

    A finder and not an entry in ``sys.modules``: every form of import then sets the attribute of
    the parent package, and nothing is loaded before it is imported.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in REPLACEMENTS:
            return ModuleSpec(fullname, self)
        if fullname in own_orders.MODULES:
            own_orders.warn_of_own_order(fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(REPLACEMENTS[spec.name])
        import_module("compat.swap.drift").refuse_drift(spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just replaced our module's spec by megatron's: restore ours.
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state


_finder = _Finder()


def install() -> None:
    """Replace ``megatron.core.parallel_state`` and ``HyperCommGrid`` by ours in this process.

    Call it before megatron is imported; it is idempotent. Afterwards
    ``megatron.core.parallel_state``, ``megatron.core.mpu`` and ``compat.parallel_state`` are one
    object, by every form of import. Raises RuntimeError if Megatron's own module is already
    imported: other modules may hold its functions. So does the import of megatron itself, if its
    ``parallel_state`` has functions, arguments or private globals that ours lacks.
    """
    stock_modules = _stock_modules()
    if stock_modules:
        raise RuntimeError(
            f"compat.install() comes too late: {', '.join(stock_modules)} is already imported, and "
            f"other modules may hold its functions. Call compat.install() before the first "
            f"`import megatron`, or start the script with `python -m compat.launch SCRIPT`."
        )
    other = hiding()
    if other is not None:
        warnings.warn(
            f"{other} has the same name as hypergrid's package `compat`, which this process has "
            f"loaded: `import compat` imports hypergrid's. Rename {other}, or remove it from "
            f"sys.path.",
            stacklevel=2,
        )
    warn_of_an_empty_package()
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undo ``install``: the next import of megatron gets its own modules.

    RuntimeError if megatron was imported with our modules.
    """
    has_our_modules = any(name in sys.modules for name in REPLACEMENTS) and not _stock_modules()
    if has_our_modules:
        raise RuntimeError(
            "megatron is already imported with hypergrid's parallel_state. Start a new process "
            "for stock."
        )
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def hiding() -> Path | None:
    """Another package `compat` on ``sys.path``: it hides ours, or ours hides it."""
    our_package = Path(__file__).parents[1].resolve()
    for folder in map(Path, sys.path):
        # A folder without __init__.py hides nothing.
        for file in (folder / "compat.py", folder / "compat" / "__init__.py"):
            if file.is_file() and file.resolve().parent != our_package:
                return file.resolve()
    return None


def warn_of_a_second_state() -> None:
    """Warn if ours is initialised while megatron itself uses its own module."""
    if _stock_modules():
        warnings.warn(
            "megatron.core has loaded its own parallel_state, which has no groups: only code that "
            "imports compat.parallel_state gets these. Call compat.install() before the first "
            "`import megatron` to have one state.",
            stacklevel=4,
        )


def _stock_modules() -> list[str]:
    names = []
    for name, replacement in REPLACEMENTS.items():
        if name in sys.modules and sys.modules[name] is not sys.modules.get(replacement):
            names.append(name)
    return names
