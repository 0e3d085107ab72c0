"""What one process recorded, and its file."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import CodeType
from typing import Any

import torch.distributed as dist

from compat.megatron.releases import RELEASE
from hypergrid.analysis.audit import SCHEMA

_EVERY = 10.0  # seconds between two writings, for processes that are killed


class Log:
    """Sites, problems, and the file of this process in ``directory``.

    Raises OSError if the directory cannot be made or written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()  # scripts change the current one
        self._pid, self._written = os.getpid(), time.monotonic()
        self._rank = int(os.environ.get("RANK", "0"))
        # Processes of two hosts may have one number, and each may record several times.
        self._name = f"reads.{self._rank}.{self._pid}.{secrets.token_hex(4)}"
        self.directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self.directory).close()
        self._lock = threading.RLock()  # a signal's handler may read
        # By id, since code compares by its bytes; the code itself is kept in the value.
        self._sites: dict[tuple[Any, ...], list[Any]] = {}
        self._problems: dict[tuple[str, str], list[Any]] = {}
        atexit.register(self.write)

    def site(
        self, code: CodeType, module: str, key: tuple[Any, ...], name: str, writes: bool
    ) -> None:
        """Count one read: ``key`` is line, outermost class, phase, state, group."""
        if os.getpid() != self._pid:  # forked, perhaps while a thread had the lock
            return
        full = (id(code), name, *key)
        with self._lock:
            known = self._sites.setdefault(full, [0, code, module, name, writes, *key])
            known[0] += 1
            if time.monotonic() - self._written > _EVERY:
                self.write()

    def problem(self, kind: str, text: str, example: str) -> None:
        """Count one read of a wrong state; ``example`` is what this rank got."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            known = self._problems.setdefault((kind, text), [0, example])
            known[0] += 1

    def close(self) -> None:
        """Write for the last time."""
        atexit.unregister(self.write)
        self.write()

    def write(self) -> None:
        """Write the file of this process; nothing in a process that was forked from it.

        What the file system refuses is a RuntimeWarning: it is no reason to end the job.
        """
        if os.getpid() != self._pid:
            return
        if dist.is_initialized():  # it may be gone when the process ends
            self._rank = dist.get_rank()
        with self._lock:
            self._written = time.monotonic()
            sites = [_site(*each) for each in [*self._sites.values()]]
            problems = [
                {"kind": kind, "text": text, "count": count, "example": example}
                for (kind, text), (count, example) in [*self._problems.items()]
            ]
            data = {
                "schema": SCHEMA,
                "rank": self._rank,
                "process": self._pid,
                "release": ".".join(map(str, RELEASE)),
                "sites": sites,
                "problems": problems,
            }
            try:
                part = self.directory / f"{self._name}.part"
                part.write_text(json.dumps(data), "utf-8")
                part.rename(part.with_suffix(".json"))
            except OSError as error:
                text = f"the audit in {self.directory} is not written: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)


def _site(
    count: int,
    code: CodeType,
    module: str,
    name: str,
    writes: bool,
    line: int,
    outermost: str,
    phase: str,
    state: str,
    group: str,
) -> dict[str, Any]:
    return {
        "module": module,
        "file": file_of(code, module),
        "line": line,
        "function": function_of(code),
        "outermost": outermost,
        "name": name,
        "writes": writes,
        "phase": phase,
        "state": state,
        "group": group,
        "count": count,
    }


def function_of(code: CodeType) -> str:
    """Its name, with its class where Python (from 3.11 on) tells it."""
    name: str = getattr(code, "co_qualname", code.co_name)
    return name


def file_of(code: CodeType, module: str) -> str:
    """The file from its top package on; of a script its name."""
    path = Path(code.co_filename)
    depth = module.count(".") + 1 + (path.name == "__init__.py")
    return "/".join(path.parts[-depth:]) if module != "__main__" else path.name
