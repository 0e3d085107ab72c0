"""Abort: free this rank from every group, whatever the other ranks do."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from hypergrid import of_torch
from hypergrid.agreement import store
from hypergrid.errors import AbortedError
from hypergrid.groups import closing, gloo
from hypergrid.groups.pool import DEFAULT, label_of, live_pools

_log = logging.getLogger(__name__)
# For code that holds what was built on groups: called when all of them are destroyed.
after_abort: set[Callable[[], None]] = set()


def raise_if_aborted() -> None:
    """AbortedError if ``abort()`` was called since the groups were created. *Local*.

    Also if NCCL's watchdog has aborted one of them, where torch reports it (nccl2). Call it before
    each ``optimizer.step()``, and before a checkpoint is written: kernels that were aborted raise
    nothing, and leave any values behind. Waits until the device has run what was called on the
    current stream, as a step is else queued before the abort comes.
    Not inside the capture of a CUDA graph.
    """
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()
    if store.was_aborted():
        raise AbortedError(
            "hypergrid.abort(), or NCCL's watchdog, has ended groups of this process. What was "
            "computed with them since may be wrong: create new groups, and load the last "
            "checkpoint."
        )


class Aborted(NamedTuple):
    """Result of ``hypergrid.abort()``: the groups that it ended, and how many connections."""

    groups: tuple[str, ...]
    connections: int


def abort(default: bool = False, *, timeout: timedelta = closing.LIMIT) -> Aborted:
    """End every group of this process, also while another thread waits in one. *Local*.

    Waits for no other rank, and may be called in any thread. A thread that waits in a collective
    on the CPU raises torch's error: RuntimeError, or ValueError where torch's logger asks for a
    group that is gone by then. One that creates groups raises ``AbortedError``: in seconds where
    it waits for other ranks in the store. Where it waits in a gloo group that has not connected,
    it raises after the timeout of that group.
    NCCL's kernels end without an error: until new groups are created, ``raise_if_aborted`` and
    Megatron's getters raise. All groups are destroyed, and what was built on them is as before
    it was initialised. Only this rank is freed: each rank has to call it. Ranks that wait for this
    one to reach creation raise ``AgreementError``.

    Torch's own abort of each group is called, of all at the same time. It does not end what waits
    in gloo, so there the group's connections are shut. For gloo this needs Linux.

    Parameters
    ----------
    default : bool
        Also end torch's default group, and groups of outside code. Torch is then as after
        ``destroy_process_group()``, which need not be called. Sockets of gloo groups of outside
        code are left alone.
    timeout : timedelta
        How long to wait for all aborts together. What has not ended by then goes on in a thread,
        and torch does not know the group any more; a further ``abort()`` waits again.

    Returns
    -------
    Aborted
        ``groups``, the labels of the groups that were destroyed, in the order of creation, and
        ``connections``, the number of gloo's connections that were shut. Both are empty if there
        was nothing to abort: a second call does no harm.

    Warns
    -----
    RuntimeWarning
        Torch could not abort a group, or not in time; the others are destroyed.
    """
    begin = time.monotonic()
    store.end_waits()
    pools = live_pools()
    # Of all pools together: states may share a group.
    name_of = label_of(pooled for pool in pools for pooled in pool.groups)
    for group in closing.inherited:  # in a forked child the groups of its parent: only forgotten
        name_of.pop(group, None)
    labels = tuple(name_of.values())  # of the groups that end
    if default and dist.is_initialized():
        gloo.note_default()
        default_group = of_torch.default_group()
        name_of[default_group] = DEFAULT
    connections = gloo.shut(name_of)
    if default:
        # Groups of outside code end too. Their sockets are left alone.
        for group in of_torch.registered_groups():
            name_of.setdefault(group, group.group_desc)
    ending = dict.fromkeys([*name_of, *closing.unfinished()])  # each once
    for group, reason in closing.free(ending, timeout).items():
        name = name_of.get(group, "a group of an earlier abort()")
        warnings.warn(f"could not abort {name}: {reason}", RuntimeWarning, stacklevel=2)
    for pool in pools:
        # The grid or state that holds a pool forgets more than its groups.
        holder = pool.holder() or pool
        holder.destroy(abort=True)
    if default:
        closing.abort(of_torch.registered_groups())
    for forget in [*after_abort]:
        forget()
    _log.info(
        "abort: ended %d groups and shut %d connections of gloo in %.3f s: %s",
        len(labels),
        connections,
        time.monotonic() - begin,
        ", ".join(labels),
    )
    return Aborted(labels, connections)
