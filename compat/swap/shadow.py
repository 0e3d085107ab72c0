"""A shadow run: megatron-core's own parallel_state runs the job, and hypergrid plans beside it.

After each ``initialize_model_parallel`` every rank compares what stock created with what hypergrid
would have created from the same arguments, and hypergrid creates nothing: the job, its speed and
its exit status are stock's. This is the first step on a cluster where hypergrid was never tried.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from compat.swap import answers
from compat.swap.answers import VARIABLE as VARIABLE
from compat.swap.answers import is_wanted as is_wanted

_NAME = "megatron.core.parallel_state"
_calls = itertools.count(1)


class _Finder(MetaPathFinder):
    """Finds megatron's parallel_state as the other finders do, and watches it once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME:
            return None
        # The other finders in their order, as the import system asks them.
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                _watch_when_loaded(spec.loader)
                return spec
        return None


def _watch_when_loaded(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        atexit.register(answers.say_at_exit)
        watch(module)

    loader.exec_module = exec_module


_finder = _Finder()


def install() -> None:
    """Compare in this process from the next import of ``megatron.core.parallel_state`` on. *Local*.

    RuntimeError if that module is imported already.
    """
    if _NAME in sys.modules:
        raise RuntimeError(
            f"the shadow run begins too late: {_NAME} is already imported, and other modules may "
            f"hold its functions. Start the script with `python -m compat.launch --shadow SCRIPT`."
        )
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def watch(stock: ModuleType) -> None:
    """Let ``stock.initialize_model_parallel`` compare what it has created. *Local*."""
    loaded = dict(vars(stock))
    initialize = stock.initialize_model_parallel

    @functools.wraps(initialize)
    def compared(*args: Any, **kwargs: Any) -> Any:
        from compat.swap.replay import Record, compare  # here: it imports torch

        record = Record(stock, loaded)
        with answers.failure_noted(), record.recorded():
            result = initialize(*args, **kwargs)
        answers.report(next(_calls), *compare(record, args, kwargs, result))
        return result

    stock.initialize_model_parallel = compared  # type: ignore[attr-defined]
