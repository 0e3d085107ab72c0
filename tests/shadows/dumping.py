"""All that a caller can see of a ``parallel_state`` module on one rank, as plain data."""

from __future__ import annotations

import inspect
import os
import sys
import typing
from types import ModuleType
from typing import Any

import torch.distributed.distributed_c10d as c10d

from tests.parity.recording import Recorder

Dump = dict[str, Any]
# No caller misses what stock imports from Python's library, from these, and four names of Megatron.
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "einops"}
OF_MEGATRON = (
    *("GlobalMemoryBuffer", "GlobalSymmetricMemoryBuffer"),
    *("SymmetricMemoryManager", "is_torch_min_version"),
)


def surface(module: ModuleType) -> Dump:
    """Public functions and classes with their signatures, and public constants."""
    shown: Dump = {}
    for name, value in vars(module).items():
        if name[0] == "_" or name in OF_MEGATRON or hasattr(typing, name):
            continue
        if isinstance(value, ModuleType) or type(value).__module__ in ("logging", "typing"):
            continue
        if callable(value):
            if value.__module__.partition(".")[0] not in LIBRARIES:
                shown[name] = _signature(value)
        else:
            shown[name] = f"{type(value).__name__} {value!r}".partition(" at 0x")[0]
    return shown


def _signature(value: Any) -> list[Any]:
    """Of a class, its bases and the signatures of its public methods."""
    if not inspect.isclass(value):
        return [type(value).__name__, _parameters(value)]
    members = {}
    for name, member in vars(value).items():
        if inspect.isfunction(member) and (name[0] != "_" or name == "__init__"):
            members[name] = _parameters(member)
        elif name[0] != "_":
            members[name] = type(member).__name__
    return [[base.__name__ for base in value.__mro__], members]


def _parameters(function: Any) -> list[str]:
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        shown.append(f"{parameter.kind} {parameter.name}={type(default).__name__} {default!r}")
    return shown


def dump_rank(module: ModuleType, arguments: dict[str, Any], recorder: Recorder) -> Dump:
    """Initialise on this rank of a pretended world, and dump all that a caller can see."""
    dump = surface(module)
    names = {*vars(module), "__warningregistry__"}
    environment = dict(os.environ)
    try:
        result = module.initialize_model_parallel(**arguments)
    except Exception as error:
        return {**dump, "refused": type(error).__name__, "error": str(error)}
    dump["result"] = recorder.show(result, "result")
    dump["environment"] = sorted(set(environment.items()) ^ set(os.environ.items()))
    for name, answer in recorder.ask_all().items():
        is_raised = isinstance(answer, dict) and "raises" in answer
        dump[name] = f"raises {answer['raises'][0]}" if is_raised else answer
    for name in vars(module).keys() - names:
        dump[name] = recorder.show(getattr(module, name), name)
    dump["groups"] = sorted(repr(with_torchs_defaults(request)) for request in recorder.created)
    for name, request in recorder.details.items():
        dump[f"group of {name}"] = with_torchs_defaults(request)
    return dump


def with_torchs_defaults(request: Any) -> Any:
    """What torch was asked for, by description, ranks, backend and timeout: None is a default."""
    if isinstance(request, str):
        return request
    description, ranks, backend, timeout, *more = request
    if timeout == "None":
        timeout = str(c10d.default_pg_timeout)
    return [description, list(ranks), backend or "fake", timeout, *more]
