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
from hypergrid.groups.pool import PooledGroup, live_pools

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
    records = group_records()
    text = json.dumps(records, indent=1)
    if path is not None:
        Path(path).write_text(text + "\n")
    return text


def group_records() -> dict[str, Any]:
    """The data that ``dump`` writes."""
    records: dict[str, Any] = {
        "schema": SCHEMA,
        "rank": None,
        "world_size": None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "groups": [],
    }
    if dist.is_initialized():
        records["rank"] = dist.get_rank()
        records["world_size"] = dist.get_world_size()
        records["groups"] = _groups()
    return records


def _groups() -> list[dict[str, Any]]:
    default = of_torch.default_group()
    registered = of_torch.registered_groups()
    records = [_record(default)]
    listed = {default}
    for pool in live_pools():
        for pooled in pool.groups:
            if pooled.group in registered:
                records.append(_record(pooled.group, pool.owner, pooled))
                listed.add(pooled.group)
    for group in registered:
        if group not in listed:
            records.append(_record(group))
    return records


def _record(
    group: ProcessGroup, owner: str | None = None, pooled: PooledGroup | None = None
) -> dict[str, Any]:
    """A group; one of outside code has no owner and no label."""
    return {
        "owner": owner,
        "label": pooled and pooled.label,
        "dims": pooled and list(pooled.dims),
        "ranks": dist.get_process_group_ranks(group),
        "backend": dist.get_backend(group),
        "name": group.group_name,
        "description": group.group_desc,
        "shared_with": pooled and pooled.shares,
    }
