"""Writes what a hang is diagnosed from: live groups, torch's flight recorder, stacks.

A thread does it, so that it works while the main thread sits in a collective.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeAlias

import torch.distributed as dist

from hypergrid import of_torch
from hypergrid.agreement import store
from hypergrid.files import check_private, replace
from hypergrid.groups import pool
from hypergrid.hangs import point_to_point
from hypergrid.hangs.dump import group_records
from hypergrid.hangs.recording import ENDED, has_ended
from hypergrid.messages import in_words, shown

SCHEMA = 1
ASKED = "asked"  # a file: when it changes, every rank that shares the directory writes
EARLIER = "earlier"  # a directory: what the previous run left
_LOOK = 5.0  # seconds between looks at the groups, the directory and the calls
# Bounds of a file of stacks.
_THREADS = 100
_FRAMES = 100
_TEXT = 20_000
_Line: TypeAlias = tuple[FrameType, int]
_Row: TypeAlias = tuple[str, int, str]  # file, line, function
_current: Recorder | None = None


def record(
    directory: str | os.PathLike[str] | None = None,
    *,
    after: float | None = None,
    p2p: bool | None = None,
) -> Recorder:
    """Let this rank write its groups, flight recorder and stacks when the job hangs. *Local*.

    Call it on every rank, before the default group is created. ``hypergrid diagnose`` and torch's
    ``torchfrtrace`` read the directory. The live groups are written at once and whenever they
    change, the rest when ``hypergrid diagnose --ask`` asks for it, on ``AgreementError`` and
    ``CreationError``, on an uncaught exception, after ``after`` seconds in a collective, and when
    another rank with the same directory did so for that reason; once more when the script ends.
    Of one hang the first recording stays: an error of tearing it down is not written.

    Parameters
    ----------
    directory : path, optional
        One for all ranks; default ``HYPERGRID_RECORD``. It is created. What an earlier run left
        there moves to ``earlier/``.
    after : float, optional
        Seconds; default ``HYPERGRID_RECORD_AFTER``, else never.
    p2p : bool, optional
        Also record point-to-point operations of CPU tensors, which torch leaves out with gloo.
        Default ``HYPERGRID_RECORD_P2P=1``.

    Returns
    -------
    Recorder
        Of this process; a further call with equal arguments gives the same one.

    Raises
    ------
    ValueError
        No directory, an invalid number of seconds, or another recorder is open.
    OSError
        The directory cannot be created or written, or every user may replace files there.
    """
    global _current
    if directory is None:
        directory = os.environ.get("HYPERGRID_RECORD")
    if not directory:
        raise ValueError("record() needs a directory, as an argument or in HYPERGRID_RECORD.")
    if after is not None:
        after = _seconds(after, "after")
    elif variable := os.environ.get("HYPERGRID_RECORD_AFTER"):
        after = _seconds(variable, "HYPERGRID_RECORD_AFTER")
    if p2p is None:
        variable = os.environ.get("HYPERGRID_RECORD_P2P", "0")
        p2p = variable not in ("", "0")
    settings = (Path(directory).resolve(), after, p2p)
    # A forked process has a copy of its parent's recorder, which records nothing.
    if _current is not None and _current.pid == os.getpid():
        if _current.settings == settings:
            return _current
        folder, seconds, has_p2p = _current.settings
        raise ValueError(
            f"this process already records to {folder} (after={seconds}, p2p={has_p2p}); close "
            "that recorder first."
        )
    _current = Recorder(*settings)
    return _current


def _seconds(value: str | float, name: str) -> float:
    with suppress(TypeError, ValueError):
        seconds = float(value)
        if 0 < seconds < float("inf"):
            return seconds
    raise ValueError(f"invalid value for {name}: {shown(value)}; allowed: seconds above 0.")


class Recorder:
    """Writes ``groups_RANK.json``, ``trace_RANK`` and ``stack_RANK.json``, until it is closed.

    ``record`` makes it. ``settings`` are the directory, the seconds and whether point-to-point
    operations are recorded; ``thread`` is the one that watches, in the process ``pid``.
    """

    def __init__(self, directory: Path, after: float | None, p2p: bool) -> None:
        self.settings = (directory, after, p2p)
        self._directory = directory
        self._after = after
        self._rank: int | None = None
        self._writing = threading.Lock()
        self._groups: object = None  # names and labels of those that were written
        self._warned: set[str] = set()  # the faults that were warned of
        self.pid = os.getpid()
        self._request_seen = self._request()
        # The exception that ended the script: a process can stay for long after that.
        self._raised: tuple[str, list[_Row]] | None = None
        self._calls: dict[str, int] = {}  # how many of each group, and since when
        self._recorded_calls: dict[str, int] | None = None  # at the last recording that is kept
        # The launcher's name of the job, where it says one.
        job = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or ""
        self._life = {"started_ns": time.time_ns(), "job": job}
        self._since: float | None = None  # None: this rank has written for these
        directory.mkdir(parents=True, exist_ok=True)
        check_private(directory)
        self._write_groups()  # what fails, fails before anything is installed
        if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:  # of NCCL's own watchdog
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(directory / "trace_"))
        self._p2p = point_to_point.PointToPoint() if p2p else None
        self._closed = threading.Event()
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_exception
        pool.after_failure.add(self._on_failure)
        atexit.register(self._on_end)
        self.thread = threading.Thread(
            target=self._watch,
            name="hypergrid-record",
            daemon=True,
        )
        self.thread.start()

    def write(self, reason: str, error: BaseException | None = None) -> None:
        """Write all three files now, from any thread. *Local*. What cannot be written is warned of.

        ``error`` is what ended this rank's work; the main thread's frames are then those where it
        was raised. If the rank has called nothing since its last recording, an error is not
        written: tearing down a job that hangs makes its ranks raise, and the first recording shows
        the hang.
        """
        if os.getpid() != self.pid:
            return  # a forked process is no rank: it would answer for this one
        with self._writing:
            self._attempt(self._write_groups)
            if self._rank is None:
                return
            calls = self._counts()
            if error is not None and self._is_same_hang(calls):
                return
            self._recorded_calls = calls
            self._attempt(lambda: self._replace(f"trace_{self._rank}", self._trace()))
            stack = f"stack_{self._rank}.json"
            self._attempt(lambda: self._replace(stack, self._stacks(reason, error)))

    def _is_same_hang(self, calls: Mapping[str, int]) -> bool:
        """Whether this rank has written before, and has called nothing in any group since then."""
        recorded = self._recorded_calls
        if recorded is None:
            return False
        # A group may be gone by now: its destruction is part of tearing down.
        return all(count <= recorded.get(group, 0) for group, count in calls.items())

    def close(self) -> None:
        """Stop recording; hooks are as before ``record``. *Local*, idempotent."""
        global _current
        if self._closed.is_set():
            return
        self._closed.set()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        pool.after_failure.discard(self._on_failure)
        atexit.unregister(self._on_end)
        if self._p2p is not None:
            self._p2p.close()
        self.thread.join()
        if _current is self:
            _current = None

    # The events that it writes on.

    def _on_exception(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        is_interrupt = issubclass(kind, KeyboardInterrupt)
        if not is_interrupt and not self._closed.is_set():
            self._raised = _raised(error)
            self.write("exception", error)
        self._excepthook(kind, error, trace)

    def _on_end(self) -> None:
        if not hasattr(sys, "last_type"):  # of an uncaught exception
            self.write(ENDED)

    def _on_failure(self, error: BaseException) -> None:
        self.write(type(error).__name__, error)

    def _watch(self) -> None:
        seconds = _LOOK
        if self._after is not None:
            seconds = min(_LOOK, self._after / 4)
        while not self._closed.wait(seconds):
            with self._writing:
                self._attempt(self._write_groups)
            self._attempt(self._look)

    def _look(self) -> None:
        request = self._request()
        if request != self._request_seen:
            self._request_seen = request
            self.write("asked in the directory")
        after = self._after
        if after is None:
            return
        calls = self._counts()
        now = time.monotonic()
        if calls != self._calls:
            self._calls = calls
            self._since = now
        if self._since is None or now - self._since <= after:
            return
        # Only now, as this costs: a rank that communicates is not stuck, and CUDA is not asked for
        # events while a graph may be captured.
        entries = [*self._entries()]
        if all(map(has_ended, entries)):
            self._since = now
            return
        # A handle that is dropped may stay pending: only a rank that does nothing else is stuck.
        newest = max(entry["time_created_ns"] for entry in entries)
        age = (time.time_ns() - newest) / 1e9
        if age <= after:
            self._since = now - age  # a send of NCCL is recorded, and changes no number
            return
        self._since = None
        self.write(f"timeout: in a call for more than {after:g} s")
        self._replace(ASKED, f"rank {self._rank}\n".encode())
        self._request_seen = self._request()

    def _counts(self) -> dict[str, int]:
        """How many calls were made in each group, by torch's name; sends and receives under ""."""
        counts = {}
        if self._p2p is not None:
            counts[""] = self._p2p.count
        for group, name in of_torch.registered_groups().items():
            counts[name] = of_torch.calls_of(group) or 0
        return counts

    def _request(self) -> int | None:
        with suppress(OSError):
            return (self._directory / ASKED).stat().st_mtime_ns
        return None

    def _entries(self) -> Iterator[dict[str, Any]]:
        for dump in of_torch.recorded_calls():
            recorder = json.loads(dump)
            yield from recorder.get("entries", ())
        if self._p2p is not None:
            yield from self._p2p.entries()

    # The content of the files.

    def _attempt(self, write: Callable[[], object]) -> None:
        """Nothing that goes wrong here ends a job: it is warned of, once each."""
        try:
            write()
        except Exception as error:
            fault = in_words(error)
            if fault in self._warned:
                return
            self._warned.add(fault)
            text = f"hypergrid.record to {self._directory}: {fault}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _write_groups(self) -> None:
        try:
            # Each look compares names and labels alone: the ranks of large groups are long lists.
            names = _names_of_groups()
            if self._rank is not None and names == self._groups:
                return
            groups = group_records()
        except (KeyError, RuntimeError, ValueError):
            return  # groups are being created or destroyed: the next look sees them
        if groups["rank"] is None:
            groups["rank"] = _number("RANK")
            groups["world_size"] = _number("WORLD_SIZE")
        if groups["rank"] is None:
            return
        if self._rank is None:
            self._make_room(groups["rank"])
        self._rank = groups["rank"]
        content = json.dumps({**groups, "life": self._life})
        self._replace(f"groups_{self._rank}.json", content.encode())
        self._groups = names

    def _make_room(self, rank: int) -> None:
        """Move the rank's files of an earlier run."""
        earlier = self._directory / EARLIER
        for name in (f"groups_{rank}.json", f"trace_{rank}", f"stack_{rank}.json"):
            if os.path.lexists(self._directory / name):
                earlier.mkdir(exist_ok=True)
                if earlier.is_symlink():
                    raise PermissionError(f"{earlier} is a link: remove it.")
                os.replace(self._directory / name, earlier / name)

    def _stacks(self, reason: str, error: BaseException | None) -> bytes:
        raised = self._raised
        if error is not None:
            raised = _raised(error)
        main_thread = threading.main_thread().ident
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        threads = []
        frames = [*sys._current_frames().items()]
        # Python gives the newest thread first, and the main thread last.
        frames.sort(key=lambda of_thread: of_thread[0] != main_thread)
        for ident, frame in frames[:_THREADS]:
            is_main = ident == main_thread
            rows = _rows(traceback.walk_stack(frame))
            if is_main and raised is not None:
                rows = raised[1]
            name = names.get(ident, "of outside Python")
            thread = {"name": name, "main": is_main, "frames": rows}
            threads.append(thread)
        content = {
            "schema": SCHEMA,
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "life": self._life,
            "written_ns": time.time_ns(),
            "reason": reason,
            "error": raised and raised[0],
            "threads": threads,
            "p2p": [],
        }
        if self._p2p is not None:
            content["p2p"] = list(self._p2p.entries())
        return json.dumps(content).encode()

    def _trace(self) -> bytes:
        """Torch's recording, pickled, with the members, which torch knows for NCCL only."""
        # Torch looks up the stacks in torch._inductor: importing that takes seconds of CPU.
        stacks = "torch._inductor.codecache" in sys.modules
        whole = _joined(of_torch.recorded(stacks))
        groups = {}
        for group in group_records()["groups"]:
            groups[group["name"]] = {
                "name": group["name"],
                "desc": group["description"],
                "ranks": json.dumps(group["ranks"]),
            }
        whole["pg_config"] = groups | whole["pg_config"]
        return pickle.dumps(whole, 2)

    def _replace(self, name: str, data: bytes) -> None:
        replace(self._directory / name, data)


def _names_of_groups() -> tuple[list[str], list[str]] | None:
    """Torch's names of all groups and the labels of ours; None where there is no default group."""
    if not dist.is_initialized():
        return None
    labels = []
    for owner in pool.live_pools():
        labels += [pooled.label for pooled in owner.groups]
    return list(of_torch.registered_groups().values()), labels


def _raised(error: BaseException) -> tuple[str, list[_Row]]:
    """The text of an error, and the frames from where it was raised to the start of the thread."""
    kind = type(error).__name__
    if store.was_aborted():  # torch blames a peer
        kind = f"{kind} after hypergrid.abort() freed this rank"
    text = f"{kind}: {error}"
    trace = error.__traceback__
    lines = [*traceback.walk_tb(trace)]
    lines.reverse()
    if trace is not None and trace.tb_frame.f_back is not None:
        lines += traceback.walk_stack(trace.tb_frame.f_back)
    return text[:_TEXT], _rows(lines)


def _rows(lines: Iterable[_Line]) -> list[_Row]:
    """File, line and function from the innermost frame on, as if nothing was recorded."""
    rows = []
    for frame, line in islice(lines, _FRAMES):
        code = frame.f_code
        if code.co_filename != point_to_point.__file__:
            rows.append((code.co_filename, line, code.co_name))
    return rows


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _joined(dumps: Iterable[bytes]) -> dict[str, Any]:
    """NCCL and the other backends have a flight recorder each: one dump of all."""
    whole: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    groups: dict[str, Any] = {}
    lost = 0
    for dump in dumps:
        recorder = pickle.loads(dump)
        calls = recorder.get("entries", [])
        if calls:
            lost += calls[0]["record_id"]
        entries += calls
        groups |= recorder.get("pg_config", {})
        whole = recorder | whole
    entries.sort(key=lambda entry: entry["time_created_ns"])
    # The number of the first call is 0 only if no recorder has lost one.
    for number, entry in enumerate(entries, start=lost):
        entry["record_id"] = number
    whole["entries"] = entries
    whole["pg_config"] = groups
    return whole
