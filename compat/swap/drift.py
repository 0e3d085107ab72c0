"""What Megatron's own modules have and the modules of hypergrid that replace them lack.

The swap, the shadow run, ``hypergrid doctor``, ``hypergrid parity`` and ``release_diff`` ask here.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from compat.megatron import releases
from compat.megatron.sources import Definition, Unreadable, imported_source
from compat.swap import REPLACEMENTS

_EMPTY = inspect.Parameter.empty
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def refuse_drift(module: str, ours: Mapping[str, Any]) -> None:
    """Refuse to replace a module of Megatron from which ours differs: RuntimeError.

    A warning where a release was asked for.
    """
    text = drift(module, ours)
    if text and os.environ.get(releases.ASKED):
        warnings.warn(f"{text} {releases.ASKED} asks for this.", stacklevel=2)
    elif text:
        number = ".".join(map(str, releases.RELEASE))
        raise RuntimeError(
            f"{text} Use a hypergrid that knows this megatron; or, if your code uses none of that, "
            f"set {releases.ASKED}={number}."
        )


def drift(module: str, ours: Mapping[str, Any] | None = None) -> str:
    """The differences of one of ``REPLACEMENTS`` in a sentence, or "".

    ``ours`` are the names of the module that replaces it.
    """
    source = releases.SOURCE or imported_source()
    if source is None:
        return ""
    if ours is None:
        ours = vars(import_module(REPLACEMENTS[module]))
    short = module.rpartition(".")[2]
    definitions = source.definitions if short == "parallel_state" else source.grid
    found = differences(definitions, ours)
    if not found:
        return ""
    return (
        f"megatron's own {short} differs from hypergrid's, which follows megatron-core "
        f"{releases.in_words()}: {'; '.join(found)}; read in {source.path.with_name(short)}.py."
    )


def differences(definitions: Sequence[Definition], ours: Mapping[str, Any]) -> list[str]:
    """What a module defines for other code, and the module with the names ``ours`` does not.

    Functions, classes, methods and constants that are public, and private globals; of functions
    and methods each argument, its kind, position and default.
    """
    values: dict[str, list[Any]] = {}
    found: dict[str, None] = {}  # each once, in order
    for row in definitions:
        if not _is_for_others(row):
            continue
        owner, _, name = row.name.rpartition(".")
        if owner and owner not in ours:  # the class is named already
            continue
        holder = ours if not owner else _attributes(ours.get(owner))
        called = f"{row.name}()" if row.arguments or row.kind == "function" else row.name
        if name not in holder:
            found[f"{called} is unknown"] = None
        elif row.kind in ("value", "field"):
            values.setdefault(row.name, []).append(row.value)
        elif row.kind == "class":
            if not inspect.isclass(holder[name]):
                found[f"{row.name} is a class"] = None
        else:
            found.update(dict.fromkeys(_of_function(row, holder[name])))
    for name, written in values.items():
        plain = [value for value in written if not isinstance(value, Unreadable)]
        # A private global has another value as soon as it is used.
        compared = len(plain) == len(written) and name in ours and not name.startswith("_")
        if compared and not any(_is_same(value, ours[name]) for value in plain):
            found[f"{name} is {plain[-1]!r}, not {ours[name]!r}"] = None
    return list(found)


def _is_for_others(row: Definition) -> bool:
    """Whether code outside of the module may use it."""
    owner, _, name = row.name.rpartition(".")
    if owner:
        is_special = name.startswith("__") and name.endswith("__")
        return not owner.startswith("_") and (is_special or not name.startswith("_"))
    if row.kind == "value":
        return not name.startswith("__")
    return not name.startswith("_") or name.startswith("__")


def _attributes(owner: Any) -> dict[str, Any]:
    """What a class has, its own and inherited, as it was written."""
    attributes: dict[str, Any] = {}
    for base in reversed(getattr(owner, "__mro__", ())):
        if base is not object:
            attributes.update(vars(base))
            attributes.update(dict.fromkeys(vars(base).get("__annotations__", {})))
    return attributes


def _of_function(row: Definition, function: Any) -> Iterator[str]:
    """The differences of one function or method."""
    kind = type(function).__name__
    if kind not in ("property", "staticmethod", "classmethod"):
        kind = "function"
    if kind != row.kind or not (callable(function) or kind == "property"):
        yield f"{row.name} is a {row.kind}, not a {kind}"
        return
    if kind == "property":
        return
    taken = inspect.signature(getattr(function, "__func__", function)).parameters
    kinds = {argument.kind for argument in taken.values()}
    named = {argument.name for argument in row.arguments}
    for argument in row.arguments:
        text = f"{row.name}({argument.name}=)"
        if argument.kind in _ANY_NUMBER:
            if argument.kind not in kinds:
                yield f"{text} takes any number of arguments"
            continue
        known = taken.get(argument.name)
        if known is None:
            yield f"{text} is unknown"
            continue
        if argument.kind != known.kind:
            yield f"{text} is {argument.kind.description}, not {known.kind.description}"
        if not _is_same(argument.default, known.default):
            yield f"{text} has {_in_words(argument.default)}, not {_in_words(known.default)}"
    by_place = [argument.name for argument in row.arguments if argument.kind in _BY_PLACE]
    known_by_place = [name for name, argument in taken.items() if argument.kind in _BY_PLACE]
    shared = [name for name in by_place if name in taken]
    if known_by_place[: len(shared)] != shared:
        yield f"{row.name}() takes {', '.join(by_place)}, not {', '.join(known_by_place)}"
    for name, known in taken.items():
        if name not in named and known.default is _EMPTY and known.kind not in _ANY_NUMBER:
            yield f"{row.name}() does not take {name}, which hypergrid's needs"


def _is_same(one: Any, other: Any) -> bool:
    if one is _EMPTY or other is _EMPTY or isinstance(one, Unreadable):
        return one is other
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _in_words(default: Any) -> str:
    if default is _EMPTY:
        return "no default"
    text = default.text if isinstance(default, Unreadable) else repr(default)
    return f"the default {text}"
