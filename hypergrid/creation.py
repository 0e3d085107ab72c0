"""Makes a planned group on this rank: by its members alone, or with every rank taking part."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

Ranks: TypeAlias = Sequence[int]
_numbering = threading.Lock()


def group_name(label: str, ranks: Ranks, epoch: str) -> int:
    """A group's name from what it is: 128 bits, which torch writes in decimal."""
    text = f"{label}|{epoch}|{','.join(map(str, ranks))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")


def by_members(label: str, ranks: Ranks, epoch: str, **options: Any) -> ProcessGroup:
    """Create the group of ``ranks``. *Collective* over these ranks and no others.

    ``options`` are those of ``torch.distributed.new_group``.
    """
    with _running_number(group_name(label, ranks, epoch)):
        group: ProcessGroup = dist.new_group(list(ranks), **options)
        return group


def by_everyone(
    label: str, groups: Sequence[Ranks], epoch: str, **options: Any
) -> list[ProcessGroup]:
    """Create all ``groups`` and give those of this rank. *Collective* over the whole world.

    A partition goes through ``torch.distributed.new_subgroups_by_enumeration``; groups that
    overlap are created one by one, which it refuses.
    """
    if not groups:
        return []
    with _running_number(group_name(label, (), epoch) if names_can_be_set() else None):
        members = [rank for ranks in groups for rank in ranks]
        if len(members) == len(set(members)):
            mine, _ = dist.new_subgroups_by_enumeration([list(r) for r in groups], **options)
            return [] if mine is None else [mine]
        made = [dist.new_group(list(ranks), **options) for ranks in groups]
        rank = dist.get_rank()
        return [group for group, ranks in zip(made, groups, strict=True) if rank in ranks]


def obstacle() -> str | None:
    """Why members alone cannot create a group in this process; None where they can."""
    if not dist.is_initialized():
        return "torch.distributed is not initialised"
    default = c10d._get_default_group()
    if dist.get_backend() == "mpi":
        return "MPI creates every group with all ranks"
    if os.environ.get("TORCH_DIST_INIT_BARRIER", "0") == "1":
        return "TORCH_DIST_INIT_BARRIER=1 makes torch wait for the whole world after each group"
    if getattr(c10d, "_use_torchcomms_enabled", lambda: False)():
        return "torchcomms splits every group from the default one, with all ranks"
    if callable(getattr(default, "new_group", None)):
        return "the default group brings its own new_group"
    if getattr(default, "bound_device_id", None) is not None:
        return "the default group is bound to a device, and its splits want every rank"
    if not names_can_be_set():
        return "this torch does not take a group's name from its running group number"
    return None


@functools.cache
def names_can_be_set() -> bool:
    """Whether this torch names a group by the running number that :func:`by_members` sets."""
    try:
        with _running_number(7):
            return c10d._process_group_name([0], use_hashed_name=False) == "7"
    except (AttributeError, TypeError):
        return False


@contextmanager
def _running_number(number: int | None) -> Iterator[None]:
    # The only private thing of torch's that creation depends on: new_group turns this counter
    # into the name. Put back afterwards, so groups made by others keep their numbers.
    if number is None:
        yield
        return
    with _numbering:
        before = c10d._world.group_count
        c10d._world.group_count = number
        try:
            yield
        finally:
            c10d._world.group_count = before
