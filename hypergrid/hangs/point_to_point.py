"""Records sends and receives of CPU tensors, which torch's flight recorder leaves out."""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, Work

from hypergrid import of_torch

_MOST, _FRAMES = 2000, 10
_METHODS = {"send": "->", "recv": "<-"}
_PEERS = {"send": "dstRank", "recv": "srcRank"}  # torch's names of the argument


class PointToPoint:
    """The last operations of this process, as entries with the keys of torch's recorder.

    An operation is done when its handle has been waited for, or dropped.
    """

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque(maxlen=_MOST)
        self._waited: weakref.WeakKeyDictionary[Work, _Call] = weakref.WeakKeyDictionary()
        self._counts: Counter[str] = Counter()
        self._record = 0
        self._closed = False
        # Got from the class they are functions, which would not bind when they are put back.
        self._originals = {name: vars(ProcessGroup)[name] for name in _METHODS}
        self._wait = vars(Work)["wait"]
        for name in _METHODS:
            setattr(ProcessGroup, name, self._recording(name))
        waited = self._waited
        wait = self._wait

        def waiting(work: Work, *args: Any, **options: Any) -> Any:
            result = wait(work, *args, **options)
            call = waited.get(work)
            if call is not None:
                call.done = time.time_ns()
            return result

        self._ours = {name: getattr(ProcessGroup, name) for name in _METHODS}
        self._our_wait = waiting
        setattr(Work, "wait", waiting)  # noqa: B010 - its type is that of torch's method

    def close(self) -> None:
        """Put torch's own methods back, where nobody has replaced ours since."""
        self._closed = True
        for name, original in self._originals.items():
            if getattr(ProcessGroup, name) is self._ours[name]:
                setattr(ProcessGroup, name, original)
        if Work.wait is self._our_wait:
            setattr(Work, "wait", self._wait)  # noqa: B010 - its type is that of torch's method

    def _recording(self, name: str) -> Callable[..., Work]:
        original = self._originals[name]

        def recording(group: ProcessGroup, tensors: list[Tensor], *args: Any, **named: Any) -> Work:
            is_registered = of_torch.knows(group)  # others may have no name
            is_on_cpu = bool(tensors) and tensors[0].device.type == "cpu"
            if self._closed or not is_registered or not is_on_cpu:
                work: Work = original(group, tensors, *args, **named)
                return work
            call = _Call(name, group, tensors, args[0] if args else named[_PEERS[name]])
            name_of_group = call.group[0]
            self._counts[name_of_group] += 1
            call.seq = self._counts[name_of_group]
            call.record = self._record
            self._record += 1
            self._calls.append(call)
            work = original(group, tensors, *args, **named)
            call.work = weakref.ref(work)
            self._waited[work] = call
            return work

        return recording

    @property
    def count(self) -> int:
        """How many operations were begun."""
        return self._record

    def entries(self) -> Iterator[dict[str, Any]]:
        """The recorded operations, from the oldest to the newest."""
        for call in list(self._calls):
            yield call.entry()


class _Call:
    __slots__ = (
        *("created", "done", "group", "inputs", "kind", "peer", "rank"),
        *("record", "seq", "stack", "work"),
    )

    def __init__(self, kind: str, group: ProcessGroup, tensors: list[Tensor], peer: int) -> None:
        self.created = time.time_ns()
        self.done = 0
        self.group = (group.group_name, group.group_desc)
        self.kind = kind
        self.rank = group.rank()
        self.peer = peer
        self.inputs = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        self.work: weakref.ref[Work] | None = None
        self.seq = self.record = 0
        self.stack: list[tuple[CodeType, int]] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and len(self.stack) < _FRAMES:
            self.stack.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back

    def entry(self) -> dict[str, Any]:
        done = self.done or (self.work is not None and self.work() is None)
        sizes = [list(size) for size, _ in self.inputs]
        dtypes = [dtype.removeprefix("torch.") for _, dtype in self.inputs]
        frames = [
            {"name": code.co_name, "filename": code.co_filename, "line": line}
            for code, line in self.stack
        ]
        return {
            "frames": frames,
            "record_id": self.record,
            "pg_id": 0,
            "process_group": list(self.group),
            "collective_seq_id": 0,
            "p2p_seq_id": self.seq,
            "op_id": self.seq,
            "profiling_name": f"gloo:{self.kind} {self.rank}{_METHODS[self.kind]}{self.peer}",
            "time_created_ns": self.created,
            "input_sizes": sizes,
            "input_dtypes": dtypes,
            "output_sizes": sizes,
            "output_dtypes": dtypes,
            "state": "completed" if done else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": self.done or None,
            "retired": bool(done),
            "timeout_ms": 0,
            "is_p2p": True,
        }
