"""Ends groups: in the order that all ranks share, or at once and without any other rank."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from hypergrid.groups.store import end_waits
from hypergrid.messages import in_words

LIMIT = timedelta(seconds=30)  # that all aborts together may take
WATCHDOG, NONBLOCKING = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_USE_COMM_NONBLOCKING"
# How torch's NCCL is to be set so that a rank can be freed: the value, torch's own, and why.
SETTINGS = {
    WATCHDOG: (
        "0",
        "3",
        "NCCL's watchdog ends a process whose collective exceeds its timeout, also one that is "
        "being freed; torchrun sets 1",
    ),
    NONBLOCKING: (
        "1",
        "0",
        "a rank that connects waits for a missing one without a limit, which no abort ends; with "
        "1 for TORCH_NCCL_NONBLOCKING_TIMEOUT seconds",
    ),
}
_HOOK = int.from_bytes(b"hypergr", "big")  # torch keeps hooks by number
_aborts: weakref.WeakKeyDictionary[ProcessGroup, _Abort] = weakref.WeakKeyDictionary()


class _Abort(threading.Thread):
    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(name=f"aborting {c10d._world.pg_names.get(group)}", daemon=True)
        self.error: Exception | None = None
        self._group: ProcessGroup | None = group
        self.start()

    def run(self) -> None:
        try:
            if self._group is not None:
                self._group.abort()
        except Exception as error:
            self.error = error
        finally:
            self._group = None


def unset() -> dict[str, str]:
    """The variables of ``SETTINGS`` that have other values: which, and what they do."""
    values = {name: os.environ.get(name, usual) for name, (_, usual, _) in SETTINGS.items()}
    return {
        name: f"{values[name]}, not {wanted}: {why}"
        for name, (wanted, _, why) in SETTINGS.items()
        if values[name] != wanted
    }


def watch(group: Any) -> None:
    """Notice that torch aborts ``group`` by itself, where it tells: nccl2's watchdog does."""
    if getattr(group, "supports_abort_hooks", bool)():
        group.register_abort_hook(_HOOK, functools.partial(_on_abort, weakref.ref(group)))


def _on_abort(group: weakref.ref[ProcessGroup]) -> None:
    if group() is not None and group() not in _aborts:
        end_waits()


def free(groups: Iterable[ProcessGroup], limit: timedelta = LIMIT) -> dict[ProcessGroup, str]:
    """Let torch abort ``groups``; returns those whose abort failed or goes on, and why. *Local*.

    All at the same time: NCCL's abort of one communicator waits until the kernels of the others
    are gone (pytorch 119797), and torch's waits for locks that a rank holds while it connects. A
    group is not aborted again while its abort goes on, or once it has ended without an error.
    """
    asked = [*groups]
    for group in asked:
        before = _aborts.get(group)
        if before is None or before.error is not None:
            _aborts[group] = _Abort(group)
    end, failed = time.monotonic() + limit.total_seconds(), dict[ProcessGroup, str]()
    for group in asked:
        _aborts[group].join(max(0, end - time.monotonic()))
        error = _aborts[group].error
        if _aborts[group].is_alive():
            failed[group] = f"its abort did not end within {limit.total_seconds():g} s."
        elif error is not None:
            failed[group] = in_words(error)
    return failed


def unfinished() -> list[ProcessGroup]:
    """The groups whose abort failed, or goes on."""
    return [group for group, each in [*_aborts.items()] if each.is_alive() or each.error]


def abort(groups: Iterable[ProcessGroup]) -> dict[ProcessGroup, str]:
    """``free`` groups that nobody has begun to free, and let torch forget all. *Local*."""
    asked = [*groups]
    failed = free(group for group in asked if group not in _aborts)
    for group in asked:
        unregister(group)
    return failed


def close(groups: Iterable[ProcessGroup]) -> dict[ProcessGroup, str]:
    """Destroy ``groups``; returns those that torch could not destroy, and why.

    In the order in which ``torch.distributed.destroy_process_group()`` destroys all groups, as
    NCCL waits for the other members.
    """
    names, failed = c10d._world.pg_names, dict[ProcessGroup, str]()
    for group in sorted(groups, key=lambda each: names.get(each, ""), reverse=True):
        try:
            dist.destroy_process_group(group)
        except RuntimeError as error:
            failed[group] = in_words(error)
        except (AssertionError, LookupError, ValueError):
            if group in c10d._world.pg_map:  # else another thread has destroyed it meanwhile
                raise
        unregister(group)
    return failed


def unregister(group: ProcessGroup) -> None:
    """Let torch forget ``group``, as ``destroy_process_group`` does, which may wait. *Local*."""
    world = c10d._world
    name = world.pg_names.pop(group, None)
    hooks = getattr(world, "pg_flight_recorder_hooks", {})
    maps = (world.pg_map, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)
    for known in (*maps, world.pg_coalesce_state, hooks):
        known.pop(group, None)
    for tag, tagged in [*world.tags_to_pg.items()]:
        if group in tagged:
            tagged.remove(group)
        if not tagged:  # torch leaves an empty list for every past group
            world.tags_to_pg.pop(tag, None)
    if name is not None:
        torch._C._distributed_c10d._unregister_process_group(name)
    if group is c10d.GroupMember.WORLD:
        c10d._update_default_pg(None)
        world.group_count = 0
