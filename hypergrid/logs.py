"""What a job tells while it runs: ``logging`` under "hypergrid", and warnings.

INFO tells each phase of a creation and of a suspension, DEBUG each group and each call to the
store. Nothing is printed unless the job configures ``logging``, or ``HYPERGRID_LOG`` is set.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from contextlib import suppress

from hypergrid.messages import shown

VARIABLE = "HYPERGRID_LOG"
LEVELS = ("INFO", "DEBUG")
_root = logging.getLogger("hypergrid")
_root.addHandler(logging.NullHandler())
_begin = time.monotonic()
_ours: logging.Handler | None = None  # the handler that HYPERGRID_LOG asks for


class _Lines(logging.Formatter):
    """Such as "[rank 3 +12.402 s] INFO agreed on 0..7/0"."""

    def format(self, record: logging.LogRecord) -> str:
        rank = os.environ.get("RANK", "?")
        # Of a machine that counts ranks in another variable, torch knows the number.
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            rank = str(distributed.get_rank())
        seconds = time.monotonic() - _begin
        return f"[rank {rank} +{seconds:.3f} s] {record.levelname} {record.getMessage()}"


def print_as_set() -> None:
    """Print what ``HYPERGRID_LOG`` asks for on the standard error; ValueError for another value."""
    global _ours
    level = os.environ.get(VARIABLE, "").upper()
    if not level:
        return
    if level not in LEVELS:
        raise ValueError(
            f"invalid value for {VARIABLE}: {shown(level)}; allowed: {', '.join(LEVELS)}."
        )
    if _ours is None:
        _ours = logging.StreamHandler()
        _ours.setFormatter(_Lines())
        _root.addHandler(_ours)
    _root.setLevel(level)


def warn(text: str, logger: logging.Logger) -> None:
    """Tell the user by a RuntimeWarning and in the log; once where both are printed.

    Never raises, also where warnings are errors: who waits for other ranks must not leave them.
    """
    logger.warning(text)
    if not _prints_warnings(logger):
        with suppress(RuntimeWarning):
            warnings.warn(text, RuntimeWarning, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """How many frames above ``warn`` the code is that has called this library."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in ("hypergrid", "compat", "contextlib"):
            break
        frame = frame.f_back
        level += 1
    return level


def _prints_warnings(logger: logging.Logger | None) -> bool:
    """Whether a handler prints the logger's warnings where ``warnings`` are printed too."""
    while logger is not None:
        for handler in logger.handlers:
            stream = getattr(handler, "stream", None)
            if stream in (sys.stderr, sys.stdout) and handler.level <= logging.WARNING:
                return True
        logger = logger.parent if logger.propagate else None
    return False


print_as_set()
