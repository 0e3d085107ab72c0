"""GroupPool: owns the process groups that were made together; nobody else destroys one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from hypergrid import creation
from hypergrid.agreement import Agreement
from hypergrid.creation import Ranks
from hypergrid.plan import Kind
from hypergrid.policy import Policy

DEFAULT = "the default group"


@dataclass(frozen=True)
class PooledGroup:
    """A label's group: its global ranks, torch's group, and whose communicator it is.

    ``shares`` is None for a group made for this label; else the label that it was made for, or
    :data:`DEFAULT`.
    """

    label: str
    ranks: tuple[int, ...]
    group: ProcessGroup
    shares: str | None = None


class GroupPool:
    """Live groups of this process, in the order in which they were made."""

    def __init__(self, agreement: Agreement, policy: Policy) -> None:
        self.agreement = agreement
        self.policy = policy
        self.groups: list[PooledGroup] = []
        self._owners: dict[tuple[Ranks, Kind], str] = {}

    def make(
        self,
        label: str,
        mine: Mapping[str, Ranks],
        everyone: Callable[[], Sequence[Ranks]],
        *,
        kind: Kind | None = None,
        **options: Any,
    ) -> list[ProcessGroup]:
        """Create the groups of one label and give those of this rank, often one or none.

        Parameters
        ----------
        label : str
            The name; also the description, unless ``group_desc`` is given.
        mine : mapping of name to ranks
            The groups that this rank belongs to; their members know them by the same name.
        everyone : function
            Gives all groups of the label; asked only where members alone cannot create.
        kind : Kind, optional
            What must be equal, beside the ranks, for labels to share a communicator; None for a
            group that is never shared.
        **options
            As for ``torch.distributed.new_group``: backend, timeout (timedelta), pg_options,
            group_desc.

        *Collective* over the members of each group, or over the world where the agreement says
        that members alone cannot create. After a failure nothing of this call is left.
        """
        options.setdefault("group_desc", label)
        before, owners = len(self.groups), dict(self._owners)
        try:
            with creation.connecting(self.agreement.lazy):
                if self._way(options.get("backend")) == "members":
                    self._make_mine(label, mine, kind, options)
                else:
                    self._make_all(label, mine, everyone(), kind, options)
        except BaseException:
            self.destroy(before)
            self._owners = owners
            raise
        return [pooled.group for pooled in self.groups[before:]]

    def _make_mine(
        self, label: str, mine: Mapping[str, Ranks], kind: Kind | None, options: dict[str, Any]
    ) -> None:
        for name, ranks in mine.items():
            owner = self._owner(label, ranks, kind)
            if owner is None:
                group = creation.by_members(name, ranks, self.agreement.epoch, **options)
                self.groups.append(PooledGroup(label, tuple(ranks), group))
            else:
                self._share(label, ranks, owner)

    def _make_all(
        self,
        label: str,
        mine: Mapping[str, Ranks],
        groups: Sequence[Ranks],
        kind: Kind | None,
        options: dict[str, Any],
    ) -> None:
        # In lockstep: every rank leaves out the same groups, those of others too.
        owners = {tuple(ranks): self._owner(label, ranks, kind) for ranks in groups}
        missing = [ranks for ranks in groups if owners[tuple(ranks)] is None]
        way = self._way(options.get("backend"))
        fresh = creation.by_world(way, label, missing, self.agreement.epoch, **options)
        for ranks in mine.values():
            owner = owners[tuple(ranks)]
            if owner is None:
                self.groups.append(PooledGroup(label, tuple(ranks), fresh.pop(0)))
            else:
                self._share(label, ranks, owner)

    def _way(self, backend: str | None) -> str:
        own = backend is None or backend == dist.get_backend()
        return self.agreement.way if own else self.agreement.others

    def _owner(self, label: str, ranks: Ranks, kind: Kind | None) -> str | None:
        """Whose communicator serves ``ranks``; None, and it is the label's own, if it is new."""
        share = self.policy.share
        if kind is None or share == "none" or (share == "singletons" and len(ranks) > 1):
            return None
        key = (tuple(ranks), kind)
        if key in self._owners:
            return self._owners[key]
        if share == "all" and len(ranks) == dist.get_world_size() and kind == _default_kind():
            return DEFAULT
        self._owners[key] = label
        return None

    def _share(self, label: str, ranks: Ranks, owner: str) -> None:
        members = tuple(ranks)
        if owner == DEFAULT:
            group = c10d._get_default_group()
        else:
            (group,) = (g.group for g in self.groups if g.label == owner and g.ranks == members)
        self.groups.append(PooledGroup(label, members, group, owner))

    def destroy(self, keep: int = 0) -> None:
        """Give back every group but the first ``keep``; those that torch has lost already too."""
        leaving, self.groups = self.groups[keep:], self.groups[:keep]
        for pooled in leaving:
            if pooled.shares is None and pooled.group in c10d._world.pg_map:
                dist.destroy_process_group(pooled.group)


def _default_kind() -> Kind | None:
    """The kind that a group must be of for the default group to serve it; None if unknown."""
    default = c10d._get_default_group()
    for device in default._device_types:
        timeout = getattr(default._get_backend(device).options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return Kind(None, timeout.total_seconds(), None)
    return None
