"""Whose groups an object was built with: the collection it was given, or the current state."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from compat.audit.getters import field_of
from compat.state import GROUP_SLOTS, ParallelState, all_states, current

_COLLECTIONS = "process_groups_config"  # where every release's classes of collections are
UNKNOWN = object()


@dataclass(frozen=True, eq=False)
class Owner:
    """The groups that one object was built with."""

    state: ParallelState | None  # whose groups they are, if a state has them
    collections: tuple[Any, ...] = ()
    was_given: bool = False  # by its constructor's arguments, not by the state that was current

    @property
    def name(self) -> str:
        """For messages."""
        if self.state is not None:
            return f"{self.state.name or 'a state without groups'!r}"
        return "a collection that is of no state"

    def group(self, slot: str) -> Any:
        """The group that the owner has for a private global; ``UNKNOWN`` if that is not said."""
        name = field_of(slot)
        for each in self.collections:
            given = getattr(each, name, None) if name else None
            if given is not None:
                return given
        if self.state is not None and self.state.request is not None:
            return getattr(self.state, slot)
        return UNKNOWN


_built: WeakIdKeyDictionary = WeakIdKeyDictionary()  # module -> Owner; modules may not hash yet
_found: dict[int, tuple[ref[ParallelState], str]] = {}  # by id(group): it may be gone
_build = torch.nn.Module.__init__  # as it is without the audit


def watch() -> None:
    """Note from now on with which groups modules are built."""
    global _build
    _build = build = torch.nn.Module.__init__

    def noting(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        _note(self, sys._getframe(1))

    torch.nn.Module.__init__ = noting  # type: ignore[method-assign]


def unwatch() -> None:
    """Undo ``watch``."""
    torch.nn.Module.__init__ = _build  # type: ignore[method-assign]
    _found.clear()


def _note(self: torch.nn.Module, frame: FrameType | None) -> None:
    found: list[Any] = []
    while frame is not None and _first(frame) is self:
        found += _groups_in(frame.f_locals.values())
        frame = frame.f_back
    owner = _owner_of(found)
    if owner is None:  # nothing was given: as the module that is being built around it
        around = (_built.get(each) for each, _ in _walk(frame) if isinstance(each, torch.nn.Module))
        owner = next((each for each in around if each is not None), None)
    _built[self] = owner or Owner(current())


def owner_of(candidate: Any) -> Owner | None:
    """The owner of an object that reads a global; None if the object holds no groups."""
    if isinstance(candidate, torch.nn.Module) and candidate in _built:
        return _built[candidate]
    if type(candidate).__module__.partition(".")[0] in ("torch", "builtins", "_pytest"):
        return None
    if _is_collection(candidate):
        return _owner_of([candidate])
    held = getattr(candidate, "__dict__", None)
    return _owner_of(_groups_in(held.values())) if isinstance(held, dict) else None


def _owner_of(found: list[Any]) -> Owner | None:
    """The one owner of these groups; None if there are none, or of several states."""
    if not found:
        return None
    collections = tuple(each for each in found if _is_collection(each))
    loose = [each for each in found if not _is_collection(each)]
    groups = [*loose, *(g for each in collections for g in _groups_in(vars(each).values()))]
    states = {id(state): state for state in map(state_of, groups) if state is not None}
    if len(states) > 1 or not groups:
        return None
    return Owner(next(iter(states.values()), None), collections, was_given=True)


def state_of(group: Any) -> ParallelState | None:
    """The state that has a group."""
    reference, slot = _found.get(id(group), (lambda: None, ""))
    known = reference()
    if known is not None and getattr(known, slot) is group:
        return known
    for state in all_states():
        for slot in GROUP_SLOTS:
            if getattr(state, slot) is group:
                _found[id(group)] = ref(state), slot
                return state
    return None


def _groups_in(values: Any) -> list[Any]:
    return [each for each in [*values] if isinstance(each, ProcessGroup) or _is_collection(each)]


def _is_collection(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.endswith(_COLLECTIONS) and hasattr(value, "__dict__")


def _first(frame: FrameType) -> Any:
    """The object whose method a frame runs."""
    code = frame.f_code
    if code.co_argcount and code.co_varnames[0] == "self":
        return frame.f_locals.get("self")
    return None


@dataclass(slots=True)
class Place:
    """Where in the job a read is."""

    phase: str  # "construction", "forward" or ""
    outermost: str  # the class of the outermost module, or ""
    reader: Any  # the innermost object that has groups
    owner: Owner | None


def look_around(frame: FrameType) -> Place:
    """The place of a read: the callers are searched, from the innermost."""
    place = Place("", "", None, None)
    last = None
    for candidate, name in _walk(frame):
        if isinstance(candidate, torch.nn.Module):
            place.outermost = type(candidate).__name__
            if not place.phase:
                if name == "__init__":
                    place.phase = "construction"
                elif name in ("_call_impl", "forward"):
                    place.phase = "forward"
        if place.owner is None and candidate is not last:
            place.owner = owner_of(candidate)
            if place.owner is not None:
                place.reader = candidate
        last = candidate
    return place


def _walk(frame: FrameType | None) -> Iterator[tuple[Any, str]]:
    while frame is not None:
        candidate = _first(frame)
        if candidate is not None:
            yield candidate, frame.f_code.co_name
        frame = frame.f_back
