"""What Megatron's own modules have and the modules of hypergrid that replace them lack.

The swap, the shadow run, ``hypergrid doctor`` and ``release_diff`` ask here.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from compat.megatron import releases
from compat.megatron.sources import Definition, imported_source
from compat.swap import REPLACEMENTS

_MISSING = object()


def refuse_drift(module: str) -> None:
    """Refuse to replace one of ``REPLACEMENTS`` from which ours differs: RuntimeError.

    A warning where a release was asked for.
    """
    source = releases.SOURCE or imported_source()
    if source is None:
        return
    name = module.rpartition(".")[2]
    replacement = vars(import_module(REPLACEMENTS[module]))
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


def differences(definitions: Sequence[Definition], replacement: Mapping[str, Any]) -> list[str]:
    """Definitions of a module for other code that its ``replacement`` does not have.

    Functions, classes, methods and constants that are public, and private globals; of functions
    and methods each argument, its kind, position and default.
    """
    sentences: dict[str, None] = {}  # in order, and a repeated one once
    for row in definitions:
        owner, _, name = row.name.rpartition(".")
        is_private = re.search(r"\b_(?!_)", row.name) is not None
        if is_private and (owner or row.kind != "value"):
            continue
        if not owner:
            value = replacement.get(name, _MISSING)
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
