"""Live groups that are suspended, and old ones that were closed for it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid import of_torch
from hypergrid.groups.backends import devices_of
from hypergrid.messages import in_words

HOW = ("auto", "native", "keep", "recreate")
_WITHOUT_DEVICE_MEMORY = {"gloo", "fake"}
_NO_COMMUNICATOR = "not initialized"  # NCCL's is created on first use, and torch says so before


@dataclass(frozen=True)
class Suspended:
    """Result of ``suspend`` for the groups of one backend on this rank.

    Attributes
    ----------
    how : str
        ``"native"``: the backend freed their device memory. ``"keep"``: they stay open.
        ``"recreate"``: they are closed, and ``resume`` creates new ones.
    communicators : int
        How many of them; a native one that was never used has no memory and does not count.
    freed : int, optional
        Bytes of device memory that the backend says it freed; None if it does not say.
    """

    how: str
    communicators: int
    freed: int | None = None


class Suspension:
    """The work of ``resume``: ``names`` has the names of all groups, in the order of creation."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.report: dict[str, Suspended] = {}
        self.suspended: list[tuple[ProcessGroup, Any]] = []  # with the backends to wake
        self.is_closed = False  # all groups are, and ``resume`` must create new ones

    def start(self, groups: Mapping[ProcessGroup, str], how: str) -> bool:
        """Keep groups, given with their labels, or let their backends suspend them.

        In the order given, since NCCL's members wait for each other. False if a backend cannot,
        and ``how`` allows to close all groups instead.
        """
        kinds: dict[str, list[ProcessGroup]] = {}
        for group in groups:
            kinds.setdefault(_kind(of_torch.backend_of(group)), []).append(group)
        for kind in sorted(kinds):
            done = self._suspend(kind, kinds[kind], groups, how)
            if done is None:
                return False
            self.report[kind] = done
        return True

    def _suspend(
        self, kind: str, members: list[ProcessGroup], labels: Mapping[ProcessGroup, str], how: str
    ) -> Suspended | None:
        backends = [(group, backend) for group in members for backend in _with_memory(group)]
        if how == "keep" or not backends:
            return Suspended("keep", len(members), None if backends else 0)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # NCCL's communicators must be idle
        freed: list[int | None] = []
        for group, backend in backends:
            try:
                size = _suspendable(backend)
                backend.suspend()
            except (RuntimeError, AttributeError) as error:  # before torch 2.12 it is no attribute
                if _NO_COMMUNICATOR in str(error):
                    continue
                if not freed and how == "auto":  # nothing of this backend has changed
                    return None
                suspended = f" {len(self.suspended)} others are suspended: call resume()."
                raise RuntimeError(
                    f"rank {dist.get_rank()} could not suspend {labels[group]} with {kind}: "
                    f"{in_words(error)}{suspended if self.suspended else ''}"
                ) from error
            self.suspended.append((group, backend))
            freed.append(size)
        known = [size for size in freed if size is not None]
        return Suspended("native", len(freed), sum(known) if len(known) == len(freed) else None)

    def close(self, groups: Iterable[ProcessGroup]) -> None:
        """The caller closes ``groups``, which are all there are."""
        kinds = Counter(_kind(of_torch.backend_of(group)) for group in groups)
        self.report = {kind: Suspended("recreate", kinds[kind]) for kind in sorted(kinds)}
        self.is_closed = True

    def wake(self) -> None:
        """Let the backends resume, in the order in which they were suspended."""
        while self.suspended:
            self.suspended[0][1].resume()
            del self.suspended[0]


def _kind(backend: str | None) -> str:
    """Such as "nccl", or "gloo+nccl" for a group with both."""
    return "+".join(sorted({*devices_of(backend).values()}))


def _with_memory(group: ProcessGroup) -> list[Any]:
    without = {
        device
        for device, name in devices_of(of_torch.backend_of(group)).items()
        if name in _WITHOUT_DEVICE_MEMORY
    }
    return of_torch.parts_of(group, without)


def _suspendable(backend: Any) -> int | None:
    try:
        stats: dict[str, int] = backend.memory_stats()
    except (RuntimeError, AttributeError):
        return None
    return stats.get("suspend")


_retired: weakref.WeakKeyDictionary[ProcessGroup, str] = weakref.WeakKeyDictionary()
_refuses = False  # whether torch asks us before a collective


def retire(groups: Mapping[ProcessGroup, str]) -> None:
    """Let collectives over closed groups, given with their labels, raise instead.

    Gloo's would continue to work over sockets that torch no longer knows. Calls with a global rank
    of the group are refused by torch, which no longer knows it.
    """
    global _refuses
    _retired.update(groups)
    if _retired and not _refuses and of_torch.has("collectives"):
        of_torch.before_collectives(_refuse_retired)
        _refuses = True


def _refuse_retired(group: ProcessGroup) -> None:
    if group in _retired:
        raise RuntimeError(
            f"rank {dist.get_rank()} used an old group: {_retired[group]}, closed by suspend(): "
            f"use the group that resume() returned under the name {group.group_name!r}."
        )
