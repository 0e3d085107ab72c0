"""Stock Megatron modules, loaded from their own source as the oracle of the parity tests.

A release's ``parallel_state.py`` is compiled from its genuine text and run as a private module
object. Whatever it imports from Megatron is answered by small stand-ins, through an ``__import__``
of its own: nothing stays in ``sys.modules``, the package's heavy ``__init__`` never runs, and two
loads share no state.
"""

from __future__ import annotations

import builtins
import functools
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from compat.megatron.releases import ASKED, PUBLISHED
from tests.support import ROOT

RELEASES = (*PUBLISHED, "main", "dev")  # and branches of Megatron-LM, where .cache has them
MAIN = ("0.16.1", PUBLISHED[-1])  # those that train, and that every kind of test runs with
# For tests that take long: MAIN; `scripts/test --long` runs the others.
EACH_RELEASE = [
    release if release in MAIN else pytest.param(release, marks=pytest.mark.long)
    for release in RELEASES
]
# For tests that take longest: the newest of MAIN, and the other with `scripts/test --long`.
NEWEST = [pytest.param(MAIN[0], marks=pytest.mark.long), MAIN[1]]

Edit = Callable[[str], str]


class GlobalMemoryBuffer:
    """Stands in for the class of the same name: an object to create, hand out and forget."""

    def __init__(self) -> None:
        self.buffer: dict[Any, Any] = {}


class GlobalSymmetricMemoryBuffer(GlobalMemoryBuffer):
    """Stands in for the class of the same name."""

    def __init__(self, size_in_mb: int, process_group: Any) -> None:
        super().__init__()
        self.size_in_mb = size_in_mb
        self.process_group = process_group


class SymmetricMemoryManager:
    """Stands in for the class of the same name; counts its destructions."""

    destroyed = 0

    @classmethod
    def destroy(cls, key: str | None = None) -> None:
        cls.destroyed += 1


@functools.cache
def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether torch is at least `version`."""
    current = torch.torch_version.TorchVersion(torch.__version__)
    return current >= version if check_equality else current > version


_STAND_INS: dict[str, dict[str, Any]] = {
    ".utils": {
        "GlobalMemoryBuffer": GlobalMemoryBuffer,
        "GlobalSymmetricMemoryBuffer": GlobalSymmetricMemoryBuffer,
        "is_torch_min_version": is_torch_min_version,
    },
    "megatron.core.inference.symmetric_memory": {"SymmetricMemoryManager": SymmetricMemoryManager},
}


def _import(
    name: str,
    globals: Any = None,
    locals: Any = None,
    fromlist: Any = (),
    level: int = 0,
) -> Any:
    full = "." * level + name
    if full in _STAND_INS:
        module = ModuleType(full)
        module.__dict__.update(_STAND_INS[full])
        return module
    if level or name.partition(".")[0] == "megatron":
        raise ImportError(f"{full} has no stand-in in {__name__}")
    return builtins.__import__(name, globals, locals, fromlist, level)


def source_dir(release: str) -> Path:
    """The folder holding `release`'s ``parallel_state.py``.

    The unpacked copy under ``.cache`` comes first, then the installed package when it has exactly
    this version.

    Raises
    ------
    FileNotFoundError
        when neither is there; the message names the command that fetches the source.
    """
    cached = ROOT / ".cache" / f"megatron-core-{release}" / "megatron" / "core"
    if (cached / "parallel_state.py").is_file():
        return cached
    try:
        if importlib.metadata.version("megatron-core") == release:
            spec = importlib.util.find_spec("megatron")
            for base in (spec.submodule_search_locations or []) if spec else []:
                if (Path(base) / "core" / "parallel_state.py").is_file():
                    return Path(base) / "core"
    except importlib.metadata.PackageNotFoundError:
        pass
    raise FileNotFoundError(
        f"megatron-core {release} is neither under .cache nor installed: "
        f"run scripts/fetch_megatron {release}"
    )


def following(release: str) -> dict[str, str]:
    """The environment of a process in which `release` would be imported, and ours follows it."""
    return {"PYTHONPATH": f"{source_dir(release).parents[1]}{os.pathsep}{ROOT}", ASKED: ""}


def have_stock(release: str) -> bool:
    """Whether `load_stock(release)` can work here (for skipping tests)."""
    try:
        source_dir(release)
    except FileNotFoundError:
        return False
    return True


@functools.cache
def source(release: str, file: str = "parallel_state.py") -> str:
    """The text of one of `release`'s source files."""
    return (source_dir(release) / file).read_text(encoding="utf-8")


@functools.lru_cache(maxsize=64)
def _compiled(text: str, filename: str) -> CodeType:
    return compile(text, filename, "exec")


def _load(release: str, file: str, edit: Edit | None) -> ModuleType:
    text = source(release, file)
    if edit is not None:
        text = edit(text)
    name = f"stock_{release.replace('.', '_')}_{file.removesuffix('.py')}"
    module = ModuleType(name)
    quiet = {"__import__": _import, "print": lambda *_: None}  # it prints advice about SHARP
    module.__dict__["__builtins__"] = {**vars(builtins), **quiet}
    with warnings.catch_warnings(), mock.patch.dict(sys.modules, {name: module}):
        warnings.simplefilter("ignore")
        exec(_compiled(text, f"<megatron-core {release} {file}>"), module.__dict__)
    return module


def load_stock(release: str, edit: Edit | None = None) -> ModuleType:
    """A fresh ``parallel_state`` module of stock `release`.

    Parameters
    ----------
    release : str
        such as ``"0.16.1"``.
    edit : callable, optional
        turns the source's text into another; for mutants that a test has to notice.
    """
    return _load(release, "parallel_state.py", edit)


def load_stock_grid(release: str, edit: Edit | None = None) -> ModuleType:
    """A fresh ``hyper_comm_grid`` module of stock `release`; parameters as `load_stock`."""
    return _load(release, "hyper_comm_grid.py", edit)
