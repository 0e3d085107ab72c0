"""Live groups that are suspended, and old ones that were closed for it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from hypergrid.groups.backends import devices_of
from hypergrid.messages import in_words

HOW = ("auto", "native", "keep", "recreate")
_WITHOUT_DEVICE_MEMORY = {"gloo", "fake"}
_NO_COMMUNICATOR = "not initialized"  # NCCL's is created on first use, and torch says so before


@dataclass(frozen=True)
class Suspended:
    """What ``suspend`` did with the groups of one backend on this rank.

    Attributes
    ----------
    how : str
        ``"native"``: the backend freed their device memory. ``"keep"``: they hold none, and stay
        open. ``"recreate"``: they are closed, and ``resume`` creates new ones.
    communicators : int
        How many of them; a native one that was never used has no memory and does not count.
    freed : int, optional
        Bytes of device memory that the backend says it freed; None if it does not say.
    """

    how: str
    communicators: int
    freed: int | None = None

    def __add__(self, other: Suspended) -> Suspended:
        known = self.freed is not None and other.freed is not None
        total = self.freed + other.freed if known else None  # type: ignore[operator]
        return Suspended(self.how, self.communicators + other.communicators, total)


class Suspension:
    """What ``resume`` must do: ``names`` are those of all groups, by label and ranks."""

    def __init__(self, names: Mapping[tuple[str, tuple[int, ...]], str], how: str) -> None:
        self.names = names
        self.how = how
        self.report: dict[str, Suspended] = {}
        self.closed: set[str] = set()  # labels of this rank's groups
        self.asleep: list[tuple[ProcessGroup, Any]] = []  # with the backends to wake

    def start(self, groups: Mapping[ProcessGroup, str], alike: bool) -> list[ProcessGroup]:
        """Suspend groups, given with their labels; returns those that the caller must close.

        In the order given, since NCCL's members wait for each other. With ``alike``, all are
        closed if one must be.
        """
        kinds: dict[str, list[ProcessGroup]] = {}
        for group in groups:
            kinds.setdefault(_kind(c10d._world.pg_map[group][0]), []).append(group)
        for kind in sorted(kinds):
            self.report[kind] = self._suspend(kind, kinds[kind], groups)
        if alike and self.closes:
            self.wake()
            self.report = {k: Suspended("recreate", len(kinds[k])) for k in self.report}
        closing = [g for k, done in self.report.items() if done.how == "recreate" for g in kinds[k]]
        self.closed = {groups[group] for group in closing}
        return closing

    def _suspend(
        self, kind: str, members: list[ProcessGroup], labels: Mapping[ProcessGroup, str]
    ) -> Suspended:
        if self.how == "recreate":
            return Suspended("recreate", len(members))
        backends = [(group, backend) for group in members for backend in _with_memory(group)]
        if self.how == "keep" or not backends:
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
                if not freed and self.how == "auto":  # nothing has changed
                    return Suspended("recreate", len(members))
                asleep = f" {len(self.asleep)} others are suspended: call resume()."
                raise RuntimeError(
                    f"rank {dist.get_rank()} could not suspend {labels[group]} with {kind}: "
                    f"{in_words(error)}{asleep if self.asleep else ''}"
                ) from error
            self.asleep.append((group, backend))
            freed.append(size)
        known = [size for size in freed if size is not None]
        return Suspended("native", len(freed), sum(known) if len(known) == len(freed) else None)

    @property
    def closes(self) -> bool:
        """Whether groups were closed, so that ``resume`` must create new ones."""
        if self.how == "recreate":
            return True
        return any(done.how == "recreate" for done in self.report.values())

    def has_closed(self, label: str, backend: str | None) -> bool:
        """Whether the groups of ``label`` were closed, also if this rank is in none of them.

        A rank without any group of the backend cannot know whether it suspends natively.
        """
        if any(each == label for each, _ in self.names):
            return label in self.closed
        done = self.report.get(_kind(backend))
        return self.how == "recreate" or (done is not None and done.how == "recreate")

    def wake(self) -> None:
        """Let the backends resume, in the order in which they were suspended."""
        while self.asleep:
            self.asleep[0][1].resume()
            del self.asleep[0]


def _kind(backend: str | None) -> str:
    """Such as "nccl", or "gloo+nccl" for a group with both."""
    return "+".join(sorted({*devices_of(backend).values()}))


def _with_memory(group: ProcessGroup) -> list[Any]:
    found: dict[int, Any] = {}
    for device, name in devices_of(c10d._world.pg_map[group][0]).items():
        if name not in _WITHOUT_DEVICE_MEMORY and torch.device(device) in group._device_types:
            backend = group._get_backend(torch.device(device))
            found[id(backend)] = backend
    return [*found.values()]


def _suspendable(backend: Any) -> int | None:
    try:
        stats: dict[str, int] = backend.memory_stats()
    except (RuntimeError, AttributeError):
        return None
    return stats.get("suspend")


_CALLS = (
    *("_allgather_base", "_reduce_scatter_base", "_start_coalescing", "all_gather_single"),
    *("all_gather_single_coalesced", "all_to_all_single", "allgather", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall"),
    *("alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv"),
    *("recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send"),
)
_retired: weakref.WeakKeyDictionary[ProcessGroup, str] = weakref.WeakKeyDictionary()
_torchs: dict[str, Any] = {}  # torch's own methods while they are guarded


def retire(groups: Mapping[ProcessGroup, str]) -> None:
    """Let communication over closed groups, given with their labels, raise instead.

    Gloo's would continue to work over sockets that torch no longer knows. The methods of torch's
    group are guarded as long as one of these groups exists. Its repr is too, as torch's own errors
    contain it.
    """
    for group, label in groups.items():
        weakref.finalize(group, _unguard).atexit = False  # before the next line: it is called last
        _retired[group] = label
    if _retired and not _torchs:
        for name in (*_CALLS, "__repr__"):
            if hasattr(ProcessGroup, name):
                _torchs[name] = vars(ProcessGroup).get(name)
                setattr(ProcessGroup, name, _guarded(name, getattr(ProcessGroup, name)))


def _guarded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def guarded(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if self not in _retired:
            return call(self, *args, **kwargs)
        text = (
            f"{_retired[self]}, closed by suspend(): use the group that resume() returned under "
            f"the name {self.group_name!r}"
        )
        if name == "__repr__":
            return f"<{text}>"
        raise RuntimeError(f"rank {dist.get_rank()} used an old group: {text}.")

    return guarded


def _unguard() -> None:
    if not _retired:
        while _torchs:
            name, own = _torchs.popitem()
            if own is None:  # inherited
                delattr(ProcessGroup, name)
            else:
                setattr(ProcessGroup, name, own)
