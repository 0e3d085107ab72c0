"""torch's own analysis of flight recorders, ``torchfrtrace``, and the ranks that it names."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import pickle
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest


class Said(NamedTuple):
    """What it printed, the ranks it names, and what it ended with."""

    text: str
    ranks: set[int]
    error: str


def torchfrtrace(directory: Path) -> Said:
    """Run it on the pickles of ``directory``."""
    why = "torch 2.9 has no torchfrtrace"
    fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace", reason=why)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("Flight Recorder")
    logger.addHandler(handler)
    error = ""
    with contextlib.ExitStack() as stack:
        stack.callback(logger.removeHandler, handler)
        stack.callback(gc.enable)  # it is switched off there
        try:
            fr_trace.main([str(directory), "-p", "trace_", "--allow-incomplete-ranks"])
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    text = "\n".join(lines)
    ranks = {int(rank) for rank in re.findall(r"Culprit rank (\d+)", text)}
    for some in re.findall(r"missing ranks: \{([\d, ]+)\}", text):
        ranks |= {int(rank) for rank in some.split(",")}
    for some in re.findall(r"missed FR dumps from ranks \(\{([\d, ]+)\}\)", text):
        ranks |= {int(rank) for rank in some.split(",")}
    return Said(text, ranks, error)


def completed(directory: Path, to: Path) -> Path:
    """Copy dumps of gloo with the members that its recorder lacks and ``hypergrid.dump`` has."""
    to.mkdir()
    for path in directory.glob("trace_*"):
        data = pickle.loads(path.read_bytes())
        said = directory / f"groups_{path.name[6:]}.json"
        groups = json.loads(said.read_text())["groups"]
        data["pg_config"] = {
            group["name"]: {
                "name": group["name"],
                "desc": group["description"],
                "ranks": json.dumps(group["ranks"]),
            }
            for group in groups
        }
        (to / path.name).write_bytes(pickle.dumps(data, 2))
        shutil.copy(said, to)
    return to
