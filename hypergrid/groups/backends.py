"""Rules of gloo, NCCL, fake and torchcomms: who takes part in a new group, when it connects.

Decided by what torch would create and not by names: from torch 2.15 on "nccl" is another class.
"""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DebugLevel,
    ProcessGroup,
    get_debug_level,
)

from hypergrid import of_torch


def devices_of(backend: str | None) -> dict[str, str]:
    """The backends of a group by type of device, in lower case; None is the default group's."""
    if not backend and not dist.is_initialized():
        return {}  # of a world that is only told
    return of_torch.devices_of(backend or of_torch.backend_of(of_torch.default_group()))


def plain_backend(backend: str | None) -> str | None:
    """None for the default group's backend, whichever way it is written; else in lower case."""
    same = backend is None or devices_of(backend) == devices_of(None)
    return None if backend is None or same else backend.lower()


def _source(device: str) -> Any:
    """The backend of the default group on a type of device; None if there is none."""
    try:
        return of_torch.part_of(of_torch.default_group(), device)
    except (AttributeError, RuntimeError):  # a default group that is not torch's own
        return None


def splits_at_creation(device: str | None = None) -> bool:
    """Whether torch splits new groups off a default group that is bound to this type of device.

    It does where ranks outside of the new group can take part: NCCL's, not gloo. Torchcomms
    creates by members. Without ``device`` whether it does for any.
    """
    if device is None:
        return any(map(splits_at_creation, devices_of(None)))
    source = of_torch.checked_by(_source(device))
    return not of_torch.torchcomms() and hasattr(source, "perform_nocolor_split")


def _split_device() -> str:
    """Equal on all ranks, also if the default group is bound on some of them only."""
    default = devices_of(None)
    return next(filter(splits_at_creation, default), next(iter(default)))


def split_off(backend: str | None) -> bool:
    """Whether a group of ``backend`` is created as the agreement says for the default backend.

    It is if it has the default group's backend on the device from which torch splits new groups,
    whichever other backends it has. Equal on all ranks.
    """
    device = _split_device()
    return devices_of(backend).get(device) == devices_of(None)[device]


def bound_to(backend: str | None = None) -> str | None:
    """The type of device of the default group from which torch splits groups of ``backend``.

    None if it does not: the default group is not bound to a device, or to that of another backend.
    """
    bound = of_torch.bound_device(of_torch.default_group())
    if bound is None or not splits_at_creation(bound.type):
        return None
    same = devices_of(backend).get(bound.type) == devices_of(None).get(bound.type)
    return bound.type if same else None


def can_split() -> bool:
    """Whether one call may split several groups off the default one."""
    return of_torch.has("splits") and getattr(_source(_split_device()), "supports_splitting", False)


def can_split_off(backend: str | None) -> bool:
    """Whether a group of ``backend`` may be one of these.

    Only if it has one kind of backend, and the default group's: a split hands the same options to
    the backends of all devices.
    """
    wanted = devices_of(backend)
    return len({*wanted.values()}) == 1 and wanted.items() <= devices_of(None).items()


def split_options(backend: str | None, given: Any) -> Any:
    """Options like those of a new group; torch itself copies those of the default group.

    None for gloo, whose options are ``gloo.options``.
    """
    source = of_torch.checked_by(_source(next(iter(devices_of(backend)))))
    if of_torch.is_gloo(source):
        return None
    return type(source.options)() if given is None else copy.deepcopy(given)


def can_wait(backend: str | None = None) -> bool:
    """Whether NCCL's part of a group of ``backend`` connects on first use, if its options ask.

    Torch then does not split it off a bound default group, so that its members alone create it.
    """
    return any(map(of_torch.waits_if_asked, devices_of(backend).values()))


def waiting(backend: str | None, given: Any) -> Any:
    """A copy of the options ``given`` for a group of ``backend``, with which it connects later."""
    options = of_torch.nccl_options() if given is None else copy.deepcopy(given)
    options.lazy_init = True
    return options


def connects_later(group: ProcessGroup) -> bool:
    """Whether the members of ``group`` connect on first use."""
    named = devices_of(of_torch.backend_of(group)).items() if group.size() > 1 else ()
    parts = (of_torch.part_of(group, device) for device, name in named if name != "gloo")
    return any(not of_torch.is_nccl2(part) or part.options.lazy_init for part in parts)


def obstacle() -> str | None:
    """Why no group can be created by its members alone."""
    if dist.get_backend() == "mpi":
        return "MPI creates every group with all ranks"
    if of_torch.torchcomms() and not of_torch.has("torchcomms by members"):
        return "torchcomms splits every group from the default one, with all ranks"
    if callable(getattr(of_torch.default_group(), "new_group", None)):
        return "the default group brings its own new_group"
    if not of_torch.has("names"):
        return "this torch does not take a group's name from its running group number"
    return None


def creation_timeout(backend: str | None, timeout: timedelta | None) -> timedelta | None:
    """The timeout with which creation fails within ``timeout``; None: its own timeout.

    Gloo needs five times its timeout to give up a member that has published its address and does
    not answer: at least ten seconds, so that a busy member has the time to answer. With
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` a group must be created with its own timeout, as torch's
    helper group keeps the first one.
    """
    if dist.get_backend() == "fake" or get_debug_level() == DebugLevel.DETAIL:
        return None
    if "gloo" not in devices_of(backend).values():
        return None
    timeout = timeout or of_torch.default_timeout()
    return max(timeout / 5, min(timeout, timedelta(seconds=2)))
