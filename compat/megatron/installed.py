"""Megatron-core as it would be imported: its folder, version and files. Nothing is imported."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

MODULES = ("parallel_state", "hyper_comm_grid")  # that hypergrid replaces
_VERSION = re.compile(r"^(MAJOR|MINOR)\s*=\s*(\d{1,9})", re.M)


def imported_core() -> Path | None:
    """The folder that ``import megatron.core`` would load; None without Megatron."""
    folders = _package("megatron.core", _package("megatron"))
    if not folders:
        return None
    return Path(folders[0])


def checksum(core: Path) -> str:
    """Of the modules of a folder ``megatron/core`` that hypergrid replaces."""
    digest = hashlib.sha256()
    for name in MODULES:
        file = core / f"{name}.py"
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def version_of(core: Path) -> str:
    """Such as "0.19"; empty where nothing says it."""
    numbers = dict(_VERSION.findall(text_of(core / "package_info.py")))
    return ".".join(numbers[part] for part in ("MAJOR", "MINOR") if part in numbers)


def text_of(path: Path) -> str:
    """The text of a file; empty without one."""
    if not path.is_file():
        return ""
    return path.read_text(errors="replace")


def _package(name: str, inside: list[str] | None = None) -> list[str]:
    """Where the modules of a package are; empty if it cannot be found. Nothing is imported."""
    if inside == []:
        return []
    loaded = getattr(sys.modules.get(name), "__path__", None)
    if loaded is not None:
        return [*loaded]
    for finder in sys.meta_path:
        if not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, inside)
        if spec is not None:
            return [*(spec.submodule_search_locations or ())]
    return []
