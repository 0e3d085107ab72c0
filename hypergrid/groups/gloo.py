"""Connections of gloo groups: one device for many groups, batched reads of the store."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from hypergrid import of_torch
from hypergrid.agreement.store import wait
from hypergrid.groups import sockets

# For a group of that many members: whether it connects on first use; None: as torch is set.
Lazily: TypeAlias = Callable[[int], bool | None]

_BATCHES = "GLOO_ENABLE_STORE_V2_API"
_LAZY = "TORCH_GLOO_LAZY_INIT"
# Settings of the user's under which two groups on one device would have the same address, or which
# are another transport than TCP.
_ALONE = ("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "GLOO_DEVICE_TRANSPORT")


def can_connect_lazily() -> bool:
    """Whether this torch's gloo can connect on first use of a group."""
    return of_torch.has("gloo") and not of_torch.torchcomms()


class Devices:
    """The gloo devices that the groups of one creation share.

    Torch gives each group a device of its own: a listening socket, and a thread that wakes up a
    hundred times a second. When a group fails to connect, a member that is late can still reach its
    device, which then calls into freed memory. Only closing prevents that: so sharing ends with the
    creation, and after a failure nobody may hold one of its groups.
    """

    def __init__(self) -> None:
        self._shared: list[Any] = []
        self._opened: sockets.Opened | None = None

    def of(self, lazily: bool | None) -> tuple[list[Any], sockets.Opened]:
        """The devices of one group, and their listeners.

        Never shared by groups that connect on first use: such a group closes its device when it
        ends.
        """
        if lazily or any(name in os.environ for name in _ALONE) or _torch_is_set(lazily):
            return _new_devices(lazily)
        if self._opened is None:
            self._shared, self._opened = _new_devices(lazily)
        return self._shared, self._opened

    def forget(self) -> None:
        """Leave them to the groups that use them, and close them with the last one."""
        self._shared, self._opened = [], None


def _torch_is_set(lazily: bool | None) -> bool:
    return lazily is None and _LAZY in os.environ


def _new_devices(lazily: bool | None) -> tuple[list[Any], sockets.Opened]:
    interfaces = [i for i in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if i]
    with sockets.opening(max(1, len(interfaces))) as opened:
        return of_torch.gloo_devices(interfaces, lazily), opened


class _Here(threading.local):
    lazily: Lazily | None = None  # None: this thread creates as torch does
    devices: Devices | None = None
    opened: tuple[sockets.Opened, ...] = ()  # what this thread's last groups connect through


_here = _Here()
_lock, _inside, _torchs = threading.Lock(), 0, None


@contextmanager
def connecting(lazily: Lazily, devices: Devices | None = None) -> Iterator[None]:
    """Gloo groups that this thread creates inside connect ``lazily``, through ``devices``.

    Without ``devices`` each has its own, as torch's have. Torch's ``new_group`` takes no options
    for gloo; the class that it calls does.
    """
    global _inside, _torchs
    kind = of_torch.gloo()
    if kind is None or not of_torch.has("gloo"):
        yield
        return
    before = _here.lazily, _here.devices, _here.opened
    with _lock:
        if _inside == 0:
            _torchs, kind.__init__ = kind.__init__, _create
        _inside += 1
    _here.lazily, _here.devices = lazily, devices
    _here.opened = tuple[sockets.Opened, ...]()
    try:
        yield
    finally:
        for opened in _here.opened:
            opened.unfinished = False  # created, or failed
        _here.lazily, _here.devices, _here.opened = before
        with _lock:
            _inside -= 1
            if _inside == 0:
                kind.__init__ = _torchs  # stays known: another thread may be in _create


def note(group: Any) -> None:
    """Remember that this thread has created ``group`` in ``connecting``, for an abort."""
    for opened in _here.opened if isinstance(group, ProcessGroup) else ():
        opened.add(group)


def options(size: int, timeout: timedelta | None = None) -> Any:
    """Options of a gloo group of that many members, as torch sets them but for the devices."""
    devices, opened = (_here.devices or Devices()).of(_waits(size))
    opened.begin(size)
    if _here.lazily is not None:
        _here.opened += (opened,)
    return of_torch.gloo_options(devices, timeout)


def _waits(size: int) -> bool | None:
    waits = None if _here.lazily is None else _here.lazily(size)
    return waits and size > 1  # alone, there is nobody to connect to


def _create(group: Any, store: Any, rank: int, size: int, *given: Any, **named: Any) -> None:
    assert _torchs is not None
    if dist.is_initialized() and dist.get_backend() == "fake":  # torch 2.15 ends the process here
        raise RuntimeError("gloo cannot connect ranks through the store of a fake default group.")
    others = named.keys() - {"timeout"}
    if _here.lazily is None or given or "timeout" not in named or not _are_options(others):
        _torchs(group, store, rank, size, *given, **named)
        return
    timeout, chosen, waits = named["timeout"], options(size, named["timeout"]), _waits(size)
    for name in others:
        setattr(chosen, name, named[name])
    try:
        if size == 1 or waits or _torch_is_set(waits):
            _torchs(group, store, rank, size, chosen)
            return
        batches = _BATCHES not in os.environ and store.has_extended_api()
        try:
            if batches:
                os.environ[_BATCHES] = "1"
            _torchs(group, _InTime(store, timeout), rank, size, chosen)
        finally:
            if batches:
                del os.environ[_BATCHES]
    except BaseException:
        of_torch.set_devices(chosen, [])  # a traceback holds them
        if _here.devices is not None:
            _here.devices.forget()
        raise


def _are_options(names: Set[str]) -> bool:
    """Whether gloo's options have what torch gives its constructor besides the timeout."""
    unknown = [name for name in names if not hasattr(of_torch.gloo_options([]), name)]
    if unknown:
        warnings.warn(
            f"torch {torch.__version__} creates gloo groups with {', '.join(unknown)}, which "
            f"hypergrid does not know: they connect at once, whatever connect= says, and abort() "
            f"does not find their connections.",
            RuntimeWarning,
            stacklevel=2,
        )
    return not unknown


class _InTime(Store):
    """A store whose reads of many keys wait for no longer than ``timeout``, or until an abort.

    Gloo gives these its store's own timeout, which others use too.
    """

    def __init__(self, store: Any, timeout: timedelta) -> None:
        super().__init__()
        self._store, self._timeout = store, timeout

    def has_extended_api(self) -> bool:
        extended: bool = self._store.has_extended_api()
        return extended

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        wait(self._store, keys, timeout or self._timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        wait(self._store, keys, self._timeout)
        values: list[bytes] = self._store.multi_get(keys)
        return values
