"""Every getter and setter of the module, each written out: a plain function over globals.

``groups``, ``numbers``, ``stages`` and ``setters`` have the functions; some releases have those of
``remat`` instead. How they work: the same
function runs over several namespaces, which are dicts with upstream's private globals.
``bind_getters_to(names)`` makes functions of the same code whose globals are ``names``; they call
each other by the names that are there:

    names = {"_TENSOR_MODEL_PARALLEL_GROUP": group, "_MPU_TENSOR_MODEL_PARALLEL_RANK": None}
    bind_getters_to(names)
    names["get_tensor_model_parallel_group"]()       # group
    names["_MPU_TENSOR_MODEL_PARALLEL_RANK"] = 3     # as outside code writes it
    names["get_tensor_model_parallel_rank"]()        # 3

The globals of ``compat.parallel_state`` are such a namespace: there are the values of the current
state, and outside code reads, writes and replaces there what it likes, as on stock. A state that is
not current has a namespace of its own, bound when it is first asked. Nobody calls a function where
it is written: there are no values. All are *local*: no communication.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from compat.megatron.getters import groups, numbers, remat, setters, stages
from compat.megatron.releases import RELEASE_HAS, as_released, drop_absent

SETTERS = ("set_", "_set_", "destroy_")  # so begin the names of functions that change something
FUNCTIONS: dict[str, FunctionType] = {}  # as they are written
_WRITTEN: dict[str, Any] = {}  # they, and the modules and constants that they use
answering: dict[str, FunctionType] = {}  # the functions over the values of the current state


def bind_getters_to(names: dict[str, Any]) -> dict[str, FunctionType]:
    """Put the functions into ``names``, which become their globals; and give them by name."""
    functions = {}
    for name, written in FUNCTIONS.items():
        plain: Any = inspect.unwrap(written)
        function = FunctionType(plain.__code__, names, name, plain.__defaults__)
        for attribute in ("__annotations__", "__doc__", "__qualname__"):
            setattr(function, attribute, getattr(plain, attribute))
        # Where the release has other arguments, a wrapper is around the function that is written.
        functions[name] = function if plain is written else as_released(function)
    # The modules that the functions use are among their globals too. What ``names`` has stays.
    names.update({**_WRITTEN, **names, **functions})
    return functions


def answer_from(names: dict[str, Any]) -> None:
    """Let the functions answer from ``names``, where the values of the current state are."""
    answering.update(bind_getters_to(names))


_modules = [groups, numbers, stages, setters]
if RELEASE_HAS["gtp_remat"]:
    _modules.append(remat)
for _module in _modules:
    drop_absent(vars(_module))
    for _name, _value in vars(_module).items():
        if _name.startswith("__"):
            continue
        _WRITTEN[_name] = _value
        if isinstance(_value, FunctionType) and _value.__module__ == _module.__name__:
            FUNCTIONS[_name] = _value
