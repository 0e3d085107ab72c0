"""The forerunners' own classes, loaded from their source as the oracle of the comparisons.

``scripts/fetch_forerunners`` puts the source under ``.cache``. A file is run as a private module:
its package, and what that depends on, is neither imported nor needed.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.support import ROOT

CACHE = ROOT / ".cache"


def load(file: str) -> ModuleType:
    """A fresh module of ``file``, such as ``colossalai-0.5.0/colossalai/cluster/x.py``.

    Skips the test, and says how to have it, where the source was not fetched.
    """
    path = CACHE / file
    if not path.is_file():
        pytest.skip(f"{file} is not under .cache: run scripts/fetch_forerunners")
    module = ModuleType(f"forerunner_{path.stem}")
    exec(compile(path.read_text(encoding="utf-8"), f"<{file}>", "exec"), module.__dict__)
    return module


def colossalai_mesh() -> type:
    """ColossalAI 0.5's own ``ProcessGroupMesh``."""
    module = load("colossalai-0.5.0/colossalai/cluster/process_group_mesh.py")
    mesh: type = module.ProcessGroupMesh
    return mesh
