"""What one process recorded, and its file."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import threading
import time
from pathlib import Path
from types import CodeType
from typing import Any

import torch.distributed as dist

from compat.megatron.releases import RELEASE
from hypergrid.analysis.audit import SCHEMA

_logs = itertools.count(1)
_EVERY = 10.0  # seconds between two writings, for processes that are killed


class Log:
    """Sites, problems, and the file of this process in ``directory``.

    Raises OSError if the directory cannot be made or written.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} cannot be written: name another directory.")
        self.directory = directory
        self._pid, self._written = os.getpid(), time.monotonic()
        self._rank = int(os.environ.get("RANK", "0"))
        self._name = f"reads.{self._rank}.{self._pid}.{next(_logs)}"
        self._lock = threading.Lock()
        # By id, since code compares by its bytes; the code itself is kept in the value.
        self._sites: dict[tuple[Any, ...], list[Any]] = {}
        self._problems: dict[tuple[str, str], list[Any]] = {}
        atexit.register(self.write)

    def site(
        self, code: CodeType, module: str, key: tuple[Any, ...], name: str, writes: bool
    ) -> None:
        """Count one read: ``key`` is line, outermost class, phase, state, group."""
        full = (id(code), name, *key)
        with self._lock:
            known = self._sites.get(full)
            if known is not None:
                known[0] += 1
                return
            self._sites[full] = [1, code, module, name, writes, *key]
        self._now_and_then()

    def problem(self, kind: str, text: str, example: str) -> None:
        """Count one read of a wrong state; ``example`` is what this rank got."""
        with self._lock:
            known = self._problems.setdefault((kind, text), [0, example])
            known[0] += 1
        if known[0] == 1:
            self._now_and_then()

    def close(self) -> None:
        """Write for the last time."""
        atexit.unregister(self.write)
        self.write()

    def _now_and_then(self) -> None:
        if time.monotonic() - self._written > _EVERY:
            self.write()

    def write(self) -> None:
        """Write the file of this process; nothing in a process that was forked from it."""
        if os.getpid() != self._pid:
            return
        self._written = time.monotonic()
        if dist.is_initialized():  # it may be gone when the process ends
            self._rank = dist.get_rank()
        with self._lock:
            sites = [[*each] for each in self._sites.values()]
            problems = dict(self._problems)
        data = {
            "schema": SCHEMA,
            "rank": self._rank,
            "process": self._pid,
            "release": ".".join(map(str, RELEASE)),
            "sites": [_site(*each) for each in sites],
            "problems": [
                {"kind": kind, "text": text, "count": count, "example": example}
                for (kind, text), (count, example) in problems.items()
            ],
        }
        part = self.directory / f"{self._name}.part"
        part.write_text(json.dumps(data), "utf-8")
        part.rename(self.directory / f"{self._name}.json")


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
