"""Records sends and receives of CPU tensors, which torch's flight recorder leaves out."""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, Work

from hypergrid import of_torch

_MOST = 2000
_ARROWS = {"send": "->", "recv": "<-"}
_PEERS = {"send": "dstRank", "recv": "srcRank"}  # torch's names of the argument


@dataclass(slots=True)
class _Call:
    """A send or receive: its entry with the keys of torch's recorder, and its handle."""

    entry: dict[str, Any]
    work: weakref.ref[Work] | None = None

    @property
    def is_done(self) -> bool:
        """Whether its handle has been waited for, or dropped."""
        if self.work is None:
            return False  # the process is still in the call
        work = self.work()
        return work is None or bool(work.is_completed())


class PointToPoint:
    """The last operations of this process."""

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque(maxlen=_MOST)
        self._counts: Counter[str] = Counter()  # by the name of a group
        self._closed = False
        self._patches: list[tuple[str, Any, Any]] = []
        for name in _PEERS:
            # Got from the class it is a function, which would not bind when it is put back.
            original = vars(ProcessGroup)[name]
            replacement = self._recording(name, original)
            self._patches.append((name, original, replacement))
            setattr(ProcessGroup, name, replacement)

    def close(self) -> None:
        """Put torch's own methods back, where nobody has replaced ours since."""
        self._closed = True
        for name, original, replacement in self._patches:
            if getattr(ProcessGroup, name) is replacement:
                setattr(ProcessGroup, name, original)

    def _recording(self, kind: str, original: Callable[..., Work]) -> Callable[..., Work]:
        peer_argument = _PEERS[kind]

        def recording(
            group: ProcessGroup,
            tensors: list[Tensor],
            *args: Any,
            **named: Any,
        ) -> Work:
            is_registered = of_torch.is_registered(group)  # others may have no name
            is_on_cpu = bool(tensors) and tensors[0].device.type == "cpu"
            if self._closed or not is_registered or not is_on_cpu:
                return original(group, tensors, *args, **named)
            peer = args[0] if args else named[peer_argument]
            call = self._begin(kind, group, tensors, peer)
            # The call is recorded before it is made: the process may stay in it.
            work = original(group, tensors, *args, **named)
            call.work = weakref.ref(work)
            return work

        return recording

    def _begin(self, kind: str, group: ProcessGroup, tensors: list[Tensor], peer: int) -> _Call:
        record = self.count
        self._counts[group.group_name] += 1
        number = self._counts[group.group_name]
        sizes = [list(tensor.shape) for tensor in tensors]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        entry = {
            "frames": [],
            "record_id": record,
            "pg_id": 0,
            "process_group": [group.group_name, group.group_desc],
            "collective_seq_id": 0,
            "p2p_seq_id": number,
            "op_id": number,
            "profiling_name": f"gloo:{kind} {group.rank()}{_ARROWS[kind]}{peer}",
            "time_created_ns": time.time_ns(),
            "input_sizes": sizes,
            "input_dtypes": dtypes,
            "output_sizes": sizes,
            "output_dtypes": dtypes,
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "timeout_ms": 0,
            "is_p2p": True,
        }
        call = _Call(entry)
        self._calls.append(call)
        return call

    @property
    def count(self) -> int:
        """How many operations were begun."""
        return sum(self._counts.values())

    def entries(self) -> Iterator[dict[str, Any]]:
        """The recorded operations, from the oldest to the newest."""
        for call in list(self._calls):
            is_done = call.is_done
            state = "completed" if is_done else "scheduled"
            yield {**call.entry, "state": state, "retired": is_done}
