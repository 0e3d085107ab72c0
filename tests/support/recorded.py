"""Dumps of flight recorders in NCCL's form, as torch writes them, without a GPU."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SECOND = 10**9
START = 1_790_000_000 * SECOND


class Rank:
    """The recorder of one rank: ``call`` appends an entry, as a collective would."""

    def __init__(
        self, rank: int, groups: Mapping[str, tuple[str, Sequence[int]]], backend: str = "nccl"
    ) -> None:
        self.backend = backend
        self.rank, self.groups = rank, {n: g for n, g in groups.items() if rank in g[1]}
        self.entries: list[dict[str, Any]] = []
        self.seq: dict[tuple[str, bool], int] = {}
        self.now = START

    def call(
        self,
        group: str,
        name: str = "all_reduce",
        *,
        done: bool = True,
        size: Sequence[int] = (4,),
        out: Sequence[int] | None = None,
        dtype: str = "Float",
        after: float = 1,  # seconds since the previous call
        lasts: float = 0.5,
        seq: int | None = None,
        frames: Sequence[tuple[str, int, str]] = (("train.py", 7, "step"),),
    ) -> Rank:
        p2p = name.split()[0] in ("send", "recv")
        number = seq or self.seq.get((group, p2p), 0) + 1
        self.seq[group, p2p] = number
        self.now += int(after * SECOND)
        self.entries.append(
            {
                "frames": [{"filename": f, "line": n, "name": w} for f, n, w in frames],
                "record_id": len(self.entries),
                "pg_id": sorted(self.groups).index(group),
                "process_group": (group, self.groups[group][0]),
                "collective_seq_id": 0 if p2p else number,
                "p2p_seq_id": number if p2p else 0,
                "op_id": len(self.entries) + 1,
                "profiling_name": f"{self.backend}:{name}",
                "time_created_ns": self.now,
                "input_sizes": [list(size)],
                "input_dtypes": [dtype],
                "output_sizes": [list(size if out is None else out)],
                "output_dtypes": [dtype],
                "state": "completed" if done else "started",
                "time_discovered_started_ns": self.now + 1000,
                "time_discovered_completed_ns": self.now + int(lasts * SECOND) if done else None,
                "retired": done,
                "timeout_ms": 600000,
                "is_p2p": p2p,
            }
        )
        return self

    def config(self) -> dict[str, dict[str, str]]:
        return {
            name: {"name": name, "desc": desc, "ranks": json.dumps(list(ranks))}
            for name, (desc, ranks) in self.groups.items()
        }

    def dump(self) -> dict[str, Any]:
        return {
            "version": "2.10",
            "pg_config": self.config(),
            "pg_status": {},
            "comm_lib_version": "2.27.5",
            "entries": self.entries,
        }


def write(directory: Path, ranks: Iterable[Rank], prefix: str = "trace_") -> Path:
    ranks = list(ranks)
    written = max([START, *(rank.now for rank in ranks)]) + 1000 * SECOND
    for rank in ranks:
        path = directory / f"{prefix}{rank.rank}"
        path.write_bytes(pickle.dumps(rank.dump(), protocol=2))
        os.utime(path, ns=(written, written))
    return directory


def stack(
    directory: Path,
    rank: int,
    frames: Sequence[tuple[str, int, str]] = (),
    *,
    error: str | None = None,
    written: int = START,
    **more: Any,
) -> None:
    """The files that ``hypergrid.record`` writes next to the flight recorder."""
    thread = {"name": "MainThread", "main": True, "frames": [list(each) for each in frames]}
    (directory / f"stack_{rank}.json").write_text(
        json.dumps(
            {
                "schema": 1,
                "rank": rank,
                "host": f"host{rank // 4}",
                "pid": 1000 + rank,
                "written_ns": written,
                "reason": "exception" if error else "SIGUSR1",
                "error": error,
                "threads": [thread],
                **more,
            }
        )
    )
