"""Transformer Engine's own Python classes without its compiled extension and without a GPU.

Only for a process of its own: it puts stand-ins in the place of the extension, of triton and onnx,
and lets torch say that there is a GPU. Modules can then be built and given groups, and the
reduction of maxima runs; no multiplication and no attention does.
"""

from __future__ import annotations

import enum
import functools
import os
import re
import sys
import types
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from tests.support import ROOT

SOURCE = ROOT / ".cache" / "transformer-engine-2.20.2"
STOOD_IN = ("transformer_engine_torch", "triton", "onnx", "onnxscript")
ENVIRONMENT = {
    "NVTE_PROJECT_BUILDING": "1",  # looks for no libraries
    "NVTE_UNFUSED_FP8_UPDATE": "1",  # scales are worked out in Python
    "NVTE_TORCH_COMPILE": "0",
    "TORCHDYNAMO_DISABLE": "1",
}


class _Blank:
    """Whatever is asked of it; as a decorator it changes nothing."""

    def __init__(self, *_, **__): ...

    def __call__(self, *arguments, **named):
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key):
        return self


class _StandIn(ModuleType):
    __path__ = ()
    __version__ = "3.5.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        members = _members(name)
        if name[0].isupper() and members:
            value = enum.IntEnum(name, members, start=0)
        else:
            value = type(name, (_Blank,), {}) if name[0].isupper() else _Blank()
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in STOOD_IN:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module): ...


def _members(name: str) -> list[str]:
    """The members of an enumeration of the extension that Transformer Engine's source names."""
    mirrored = re.findall(rf"int\(tex\.{name}\.(\w+)\)", _text())
    return sorted(set(mirrored or re.findall(rf"\b{name}\.([A-Za-z]\w+)", _text())))


@functools.cache
def _text() -> str:
    files = (SOURCE / "transformer_engine" / "pytorch").rglob("*.py")
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def create_groups(grid: Any) -> None:
    """The groups of a grid that ``compat.transformer_engine`` asks for. *Collective*."""
    without_dp = ["tp"], ["a2a"], ["p2p"], ["cp", "a2a", "p2p"], ["tp", "cp", "a2a", "p2p"]
    for names in (*without_dp, ["tp", "cp", "a2a", "p2p", "dp"]):
        dims = [dim for dim in grid.layout.dims if dim in names]
        if dims and "-".join(reversed(dims)) not in grid.groups:
            grid.create_pg(dims)
    if "expert" in grid.views:
        grid.create_pg("tp", view="expert")


def stand_in() -> None:
    """Answer `import transformer_engine.pytorch` of a page with whatever is asked of it."""
    import torch

    package = mock.MagicMock()
    modules = {"transformer_engine": package, "transformer_engine.pytorch": package.pytorch}
    sys.modules.update(modules)
    torch.cuda.Stream = lambda: None  # type: ignore[assignment, misc]  # there is no GPU


def load() -> ModuleType:
    """``transformer_engine.pytorch``, its real source."""
    os.environ.update(ENVIRONMENT)
    import torch
    import torch._dynamo  # which looks at triton itself

    hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="none")
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: hopper,
        "is_current_stream_capturing": lambda: False,
        "Stream": lambda *_: mock.sentinel.stream,
    }.items():
        setattr(torch.cuda, name, value)
    sys.path.insert(0, str(SOURCE))
    sys.meta_path.insert(0, _Finder())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.common

        transformer_engine.common.load_framework_extension = lambda _: None
        import transformer_engine.pytorch
    from transformer_engine.pytorch.quantization import RecipeState

    RecipeState.create = staticmethod(functools.partial(RecipeState.create, device="cpu"))
    pytorch: types.ModuleType = transformer_engine.pytorch
    return pytorch
