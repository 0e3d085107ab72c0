"""Reads Megatron's own ``parallel_state.py`` without importing it: its names and arguments.

A version number does not say that: branches and pre-releases carry the number of a release whose
file they do not have.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

# Read by these, and only signatures as a syntax tree: the tree of the whole file costs ten times
# as much.
_HEAD = re.compile(r"^def (\w+)\(.*?\)(?:\s*->[^\n]*?)?:[ \t]*(?:#[^\n]*)?$", re.M | re.S)
_ASSIGNED = re.compile(r"^(_[A-Za-z]\w*)[ \t]*(?::[^=\n]+)?=(?!=)|^[ \t]+global (_\w+)", re.M)
_METHOD = re.compile(r"^    def (\w+)", re.M)
_VERSION = re.compile(r"^(MAJOR|MINOR)\s*=\s*(\d{1,9})", re.M)


@dataclass(frozen=True, eq=False)
class Source:
    """Names in a ``parallel_state.py`` and in ``HyperCommGrid`` beside it, and its version."""

    path: Path
    version: str  # such as "0.19"; empty where nothing says it
    arguments: dict[str, list[str]]  # of each function, in order
    private: frozenset[str]  # globals
    # All of these: functions, globals, arguments, "function.argument", "HyperCommGrid.method".
    names: frozenset[str]


def imported_source() -> Source | None:
    """The source that ``import megatron.core.parallel_state`` would load; None without Megatron."""
    core = _package("megatron.core", _package("megatron"))
    return read(Path(core[0])) if core else None


def read(core: Path) -> Source:
    """The names in a folder ``megatron/core``; a file that is not there has none."""
    files = [core / name for name in ("parallel_state.py", "hyper_comm_grid.py", "package_info.py")]
    text, grid, info = (f.read_text(errors="replace") if f.is_file() else "" for f in files)
    heads = ast.parse("\n".join(f"{match[0]} ..." for match in _HEAD.finditer(text)))
    numbers = dict(_VERSION.findall(info))
    arguments = {
        node.name: [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
        for node in heads.body
        if isinstance(node, ast.FunctionDef)
    }
    private = frozenset(one or other for one, other in _ASSIGNED.findall(text))
    names = {*arguments, *private, *(f"HyperCommGrid.{name}" for name in _METHOD.findall(grid))}
    for function, taken in arguments.items():
        names |= {*taken, *(f"{function}.{name}" for name in taken)}
    version = ".".join(numbers[part] for part in ("MAJOR", "MINOR") if part in numbers)
    return Source(files[0], version, arguments, private, frozenset(names))


def _package(name: str, inside: list[str] | None = None) -> list[str]:
    """Where the modules of a package are; empty if it cannot be found. Nothing is imported."""
    if inside == []:
        return []
    loaded = getattr(sys.modules.get(name), "__path__", None)
    if loaded is not None:
        return [*loaded]
    for finder in sys.meta_path:
        spec = finder.find_spec(name, inside) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return [*(spec.submodule_search_locations or ())]
    return []
