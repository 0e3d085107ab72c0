"""The live groups of this process as JSON, to be read with torch's flight recorder."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid import of_torch
from hypergrid.groups.pool import GroupPool, PooledGroup, live_pools

SCHEMA = 1


def dump(path: str | os.PathLike[str] | None = None) -> str:
    """Every live process group of this rank, one entry per name. *Local*.

    Parameters
    ----------
    path : path, optional
        Also write the text to this file. Give each rank its own.

    Returns
    -------
    str
        JSON: ``{"schema": 1, "rank", "world_size", "host", "pid", "groups": [...]}``. Each group
        has ``owner`` and ``label`` (null for a group of outside code), ``dims``, ``ranks``
        in the order of the group, ``backend``, ``name`` and ``description`` as torch's flight
        recorder writes them, and ``shared_with``: the label whose communicator it is, or null.
    """
    text = json.dumps(group_records(), indent=1)
    if path is not None:
        Path(path).write_text(text + "\n")
    return text


def group_records() -> dict[str, Any]:
    """The data that ``dump`` writes."""
    alive = dist.is_initialized()
    return {
        "schema": SCHEMA,
        "rank": dist.get_rank() if alive else None,
        "world_size": dist.get_world_size() if alive else None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "groups": _groups() if alive else [],
    }


def _groups() -> list[dict[str, Any]]:
    default, alive = of_torch.default_group(), of_torch.known()
    pooled = [(p, each) for p in live_pools() for each in p.groups if each.group in alive]
    ours = {default, *(each.group for _, each in pooled)}
    rows: list[tuple[ProcessGroup, GroupPool | None, PooledGroup | None]] = [
        (default, None, None),
        *((each.group, pool, each) for pool, each in pooled),
        *((group, None, None) for group in alive if group not in ours),
    ]
    return [
        {
            "owner": pool and pool.owner,
            "label": each and each.label,
            "dims": each and list(each.dims),
            "ranks": dist.get_process_group_ranks(group),
            "backend": dist.get_backend(group),
            "name": group.group_name,
            "description": group.group_desc,
            "shared_with": each and each.shares,
        }
        for group, pool, each in rows
    ]
