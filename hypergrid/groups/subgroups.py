"""Subgroups: parts of a grid's groups, created when a rank asks for one, without agreement."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid.agreement.store import abortable, check_timeout
from hypergrid.groups import backends, creation, gloo
from hypergrid.groups.pool import GroupPool, PooledGroup
from hypergrid.messages import shown, span_of
from hypergrid.plan import SUBGROUP, Ranks
from hypergrid.policy import Policy


class Subgroups:
    """The subgroups that this rank has of the groups of ``planned``, a grid's pool.

    A name comes from what all members know without asking each other: the epoch of the grid's first
    creation, how often the grid was suspended, the ranks, and how often these were released.
    """

    def __init__(self, planned: GroupPool, suspensions: int) -> None:
        if planned.first is None:
            raise RuntimeError(
                f"rank {dist.get_rank()} asks for a subgroup of {planned.owner} before the ranks "
                f"of the grid have created a group together, whose epoch the subgroup's name has."
            )
        self._planned, self._first = planned, planned.first
        owner, on_demand = f"subgroups of {planned.owner}", replace(planned.first, lazy=True)
        self._pool = GroupPool(on_demand, Policy(connect="lazy"), owner)
        self._pool.holder = planned.holder
        self._suspensions, self._released = suspensions, Counter[Ranks]()
        self._asking = threading.Lock()

    @property
    def groups(self) -> list[PooledGroup]:
        """The groups that exist, even those that were planned."""
        planned = (e for e in self._planned.usable() if e.label.startswith(SUBGROUP))
        return [*planned, *self._pool.groups]

    def get(
        self,
        label: str,
        ranks: Ranks,
        size: int,
        limit: int | None,
        dims: tuple[str, ...],
        backend: str | None,
        timeout: timedelta | None,
    ) -> ProcessGroup:
        """The subgroup of ``ranks``; created if it does not exist. *Local*."""
        me = f"rank {dist.get_rank()}"
        check_timeout(timeout)
        if self._planned.suspended is not None:
            raise RuntimeError(
                f"{me} cannot have {label} while {self._planned.owner} is suspended: call "
                f"resume() first, on every rank."
            )
        with self._asking, abortable():
            for each in self.groups:
                if each.ranks == ranks:
                    return each.group
            obstacle = self._obstacle(backend)
            if obstacle is not None:
                raise RuntimeError(
                    f"{me} asks for {label} of ranks {span_of(ranks)}, which cannot be created on "
                    f"demand: {obstacle}. Plan it: call create_subgroups() on every rank of the "
                    f"grid before, with these dims and this size."
                )
            if limit is not None and len(self._pool.groups) >= limit:
                raise RuntimeError(
                    f"{me} asks for {label} of ranks {span_of(ranks)} and has "
                    f"{len(self._pool.groups)} subgroups, with limit={limit}: call release() with "
                    f"one that is no longer needed, on all its members, or raise the limit."
                )
            count = f"{self._suspensions}/{self._released[ranks]}"
            epoch = f"{self._first.epoch}/subgroups/{count}"
            self._pool.agreement = replace(self._pool.agreement, epoch=epoch)
            short = f", last run of {len(ranks)}" if len(ranks) < size else ""
            (made,) = self._pool.make(
                label,
                {"subgroup": ranks},
                lambda: [ranks],
                dims=dims,
                backend=backend,
                timeout=timeout,
                group_desc=label + short,
            )
            return made

    def _obstacle(self, backend: str | None) -> str | None:
        """Why no group of ``backend`` can be created without waiting for other ranks."""
        can = creation.abilities()
        if can.obstacle is not None:
            return can.obstacle
        device = backends.bound_to(backend)
        if device is not None and not backends.can_wait(backend):
            return (
                f"init_process_group(device_id=...) has bound the default group to a {device} "
                f"device, and torch connects each new group at once"
            )
        if creation.way_of(self._first, backend) != "members":
            return self._first.why or "creation was set so that members do not create alone"
        if "gloo" in backends.devices_of(backend).values() and not gloo.can_connect_lazily():
            return "this torch's gloo connects at once"
        return None

    def release(self, group: ProcessGroup) -> None:
        """Destroy a subgroup. *Collective* over its members."""
        with self._asking:
            known = next((each for each in self.groups if each.group is group), None)
            if known is None:
                raise ValueError(
                    f"rank {dist.get_rank()} cannot release {shown(group)}: it is no subgroup of "
                    f"this grid. Give what subgroup() returned, once."
                )
            self._released[known.ranks] += 1
        for pool in (self._planned, self._pool):
            pool.close([group])

    def destroy(self, *, abort: bool = False) -> None:
        """Destroy those that were not planned."""
        self._pool.destroy(abort=abort)
