"""Runs an edited stock on pretended ranks, with a shadow run beside it or swapped."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import ROOT, warm
from tests.support.stock import ASKED, source_dir

WORLD = 4
RANKS = (0, 3)  # of these, those that are looked at
STAND_INS = {
    "__init__.py": "",
    "inference/__init__.py": "",
    "inference/symmetric_memory.py": "class SymmetricMemoryManager: pass\n",
    "utils.py": (
        "class GlobalMemoryBuffer: pass\n"
        "class GlobalSymmetricMemoryBuffer: pass\n"
        "def is_torch_min_version(version, check_equality=True): return True\n"
    ),
}


class Seen(NamedTuple):
    """What a caller sees, and what the shadow run reported, or None if it compared nothing."""

    dump: dict[str, Any]
    differences: list[str] | None


def write_tree(folder: Path, release: str, text: str) -> None:
    """A megatron-core whose ``parallel_state`` is ``text``, and which imports fast."""
    core = folder / "megatron" / "core"
    core.joinpath("inference").mkdir(parents=True)
    (folder / "megatron" / "__init__.py").touch()
    for name, stand_in in STAND_INS.items():
        (core / name).write_text(stand_in)
    for name in ("hyper_comm_grid.py", "package_info.py"):
        (core / name).write_text((source_dir(release) / name).read_text())
    (core / "parallel_state.py").write_text(text)


def run_side(
    folder: Path,
    release: str,
    arguments: dict[str, Any],
    patches: Sequence[str],
    is_swapped: bool,
) -> list[Seen]:
    """What the ranks see of the megatron-core that is in the folder."""
    words = {
        "release": release,
        "arguments": arguments,
        "patches": patches,
        "is_swapped": is_swapped,
    }
    path = f"{folder}{os.pathsep}{ROOT}"
    command = ("-m", "tests.shadows.side", json.dumps(words))
    done = warm.run(*command, cwd=folder, **{"PYTHONPATH": path, ASKED: ""})
    assert done.returncode == 0, done.stderr
    seen = []
    for rank in RANKS:
        file = folder / f"{rank}.seen"
        assert file.exists(), f"rank {rank} failed:\n{done.stderr}"
        seen.append(Seen(*pickle.loads(file.read_bytes())))
        file.unlink()
    return seen
