"""Loads files of strangers in processes of their own, whose memory and time are limited. No torch.

A pickle is a program. It can run code; a short one can stand for endlessly many values, as forty
times "a pair of twice the last value" is 2**40 of them; and some keys of a dict take years to hash.
So no class is looked up, and the system ends a process that needs too much: its file is named, and
the next process goes on behind it.
"""

from __future__ import annotations

import gc
import io
import math
import os
import pickle
import resource
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

_LEAST_FILES = 16  # of a process: to start one takes as long as to read some
# What a file may take, beside a process that has read none: a call of a recorder takes 10 times the
# bytes that it has in a pickle.
_BYTES = 128 << 20
_BYTES_OF_A_BYTE = 64
_SECONDS = 0.5  # of the processor, of which the system counts whole ones
_SECONDS_OF_A_MIB = 0.25  # 0.03 are needed
_Answer = TypeVar("_Answer")


class Refused(Exception):
    """A file has more than the plain data that a recorder writes, or stands for too much."""


class _Plain(pickle.Unpickler):
    """Python's own, which makes numbers, text and containers, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse what a pickle would call, or make an object of."""
        raise Refused(f"it holds a reference to {name[:40]}, and only plain data is read")

    def persistent_load(self, key: Any) -> Any:
        """Refuse what is elsewhere."""
        raise Refused("it holds a reference to another file, and only plain data is read")


def unpickled(data: bytes) -> Any:
    """The value of a pickle of plain data.

    Raises Refused if it names a class, and any other Exception if it is cut or damaged. Only in a
    process with limits: what it stands for may have no end.
    """
    # Without a buffer to look into, it would ask for each opcode.
    file = io.BufferedReader(io.BytesIO(data), buffer_size=1 << 16)
    return _Plain(file).load()


def load_all(
    load: Callable[[Path], _Answer],
    paths: Sequence[Path],
    processes: int,
) -> Iterator[_Answer | Refused]:
    """``load`` of each path, in their order, called by so many forked processes.

    Refused of a file for which ``load`` raises that, and of one that ends its process. A process
    loads the next file only when its last answer was taken.
    """
    count = max(1, min(processes, len(paths) // _LEAST_FILES))
    workers = []
    for number in range(count):
        workers.append(_Worker(load, paths[number::count]))
    try:
        for number in range(len(paths)):
            yield workers[number % count].next()
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process that loads some files, and the next one where a file has ended it."""

    def __init__(self, load: Callable[[Path], Any], paths: Sequence[Path]) -> None:
        self.load = load
        self.paths = deque(paths)
        self._start()

    def _start(self) -> None:
        self.answers, answers = Pipe(duplex=False)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _work(self.load, [*self.paths], answers)
            finally:
                os._exit(0)
        answers.close()  # so that the end of the process is the end of the pipe

    def next(self) -> Any:
        """The answer for the next path."""
        self.paths.popleft()
        try:
            answer = self.answers.recv_bytes()
        except EOFError:
            self.end()
            if self.paths:
                self._start()
            return Refused("it takes more memory or time than its size explains")
        return pickle.loads(answer)

    def end(self) -> None:
        """End the process, if it has not ended."""
        if self.pid:
            self.answers.close()
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


def _work(load: Callable[[Path], Any], paths: Sequence[Path], answers: Any) -> None:
    gc.disable()  # there are no cycles to find among millions of new objects
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = _address_space()
    for path in paths:
        size = path.stat().st_size if path.exists() else 0
        _limit(resource.RLIMIT_AS, before + _BYTES + _BYTES_OF_A_BYTE * size)
        seconds = _SECONDS + _SECONDS_OF_A_MIB * (size >> 20)
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))
        try:
            answer = pickle.dumps(load(path), protocol=5)
        except Refused as error:
            answer = pickle.dumps(error)
        except MemoryError:
            answer = pickle.dumps(Refused("it takes more memory than its size explains"))
        answers.send_bytes(answer)


def _limit(kind: int, value: int) -> None:
    """The system's limit of this process, at most the one that it has been started with."""
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:
        value = min(value, most)
    resource.setrlimit(kind, (value, most))


def _address_space() -> int:
    """The bytes that this process has; 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
    except OSError:
        return 1 << 40
    return int(pages) * resource.getpagesize()
