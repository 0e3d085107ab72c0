"""Reads the modules of Megatron that hypergrid replaces, without importing them.

A version number does not say which names and arguments they have: branches and pre-releases carry
the number of a release whose file they do not have.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compat.megatron.installed import MODULES, text_of

_GLOBAL = re.compile(r"^[ \t]+global ([\w, \t]+)", re.M)
_WRAPPERS = ("staticmethod", "classmethod", "property")
# Their results are a file's own, and no other code asks for them.
_ASIDE = ("TypeVar", "ParamSpec", "getLogger")
UNREADABLE = object()  # in place of a default that is no constant, or is not there


@dataclass(frozen=True)
class Definition:
    """A function, method, class or value that a module defines, also under an ``if``."""

    name: str  # of a method or field with its class, such as "RankGenerator.get_ranks"
    # "function", "class", "value", "aside": a value that no other code misses, such as _log; or
    # "loaded", whatever it is, where the module was loaded
    kind: str
    text: str  # such as "get_all_ranks(order=None)", "class RankGenerator", "HAVE_EINOPS = True"
    defaults: dict[str, Any] = field(default_factory=dict)  # of each argument


@dataclass(frozen=True, eq=False)
class Source:
    """The definitions of ``parallel_state.py`` and ``hyper_comm_grid.py``."""

    path: Path
    definitions: dict[str, list[Definition]]  # of "parallel_state" and "hyper_comm_grid"
    functions: dict[str, dict[str, Any]]  # of parallel_state.py; of each argument the default
    # All of these: functions, globals, arguments, "function.argument", "HyperCommGrid.method".
    names: frozenset[str]
    words: frozenset[str]  # of the text of parallel_state.py


def read(core: Path) -> Source:
    """Read the definitions of a folder ``megatron/core``; a file that is missing has none."""
    with _collector_paused():
        definitions = {name: defined(core / f"{name}.py") for name in MODULES}
    state = definitions["parallel_state"]
    functions = {}
    names = {definition.name for definition in definitions["hyper_comm_grid"]}
    for definition in state:
        names.add(definition.name)
        if definition.kind == "function" and "." not in definition.name:
            functions[definition.name] = definition.defaults
            for argument in definition.defaults:
                names |= {argument, f"{definition.name}.{argument}"}
    return Source(
        path=core / "parallel_state.py",
        definitions=definitions,
        functions=functions,
        names=frozenset(names),
        words=frozenset(re.findall(r"\w+", text_of(core / "parallel_state.py"))),
    )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A tree of thousands of nodes would start a full collection over all that torch has loaded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def defined(path: Path) -> list[Definition]:
    """The definitions of a module, in its order: of classes also the methods and fields.

    SyntaxError, which names it, for a file that is not Python.
    """
    text = text_of(path)
    tree = ast.parse(text, str(path))
    declared = set(re.findall(r"\w+", " ".join(_GLOBAL.findall(text))))
    definitions = []
    for definition in _defined_by(tree):
        if definition.kind == "aside" and definition.name in declared:
            definition = replace(definition, kind="value")
        definitions.append(definition)
    # A global may be set in functions alone.
    for name in sorted(declared - {definition.name for definition in definitions}):
        definitions.append(Definition(name, "value", name))
    return definitions


def _defined_by(parent: ast.AST, prefix: str = "") -> Iterator[Definition]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            wrapper = ""
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Name) and decorator.id in _WRAPPERS:
                    wrapper += f"@{decorator.id} "
            yield _function(prefix + node.name, wrapper, node.args)
        elif isinstance(node, ast.ClassDef):
            name = prefix + node.name
            yield Definition(name, "class", f"class {name}")
            yield from _defined_by(node, f"{name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            value = ""
            if isinstance(node.value, ast.Constant):
                value = f" = {ast.unparse(node.value)}"
            for target in ast.walk(node):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    name = prefix + target.id
                    kind = "aside" if _is_aside(target.id, node.value) else "value"
                    yield Definition(name, kind, name + value)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield Definition("import *", "value", "import *")  # its names are not known
        elif isinstance(node, ast.If) and _never_holds(node.test):
            for alternative in node.orelse:
                yield from _defined_by(ast.Module([alternative], []), prefix)
        else:
            yield from _defined_by(node, prefix)  # under if, try, with, and in loops


def _is_aside(name: str, value: ast.expr | None) -> bool:
    """Whether no other code misses this value: it is a constant of the file's own, or a logger."""
    if name.startswith("__"):
        return True
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in _ASIDE
    # A private None is a place for a value of later.
    is_constant = isinstance(value, ast.Constant) and value.value is not None
    return is_constant and name.startswith("_")


def _never_holds(test: ast.expr) -> bool:
    """Whether the test of an ``if`` is False while the program runs."""
    if isinstance(test, ast.Constant):
        return not test.value
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _function(name: str, wrapper: str, written: ast.arguments) -> Definition:
    by_place = [*written.posonlyargs, *written.args]
    no_defaults = [None] * (len(by_place) - len(written.defaults))
    values = map(_constant, [*no_defaults, *written.defaults, *written.kw_defaults])
    names = [argument.arg for argument in (*by_place, *written.kwonlyargs)]
    for node in ast.walk(written):
        if isinstance(node, ast.arg):
            node.annotation = None
    text = f"{wrapper}{name}({ast.unparse(written)})"
    return Definition(name, "function", text, dict(zip(names, values, strict=True)))


def _constant(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    return UNREADABLE
