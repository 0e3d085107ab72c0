"""What Megatron's own modules have and the modules of hypergrid that replace them lack.

The swap, the shadow run and ``hypergrid doctor`` ask here.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import typing
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from compat.megatron import installed, releases, sources
from compat.megatron.sources import Definition
from compat.swap import REPLACEMENTS

_MISSING = object()
# What upstream's module imports for itself and ours does not, as docs/differences.md says.
_IMPORTED = {
    "GlobalMemoryBuffer",
    "GlobalSymmetricMemoryBuffer",
    "SymmetricMemoryManager",
    "is_torch_min_version",
}
# The packages whose functions, classes and objects are nobody's interface of Megatron.
_OF_OTHERS = {"torch", "numpy", "einops", "logging", "typing", "types"}
_OF_PYTHON = {*sys.stdlib_module_names} - {"builtins"}  # the functions and classes, not objects


def refuse_drift(module: str) -> list[str]:
    """Refuse to replace one of ``REPLACEMENTS`` from which ours differs: RuntimeError.

    A warning where a release was asked for. Returns the names that ours lacks and that no other
    code misses, such as ``_log``.
    """
    core = installed.imported_core()
    if core is None:
        return []
    is_followed = not os.environ.get(releases.ASKED)
    if is_followed and installed.checksum(core) in releases.CHECKSUMS:
        return []  # ours has all that these files have: the tests compare them
    source = releases.SOURCE or sources.read(core)
    name = module.rpartition(".")[2]
    definitions = source.definitions[name]
    replacement = vars(import_module(REPLACEMENTS[module]))
    asides = [row.name for row in definitions if row.kind == "aside"]
    not_taken_over = [aside for aside in dict.fromkeys(asides) if aside not in replacement]
    lacking = differences(definitions, replacement)
    if lacking:
        number = ".".join(map(str, releases.RELEASE))
        text = (
            f"megatron's own {name} differs from hypergrid's, which follows megatron-core "
            f"{number}: {'; '.join(lacking)}; read in "
            f"{source.path.with_name(f'{name}.py')}."
        )
        if is_followed:
            raise RuntimeError(
                f"{text} Use a hypergrid that knows this megatron; or, if your code uses none of "
                f"that, set {releases.ASKED}={number}."
            )
        warnings.warn(f"{text} {releases.ASKED} asks for this.", stacklevel=2)
    return not_taken_over


def differences(definitions: Sequence[Definition], replacement: Mapping[str, Any]) -> list[str]:
    """Definitions of a module for other code that its ``replacement`` does not have.

    Functions, classes, methods and constants that are public, and private globals; of functions
    and methods each argument, its kind, position and default.
    """
    sentences: list[str] = []
    for row in definitions:
        owner, _, name = row.name.rpartition(".")
        is_private = re.search(r"\b_(?!_)", row.name) is not None
        if row.kind == "aside" or (is_private and (owner or row.kind != "value")):
            continue
        if owner and owner not in replacement:
            continue  # the class is named already
        if owner:
            value = inspect.getattr_static(replacement[owner], name, _MISSING)
        else:
            value = replacement.get(name, _MISSING)
        if value is _MISSING:
            sentences.append(f"{row.text} is unknown")
            continue
        texts = [row.text]
        if row.kind == "value":
            # There may be several under an `if`.
            texts = [definition.text for definition in definitions if definition.name == row.name]
        # A value that cannot be read is the name alone. A private global changes when it is used.
        if is_private or row.name in texts:
            continue
        known_arguments: Iterable[str] | None = row.defaults
        if row.kind == "loaded":
            known_arguments = None
        text = described(row.name, value, known_arguments)
        if text not in texts:
            sentences.append(f"{row.text} is {text} in hypergrid's")
    # In order, and a repeated one once.
    return list(dict.fromkeys(sentences))


def described(name: str, value: Any, known_arguments: Iterable[str] | None = None) -> str:
    """A function, class or value under a name, as ``Definition.text`` describes it.

    Without optional arguments that are not in ``known_arguments``, if these are given: an argument
    that only hypergrid has harms no call.
    """
    if inspect.isclass(value):
        text = f"class {name}"
        bases = [base.__name__ for base in value.__mro__[1:-1]]
        if bases:
            text += f"({', '.join(bases)})"
        return text
    # The function in a static or class method, or in a property.
    function = getattr(value, "__func__", getattr(value, "fget", value))
    if not callable(function):
        return f"{name} = {value!r}"
    wrapper = ""
    if not isinstance(value, FunctionType):
        wrapper = f"@{type(value).__name__} "
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function without one
        return f"{wrapper}{name}"
    parameters = []
    for argument in signature.parameters.values():
        is_required = argument.default is argument.empty
        if is_required or known_arguments is None or argument.name in known_arguments:
            without_hint = argument.replace(annotation=argument.empty)
            parameters.append(without_hint)
    shown = signature.replace(parameters=parameters, return_annotation=signature.empty)
    return f"{wrapper}{name}{shown}"


def loaded_definitions(names: Mapping[str, Any]) -> list[Definition]:
    """The definitions of a module of Megatron that was loaded, by its real names.

    Its text does not tell what a loop, a decorator or ``globals()`` has made of them.
    """
    offered = {}
    for name, value in names.items():
        if not _is_offered(name, value):
            continue
        offered[name] = value
        if not inspect.isclass(value):
            continue
        for member, part in vars(value).items():
            if member == "__init__" or not member.startswith("_"):
                offered[f"{name}.{member}"] = part
    return [Definition(name, "loaded", described(name, value)) for name, value in offered.items()]


def _is_offered(name: str, value: Any) -> bool:
    """Whether other code may look for this name: a function, a class or a constant of Megatron."""
    # TYPE_CHECKING is a plain False.
    if name.startswith("_") or name in _IMPORTED or hasattr(typing, name):
        return False
    if isinstance(value, ModuleType):
        return False
    home: Any = type(value)
    others = _OF_OTHERS
    if inspect.isroutine(value) or inspect.isclass(value):
        home = value
        others = _OF_OTHERS | _OF_PYTHON
    return str(getattr(home, "__module__", "")).partition(".")[0] not in others
