"""nvidia-physicsnemo's own tree and manager, from their genuine source: the oracle.

What they import beside torch is answered by stand-ins, through an ``__import__`` of their own:
nothing is installed, and nothing stays in ``sys.modules``.
"""

from __future__ import annotations

import builtins
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from tests.support import ROOT

RELEASE = "1.3.0"
FOLDER = ROOT / f".cache/nvidia-physicsnemo-{RELEASE}/physicsnemo/distributed"
MISSING = (
    ""
    if (FOLDER / "manager.py").is_file()
    else f"nvidia-physicsnemo {RELEASE} is not in .cache: run scripts/fetch_forerunners"
)


class Tree:
    """As much of ``treelib.Tree`` as physicsnemo uses."""

    def __init__(self) -> None:
        self.nodes: dict[str, Any] = {}

    def create_node(self, tag: str, identifier: str, data: Any, parent: Any = None) -> None:
        if identifier in self.nodes or (parent is not None and parent not in self.nodes):
            raise RuntimeError(f"{identifier} is there, or {parent} is not")
        self.nodes[identifier] = SimpleNamespace(
            identifier=identifier,
            data=data,
            parent=parent,
            is_leaf=lambda: not self.children(identifier),
        )

    def contains(self, name: str) -> bool:
        return name in self.nodes

    def get_node(self, name: str) -> Any:
        return self.nodes.get(name)

    def children(self, name: str) -> list[Any]:
        return [node for node in self.nodes.values() if node.parent == name]

    def leaves(self) -> list[Any]:
        return [node for node in self.nodes.values() if node.is_leaf()]


def load() -> SimpleNamespace:
    """Fresh classes of the stock release: ``DistributedManager``, ``ProcessGroupConfig``, ..."""
    stand_ins: dict[str, dict[str, Any]] = {
        "treelib": {"Tree": Tree},
        "physicsnemo.utils.version_check": {
            "check_min_version": lambda *_: None,
            "require_version": lambda *_: lambda function: function,
        },
    }

    def answer(name: str, globals: Any = None, locals: Any = None, *rest: Any) -> Any:
        if name in stand_ins:
            return SimpleNamespace(**stand_ins[name])
        return builtins.__import__(name, globals, locals, *rest)

    for file in ("config", "manager"):
        name = f"stock_physicsnemo_{file}"
        module = ModuleType(name)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": answer}
        text = (FOLDER / f"{file}.py").read_text(encoding="utf-8")
        with mock.patch.dict(sys.modules, {name: module}), mock.patch("atexit.register", _as_is):
            exec(compile(text, f"<physicsnemo {RELEASE} {file}.py>", "exec"), module.__dict__)
        stand_ins[f"physicsnemo.distributed.{file}"] = vars(module)
    return SimpleNamespace(**stand_ins["physicsnemo.distributed.manager"])


def _as_is(function: Any) -> Any:
    return function


def started(stock: SimpleNamespace, rank: int, world_size: int) -> Any:
    """The stock manager over a default group that runs already. Its own start refuses a CPU."""
    stock.DistributedManager._shared_state = {
        "_is_initialized": True,
        "_distributed": True,
        "_rank": rank,
        "_world_size": world_size,
    }
    return stock.DistributedManager()
