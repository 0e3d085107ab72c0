"""Reads the modules of Megatron that hypergrid replaces, without importing them.

A version number does not say which names and arguments they have: branches and pre-releases carry
the number of a release whose file they do not have.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple

# A function's head and its body: all lines that follow and are indented deeper, empty or comments.
_FUNCTION = re.compile(
    r"^([ \t]*)((?:async )?def \w+\(.*?\)(?:\s*->[^\n]*?)?:[ \t]*(?:#[^\n]*)?)\n"
    r"(?:\1[ \t]+[^\n]*\n|[ \t]*(?:#[^\n]*)?\n)*",
    re.M | re.S,
)
_GLOBAL = re.compile(r"^[ \t]+global ([\w, \t]+)", re.M)
_VERSION = re.compile(r"^(MAJOR|MINOR)\s*=\s*(\d{1,9})", re.M)
_CONSTANTS = (str, int, float, bool, type(None))
_BLOCKS = ("body", "orelse", "handlers", "finalbody")  # of if, try, with and loops


@dataclass(frozen=True)
class Unreadable:
    """The text of a default, or of a value, that is no constant."""

    text: str = ""


class Argument(NamedTuple):
    """An argument of a function; ``default`` is ``Parameter.empty`` if it has none."""

    name: str
    kind: Any  # of inspect.Parameter
    default: Any


class Definition(NamedTuple):
    """A function, method, class or value that a module defines, also under an ``if``."""

    name: str  # of a method or field with its class, such as "RankGenerator.get_ranks"
    kind: str  # "function", "staticmethod", "classmethod", "property", "class", "field" or "value"
    arguments: tuple[Argument, ...] = ()
    value: Any = Unreadable()


@dataclass(frozen=True, eq=False)
class Source:
    """What ``parallel_state.py`` and the files beside it define, and their version."""

    path: Path
    version: str  # such as "0.19"; empty where nothing says it
    definitions: list[Definition]  # of parallel_state.py
    grid: list[Definition]  # of hyper_comm_grid.py
    arguments: dict[str, list[str]]  # of each function of parallel_state.py, in order
    defaults: dict[str, dict[str, Any]]  # of each function the defaults that are constants
    # All of these: functions, globals, arguments, "function.argument", "HyperCommGrid.method".
    names: frozenset[str]


def imported_source() -> Source | None:
    """The source that ``import megatron.core.parallel_state`` would load; None without Megatron."""
    core = _package("megatron.core", _package("megatron"))
    return read(Path(core[0])) if core else None


def read(core: Path) -> Source:
    """What the modules in a folder ``megatron/core`` define; a file that is missing has nothing."""
    state, grid = (defined(core / name) for name in ("parallel_state.py", "hyper_comm_grid.py"))
    numbers = dict(_VERSION.findall(_text(core / "package_info.py")))
    version = ".".join(numbers[part] for part in ("MAJOR", "MINOR") if part in numbers)
    arguments = {}
    defaults = {}
    for row in state:
        if row.kind == "function" and "." not in row.name:
            arguments[row.name] = [argument.name for argument in row.arguments]
            defaults[row.name] = {
                argument.name: argument.default
                for argument in row.arguments
                if isinstance(argument.default, _CONSTANTS)
            }
    names = {row.name for row in state} | {row.name for row in grid if "." in row.name}
    for function, taken in arguments.items():
        names |= {*taken, *(f"{function}.{name}" for name in taken)}
    return Source(
        path=core / "parallel_state.py",
        version=version,
        definitions=state,
        grid=grid,
        arguments=arguments,
        defaults=defaults,
        names=frozenset(names),
    )


def defined(path: Path) -> list[Definition]:
    """What a module defines, in its order: of classes also the methods and fields.

    RuntimeError for a file that is not Python.
    """
    text = _text(path)
    try:
        # Without the bodies of functions: the tree of the whole file costs ten times as much.
        tree = ast.parse(_FUNCTION.sub(r"\1\2\n\1 ...\n", text))
    except SyntaxError:
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise RuntimeError(f"{path} cannot be read as Python: {error}.") from None
    definitions = list(_defined_by(tree.body, ""))
    known = {row.name for row in definitions}
    for names in _GLOBAL.findall(text):
        for name in re.findall(r"\w+", names):
            if name not in known:
                known.add(name)
                definitions.append(Definition(name, "value"))
    return definitions


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def _defined_by(statements: Sequence[ast.AST], prefix: str) -> Iterator[Definition]:
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            kinds = decorators & {"staticmethod", "classmethod", "property"}
            kind = next(iter(kinds), "function")
            # The setter of a property has its name and other arguments.
            if not any(decorator.endswith(".setter") for decorator in decorators):
                yield Definition(prefix + node.name, kind, tuple(_arguments(node.args)))
        elif isinstance(node, ast.ClassDef):
            yield Definition(prefix + node.name, "class")
            yield from _defined_by(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            kind = "field" if prefix and isinstance(node, ast.AnnAssign) else "value"
            for target in targets:
                names = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                value = _constant(node.value) if names == [target] else Unreadable()
                for name in names:
                    if isinstance(name, ast.Name):
                        yield Definition(prefix + name.id, kind, value=value)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield Definition(f"{prefix}import *", "value")  # whose names are not known
        for block in _BLOCKS:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _defined_by(getattr(node, block, ()), prefix)


def _arguments(written: ast.arguments) -> Iterator[Argument]:
    plain = [*written.posonlyargs, *written.args]
    defaults = [None] * (len(plain) - len(written.defaults)) + [*written.defaults]
    for number, (argument, default) in enumerate(zip(plain, defaults, strict=True)):
        only = number < len(written.posonlyargs)
        kind = Parameter.POSITIONAL_ONLY if only else Parameter.POSITIONAL_OR_KEYWORD
        yield Argument(argument.arg, kind, _default(default))
    if written.vararg:
        yield Argument(written.vararg.arg, Parameter.VAR_POSITIONAL, Parameter.empty)
    for argument, default in zip(written.kwonlyargs, written.kw_defaults, strict=True):
        yield Argument(argument.arg, Parameter.KEYWORD_ONLY, _default(default))
    if written.kwarg:
        yield Argument(written.kwarg.arg, Parameter.VAR_KEYWORD, Parameter.empty)


def _default(node: ast.expr | None) -> Any:
    return Parameter.empty if node is None else _constant(node)


def _constant(node: ast.expr | None) -> Any:
    """The value of a literal, or else its text."""
    if node is None:
        return Unreadable()
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return Unreadable(ast.unparse(node))


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
