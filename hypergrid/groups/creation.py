"""Creates one group on this rank: by its members alone, by a split, or with every rank."""

from __future__ import annotations

import copy
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid import of_torch
from hypergrid.agreement.commit import NO_ADDRESS
from hypergrid.agreement.prepare import Abilities, Agreement, accept, choose
from hypergrid.groups import backends, closing, gloo
from hypergrid.messages import span_of
from hypergrid.policy import Policy

Ranks: TypeAlias = Sequence[int]
NOT_A_MEMBER: Any = dist.GroupMember.NON_GROUP_MEMBER  # torch's marker of a rank outside a group


def group_name(label: str, ranks: Ranks, epoch: str) -> int:
    """A group's name from what it is: 128 bits, which torch writes as a decimal number."""
    digest = hashlib.blake2b(f"{label}|{epoch}|".encode(), digest_size=16)
    digest.update(np.asarray(ranks, dtype="<i8").tobytes())
    return int.from_bytes(digest.digest(), "big")


def by_members(
    label: str, ranks: Ranks, epoch: str, waits: bool = False, **options: Any
) -> ProcessGroup:
    """Create the group of ``ranks``. *Collective* over these ranks and no others.

    ``options`` are those of ``torch.distributed.new_group``. With ``waits`` the group connects on
    first use if its backend can; so it does where torch would split it off the default group, with
    all ranks.
    """
    backend = options.get("backend")
    if (waits or backends.bound_to(backend)) and backends.can_wait(backend):
        options["pg_options"] = backends.waiting(backend, options.get("pg_options"))
    with of_torch.numbered(group_name(label, ranks, epoch)):
        try:
            group: ProcessGroup = dist.new_group(list(ranks), **copied_options(options))
        except gloo.NoAddress as error:
            missing = span_of([ranks[place] for place in error.places])
            raise RuntimeError(f"ranks {missing} {NO_ADDRESS}.") from error
        except RuntimeError:
            # A dry run in which outside code has replaced new_group.
            if dist.get_backend() != "fake" or backend in (None, "fake"):
                raise
            group = dist.new_group(list(ranks), **{**options, "backend": "fake"})
        return group


def by_split(
    label: str, groups: Sequence[Ranks], epoch: str, **options: Any
) -> ProcessGroup | None:
    """Split disjoint ``groups`` off the default group, in one call. *Collective* over the world.

    A rank that is in none of them takes part too, as NCCL demands. ``options`` are those of
    ``torch.distributed.new_group``; nothing is inherited from the default group.
    """
    rank, backend = dist.get_rank(), options.get("backend")
    ranks = sorted(next((each for each in groups if rank in each), groups[0]))
    return of_torch.split(
        ranks,
        str(group_name(label, ranks, epoch)),
        backend,
        backends.split_options(backend, options.get("pg_options")) or gloo.options(len(ranks)),
        options.get("timeout"),
        options.get("group_desc") or "undefined",
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
    before = of_torch.known()
    with named_from(label, (), epoch):
        try:
            if disjoint(groups):
                every = [list(ranks) for ranks in groups]
                mine, _ = dist.new_subgroups_by_enumeration(every, **copied_options(options))
                return [] if mine is None else [mine]
            made = [dist.new_group(list(ranks), **copied_options(options)) for ranks in groups]
        except BaseException:
            closing.abort(of_torch.known().keys() - before)
            raise
        rank = dist.get_rank()
        return [group for group, ranks in zip(made, groups, strict=True) if rank in ranks]


def by_world(
    way: str, label: str, groups: Sequence[Ranks], epoch: str, **options: Any
) -> list[ProcessGroup]:
    """Create ``groups`` with all ranks, by a split if that is the ``way`` and possible."""
    if way != "split" or not disjoint(groups) or not backends.can_split_off(options.get("backend")):
        return by_everyone(label, groups, epoch, **options)
    mine = by_split(label, groups, epoch, **options) if groups else None
    return [] if mine is None else [mine]


def disjoint(groups: Sequence[Ranks]) -> bool:
    """Whether no rank is in two of ``groups``."""
    members = [rank for ranks in groups for rank in ranks]
    return len(members) == len(set(members))


def abilities(policy: Policy | None = None) -> Abilities:
    """The ways that torch, its default group and the environment allow for this ``policy``.

    Gloo is split only if the policy says so. A group that torch would split off a bound default
    group is created by its members if it may connect on first use.
    """
    if not dist.is_initialized():
        return Abilities("torch.distributed is not initialised")
    if not of_torch.has("groups"):
        raise RuntimeError(
            f"{'; '.join(of_torch.lacking())}. Use torch {of_torch.OLDEST} to "
            f"{of_torch.NEWEST}, or a newer hypergrid."
        )
    policy, device, reason, can_split = policy or Policy(), backends.bound_to(), None, False
    later = policy.connect == "lazy" or (policy.connect, policy.creation) == ("eager", "members")
    if device is not None:
        can_split = backends.can_split()
        if not (later and backends.can_wait()):
            hint = "; with connect='lazy' members create alone" if backends.can_wait() else ""
            reason = (  # the same text on every rank
                f"the default group is bound to a {device} device (init_process_group(device_id="
                f"...), and torch 2.15 by itself), and its splits want every rank{hint}"
            )
    elif policy.creation == "split":  # NCCL may not have connected yet, and then cannot be split
        can_split = backends.can_split() and not backends.splits_at_creation()
    return Abilities(_obstacle(), reason, can_split, gloo.can_connect_lazily())


def expected(policy: Policy) -> Agreement:
    """The probable result of the agreement, seen from this rank; or AgreementError. *Local*."""
    return accept(choose("", policy, [abilities(policy)]))


def way_of(agreement: Agreement, backend: str | None) -> str:
    """The way to create groups of ``backend`` under ``agreement``; the same on all ranks."""
    same = agreement.way == agreement.others
    return agreement.way if same or backends.split_off(backend) else agreement.others


def _obstacle() -> str | None:
    if os.environ.get("TORCH_DIST_INIT_BARRIER", "0") == "1":
        return "TORCH_DIST_INIT_BARRIER=1 makes torch wait for the whole world after each group"
    return backends.obstacle()


def copied_options(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` with a copy of the backend options: torch writes the group's name into them.

    Those that cannot be copied are gloo's, which torch does not read. In a dry run on a fake
    default group every group is fake, as its store connects no ranks; outside code that has
    replaced ``new_group`` sees the backend that was asked for.
    """
    wanted = options.get("backend") is not None and not is_replaced(dist.new_group)
    if wanted and dist.get_backend() == "fake":
        options = {**options, "backend": "fake"}
    try:
        return {**options, "pg_options": copy.deepcopy(options.get("pg_options"))}
    except TypeError:
        return options


def connect(group: ProcessGroup, timeout: timedelta) -> None:
    """Connect the members of ``group`` by a barrier. *Collective* over them.

    Raises RuntimeError if it fails or exceeds ``timeout``; the barrier may then still run.
    """
    device = of_torch.bound_device(group)  # a thread of its own has no current device
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
    with of_torch.numbered(group_name(label, ranks, epoch) if of_torch.has("names") else None):
        yield
