"""Others' analyses of flight recorders, torch's and NVRx's, and the ranks that they name."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import pickle
import re
import shutil
from collections.abc import Sequence
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


def fr_attribution(directory: Path) -> Said:
    """Run NVRx's, without a language model; it must be importable (0.6 or later)."""
    from nvidia_resiliency_ext.attribution.trace_analyzer import fr_attribution as theirs

    said = io.StringIO()
    text, error = "", ""
    with contextlib.redirect_stderr(said):
        try:
            given = {"fr_path": str(directory), "pattern": "trace_*", "llm_analyze": False}
            result = theirs.CollectiveAnalyzer(given).run_sync(given)
            text = str(result[0]["hanging_ranks"])
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return Said(text, set(map(int, re.findall(r"\d+", text))), error)


def with_members(directory: Path, groups: Sequence[tuple[str, tuple[str, Sequence[int]]]]) -> None:
    """Write the members of all groups into dumps, as gloo's have none."""
    for path in directory.glob("trace_*"):
        data = pickle.loads(path.read_bytes())
        data["pg_config"] = {
            name: {"name": name, "desc": label, "ranks": json.dumps(ranks)}
            for name, (label, ranks) in groups
            if int(path.name[6:]) in ranks
        }
        path.write_bytes(pickle.dumps(data, 2))


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
