"""All that a caller can see of a ``parallel_state`` module on one rank, as plain data."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import sys
import typing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from hypergrid.groups import creation
from tests.parity.recording import _ProcessGroupNCCL, options_content

Dump = dict[str, Any]
GETTERS = ("get_", "is_", "has_", "model_parallel_is_")
# Values to try for a parameter of a getter; for any other, the two flags.
VALUES: dict[str, tuple[Any, ...]] = {"vp_stage": (None, 0, 1), "group_size": (None, 1, 2, 4)}
PLAIN = (type(None), bool, int, float, str)


class Creation(NamedTuple):
    """What torch was asked for when it created a group."""

    backend: str
    timeout: str
    options: Any


@contextmanager
def pretended_backends(creations: dict[int, Creation]) -> Iterator[None]:
    """Create each group with the backend fake, and keep what was asked for by the group's id."""
    create = c10d._new_process_group_helper
    set_timeout = c10d._set_pg_timeout
    copy_options = creation.copied_options
    signature = inspect.signature(create)
    # In a fake world hypergrid asks torch for the backend fake by itself.
    asked_of_hypergrid: list[str | None] = []

    def copied_options(options: dict[str, Any]) -> dict[str, Any]:
        asked_of_hypergrid[:] = [options.get("backend")]
        return copy_options(options)

    def helper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        asked = bound.arguments
        shown = options_content(asked.get("backend_options"))
        backend = str(asked["backend"])
        if asked_of_hypergrid:
            backend = asked_of_hypergrid.pop() or backend
        request = Creation(backend, str(asked.get("timeout")), shown)
        asked.update(backend=c10d.Backend("fake"), backend_options=None)
        made = create(*bound.args, **bound.kwargs)
        creations[id(made[0])] = request
        return made

    def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        creations[id(group)] = creations[id(group)]._replace(timeout=str(timeout))

    c10d._new_process_group_helper = helper
    c10d._set_pg_timeout = set_pg_timeout
    creation.copied_options = copied_options
    dist.ProcessGroupNCCL = _ProcessGroupNCCL  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        c10d._new_process_group_helper = create
        c10d._set_pg_timeout = set_timeout
        creation.copied_options = copy_options


class Viewer:
    """Shows values with their types, and each group by the first place that showed it."""

    def __init__(self, creations: dict[int, Creation]) -> None:
        self.creations = creations
        self.first_places: dict[int, str] = {}

    def show(self, value: Any, place: str) -> Any:
        kind = type(value)
        if kind in PLAIN or isinstance(value, timedelta):
            return f"{kind.__name__} {value!r}"
        if value is dist.GroupMember.NON_GROUP_MEMBER:
            return "not a member"
        if isinstance(value, dist.ProcessGroup):
            first = self.first_places.setdefault(id(value), place)
            return f"group of {first}: {self.group(value)}"
        if isinstance(value, list | tuple | set):
            return [
                kind.__name__,
                *(self.show(part, f"{place}[{i}]") for i, part in enumerate(value)),
            ]
        if isinstance(value, dict):
            shown = []
            for key, part in value.items():
                shown.append(f"{self.show(key, '')}: {self.show(part, f'{place}[{key!r}]')}")
            return [kind.__name__, *sorted(shown)]
        if inspect.isfunction(value) or inspect.isclass(value):
            return f"{kind.__name__} {value.__qualname__}"
        return kind.__name__

    def group(self, group: dist.ProcessGroup) -> str:
        if group is dist.group.WORLD:
            return "the default group"
        ranks = dist.get_process_group_ranks(group)
        request = self.creations.get(id(group)) or _live(group)
        return f"{group.group_desc} {ranks} {tuple(request)}"


def _live(group: dist.ProcessGroup) -> Creation:
    backend = group._get_backend(torch.device("cpu"))
    return Creation(dist.get_backend(group), str(backend.options._timeout), None)


def imported_names(text: str) -> set[str]:
    """Names that a module's text imports at its top."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def state_names(text: str) -> set[str]:
    """Private names that some function declares global, or that hold None or nothing at first."""
    names = set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names |= set(node.names)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in ("None", "{}", "[]"):
            names.add(ast.unparse(node.targets[0]))
    return {name for name in names if name[0] == "_" and name[:2] != "__"}


def surface(module: ModuleType, plain: str, state: set[str]) -> Dump:
    """Functions with signatures, classes with their methods, and public constants.

    Not what no caller misses: modules, loggers, variables of types, private constants, functions
    of Python's own library and of torch, and what unedited stock, whose text is ``plain``, imports
    or lacks as a private name.
    """
    ignored = imported_names(plain)
    dump: Dump = {}
    for name, value in vars(module).items():
        if name[:2] == "__" or name in ignored or isinstance(value, ModuleType):
            continue
        if name[0] == "_" and name not in state and f" {name}(" not in plain:
            continue
        if hasattr(typing, name):  # TYPE_CHECKING is a plain False
            continue
        if inspect.isclass(value) and _of(value, module):
            dump[f"class {name}"] = _class(value)
        elif callable(value) and not inspect.isclass(value) and hasattr(value, "__module__"):
            if type(value).__module__ == "typing":
                continue
            if _of(value, module):
                dump[f"function {name}"] = (type(value).__name__, _signature(value))
        elif name in state:
            dump[f"state {name}"] = True
        elif name[0] != "_" and type(value) in (*PLAIN, list, tuple, dict):
            dump[f"constant {name}"] = f"{type(value).__name__} {value!r}"
        elif name[0] != "_" and type(value).__module__.partition(".")[0] not in _INFRASTRUCTURE:
            dump[f"constant {name}"] = type(value).__name__
    return dump


_INFRASTRUCTURE = {"logging", "typing", "torch", "numpy"}


def _of(value: Any, module: ModuleType) -> bool:
    """Whether a function or class is a part of Megatron's interface, wherever it was defined."""
    top = str(value.__module__).partition(".")[0]
    return top not in sys.stdlib_module_names and top not in ("torch", "numpy", "einops")


def _class(value: type) -> Dump:
    bases = [base.__name__ for base in value.__mro__[1:]]
    members: Dump = {"bases": bases}
    for name, member in vars(value).items():
        if inspect.isfunction(member) and (name[0] != "_" or name == "__init__"):
            members[name] = _signature(member)
        elif name[0] != "_" and name != "__init__":
            members[name] = type(member).__name__
    return members


def _signature(function: Any) -> list[str]:
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        empty = default is inspect.Parameter.empty
        text = "no default" if empty else f"{type(default).__name__} {default!r}"
        shown.append(f"{parameter.kind.name} {parameter.name}: {text}")
    return shown


def calls(module: ModuleType, ignored: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each getter, with each combination of its flags."""
    for name, function in sorted(vars(module).items()):
        if name in ignored or name == "get_nccl_options" or not name.startswith(GETTERS):
            continue
        if not callable(function):
            continue
        if getattr(function, "__module__", "").partition(".")[0] in sys.stdlib_module_names:
            continue
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            continue
        absent = object()
        choices = [(absent, *VALUES.get(parameter, (False, True))) for parameter in parameters]
        for values in itertools.product(*choices):
            named = zip(parameters, values, strict=True)
            yield name, {key: value for key, value in named if value is not absent}


def dump_rank(
    module: ModuleType, arguments: dict[str, Any], texts: tuple[str, str], pretend: bool
) -> Dump:
    """Initialise on this rank of an open world, and dump all that a caller can see.

    ``texts`` are the texts of unedited and of edited stock, for what counts as a name of theirs.
    """
    warnings.simplefilter("ignore")
    plain, edited = texts
    state = state_names(plain) | state_names(edited)
    creations: dict[int, Creation] = {}
    ignored = imported_names(plain)
    dump = surface(module, plain, state)
    environment = dict(os.environ)
    with pretended_backends(creations) if pretend else _nothing():
        viewer = Viewer(creations)
        try:
            result = module.initialize_model_parallel(**arguments)
        except Exception as error:
            dump["initialisation"] = f"{type(error).__name__}"
            dump["error"] = str(error)[:300]
            return dump
        dump["initialisation"] = viewer.show(result, "the result")
        for variable in sorted(set(environment) ^ set(os.environ)):
            dump[f"environment {variable}"] = os.environ.get(variable)
        for name in sorted(state):
            if hasattr(module, name):
                value = viewer.show(getattr(module, name), name)
                if name == "_global_process_group_list" and isinstance(value, list):
                    value = sorted(value)  # the order of creation has no effect
                dump[f"global {name}"] = value
        for name, keywords in calls(module, ignored):
            text = f"{name}({keywords})"
            try:
                dump[text] = viewer.show(getattr(module, name)(**keywords), text)
            except Exception as error:
                dump[text] = f"raises {type(error).__name__}"
        groups = [group for group in c10d._world.pg_map if group is not dist.group.WORLD]
        dump["groups"] = sorted(map(viewer.group, groups))
    return dump


@contextmanager
def _nothing() -> Iterator[None]:
    yield
