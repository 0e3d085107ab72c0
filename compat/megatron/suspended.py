"""What stands where the groups of a suspended ParallelState were."""

from __future__ import annotations

from typing import Any


class SuspendedGroup:
    """Stands where a group was that ``ParallelState.suspend`` gave back."""

    __slots__ = ("_label",)

    def __init__(self, label: str) -> None:
        self._label = label

    def __repr__(self) -> str:
        return f"<{self._label}, suspended: call resume() on its ParallelState and fetch it anew>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"{self._label} was used while it is suspended: call resume() on its ParallelState on "
            f"all ranks, and fetch the group anew."
        )


def is_suspended(value: Any) -> bool:
    """Whether a private global holds such a group, alone or among others."""
    values = value.values() if isinstance(value, dict) else value
    values = values if isinstance(value, dict | list) else [value]
    return any(isinstance(each, SuspendedGroup) for each in values)


def exchanged(value: Any, stand_ins: dict[Any, Any]) -> Any:
    """What a private global holds, with ``stand_ins`` in the place of their groups."""
    if isinstance(value, dict):
        return {key: stand_ins.get(each, each) for key, each in value.items()}
    if isinstance(value, list):
        return [stand_ins.get(each, each) for each in value]
    return stand_ins.get(value, value)
