"""The files that a rank leaves, as torch's flight recorder and ``hypergrid.record`` write them."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SECOND = 10**9
START = 1_790_000_000 * SECOND
Frames = Sequence[tuple[str, int, str]]
# Label and members by torch's name of the group.
Groups = Mapping[str, tuple[str, Sequence[int]]]


def entry(
    number: int,
    groups: Groups,
    group: str,
    name: str,
    numbers: tuple[int, int],
    *,
    is_p2p: bool,
    created: int,
    started: int | None,
    completed: int | None,
    retired: bool,
    sizes: Sequence[Sequence[int]],
    output_sizes: Sequence[Sequence[int]],
    dtype: str,
    frames: Frames,
) -> dict[str, Any]:
    """The recorder's call of that number; ``groups`` are those of the rank.

    ``numbers``: of the collectives of the group until then, and of its sends and receives.
    """
    state = "started" if started else "scheduled"
    label, _ = groups[group]
    collectives, sends = numbers
    return {
        "frames": [{"filename": file, "line": line, "name": code} for file, line, code in frames],
        "record_id": number,
        "op_id": number + 1,
        "pg_id": sorted(groups).index(group),
        "process_group": (group, label),
        "collective_seq_id": collectives,
        "p2p_seq_id": sends,
        "profiling_name": name,
        "time_created_ns": created,
        "input_sizes": sizes,
        "input_dtypes": [dtype] * len(sizes),
        "output_sizes": output_sizes,
        "output_dtypes": [dtype] * len(output_sizes),
        "state": "completed" if completed else state,
        "time_discovered_started_ns": started,
        "time_discovered_completed_ns": completed,
        "retired": retired,
        "timeout_ms": 600000,
        "is_p2p": is_p2p,
    }


def config(groups: Groups) -> dict[str, dict[str, str]]:
    """The members of groups, as NCCL's recorder has them."""
    rows = {}
    for name, (label, ranks) in groups.items():
        rows[name] = {"name": name, "desc": label, "ranks": json.dumps(list(ranks))}
    return rows


# As gloo's recorder has them.
NO_MEMBERS = {"": {"name": "", "desc": "", "ranks": "[]"}}


class Rank:
    """The recorder of one rank: ``call`` appends an entry, as a collective would."""

    def __init__(self, rank: int, groups: Groups, backend: str = "nccl") -> None:
        self.rank = rank
        self.groups = {name: group for name, group in groups.items() if rank in group[1]}
        self.config = config(self.groups)
        self.backend = backend
        self.entries: list[dict[str, Any]] = []
        self.seq = Counter[tuple[str, bool]]()
        self.now = START

    def call(
        self,
        group: str,
        name: str = "all_reduce",
        *,
        done: bool = True,
        size: Sequence[int] = (4,),
        dtype: str = "Float",
        after: float = 1,  # seconds since the previous call
        lasts: float = 0.5,
        frames: Frames = (("train.py", 7, "step"),),
    ) -> Rank:
        is_p2p = name.startswith(("send", "recv"))
        self.seq[group, is_p2p] += 1
        self.now += int(after * SECOND)
        call = entry(
            len(self.entries),
            self.groups,
            group,
            f"{self.backend}:{name}",
            (self.seq[group, False], self.seq[group, True]),
            is_p2p=is_p2p,
            created=self.now,
            started=self.now + 1000,
            completed=self.now + int(lasts * SECOND) if done else None,
            retired=done,
            sizes=[list(size)],
            output_sizes=[list(size)],
            dtype=dtype,
            frames=frames,
        )
        self.entries.append(call)
        return self

    def dump(self) -> dict[str, Any]:
        """What torch would pickle."""
        return {"version": "2.10", "pg_config": self.config, "entries": self.entries}


def write(directory: Path, ranks: Iterable[Rank], prefix: str = "trace_") -> Path:
    """Write the flight recorders, a while after the last call of all."""
    ranks = list(ranks)
    written = max([START, *(rank.now for rank in ranks)]) + 1000 * SECOND
    for rank in ranks:
        trace(directory / f"{prefix}{rank.rank}", rank.dump(), written)
    return directory


def trace(path: Path, dump: Mapping[str, Any], written: int) -> None:
    """Write a flight recorder at a moment (ns)."""
    path.write_bytes(pickle.dumps(dump, protocol=2))
    os.utime(path, ns=(written, written))


def stack(
    directory: Path,
    rank: int,
    frames: Frames = (),
    *,
    error: str | None = None,
    written: int = START,
    **more: Any,
) -> None:
    """Write the stacks of a rank, as ``hypergrid.record`` does next to the flight recorder."""
    content = {
        "schema": 1,
        "rank": rank,
        "host": f"host{rank // 4}",
        "pid": 1000 + rank,
        "written_ns": written,
        "reason": "exception" if error else "asked in the directory",
        "error": error,
        "threads": [{"name": "MainThread", "main": True, "frames": frames}],
    }
    (directory / f"stack_{rank}.json").write_text(json.dumps(content | more))


def dumped(rank: int, world_size: int, groups: Groups, **more: Any) -> dict[str, Any]:
    """The content of a file of ``hypergrid.dump``; ``more`` is in every group."""
    rows = []
    for name, (description, members) in groups.items():
        rows.append({"name": name, "description": description, "ranks": list(members)} | more)
    return {
        "schema": 1,
        "rank": rank,
        "world_size": world_size,
        "host": f"host{rank // 4}",
        "pid": 1000 + rank,
        "groups": rows,
    }
