"""Asks running ranks for their recordings: by SIGUSR1 on this host, by a file on the others."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypedDict

from hypergrid.files import FileError, bytes_of, check_private, decoded, replace
from hypergrid.messages import one_line

VARIABLE = "HYPERGRID_RECORD"
_REQUEST = "asked"  # a file; recorders look at it every five seconds


class Ask(NamedTuple):
    """Where the recordings are, which ranks were asked, and why some did not write."""

    directory: Path
    ranks: tuple[int, ...]
    problems: tuple[str, ...]


class AskError(Exception):
    """No rank can be asked; the text is one line, whatever a directory is called."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


def ask(pids: Sequence[int], directory: Path | None = None, timeout: float = 30) -> Ask:
    """Have the ranks among these processes and their descendants write, and wait for that.

    Only processes that a recorder has named in ``directory`` and that catch SIGUSR1 are sent the
    signal: it would end others. Those of another user may see the file. Without ``directory`` it is
    the ``HYPERGRID_RECORD`` of the first process that has one. Ranks of other hosts that share the
    directory write too, within some seconds; this does not wait for them. Raises AskError if there
    is no process or no rank.
    """
    family = _family(pids)
    directory = directory or _directory(family)
    try:
        check_private(directory)
    except PermissionError as error:
        raise AskError(str(error)) from None
    request_time = time.time_ns()
    problems = []
    waiting: dict[int, int] = {}  # by rank its process
    for rank, pid in _recorders(directory).items():
        if pid not in family:
            continue
        # A process that does not catch the signal would be ended by it.
        state = _state(pid)
        if state is None:
            problems.append(f"rank {rank} (pid {pid}) has ended")
        elif not state.catches:
            problems.append(f"rank {rank} (pid {pid}) does not catch SIGUSR1: not asked")
        elif state.stopped:
            problems.append(f"rank {rank} (pid {pid}) is stopped and cannot answer")
        else:
            waiting[rank] = pid
    ranks = tuple(waiting)
    if not ranks and not problems:
        shown = ", ".join(map(str, pids))
        raise AskError(
            f"no rank among the processes {shown} and their children records to {directory}; "
            f"call hypergrid.record there, or start with {VARIABLE}=DIR under compat.launch"
        )
    with suppress(OSError):
        replace(directory / _REQUEST, b"")
    for pid in waiting.values():
        # It may have ended meanwhile.
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
    end = time.monotonic() + timeout
    while waiting and time.monotonic() < end:
        time.sleep(0.05)
        for rank, pid in list(waiting.items()):
            if _written_time(directory / f"stack_{rank}.json") > request_time:
                del waiting[rank]
            elif _state(pid) is None:
                problems.append(f"rank {rank} (pid {pid}) ended before it wrote")
                del waiting[rank]
    for rank, pid in waiting.items():
        problems.append(f"rank {rank} (pid {pid}) did not write in {timeout:g} s")
    return Ask(directory, ranks, tuple(problems))


class _State(NamedTuple):
    catches: bool
    stopped: bool


def _state(pid: int) -> _State | None:
    """The kernel's status of a process; None if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    # A zombie or a dead process still has an entry.
    if status["State"][0] in "ZX":
        return None
    # Bit 9 of the mask stands for signal 10, which is SIGUSR1.
    catches = int(status["SigCgt"], 16) >> (signal.SIGUSR1 - 1) & 1
    return _State(bool(catches), status["State"][0] in "Tt")


def _family(pids: Sequence[int]) -> list[int]:
    """The processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # "123 (a name) S 45 ...": the name may have brackets and blanks.
            fields = path.read_text().rpartition(")")[2].split()
            parent = int(fields[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    family = list(pids)
    for pid in pids:
        if not Path(f"/proc/{pid}").exists():
            raise AskError(f"there is no process {pid} on this host")
    # The list grows while it is walked: children of children come too.
    for pid in family:
        family += [child for child in children.get(pid, ()) if child not in family]
    return family


def _directory(family: Sequence[int]) -> Path:
    for pid in family:
        with suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            for pair in environment.split("\0"):
                name, _, directory = pair.partition("=")
                if name == VARIABLE and directory:
                    # It may be relative to where the process runs.
                    return Path(os.readlink(f"/proc/{pid}/cwd"), directory)
    raise AskError(
        f"none of these processes was started with {VARIABLE}, as far as this user may read: name "
        f"the directory that the job records to"
    )


class _Recorder(TypedDict):
    """Of a rank's ``groups_RANK.json``."""

    host: str
    rank: int
    pid: int


class _Stack(TypedDict):
    """Of a rank's ``stack_RANK.json``."""

    written_ns: int


def _recorders(directory: Path) -> dict[int, int]:
    """Ranks of this host that record to the directory, and their processes."""
    pid_of = {}
    for path in directory.glob("groups_*.json"):
        with suppress(OSError, FileError):
            recorder = decoded(bytes_of(path), _Recorder, path.name)
            # A pid of another host is another process here.
            if recorder["host"] == socket.gethostname():
                pid_of[recorder["rank"]] = recorder["pid"]
    if not pid_of:
        raise AskError(f"no rank of this host has recorded to {directory}")
    return dict(sorted(pid_of.items()))


def _written_time(path: Path) -> int:
    """When a rank wrote its stack, in nanoseconds; 0 if it did not."""
    with suppress(OSError, FileError):
        return decoded(bytes_of(path), _Stack, path.name)["written_ns"]
    return 0
