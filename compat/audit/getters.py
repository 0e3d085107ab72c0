"""The private global behind each getter, and the argument to pass instead of calling it."""

from __future__ import annotations

import functools
import inspect

from compat.collection import SLOTS
from compat.megatron.getters import FUNCTIONS, SETTERS
from compat.megatron.table import ROWS
from compat.state import GROUP_SLOTS

# The names that are audited: what outside code calls.
_BUFFERS = ("_set_global_memory_buffer", "_set_global_symmetric_memory_buffer")
_PUBLIC = [name for name in FUNCTIONS if not name.startswith("_") and name != "missing"]
AUDITED = (*_PUBLIC, *_BUFFERS)
_SLOT_OF_RANKS = {row.ranks: row.slot for row in ROWS if row.ranks}
# By private global: the field of ProcessGroupCollection that has its group.
FIELDS = {slot: field for field, slot in SLOTS.items() if slot}
# Getters that ask whether there are groups at all are right in any state.
_STATELESS = ("is_initialized", "is_unitialized", "model_parallel_is_initialized")


@functools.cache
def slots_behind(name: str) -> tuple[str, ...]:
    """The private globals of groups that a getter answers from, or that a global's name means.

    Behind ``get_data_parallel_rank`` are those behind ``get_data_parallel_group``, which it calls.
    """
    if name in GROUP_SLOTS:
        return (name,)
    if name in _SLOT_OF_RANKS:
        return (_SLOT_OF_RANKS[name],)
    if name not in FUNCTIONS or name in _STATELESS or name.startswith(SETTERS):
        return ()
    # The getter's own globals come before those of the getters that it calls.
    code = inspect.unwrap(FUNCTIONS[name]).__code__
    used_names = sorted(code.co_names, key=FUNCTIONS.__contains__)
    slots = {}
    for used_name in used_names:
        slots.update(dict.fromkeys(slots_behind(used_name)))
    return tuple(slots)


def instead_of(name: str, slot: str | None = None) -> str:
    """Advice in words: the value to pass instead of reading ``name``."""
    slots = [slot] if slot else slots_behind(name)
    fields = [FIELDS[holder] for holder in slots if holder in FIELDS]
    if not fields:
        return "let the caller pass the value, no field of ProcessGroupCollection has it"
    method = ""
    if name.endswith("_rank"):
        method = ".rank()"
    elif name.endswith("_world_size"):
        method = ".size()"
    # More than four names advise nothing.
    choices = [f"pg_collection.{field}{method}" for field in fields[:4]]
    choice = " or ".join(choices)
    return f"pass {choice}"
