"""install() and uninstall(): one module object under megatron's name and ours."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from compat.swap import own_orders
from compat.transformer_engine.process import warn_of_an_empty_package

FACES = {
    "megatron.core.parallel_state": "compat.parallel_state",
    "megatron.core.hyper_comm_grid": "compat.hyper_comm_grid",
}


class _Finder(MetaPathFinder, Loader):
    """Answers megatron's names of our modules with ours, finished; watches who orders by itself.

    Through the import system, and not by an entry in ``sys.modules``, so that the parent package
    gets its attribute by every form of import and nothing is loaded before it is asked for.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in FACES:
            return ModuleSpec(fullname, self)
        return own_orders.watched(fullname, path)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(FACES[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just written megatron's spec into our module: put ours back.
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state


_finder = _Finder()


def install() -> None:
    """Make ``megatron.core.parallel_state`` and its ``HyperCommGrid`` ours in this process.

    Call it before megatron is imported; a second call does nothing. Afterwards
    ``megatron.core.parallel_state``, ``megatron.core.mpu`` and ``compat.parallel_state`` are one
    object, by every form of import.

    Raises
    ------
    RuntimeError
        Megatron's own module has been imported already: others hold its functions by now.
    """
    stock = _stock_modules()
    if stock:
        raise RuntimeError(
            f"compat.install() comes too late: {', '.join(stock)} is already imported, and "
            f"{len(_importers())} modules of megatron may hold its functions. Call "
            f"compat.install() before the first `import megatron`, or start the script with "
            f"`python -m compat.launch SCRIPT`."
        )
    other = hiding()
    if other is not None:
        warnings.warn(
            f"{other} has the same name as hypergrid's package `compat`, which this process has "
            f"loaded: `import compat` gives hypergrid's. Rename {other}, or keep it off sys.path.",
            stacklevel=2,
        )
    warn_of_an_empty_package()
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def uninstall(*, forget_megatron: bool = False) -> None:
    """Undo ``install``: the next import of megatron gets its own modules.

    Parameters
    ----------
    forget_megatron : bool
        Take every loaded megatron module out of ``sys.modules``, so that it is imported afresh.
        Objects that were made from the old modules live on beside the new ones.

    Raises
    ------
    RuntimeError
        Megatron was imported with our modules and ``forget_megatron`` is False.
    """
    if any(name in sys.modules for name in FACES) and not _stock_modules() and not forget_megatron:
        raise RuntimeError(
            f"megatron is already imported with hypergrid's parallel_state, in "
            f"{len(_importers())} modules. Start a fresh process for stock, or pass "
            f"forget_megatron=True to import megatron anew in this one."
        )
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    if forget_megatron:
        for name in [*_importers(), *FACES]:
            sys.modules.pop(name, None)


def is_installed() -> bool:
    """Whether an import of megatron gets our modules."""
    return _finder in sys.meta_path


def stray_bindings() -> list[str]:
    """Names in loaded megatron modules that still mean megatron's own parallel_state."""
    ours = {name: sys.modules.get(face) for name, face in FACES.items()}
    strays = []
    for name in _importers():
        for key, value in list(vars(sys.modules[name]).items()):
            home = value.__name__ if isinstance(value, ModuleType) else None
            home = home or getattr(value, "__module__", None)
            if home in ours and value is not ours[home] and name not in FACES:
                strays.append(f"{name}.{key}")
    return strays


def hiding() -> Path | None:
    """A `compat` of somebody else's on ``sys.path``, which ours hides or is hidden by."""
    ours = Path(__file__).parents[1].resolve()
    for entry in sys.path:
        spec = PathFinder.find_spec("compat", [entry or "."])
        if spec is not None and spec.origin is not None:
            found = Path(spec.origin).resolve()
            if found.parent != ours:
                return found
    return None


def warn_of_a_second_state() -> None:
    """Tell who initialises ours while megatron itself reads its own module."""
    if _stock_modules():
        warnings.warn(
            "megatron.core has loaded its own parallel_state, which stays without groups: only "
            "code that imports compat.parallel_state sees these. Call compat.install() before "
            "the first `import megatron` to have one state.",
            stacklevel=3,
        )


def _stock_modules() -> list[str]:
    return [
        name
        for name, face in FACES.items()
        if name in sys.modules and sys.modules[name] is not sys.modules.get(face)
    ]


def _importers() -> list[str]:
    return [name for name in sys.modules if name == "megatron" or name.startswith("megatron.")]
