"""Whose groups an object was built with: the collection it was given, or the current state."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from compat.audit.getters import FIELDS
from compat.state import GROUP_SLOTS, ParallelState, all_states, current

_COLLECTIONS = "process_groups_config"  # where every release's classes of collections are
UNKNOWN = object()


@dataclass(frozen=True, eq=False)
class Owner:
    """The groups that one object was built with."""

    state: ParallelState | None  # whose groups they are, if a state has them
    collections: tuple[Any, ...] = ()
    was_given: bool = False  # by its constructor's arguments, not by the state that was current

    def group(self, slot: str) -> Any:
        """The group that the owner has for a private global; ``UNKNOWN`` if that is not said."""
        field = FIELDS.get(slot, "")
        for collection in self.collections:
            # A release's collection lacks newer fields, and a program fills those that it needs.
            group = getattr(collection, field, None)
            if group is not None:
                return group
        if self.state is not None and self.state.request is not None:
            return getattr(self.state, slot)
        return UNKNOWN


_owner_of_module: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by identity: it may not hash yet
_build = torch.nn.Module.__init__  # as it is without the audit


def watch() -> None:
    """Note from now on with which groups modules are built."""
    global _build
    build = torch.nn.Module.__init__
    _build = build

    def noting(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        _note(self, sys._getframe(1))

    torch.nn.Module.__init__ = noting  # type: ignore[method-assign]


def unwatch() -> None:
    """Undo ``watch``."""
    torch.nn.Module.__init__ = _build  # type: ignore[method-assign]


def _note(module: torch.nn.Module, frame: FrameType | None) -> None:
    """Note the owner of a module, which is built in ``frame`` and perhaps in its callers.

    The groups are those in the arguments and variables of its constructors. Without any the owner
    is that of the module that is being built around it, and else the current state.
    """
    holders = []
    while frame is not None and _object_of(frame) is module:
        holders += _holders_in(frame.f_locals.values())
        frame = frame.f_back
    owner = _owner_of(holders)
    if owner is None:
        for caller in _callers(frame):
            if isinstance(caller, torch.nn.Module) and caller in _owner_of_module:
                owner = _owner_of_module[caller]
                break
    _owner_of_module[module] = owner or Owner(current())


def owner_of(reader: Any) -> Owner | None:
    """The owner of an object that reads a global; None if the object holds no groups."""
    if isinstance(reader, torch.nn.Module) and reader in _owner_of_module:
        return _owner_of_module[reader]
    # Torch's objects hold groups for others.
    if type(reader).__module__.partition(".")[0] in ("torch", "builtins"):
        return None
    attributes = getattr(reader, "__dict__", None)
    if not isinstance(attributes, dict):
        return None
    return _owner_of(_holders_in(attributes.values()))


def _owner_of(holders: list[Any]) -> Owner | None:
    """The one owner of groups and collections; None if there are none, or of several states."""
    collections = []
    groups = []
    for holder in holders:
        if _is_collection(holder):
            collections.append(holder)
            groups += _holders_in(vars(holder).values())
        else:
            groups.append(holder)
    ids = {id(group) for group in groups}
    states = []
    for state in all_states():
        if any(id(getattr(state, slot)) in ids for slot in GROUP_SLOTS):
            states.append(state)
    if len(states) > 1 or not groups:
        return None
    # Groups that a program made by hand are of no state.
    owning_state = next(iter(states), None)
    return Owner(owning_state, tuple(collections), was_given=True)


def _holders_in(values: Iterable[Any]) -> list[Any]:
    """The groups and the collections of groups among ``values``."""
    holders = []
    for value in [*values]:  # a copy: another thread may set an attribute meanwhile
        if isinstance(value, ProcessGroup) or _is_collection(value):
            holders.append(value)
    return holders


def _is_collection(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.endswith(_COLLECTIONS) and hasattr(value, "__dict__")


def _object_of(frame: FrameType) -> Any:
    """The object whose method a frame runs."""
    code = frame.f_code
    if code.co_argcount and code.co_varnames[0] == "self":
        return frame.f_locals.get("self")
    return None


def reader_of(frame: FrameType) -> tuple[Any, Owner]:
    """The object that reads in ``frame``, the innermost that has groups, and their owner."""
    for caller in _callers(frame):
        owner = owner_of(caller)
        if owner is not None:
            return caller, owner
    return None, Owner(None)


def _callers(frame: FrameType | None) -> Iterator[Any]:
    """The objects whose methods are running, the innermost first."""
    while frame is not None:
        caller = _object_of(frame)
        if caller is not None:
            yield caller
        frame = frame.f_back
