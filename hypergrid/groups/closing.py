"""Ends groups: in the order that all ranks share, or at once and without any other rank."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid import of_torch
from hypergrid.agreement.store import end_waits, shared_store
from hypergrid.agreement.waits import watched_closing
from hypergrid.messages import in_words

LIMIT = timedelta(seconds=30)  # that all aborts together may take
_log = logging.getLogger(__name__)
_HOOK = int.from_bytes(b"hypergr", "big")  # torch keeps hooks by number
_aborts: weakref.WeakKeyDictionary[ProcessGroup, _Abort] = weakref.WeakKeyDictionary()
# Groups of the process that forked this one. Their threads are not in this process, and their
# sockets are the parent's too: they are never ended here, and held, as gloo's destructor waits for
# the threads.
inherited: set[ProcessGroup] = set()


class _Abort(threading.Thread):
    """Torch's abort of one group, which may wait for others."""

    def __init__(self, group: ProcessGroup) -> None:
        name = of_torch.registered_groups().get(group)
        # Python lets go of a thread's arguments at its end: else it would keep the group alive.
        super().__init__(target=self._abort, args=(group,), name=f"aborting {name}", daemon=True)
        self.failure = ""
        try:
            self.start()
        except RuntimeError:  # no memory for one more thread: the caller's does it
            self.run()

    def _abort(self, group: ProcessGroup) -> None:
        try:
            group.abort()
        except Exception as error:
            self.failure = in_words(error)


def _inherit() -> None:
    inherited.update(of_torch.registered_groups(), _aborts)
    _aborts.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)


def watch(group: Any) -> None:
    """Notice that torch aborts ``group`` by itself, where it tells: nccl2's watchdog does."""
    if getattr(group, "supports_abort_hooks", False):
        group.register_abort_hook(_HOOK, functools.partial(_on_abort, weakref.ref(group)))


def _on_abort(reference: weakref.ref[ProcessGroup]) -> None:
    group = reference()
    if group is not None and group not in _aborts:
        end_waits()


def free(groups: Iterable[ProcessGroup], limit: timedelta = LIMIT) -> dict[ProcessGroup, str]:
    """Let torch abort ``groups``; returns those whose abort failed or goes on, and why. *Local*.

    All at the same time: NCCL's abort of one communicator waits until the kernels of the others
    are gone (pytorch 119797), and torch's waits for locks that a rank holds while it connects. A
    group is not aborted again while its abort goes on, or once it has ended without an error, and
    none that this process inherited from the one that forked it.
    """
    aborts = {}
    for group in groups:
        if group in inherited:
            continue
        earlier = _aborts.get(group)
        if earlier is None or earlier.failure:
            _aborts[group] = _Abort(group)
        aborts[group] = _aborts[group]
    end = time.monotonic() + limit.total_seconds()
    reasons = {}
    for group, thread in aborts.items():
        if thread.is_alive():
            thread.join(max(0, end - time.monotonic()))
        if thread.is_alive():
            reasons[group] = f"its abort did not end within {limit.total_seconds():g} s."
        elif thread.failure:
            reasons[group] = thread.failure
    return reasons


def unfinished() -> list[ProcessGroup]:
    """The groups whose abort failed, or goes on."""
    groups = []
    for group, thread in [*_aborts.items()]:
        if thread.is_alive() or thread.failure:
            groups.append(group)
    return groups


def abort(groups: Iterable[ProcessGroup]) -> dict[ProcessGroup, str]:
    """``free`` groups that nobody has begun to free, and let torch forget all. *Local*."""
    all_groups = [*groups]
    reasons = free(group for group in all_groups if group not in _aborts)
    for group in all_groups:
        of_torch.forget(group)
    return reasons


def close(label_of: Mapping[ProcessGroup, str]) -> dict[ProcessGroup, str]:
    """Destroy groups, given with their labels; returns those that torch could not, and why.

    In the order in which ``torch.distributed.destroy_process_group()`` destroys all groups, as
    NCCL waits for the other members. A rank that waits says for whom.
    """
    reasons = {}
    name_of = of_torch.registered_groups()
    store = shared_store() if label_of else None
    in_torchs_order = sorted(label_of, key=lambda group: name_of.get(group, ""), reverse=True)
    for group in in_torchs_order:
        begin = time.monotonic()
        name = name_of.get(group)
        try:
            with ExitStack() as watched:
                if store is not None and name is not None and group.size() > 1:
                    ranks = sorted(dist.get_process_group_ranks(group))
                    watching = watched_closing(store, dist.get_rank(), name, label_of[group], ranks)
                    watched.enter_context(watching)
                dist.destroy_process_group(group)
        except RuntimeError as error:
            reasons[group] = in_words(error)
        except (AssertionError, LookupError, ValueError):
            if of_torch.is_registered(group):  # else another thread has destroyed it meanwhile
                raise
        of_torch.forget(group)
        seconds = time.monotonic() - begin
        _log.debug("destroyed %s in %.1f ms", label_of[group], 1000 * seconds)
    return reasons
