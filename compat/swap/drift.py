"""What Megatron's own modules have and the modules of hypergrid that replace them lack.

The swap, the shadow run, ``hypergrid doctor``, ``hypergrid parity`` and ``release_diff`` ask here.
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
    short = module.rpartition(".")[2]
    ours = vars(import_module(REPLACEMENTS[module]))
    found = differences(source.definitions[short], ours)
    if not found:
        return
    text = (
        f"megatron's own {short} differs from hypergrid's, which follows megatron-core "
        f"{releases.in_words()}: {'; '.join(found)}; read in {source.path.with_name(short)}.py."
    )
    if os.environ.get(releases.ASKED):
        warnings.warn(f"{text} {releases.ASKED} asks for this.", stacklevel=2)
        return
    number = ".".join(map(str, releases.RELEASE))
    raise RuntimeError(
        f"{text} Use a hypergrid that knows this megatron; or, if your code uses none of that, set "
        f"{releases.ASKED}={number}."
    )


def differences(definitions: Sequence[Definition], ours: Mapping[str, Any]) -> list[str]:
    """What a module defines for other code, and the module with the names ``ours`` does not.

    Functions, classes, methods and constants that are public, and private globals; of functions
    and methods each argument, its kind, position and default.
    """
    found: dict[str, None] = {}  # each once, in order
    for row in definitions:
        owner, _, name = row.name.rpartition(".")
        is_private = re.search(r"\b_(?!_)", row.name) is not None
        if is_private and (owner or row.kind != "value"):
            continue
        if not owner:
            value = ours.get(name, _MISSING)
        elif owner in ours:
            value = inspect.getattr_static(ours[owner], name, _MISSING)
        else:
            continue  # the class is named already
        if value is _MISSING:
            found[f"{row.text} is unknown"] = None
            continue
        texts = [row.text]
        if row.kind == "value":
            # Under an `if` there may be several. One that cannot be read is not compared.
            texts = [other.text for other in definitions if other.name == row.name]
        # A private global has another value as soon as it is used.
        is_open = is_private or row.name in texts
        text = _text(row, value)
        if not is_open and text not in texts:
            found[f"{row.text} is {text} in hypergrid's"] = None
    return list(found)


def _text(row: Definition, value: Any) -> str:
    """What hypergrid has under the name of ``row``, as ``Definition.text`` describes it."""
    function = getattr(value, "__func__", getattr(value, "fget", value))
    if row.kind == "class" and inspect.isclass(value):
        return f"class {row.name}"
    if row.kind != "function" or not callable(function):
        return f"{row.name} = {value!r}"
    signature = inspect.signature(function)
    parameters: list[inspect.Parameter] = []
    for argument in reversed([*signature.parameters.values()]):
        # An optional argument of hypergrid alone harms no call, unless others come after it.
        is_more = argument.name not in row.defaults and argument.default is not argument.empty
        if not is_more or any(after.kind == after.POSITIONAL_OR_KEYWORD for after in parameters):
            parameters.insert(0, argument.replace(annotation=argument.empty))
    signature = signature.replace(parameters=parameters, return_annotation=signature.empty)
    wrapper = "" if value is function else f"@{type(value).__name__} "
    return f"{wrapper}{row.name}{signature}"
