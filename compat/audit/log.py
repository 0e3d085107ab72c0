"""The reads and problems that one process recorded, and their file."""

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

from compat.audit.recordings import SCHEMA
from compat.megatron.releases import RELEASE
from hypergrid.files import check_private, replace

_EVERY = 10.0  # seconds between two writings, for processes that are killed


class Log:
    """Sites, problems, and the file of this process in ``directory``.

    Raises OSError if the directory cannot be made or written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()  # scripts change the current one
        self.process = os.getpid()
        self._written = time.monotonic()
        self._rank = int(os.environ.get("RANK", "0"))
        # Processes of two hosts may have one number, and each may record several times.
        random_name = secrets.token_hex(4)
        self._name = f"reads.{self._rank}.{self.process}.{random_name}"
        self.directory.mkdir(parents=True, exist_ok=True)
        check_private(self.directory)
        # A directory that cannot be written is refused now, not when the job ends.
        tempfile.TemporaryFile(dir=self.directory).close()
        self._lock = threading.RLock()  # a signal's handler may read
        # By the code's id, since code compares by its bytes; the value keeps the code alive.
        self._sites: dict[tuple[Any, ...], tuple[CodeType, dict[str, Any]]] = {}
        self._problems: dict[tuple[str, str], dict[str, Any]] = {}
        atexit.register(self.write)

    def site(self, code: CodeType, use: dict[str, Any]) -> None:
        """Count one read or write in ``code``; ``use`` is all else that the file says of it."""
        key = (id(code), *use.values())
        with self._lock:
            if key not in self._sites:
                file = file_of(code, use["module"])
                function = function_of(code)
                site = {**use, "file": file, "function": function, "count": 0}
                self._sites[key] = (code, site)
            _, site = self._sites[key]
            site["count"] += 1
            if time.monotonic() - self._written > _EVERY:
                self.write()

    def problem(self, kind: str, text: str, example: str) -> None:
        """Count one read of a wrong state; ``example`` is what this rank got."""
        new_problem = {"kind": kind, "text": text, "count": 0, "example": example}
        with self._lock:
            problem = self._problems.setdefault((kind, text), new_problem)
            problem["count"] += 1

    def close(self) -> None:
        """Write for the last time."""
        atexit.unregister(self.write)
        self.write()

    def write(self) -> None:
        """Write the file of this process; nothing in a process that was forked from it.

        What the file system refuses is a RuntimeWarning: it is no reason to end the job.
        """
        if os.getpid() != self.process:
            return
        # The default group may be gone when the process ends: then the last rank is right.
        if dist.is_initialized():
            self._rank = dist.get_rank()
        with self._lock:
            self._written = time.monotonic()
            recorded = [*self._sites.values()]
            release = ".".join(map(str, RELEASE))
            data = {
                "schema": SCHEMA,
                "rank": self._rank,
                "release": release,
                "sites": [site for _, site in recorded],
                "problems": [*self._problems.values()],
            }
            content = json.dumps(data)
            path = self.directory / f"{self._name}.json"
            try:
                replace(path, content.encode())
            except OSError as error:
                text = f"the audit in {self.directory} is not written: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)


def function_of(code: CodeType) -> str:
    """The function's name, with its class where Python (from 3.11 on) tells it."""
    return getattr(code, "co_qualname", code.co_name)


def file_of(code: CodeType, module: str) -> str:
    """The file from its top package on; of a script its name."""
    path = Path(code.co_filename)
    if module == "__main__":
        return path.name
    # megatron.core.utils is the last three parts of /site-packages/megatron/core/utils.py.
    packages = module.split(".")
    depth = len(packages)
    if path.name == "__init__.py":
        depth += 1
    parts = path.parts[-depth:]
    return "/".join(parts)
