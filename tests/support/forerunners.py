"""The forerunners' own classes, loaded from their source as the oracle of the comparisons.

``scripts/fetch_forerunners`` puts the source under ``.cache``. A file is run as a private module:
its package is not imported, and what it depends on beside torch is answered by stand-ins.
"""

from __future__ import annotations

import builtins
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.support import ROOT

CACHE = ROOT / ".cache"


def load(file: str, **stand_ins: Any) -> ModuleType:
    """A fresh module of ``file``, such as ``colossalai-0.5.0/colossalai/cluster/x.py``.

    What it imports by the name of a stand-in has the stand-in's attributes. Skips the test, and
    says how to have it, where the source was not fetched.
    """
    path = CACHE / file
    if not path.is_file():
        pytest.skip(f"{file} is not under .cache: run scripts/fetch_forerunners")

    def answer(name: str, *rest: Any) -> Any:
        if name in stand_ins:
            return stand_ins[name]
        return builtins.__import__(name, *rest)

    module = ModuleType(f"forerunner_{path.stem}")
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": answer}
    # What it would do as this process ends is none of the tests'.
    with mock.patch("atexit.register", _unchanged):
        exec(compile(path.read_text(encoding="utf-8"), f"<{file}>", "exec"), module.__dict__)
    return module


def colossalai_mesh() -> type:
    """ColossalAI 0.5's own ``ProcessGroupMesh``."""
    module = load("colossalai-0.5.0/colossalai/cluster/process_group_mesh.py")
    mesh: type = module.ProcessGroupMesh
    return mesh


class Tree(dict[str, Any]):
    """As much of ``treelib.Tree`` as physicsnemo uses: nodes by their identifiers."""

    contains = dict.__contains__
    get_node = dict.get

    def create_node(self, tag: str, identifier: str, data: Any, parent: Any = None) -> None:
        self[identifier] = SimpleNamespace(
            identifier=identifier,
            data=data,
            parent=parent,
            is_leaf=lambda: not self.children(identifier),
        )

    def children(self, name: str) -> list[Any]:
        return [node for node in self.values() if node.parent == name]

    def leaves(self) -> list[Any]:
        return [node for node in self.values() if node.is_leaf()]


def physicsnemo() -> ModuleType:
    """physicsnemo 1.3's own ``DistributedManager``, ``ProcessGroupConfig`` and their errors."""
    folder = "nvidia-physicsnemo-1.3.0/physicsnemo/distributed"
    config = load(f"{folder}/config.py", treelib=SimpleNamespace(Tree=Tree))
    version_check = SimpleNamespace(
        check_min_version=lambda *_: None,
        require_version=lambda *_: _unchanged,
    )
    stand_ins = {
        "physicsnemo.distributed.config": config,
        "physicsnemo.utils.version_check": version_check,
    }
    return load(f"{folder}/manager.py", **stand_ins)


def _unchanged(function: Any) -> Any:
    return function
