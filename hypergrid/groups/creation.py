"""Creates one group on this rank: by its members alone, by a split, or with every rank."""

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

from hypergrid.groups import closing, gloo

Ranks: TypeAlias = Sequence[int]
_private = threading.RLock()  # outside code may create groups while it is called to create one


def group_name(label: str, ranks: Ranks, epoch: str) -> int:
    """A group's name from what it is: 128 bits, which torch writes as a decimal number."""
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
            # A dry run on a fake default group: no store for a real backend to connect through.
            if dist.get_backend() != "fake" or options.get("backend") in (None, "fake"):
                raise
            group = dist.new_group(list(ranks), **{**options, "backend": "fake"})
        return group


def by_split(
    label: str, groups: Sequence[Ranks], epoch: str, **options: Any
) -> ProcessGroup | None:
    """Split disjoint ``groups`` off the default group, in one call. *Collective* over the world.

    A rank that is in none of them takes part too, as NCCL demands. ``options`` are those of
    ``torch.distributed.new_group``; nothing is inherited from the default group. Torch releases
    whose split takes no name derive one from what each rank created before, so that the name of a
    group may differ between its members.
    """
    default, rank = c10d._get_default_group(), dist.get_rank()
    backend = c10d.Backend(options.pop("backend", None) or c10d._world.pg_map[default][0])
    _tell_its_ranks(default)
    if not splits_take_names():
        split = dist.split_group(split_ranks=[list(ranks) for ranks in groups], **options)
        return split if isinstance(split, ProcessGroup) else None  # or torch's non-member marker
    ranks = sorted(next((each for each in groups if rank in each), groups[0]))
    name = c10d.GroupName(str(group_name(label, ranks, epoch)))
    wanted, parts = devices_of(backend), dict[str, torch.device]()
    for kind, part in wanted.items():  # torch splits for each device, also twice the same backend
        parts.setdefault(part, torch.device(kind))
    source = _backend_of(default)
    timeout = options.get("timeout") or c10d._get_default_timeout(backend)
    group: ProcessGroup | None = default.split_group(
        ranks,
        timeout=timeout,
        opts=_options_like_new_group(source, len(ranks), options.get("pg_options")),
        group_name=name,
        group_desc=options.get("group_desc") or "undefined",
        device_types=list(parts.values()),
    )
    if rank not in ranks or group is None:
        return None
    for kind, part in wanted.items():
        if kind != parts[part].type:
            same, of = group._get_backend(parts[part]), c10d.Backend.backend_type_map[part]
            group._register_backend(torch.device(kind), of, same)
    if default.bound_device_id is not None:
        group.bound_device_id = default.bound_device_id
    for device in parts.values():
        group._get_backend(device)._set_sequence_number_for_group()
    c10d._set_pg_timeout(timeout, group)  # torch gives it to the default's main backend alone
    c10d._register_pg_in_world(
        group,
        backend_name=backend,
        store=group.get_group_store(),
        group_name=name,
        backend_config=str(c10d.BackendConfig(backend)),
        rank_mapping={member: place for place, member in enumerate(ranks)},
    )
    return group


def _tell_its_ranks(default: ProcessGroup) -> None:
    # Torch reads them when it splits, but does not set them if the default group is not the first
    # of its backend in this process: it then reads beyond the end of the list.
    for device in default._device_types:
        backend = default._get_backend(device)
        if backend.supports_splitting and not backend.options.global_ranks_in_group:
            backend.options.global_ranks_in_group = list(range(default.size()))


def _options_like_new_group(source: Any, size: int, given: Any) -> Any:
    """Options of the backend ``source``, to split with; torch itself copies those of ``source``."""
    kind = getattr(c10d, "ProcessGroupGloo", None)
    if kind is None or not isinstance(source, kind):
        return type(source.options)() if given is None else copy.deepcopy(given)
    return gloo.options(size)


@functools.cache
def splits_take_names() -> bool:
    """Whether this torch's split takes the name that the new group shall have."""
    split = getattr(ProcessGroup, "split_group", None)
    return "device_types" in (getattr(split, "__doc__", None) or "") and hasattr(
        c10d, "_register_pg_in_world"
    )


def by_everyone(
    label: str, groups: Sequence[Ranks], epoch: str, **options: Any
) -> list[ProcessGroup]:
    """Create all ``groups``; returns those of this rank. *Collective* over the whole world.

    Disjoint groups go through ``torch.distributed.new_subgroups_by_enumeration``, which refuses
    groups that overlap: these are created one by one.
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
            closing.abort(c10d._world.pg_map.keys() - before)
            raise
        rank = dist.get_rank()
        return [group for group, ranks in zip(made, groups, strict=True) if rank in ranks]


def by_world(
    way: str, label: str, groups: Sequence[Ranks], epoch: str, **options: Any
) -> list[ProcessGroup]:
    """Create ``groups`` with all ranks, by a split if that is the ``way`` and possible."""
    if way != "split" or not disjoint(groups) or not _is_part_of_default(options.get("backend")):
        return by_everyone(label, groups, epoch, **options)
    mine = by_split(label, groups, epoch, **options) if groups else None
    return [] if mine is None else [mine]


def disjoint(groups: Sequence[Ranks]) -> bool:
    """Whether no rank is in two of ``groups``."""
    members = [rank for ranks in groups for rank in ranks]
    return len(members) == len(set(members))


@dataclass(frozen=True)
class Abilities:
    """What this process can do, as ranks tell each other in the prepare phase.

    ``obstacle`` says why no group can be created by its members alone; ``bound`` why none of the
    default group's backend can: it is bound to a device, and each new group is split from it.
    """

    obstacle: str | None = None
    bound: str | None = None
    can_split: bool = False
    can_connect_lazily: bool = True


def abilities(insisted: str = "auto") -> Abilities:
    """What torch, its default group and the environment allow.

    ``insisted`` is the policy's way of creation: gloo is split only if the policy says so.
    """
    if not dist.is_initialized():
        return Abilities("torch.distributed is not initialised")
    default = c10d._get_default_group()
    device = getattr(default, "bound_device_id", None)
    reason, can_split = None, False
    if device is not None or insisted == "split":
        can_split = _backend_of(default) is not None
        nccl = "nccl" in devices_of(None).values()
        if device is None:  # NCCL may not have connected yet, and then cannot be split
            can_split = can_split and not nccl and splits_take_names()
        elif can_split and nccl:
            reason = (  # the same text on every rank
                f"init_process_group(device_id=...) has bound the default group to a {device.type} "
                f"device, and its splits want every rank"
            )
    return Abilities(_obstacle(), reason, can_split, gloo.can_connect_lazily())


def devices_of(backend: str | None) -> dict[str, str]:
    """The backends of a group by type of device, in lower case; None is the default group's."""
    if not backend:
        backend = c10d._world.pg_map[c10d._get_default_group()][0]
    config = c10d.BackendConfig(c10d.Backend(backend))
    return {device: str(each) for device, each in config.get_device_backend_map().items()}


def plain_backend(backend: str | None) -> str | None:
    """None for the default group's backend, whichever way it is written; else in lower case."""
    same = backend is None or devices_of(backend) == devices_of(None)
    return None if backend is None or same else backend.lower()


def split_off(backend: str | None) -> bool:
    """Whether torch splits a group of ``backend`` off the default one, if that is bound.

    It does so for NCCL, whichever other backends the group has. A default group without NCCL is
    split only on request, and for groups of its own backend. Equal on all ranks.
    """
    device = _split_device()
    return devices_of(backend).get(device) == devices_of(None)[device]


def _split_device() -> str:
    default = devices_of(None)
    return next((device for device, each in default.items() if each == "nccl"), next(iter(default)))


def _is_part_of_default(backend: str | None) -> bool:
    return devices_of(backend).items() <= devices_of(None).items()


def _backend_of(default: ProcessGroup) -> Any:
    """The backend that groups are split from; None if it cannot be split."""
    try:
        backend = default._get_backend(torch.device(_split_device()))
        return backend if backend.supports_splitting else None
    except (AttributeError, RuntimeError):
        return None


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


@functools.cache
def names_can_be_set() -> bool:
    """Whether this torch names a group by the running number that ``by_members`` sets."""
    try:
        with _running_number(7):
            return c10d._process_group_name([0], use_hashed_name=False) == "7"
    except (AttributeError, TypeError):
        return False


def patience(backend: str | None, timeout: timedelta | None) -> timedelta | None:
    """The timeout with which creation fails within ``timeout``; None: its own timeout.

    Gloo needs five times its timeout to give up a member that has published its address and does
    not answer. With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` a group must be created with its own
    timeout, as torch's helper group keeps the first one.
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


def own(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` with a copy of the backend options: torch writes the group's name into them.

    Those that cannot be copied are gloo's, which torch does not read.
    """
    try:
        return {**options, "pg_options": copy.deepcopy(options.get("pg_options"))}
    except TypeError:
        return options


def connects_later(group: ProcessGroup) -> bool:
    """Whether the members of ``group`` connect on first use; gloo connects at once."""
    return group.size() > 1 and {*devices_of(c10d._world.pg_map[group][0]).values()} != {"gloo"}


def connect(group: ProcessGroup, timeout: timedelta) -> None:
    """Connect the members of ``group`` by a barrier. *Collective* over them.

    Raises RuntimeError if it fails or exceeds ``timeout``; the barrier may then still run.
    """
    device = getattr(group, "bound_device_id", None)  # a thread of its own has no current device
    here = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    index = here if device is None else device.index
    failures: list[BaseException] = []

    def barrier() -> None:
        try:
            dist.barrier(group, device_ids=None if index is None else [index])
        except BaseException as error:
            failures.append(error)

    # NCCL waits without a limit for a member that is missing.
    thread = threading.Thread(target=barrier, name=f"connecting {group.group_name}", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if thread.is_alive():
        raise RuntimeError(f"its members did not connect within {timeout}.")
    if failures:
        raise failures[0]


def is_replaced(function: object) -> bool:
    """Whether outside code has replaced this function of torch.distributed.

    By the file of its code: a wrapper may have torch's name and module.
    """
    code = getattr(function, "__code__", None)
    return code is None or not code.co_filename.startswith(os.path.dirname(dist.__file__))


@contextmanager
def named_from(label: str, ranks: Ranks, epoch: str) -> Iterator[None]:
    """Groups that outside code creates inside have names that count up from this one's.

    Each has its own name, equal on every rank that makes the same calls inside.
    """
    with _running_number(group_name(label, ranks, epoch) if names_can_be_set() else None):
        yield


@contextmanager
def _running_number(number: int | None) -> Iterator[None]:
    # The only private part of torch that creation depends on: new_group turns this counter into
    # the name. Restored afterwards, so that groups of outside code keep their numbers.
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
