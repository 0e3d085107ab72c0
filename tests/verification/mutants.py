"""Faults put into megatron-core on each rank of a layout; one rank alone computes as ever."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from compat.verification import Layout
from compat.verification.gpt import small_gpt
from tests.verification import layouts

MUTANTS = yaml.safe_load(Path(__file__).with_name("mutants.yaml").read_text())


def layout_of(mutant: dict[str, str]) -> Layout:
    """The layout that shows the fault."""
    layout: Layout = eval(mutant["layout"], vars(layouts))
    return layout


def mutated(mutant: dict[str, str]) -> Callable[..., Any]:
    """A build function whose ranks have the fault."""

    def build(layout: Layout, **where: Any) -> Any:
        if layout.world_size > 1:
            _edit(mutant["place"], mutant["old"], mutant["new"])
        return small_gpt(layout, **where)

    return build


@cache
def _edit(place: str, old: str, new: str) -> None:
    """Replace a part of a function's text, for all who hold the function; once in a process."""
    module, _, path = place.partition(":")
    function = inspect.unwrap(attrgetter(path)(import_module(f"megatron.core.{module}")))
    text = inspect.getsource(function)
    if text.count(old) != 1:
        raise ValueError(f"{place} has {old!r} {text.count(old)} times")
    text = text.replace(old, new)
    if "." in path:  # a method needs a class around it, for super()
        text = f"class _:\n{text}"
    names: dict[str, Any] = {}
    exec(text, function.__globals__, names)
    definitions = vars(names["_"]) if "." in path else names
    function.__code__ = inspect.unwrap(definitions[function.__name__]).__code__
