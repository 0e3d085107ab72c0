"""What Megatron's own modules have and the modules of hypergrid that replace them lack.

The swap, the shadow run, ``hypergrid doctor`` and ``release_diff`` ask here.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from compat.megatron import releases
from compat.megatron.sources import Definition, imported_source
from compat.swap import REPLACEMENTS

_log = logging.getLogger("hypergrid.swap")
_MISSING = object()
# What upstream's module imports for itself and ours does not, as docs/differences.md says.
_IMPORTED = {
    *("GlobalMemoryBuffer", "GlobalSymmetricMemoryBuffer", "SymmetricMemoryManager"),
    "is_torch_min_version",
}
# The packages whose functions and objects are nobody's interface of Megatron.
_OF_OTHERS = {*sys.stdlib_module_names, "torch", "numpy", "einops"}


def refuse_drift(module: str) -> None:
    """Refuse to replace one of ``REPLACEMENTS`` from which ours differs: RuntimeError.

    A warning where a release was asked for.
    """
    source = releases.SOURCE or imported_source()
    if source is None:
        return
    name = module.rpartition(".")[2]
    replacement = vars(import_module(REPLACEMENTS[module]))
    aside = not_taken_over(module)
    if aside:
        _log.info("%s of megatron's own %s are not taken over", ", ".join(aside), name)
    lacking = differences(source.definitions[name], replacement)
    if not lacking:
        return
    text = (
        f"megatron's own {name} differs from hypergrid's, which follows megatron-core "
        f"{releases.in_words()}: {'; '.join(lacking)}; read in {source.path.with_name(name)}.py."
    )
    if os.environ.get(releases.ASKED):
        warnings.warn(f"{text} {releases.ASKED} asks for this.", stacklevel=2)
        return
    number = ".".join(map(str, releases.RELEASE))
    raise RuntimeError(
        f"{text} Use a hypergrid that knows this megatron; or, if your code uses none of that, set "
        f"{releases.ASKED}={number}."
    )


def not_taken_over(module: str) -> list[str]:
    """Names of one of ``REPLACEMENTS`` that ours lacks and no other code misses, such as _log."""
    source = releases.SOURCE or imported_source()
    if source is None:
        return []
    replacement = vars(import_module(REPLACEMENTS[module]))
    definitions = source.definitions[module.rpartition(".")[2]]
    asides = [row.name for row in definitions if row.kind == "aside"]
    return [name for name in dict.fromkeys(asides) if name not in replacement]


def differences(definitions: Sequence[Definition], replacement: Mapping[str, Any]) -> list[str]:
    """Definitions of a module for other code that its ``replacement`` does not have.

    Functions, classes, methods and constants that are public, and private globals; of functions
    and methods each argument, its kind, position and default.
    """
    sentences: dict[str, None] = {}  # in order, and a repeated one once
    for row in definitions:
        owner, _, name = row.name.rpartition(".")
        is_private = re.search(r"\b_(?!_)", row.name) is not None
        if row.kind == "aside" or (is_private and (owner or row.kind != "value")):
            continue
        if not owner:
            value = replacement.get(name, _MISSING)
            # Ours answers no name: it only says which are similar.
            if name == "__getattr__":
                value = _MISSING
        elif owner in replacement:
            value = inspect.getattr_static(replacement[owner], name, _MISSING)
        else:
            continue  # the class is named already
        if value is _MISSING:
            sentences[f"{row.text} is unknown"] = None
            continue
        # A private global has another value as soon as it is used.
        if is_private:
            continue
        texts = [row.text]
        if row.kind == "value":
            # There may be several under an `if`. A value that cannot be read is the name alone.
            texts = [definition.text for definition in definitions if definition.name == row.name]
            if row.name in texts:
                continue
        text = _text(row, value)
        if text not in texts:
            sentences[f"{row.text} is {text} in hypergrid's"] = None
    return list(sentences)


def _text(row: Definition, value: Any) -> str:
    """Hypergrid's definition under the name of ``row``, as ``Definition.text`` describes it."""
    # The function in a static or class method, or in a property.
    function = getattr(value, "__func__", getattr(value, "fget", value))
    if row.kind == "class" and inspect.isclass(value):
        return f"class {row.name}"
    if row.kind != "function" or not callable(function):
        return f"{row.name} = {value!r}"
    signature = inspect.signature(function)
    parameters: list[inspect.Parameter] = []
    has_later = False  # whether an argument that is kept may be passed by position
    for argument in reversed([*signature.parameters.values()]):
        # An optional argument of hypergrid alone harms no call, unless others come after it.
        is_optional = argument.default is not argument.empty
        if argument.name not in row.defaults and is_optional and not has_later:
            continue
        parameters.insert(0, argument.replace(annotation=argument.empty))
        has_later = has_later or argument.kind == argument.POSITIONAL_OR_KEYWORD
    signature = signature.replace(parameters=parameters, return_annotation=signature.empty)
    text = f"{row.name}{signature}"
    if value is not function:
        text = f"@{type(value).__name__} {text}"
    return text


def differences_of_loaded(
    loaded: Mapping[str, Any], replacement: Mapping[str, Any], functions: Iterable[str]
) -> Iterator[str]:
    """Compare a module of Megatron that was loaded, by its real names, with its ``replacement``.

    Its text does not tell what a loop, a decorator or ``globals()`` has made of them. ``functions``
    are those of the replacement that are upstream's.
    """
    for name, value in loaded.items():
        ours = replacement.get(name, _MISSING)
        if not _is_offered(name, value):
            continue
        if ours is _MISSING:
            if not name.startswith("_"):
                yield f"{name} is unknown"
            continue
        loaded_shape = _shape(value)
        our_shape = _shape(ours, of=value)
        if loaded_shape != our_shape:
            yield f"{name} is {_words(loaded_shape)} with stock, and {_words(our_shape)} in ours"
    for name in functions:
        if name not in loaded:
            yield f"stock has no {name}, and hypergrid has"


def _is_offered(name: str, value: Any) -> bool:
    """Whether other code may look for this name: a function, a class or a constant of Megatron."""
    if name.startswith("__") or name in _IMPORTED or isinstance(value, ModuleType):
        return False
    if hasattr(typing, name):  # TYPE_CHECKING is a plain False
        return False
    if inspect.isclass(value) or callable(value):
        return str(getattr(value, "__module__", "")).partition(".")[0] not in _OF_OTHERS
    # Private values are compared after the initialisation, under their names.
    is_plain = type(value).__module__ == "builtins"
    is_of_others = type(value).__module__.partition(".")[0] in _OF_OTHERS
    return not name.startswith("_") and (is_plain or not is_of_others)


def _shape(value: Any, of: Any = None) -> Any:
    """The shape of a function, class or constant for callers; of a class what ``of`` has too."""
    if inspect.isclass(value):
        members = vars(of if inspect.isclass(of) else value)
        shapes: dict[str, Any] = {"bases": [base.__name__ for base in value.__mro__[1:]]}
        for name in members:
            if name == "__init__" or not name.startswith("_"):
                shapes[name] = _shape(inspect.getattr_static(value, name, None))
        return shapes
    function: Any = getattr(value, "__func__", getattr(value, "fget", value))
    if not callable(function):
        return type(value).__name__, repr(value)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function without one
        return type(value).__name__, ""
    shown = [(p.name, p.kind.description, type(p.default), repr(p.default)) for p in parameters]
    return type(value).__name__, shown


def _words(shape: Any) -> str:
    if isinstance(shape, dict):
        members = [f"{name}: {_words(part)}" for name, part in shape.items() if name != "bases"]
        return f"class of {', '.join(shape['bases'])} with {'; '.join(members)}"
    kind, shown = shape
    if isinstance(shown, str):
        return f"{kind} {shown}"
    texts = []
    for name, _, default_type, default in shown:
        has_default = default_type is not type
        texts.append(f"{name}={default}" if has_default else name)
    return f"{kind}({', '.join(texts)})"
