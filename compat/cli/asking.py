"""Asks the ranks of a running job, on all hosts, to write their recordings."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

from hypergrid.files import check_private, replace

_REQUEST = "asked"  # a file; recorders look at it every five seconds


def ask(directory: Path, seconds: float = 20) -> list[int]:
    """Have all ranks that record to ``directory`` write, and wait for that.

    Returns the ranks that did not. Raises PermissionError if every user may replace the files of
    the directory.
    """
    check_private(directory)
    # The clocks of hosts differ: the time of a file is compared with its earlier time only.
    written_before = {}
    for path in directory.glob("groups_*.json"):
        if match := re.fullmatch(r"groups_(\d{1,7})\.json", path.name):
            rank = int(match[1])
            written_before[rank] = _written_time(directory, rank)
    replace(directory / _REQUEST, b"")
    end = time.monotonic() + seconds
    while True:
        written_now = {rank: _written_time(directory, rank) for rank in written_before}
        silent_ranks = [rank for rank in written_now if written_now[rank] == written_before[rank]]
        if not silent_ranks or time.monotonic() > end:
            return sorted(silent_ranks)
        time.sleep(0.1)


def _written_time(directory: Path, rank: int) -> int:
    """When a rank wrote its stack, in nanoseconds; 0 if it did not."""
    with suppress(OSError):
        return (directory / f"stack_{rank}.json").stat().st_mtime_ns
    return 0
