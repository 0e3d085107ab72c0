"""Placeholders for the groups of a suspended ParallelState."""

from __future__ import annotations

from typing import Any


class SuspendedGroup:
    """In place of a group that ``ParallelState.suspend`` closed; raises on use."""

    __slots__ = ("_label",)

    def __init__(self, label: str) -> None:
        self._label = label

    def __repr__(self) -> str:
        return f"<{self._label}, suspended: call resume() on its ParallelState and get it again>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"{self._label} was used while it is suspended: call resume() on its ParallelState on "
            f"all ranks, and get the group again."
        )


def is_suspended(value: Any) -> bool:
    """Whether a private global holds a placeholder, alone, in a list or in a dict."""
    values = value.values() if isinstance(value, dict) else value
    values = values if isinstance(value, dict | list) else [value]
    return any(isinstance(each, SuspendedGroup) for each in values)


def exchanged(value: Any, others: dict[Any, Any]) -> Any:
    """The value of a private global, with each group in ``others`` exchanged for what is there."""
    if isinstance(value, dict):
        return {key: others.get(each, each) for key, each in value.items()}
    if isinstance(value, list):
        return [others.get(each, each) for each in value]
    return others.get(value, value)
