"""Makes a planned group on this rank: by its members alone, by a split, or with every rank."""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

Ranks: TypeAlias = Sequence[int]
_private = threading.RLock()  # outside code may create groups while it is called to create one


def group_name(label: str, ranks: Ranks, epoch: str) -> int:
    """A group's name from what it is: 128 bits, which torch writes in decimal."""
    digest = hashlib.blake2b(f"{label}|{epoch}|".encode(), digest_size=16)
    digest.update(np.asarray(ranks, dtype="<i8").tobytes())
    return int.from_bytes(digest.digest(), "big")


def by_members(label: str, ranks: Ranks, epoch: str, **options: Any) -> ProcessGroup:
    """Create the group of ``ranks``. *Collective* over these ranks and no others.

    ``options`` are those of ``torch.distributed.new_group``.
    """
    with _running_number(group_name(label, ranks, epoch)):
        try:
            group: ProcessGroup = dist.new_group(list(ranks), **own(options))
        except RuntimeError:
            # A dry run on a fake default group: no store through which a real backend connects.
            if dist.get_backend() != "fake" or options.get("backend") in (None, "fake"):
                raise
            group = dist.new_group(list(ranks), **{**options, "backend": "fake"})
        return group


def by_split(groups: Sequence[Ranks], **options: Any) -> ProcessGroup | None:
    """Split disjoint ``groups`` off the default group, in one call. *Collective* over the world.

    Torch names these groups from what each rank made before, so that the members of one group
    may know it by different names.
    """
    options.pop("backend", None)
    group: ProcessGroup | None = dist.split_group(split_ranks=[list(r) for r in groups], **options)
    return group if isinstance(group, ProcessGroup) else None  # or torch's non-member marker


def by_everyone(
    label: str, groups: Sequence[Ranks], epoch: str, **options: Any
) -> list[ProcessGroup]:
    """Create all ``groups`` and give those of this rank. *Collective* over the whole world.

    A partition goes through ``torch.distributed.new_subgroups_by_enumeration``; groups that
    overlap are created one by one, which it refuses.
    """
    if not groups:
        return []
    before = set(c10d._world.pg_map)
    with named_from(label, (), epoch):
        try:
            if disjoint(groups):
                every = [list(ranks) for ranks in groups]
                mine, _ = dist.new_subgroups_by_enumeration(every, **own(options))
                return [] if mine is None else [mine]
            made = [dist.new_group(list(ranks), **own(options)) for ranks in groups]
        except BaseException:
            for group in c10d._world.pg_map.keys() - before:
                dist.destroy_process_group(group)
            raise
        rank = dist.get_rank()
        return [group for group, ranks in zip(made, groups, strict=True) if rank in ranks]


def by_world(
    way: str, label: str, groups: Sequence[Ranks], epoch: str, **options: Any
) -> list[ProcessGroup]:
    """Create ``groups`` with all ranks, by a split if that is the ``way`` and they are disjoint."""
    if way != "split" or not disjoint(groups):
        return by_everyone(label, groups, epoch, **options)
    mine = by_split(groups, **options) if groups else None
    return [] if mine is None else [mine]


def disjoint(groups: Sequence[Ranks]) -> bool:
    """Whether no rank is in two of ``groups``."""
    members = [rank for ranks in groups for rank in ranks]
    return len(members) == len(set(members))


@dataclass(frozen=True)
class Abilities:
    """What this process can do, as ranks tell each other before they create.

    ``obstacle`` keeps every group from being created by its members alone; ``bound`` only those
    of the default group's backend, because the default group is bound to a device and each new
    one is split from it. Each is a reason in words, or None.
    """

    obstacle: str | None = None
    bound: str | None = None
    can_split: bool = False
    can_connect_lazily: bool = True


def abilities() -> Abilities:
    """Look at torch, its default group and the environment."""
    if not dist.is_initialized():
        return Abilities("torch.distributed is not initialised")
    device = getattr(c10d._get_default_group(), "bound_device_id", None)
    reason = None
    if device is not None:
        reason = f"the default group is bound to {device}, and its splits want every rank"
    return Abilities(
        _obstacle(), reason, device is not None and _splits(device), can_connect_lazily()
    )


def _obstacle() -> str | None:
    if dist.get_backend() == "mpi":
        return "MPI creates every group with all ranks"
    if os.environ.get("TORCH_DIST_INIT_BARRIER", "0") == "1":
        return "TORCH_DIST_INIT_BARRIER=1 makes torch wait for the whole world after each group"
    if getattr(c10d, "_use_torchcomms_enabled", lambda: False)():
        return "torchcomms splits every group from the default one, with all ranks"
    if callable(getattr(c10d._get_default_group(), "new_group", None)):
        return "the default group brings its own new_group"
    if not names_can_be_set():
        return "this torch does not take a group's name from its running group number"
    return None


def _splits(device: torch.device) -> bool:
    try:
        return bool(c10d._get_default_group()._get_backend(device).supports_splitting)
    except (AttributeError, RuntimeError):
        return False


@functools.cache
def names_can_be_set() -> bool:
    """Whether this torch names a group by the running number that ``by_members`` sets."""
    try:
        with _running_number(7):
            return c10d._process_group_name([0], use_hashed_name=False) == "7"
    except (AttributeError, TypeError):
        return False


@functools.cache
def can_connect_lazily() -> bool:
    """Whether this torch's gloo can put off connecting until a group is first used."""
    gloo = getattr(dist, "ProcessGroupGloo", None)
    return "lazy_init" in (getattr(getattr(gloo, "create_device", None), "__doc__", None) or "")


def patience(backend: str | None, timeout: timedelta | None) -> timedelta | None:
    """The timeout to create a group with, for it to be given up within ``timeout`` altogether.

    Gloo takes five times as long before it gives up a member that has said where it is and does
    not answer there. None where the group can be created with its own timeout; also where it must
    be: with ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch gives each a helper that keeps the first one.
    """
    known = hasattr(c10d, "_set_pg_timeout") and dist.get_backend() != "fake"
    if not known or c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
        return None
    config = backend or dist.get_backend()
    if config == dist.Backend.UNDEFINED:  # what this machine's devices use
        config = repr(c10d.BackendConfig(dist.Backend(config)))
    if "gloo" not in config.lower():
        return None
    timeout = timeout or c10d.default_pg_timeout
    return max(timeout / 5, min(timeout, timedelta(seconds=5)))


@contextmanager
def connecting(lazily: bool) -> Iterator[None]:
    """Let gloo groups that are created inside connect when they are first used."""
    if not lazily:
        yield
        return
    name = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def own(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` with backend options for one group alone: torch writes its name into them.

    Those that cannot be copied are gloo's, which torch does not read.
    """
    try:
        return {**options, "pg_options": copy.deepcopy(options.get("pg_options"))}
    except TypeError:
        return options


def is_replaced(function: object) -> bool:
    """Whether outside code has put its own in the place of this function of torch.distributed.

    By where the code is: a wrapper may carry torch's name and module.
    """
    code = getattr(function, "__code__", None)
    return code is None or not code.co_filename.startswith(os.path.dirname(dist.__file__))


@contextmanager
def named_from(label: str, ranks: Ranks, epoch: str) -> Iterator[None]:
    """Let the groups that others' code creates inside have names that begin at this one's.

    Each has a name of its own, the same on every rank that makes the same calls inside.
    """
    with _running_number(group_name(label, ranks, epoch) if names_can_be_set() else None):
        yield


@contextmanager
def _running_number(number: int | None) -> Iterator[None]:
    # The only private thing of torch's that creation depends on: new_group turns this counter
    # into the name. Put back afterwards, so groups made by others keep their numbers.
    if number is None:
        yield
        return
    with _private:
        before = c10d._world.group_count
        c10d._world.group_count = number
        try:
            yield
        finally:
            c10d._world.group_count = before
