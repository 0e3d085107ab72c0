"""Abort: free this rank from every group, whatever the other ranks do."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from hypergrid.groups import creation, of_torch, sockets
from hypergrid.groups.pool import live_pools
from hypergrid.groups.store import end_waits

# For code that holds what was built on groups: called when all of them are destroyed.
after_abort: set[Callable[[], None]] = set()


class Aborted(NamedTuple):
    """What ``hypergrid.abort()`` found: the groups that it ended, and how many connections."""

    groups: tuple[str, ...]
    connections: int


def abort(default: bool = False) -> Aborted:
    """End every group of this process, also while another thread waits in one. *Local*.

    Waits for no other rank, and may be called in any thread. A thread that waits in a collective
    of one of the groups raises torch's error; one that creates groups raises ``AbortedError``,
    in seconds. Then all groups are destroyed, and what was built on them is as before it was
    initialised. Only this rank is freed: each rank has to call it. Ranks that wait for this one to
    reach creation raise ``AgreementError``.

    With NCCL this is torch's own abort of each communicator (not tested yet). Torch's abort does
    not end what waits in gloo, so there the group's connections are shut. For gloo this needs
    Linux.

    Parameters
    ----------
    default : bool
        Also end what waits in torch's default group. It stays registered, and cannot be used:
        ``torch.distributed.destroy_process_group()`` then waits for no other rank.

    Returns
    -------
    Aborted
        ``groups``, the labels of the groups that were destroyed, in the order of creation, and
        ``connections``, the number of gloo's connections that were shut. Both are empty if there
        was nothing to abort: a second call does no harm.

    Warns
    -----
    RuntimeWarning
        Torch could not destroy a group; the others are destroyed.
    """
    end_waits()
    pools = live_pools()
    pooled = [each for pool in pools for each in pool.groups if each.shares is None]
    world = of_torch.default_group() if default and dist.is_initialized() else None
    ending = [each.group for each in pooled] + ([] if world is None else [world])
    if world is not None:
        sockets.note_default(ask_store=False)
    connections = sockets.shut(ending, unfinished=True)
    for pool in pools:
        (pool.holder() or pool).destroy(abort=True)
    if world is not None:
        creation.abort(world)
    for forget in [*after_abort]:
        forget()
    return Aborted(tuple(each.label for each in pooled), connections)
