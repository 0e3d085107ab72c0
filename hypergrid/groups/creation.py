"""Creates groups on this rank: by their members alone, by a split, or with every rank.

And the rules of gloo, NCCL, fake and torchcomms: who takes part in a new group, when it connects.
Decided by what torch would create and not by names: from torch 2.15 on "nccl" is another class.
A lazy group is one whose members connect on first use.
"""

from __future__ import annotations

import copy
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DebugLevel,
    ProcessGroup,
    get_debug_level,
)

from hypergrid import of_torch
from hypergrid.agreement.commit import NO_ADDRESS, let_waiting_ranks_fail_first
from hypergrid.groups import gloo
from hypergrid.layout import span_of
from hypergrid.policy import Abilities, Agreement, Policy, choose

Ranks: TypeAlias = Sequence[int]
NOT_A_MEMBER: Any = dist.GroupMember.NON_GROUP_MEMBER  # torch's marker of a rank outside a group
_DEFAULTS = Policy()


def group_name(label: str, ranks: Ranks, epoch: str) -> int:
    """A group's name from what it is: 128 bits, which torch writes as a decimal number.

    Of ranks (2, 3), the label "TENSOR" and the epoch "0..3/0", the first of ranks 0 to 3, each
    member computes the same name by itself.
    """
    # Without the ranks, of which there may be many: these follow as bytes, not as text.
    head = f"{label}|{epoch}|".encode()
    digest = hashlib.blake2b(head, digest_size=16)
    # As bytes of one order: ranks on hosts of different kinds must agree on the name.
    rank_bytes = np.asarray(ranks, dtype="<i8").tobytes()
    digest.update(rank_bytes)
    return int.from_bytes(digest.digest(), "big")


def named_groups(label: str, ranks_of: Mapping[str, Ranks], epoch: str) -> list[ProcessGroup]:
    """The groups that torch knows of those that this rank creates for a label. *Local*.

    ``ranks_of`` has their ranks by the names that ``by_members`` is called with.
    """
    names = set()
    # ``by_world`` numbers groups of equal ranks, of which this rank is in all.
    labels_in_world = [f"{label}#{number}" for number in range(len(ranks_of))]
    for name, ranks in ranks_of.items():
        for group_label in [name, *labels_in_world]:
            number = group_name(group_label, ranks, epoch)
            names.add(str(number))
    registered = of_torch.registered_groups()
    return [group for group, name in registered.items() if name in names]


def named_from(label: str, ranks: Ranks, epoch: str) -> AbstractContextManager[None]:
    """Groups that are created inside have names that count up from this one's.

    Each has its own name, equal on every rank that makes the same calls inside.
    """
    number = None
    if of_torch.has("names"):
        number = group_name(label, ranks, epoch)
    return of_torch.numbered(number)


def by_members(
    label: str, ranks: Ranks, epoch: str, lazy: bool = False, **options: Any
) -> ProcessGroup:
    """Create the group of ``ranks``. *Collective* over these ranks and no others.

    ``options`` are those of ``torch.distributed.new_group``. With ``lazy`` the group is lazy if its
    backend can be; so it is where torch would split it off the default group, with all ranks. A
    group of one rank is lazy wherever torch connects when it splits.
    """
    backend = options.get("backend")
    alone = len(ranks) == 1
    would_split = bound_to(backend) is not None
    if can_be_lazy(backend):
        lazy = lazy or would_split or alone
        return _new_group(label, ranks, epoch, options, lazy)
    if not alone or not would_split:
        return _new_group(label, ranks, epoch, options)
    # Torch would split a group of one rank off with all ranks, unless the default group is bound to
    # no device meanwhile.
    with of_torch.unbound():
        group = _new_group(label, ranks, epoch, options)
    of_torch.bind(group)
    return group


def by_world(
    way: str, label: str, groups: Sequence[Ranks], epoch: str, **options: Any
) -> list[ProcessGroup]:
    """Create ``groups``; returns those of this rank, in their order. *Collective* over the world.

    With the ``way`` "everyone" each rank calls ``new_group`` for each group; with "split" for its
    own groups. Where it is in none of those that are created together, it calls it for the first,
    as torch then takes part in their split without a color. After a failure the caller closes the
    ``named_groups``.
    """
    rank = dist.get_rank()
    created = []
    equal_before = Counter[tuple[int, ...]]()  # by ranks
    for together in _rounds(way, groups):
        groups_of_rank = [ranks for ranks in together if rank in ranks]
        ranks = together[0]
        if groups_of_rank:
            ranks = groups_of_rank[0]
        # Two rounds may have groups of equal ranks, which need different names.
        number = equal_before[tuple(ranks)]
        group = _new_group(f"{label}#{number}", ranks, epoch, options)
        if groups_of_rank:
            created.append(group)
        equal_before.update(map(tuple, together))
    return created


def _rounds(way: str, groups: Sequence[Ranks]) -> list[list[Ranks]]:
    """The groups that are created together, in the order of ``groups``; one by one by everyone.

    Of (0, 1), (2, 3) and (1, 2) the first two are one split of four ranks, and the third is
    another, as a rank has one color in a split. Torch computes the color of a group from its
    ranks, and two groups of one color would become one communicator.
    """
    rounds: list[list[Ranks]] = []
    used_ranks = set[int]()
    used_colors = set[int | None]()
    for ranks in groups:
        color = of_torch.split_color(ranks)
        begins_a_round = (
            not rounds
            or way != "split"
            or color is None
            or color in used_colors
            or not used_ranks.isdisjoint(ranks)
        )
        # Where every rank creates each group, each is a round.
        if begins_a_round:
            rounds.append([])
            used_ranks.clear()
            used_colors.clear()
        rounds[-1].append(ranks)
        used_ranks.update(ranks)
        used_colors.add(color)
    return rounds


def _new_group(
    label: str, ranks: Ranks, epoch: str, options: dict[str, Any], lazy: bool = False
) -> ProcessGroup:
    """Torch's ``new_group`` under our name; ``NOT_A_MEMBER`` on a rank outside of ``ranks``."""
    options = copied_options(options)
    if lazy:
        if options["pg_options"] is None:
            options["pg_options"] = of_torch.nccl_options()
        options["pg_options"].lazy_init = True
    # Torch makes a group's name from a count of groups, and new_group asks no other rank. With the
    # count set to this number, members alone find each other under one name.
    with named_from(label, ranks, epoch):
        try:
            group: ProcessGroup = dist.new_group(list(ranks), **options)
        except gloo.NoAddress as error:
            missing = [ranks[place] for place in error.places]
            let_waiting_ranks_fail_first(missing, error.timeout)
            raise RuntimeError(f"ranks {span_of(missing)} {NO_ADDRESS}.") from error
        except RuntimeError:
            # A dry run in which outside code has replaced new_group, and has called torch's with a
            # backend that the store of a fake default group cannot connect.
            is_fake = options.get("backend") in (None, "fake")
            if is_fake or dist.get_backend() != "fake":
                raise
            options["backend"] = "fake"
            group = dist.new_group(list(ranks), **options)
        return group


def copied_options(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` with a copy of the backend options: torch writes the group's name into them.

    Torch does not read those of gloo, which cannot be copied. In a dry run on a fake
    default group every group is fake, as its store connects no ranks; outside code that has
    replaced ``new_group`` sees the backend that was asked for.
    """
    options = {"pg_options": None, **options}
    # None is the default group's backend, which is fake too.
    asked_of_torch = options.get("backend") is not None and not is_replaced(dist.new_group)
    if asked_of_torch and dist.get_backend() == "fake":
        options["backend"] = "fake"
    # Gloo's cannot be copied.
    with suppress(TypeError):
        options["pg_options"] = copy.deepcopy(options["pg_options"])
    return options


def is_replaced(function: object) -> bool:
    """Whether outside code has replaced this function of torch.distributed.

    By the file of its code: a wrapper may have torch's name and module.
    """
    code = getattr(function, "__code__", None)
    torchs_folder = os.path.dirname(dist.__file__)
    return code is None or not code.co_filename.startswith(torchs_folder)


def abilities(policy: Policy = _DEFAULTS) -> Abilities:
    """The ways that torch, its default group and the environment allow for this ``policy``."""
    if not dist.is_initialized():
        return Abilities("torch.distributed is not initialised")
    return Abilities(
        obstacle=_obstacle(),
        bound=_why_bound(policy),
        can_connect_lazily=of_torch.has("gloo") and not of_torch.torchcomms(),
    )


def _why_bound(policy: Policy) -> str | None:
    """Why members alone cannot create a group that torch splits; None if they can.

    They can where the default group is bound to no device, or where the group is lazy.
    """
    device = bound_to()
    if device is None:
        return None
    hint = ""
    if can_be_lazy():
        if policy.connect == "lazy":
            return None
        # Such a group is lazy too, and is connected right after it is created.
        if policy.connect == "eager" and policy.creation == "members":
            return None
        hint = "; with connect='lazy' members create alone"
    return (  # the same text on every rank
        f"the default group is bound to a {device} device (init_process_group(device_id=...), and "
        f"torch 2.15 by itself), and its splits want every rank{hint}"
    )


def _obstacle() -> str | None:
    """Why no group can be created by its members alone; RuntimeError if this torch is unknown."""
    if not of_torch.has("groups"):
        raise RuntimeError(
            f"{'; '.join(of_torch.lacking())}. Use torch {of_torch.OLDEST} to "
            f"{of_torch.NEWEST}, or a newer hypergrid."
        )
    if os.environ.get("TORCH_DIST_INIT_BARRIER", "0") == "1":
        return "TORCH_DIST_INIT_BARRIER=1 makes torch wait for the whole world after each group"
    if dist.get_backend() == "mpi":
        return "MPI creates every group with all ranks"
    if of_torch.torchcomms() and not of_torch.has("torchcomms by members"):
        return "torchcomms splits every group from the default one, with all ranks"
    if callable(getattr(of_torch.default_group(), "new_group", None)):
        return "the default group brings its own new_group"
    if not of_torch.has("names"):
        return "this torch does not take a group's name from its running group number"
    return None


def expected(policy: Policy) -> Agreement:
    """The probable result of the agreement, seen from this rank; or AgreementError. *Local*."""
    return choose("", policy, [abilities(policy)])


def way_of(agreement: Agreement, backend: str | None, members: int) -> str:
    """The way to create a group of ``backend`` with so many ``members``; the same on all ranks.

    A group of one rank has nobody to connect to: its rank creates it alone, and the others do not
    take part, wherever torch allows it.
    """
    one_rank = members == 1
    splits = True
    # Elsewhere that decides nothing, and to ask torch costs more than all the rest.
    if agreement.bound or agreement.creation == "split":
        splits = is_split(backend)
    return agreement.way_of(one_rank, splits)


def devices_of(backend: str | None) -> dict[str, str]:
    """The backends of a group by type of device, in lower case; None is the default group's."""
    if not backend:
        if not dist.is_initialized():
            return {}  # of a world that is only told
        backend = of_torch.backend_of(of_torch.default_group())
    return of_torch.devices_of(backend)


def plain_backend(backend: str | None) -> str | None:
    """None for the default group's backend, whichever way it is written; else in lower case."""
    if backend is None or devices_of(backend) == devices_of(None):
        return None
    return backend.lower()


def _splits(device: str) -> bool:
    """Whether torch splits new groups off a default group that is bound to this type of device.

    It does where ranks outside of the new group can take part: NCCL's, not gloo. Torchcomms
    creates by members.
    """
    try:
        part = of_torch.part_of(of_torch.default_group(), device)
    except (AttributeError, RuntimeError):  # a default group that is not torch's own, or without
        return False
    inner = of_torch.checked_by(part)
    return hasattr(inner, "perform_nocolor_split") and not of_torch.torchcomms()


def is_split(backend: str | None) -> bool:
    """Whether torch splits a group of ``backend`` where the default group is bound.

    It does if the group has the default group's backend on the device from which torch splits,
    whichever other backends it has. Equal on all ranks, also if the default group is bound on some
    of them only.
    """
    default_devices = devices_of(None)
    # The device from which torch splits, as "cuda" of "cpu:gloo,cuda:nccl"; else the first one,
    # which is the same on a rank whose default group is not bound.
    first_device = next(iter(default_devices))
    splitting_device = next(filter(_splits, default_devices), first_device)
    return devices_of(backend).get(splitting_device) == default_devices[splitting_device]


def bound_to(backend: str | None = None) -> str | None:
    """The type of device of the default group from which torch splits groups of ``backend``.

    None if it does not: the default group is not bound to a device, or to that of another backend.
    """
    device = of_torch.bound_device(of_torch.default_group())
    if device is None:
        return None
    # The default group is gloo's on this device, or torchcomms'.
    if not _splits(device.type):
        return None
    # The group has another backend there: torch creates it anew.
    if not is_split(backend):
        return None
    return device.type


def can_be_lazy(backend: str | None = None) -> bool:
    """Whether NCCL's part of a group of ``backend`` is lazy, if its options ask.

    Torch then does not split it off a bound default group, so that its members alone create it.
    """
    return any(map(of_torch.waits_if_asked, devices_of(backend).values()))


def is_lazy(group: ProcessGroup) -> bool:
    """Whether the members of ``group`` connect on first use."""
    if group.size() == 1:
        return False
    for device, name in devices_of(of_torch.backend_of(group)).items():
        if name != "gloo":
            part = of_torch.part_of(group, device)
            if not of_torch.is_nccl2(part) or part.options.lazy_init:
                return True
    return False


def connect(group: ProcessGroup, timeout: timedelta) -> None:
    """Connect the members of ``group`` by a barrier. *Collective* over them.

    Raises RuntimeError if it fails or exceeds ``timeout``; the barrier may then still run.
    """
    # NCCL's barrier needs a device, and the thread below has no current one.
    device_ids = None
    device = of_torch.bound_device(group)
    if device is not None:
        device_ids = [device.index]
    elif torch.accelerator.is_available():
        current_device = torch.accelerator.current_device_index()
        device_ids = [current_device]
    failures: list[BaseException] = []

    def barrier() -> None:
        try:
            dist.barrier(group, device_ids=device_ids)
        except BaseException as error:
            failures.append(error)

    # In a thread, which is left alone after the timeout: NCCL waits without a limit for a member
    # that is missing.
    name = f"connecting {group.group_name}"
    thread = threading.Thread(target=barrier, name=name, daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if thread.is_alive():
        raise RuntimeError(f"its members did not connect within {timeout}.")
    if failures:
        raise failures[0]


def creation_timeout(
    backend: str | None, timeout: timedelta | None, limit: timedelta | None = None
) -> timedelta | None:
    """The timeout with which creation fails within ``timeout``, and within ``limit``.

    None: with its own timeout. Gloo needs five times its timeout to give up a member that has
    published its address and does not answer: at least ten seconds, so that a busy member has the
    time to answer. With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` a group must be created with its own
    timeout, as torch's helper group keeps the first one.
    """
    if dist.get_backend() == "fake" or get_debug_level() == DebugLevel.DETAIL:
        return None
    if "gloo" not in devices_of(backend).values():
        return None
    timeout = timeout or of_torch.default_timeout()
    if limit is not None:
        timeout = min(timeout, limit)
    # Of 60 seconds 12, of 5 seconds 2.
    least = min(timeout, timedelta(seconds=2))
    for_gloo = timeout / 5
    return max(for_gloo, least)
