"""Backends free the device memory of live groups for a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid import of_torch
from hypergrid.groups.creation import devices_of
from hypergrid.messages import in_words

_WITHOUT_DEVICE_MEMORY = {"gloo", "fake"}
_NO_COMMUNICATOR = "not initialized"  # NCCL's is created on first use, and torch says so before


@dataclass(frozen=True)
class Suspended:
    """Result of ``suspend`` for the groups of one backend on this rank.

    Attributes
    ----------
    how : str
        ``"native"``: the backend freed their device memory. ``"keep"``: they have none, and work
        as before.
    communicators : int
        The number of these groups; a native one that was never used has no memory and does not
        count.
    freed : int, optional
        Bytes of device memory that the backend says it freed; None if it does not say.
    """

    how: str
    communicators: int
    freed: int | None = None


class Suspension:
    """The groups of one pool on this rank while they are suspended, and what ``wake`` has to do."""

    def __init__(self) -> None:
        self.report: dict[str, Suspended] = {}
        # Groups and their backends, in the order in which they were suspended.
        self._sleeping: list[tuple[ProcessGroup, Any]] = []

    def start(self, label_of: Mapping[ProcessGroup, str]) -> None:
        """Suspend groups, given with their labels; fill the report.

        RuntimeError at the first group that cannot be suspended: ``wake`` wakes the others.
        """
        # The same order on all ranks, since NCCL's members wait for each other.
        for kind, groups_of_kind in groupby(sorted(label_of, key=_kind), _kind):
            groups = list(groups_of_kind)
            if any(_parts_with_memory(group) for group in groups):
                self.report[kind] = self._suspend(groups, kind, label_of)
            else:
                self.report[kind] = Suspended("keep", len(groups), 0)

    def _suspend(
        self, groups: Sequence[ProcessGroup], kind: str, label_of: Mapping[ProcessGroup, str]
    ) -> Suspended:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # NCCL's communicators must be idle
        communicators = 0
        freed: int | None = 0
        for group in groups:
            for backend in _parts_with_memory(group):
                size = _suspendable_bytes(backend)
                try:
                    backend.suspend()
                except (RuntimeError, AttributeError) as error:  # torch 2.11 has no such method
                    if _NO_COMMUNICATOR in str(error):
                        continue
                    raise RuntimeError(
                        f"rank {dist.get_rank()} could not suspend {label_of[group]} with {kind}: "
                        f"{in_words(error)} No group stays suspended. To free what groups hold, "
                        f"destroy them, and initialise again when they are needed."
                    ) from error
                self._sleeping.append((group, backend))
                communicators += 1
                if size is None or freed is None:
                    freed = None  # one of them does not say
                else:
                    freed += size
        return Suspended("native", communicators, freed)

    def wake(self, groups: Sequence[ProcessGroup]) -> None:
        """Let the backends of ``groups`` resume, in the order of suspension."""
        for sleeping in [*self._sleeping]:
            group, backend = sleeping
            if any(group is other for other in groups):
                backend.resume()
                self._sleeping.remove(sleeping)


def _kind(group: ProcessGroup) -> str:
    """Such as "nccl", or "gloo+nccl" for a group with both."""
    names = devices_of(of_torch.backend_of(group)).values()
    return "+".join(sorted({*names}))


def _parts_with_memory(group: ProcessGroup) -> list[Any]:
    """The backends of ``group`` that hold device memory."""
    devices_without = set()
    for device, name in devices_of(of_torch.backend_of(group)).items():
        if name in _WITHOUT_DEVICE_MEMORY:
            devices_without.add(device)
    return of_torch.parts_of(group, devices_without)


def _suspendable_bytes(backend: Any) -> int | None:
    try:
        stats: dict[str, int] = backend.memory_stats()
    except (RuntimeError, AttributeError):
        return None
    return stats.get("suspend")
