"""Gloo groups: when they connect, how long they wait for addresses, how a rank gets out of them.

A rank that waits in a gloo group is freed by shutting the group's connections. Linux only. Each
gloo group has an event loop: an epoll instance with one listening socket and the group's
connections. The kernel lists the members of an epoll instance. So the listening socket, which is
noted when a group is created, leads to the group's connections and to no others.

Only connections are shut, as if the other rank had ended. Gloo survives that. A group that has not
connected, or has failed, is left alone: a connection to it would end the process.
"""

from __future__ import annotations

import mmap
import os
import re
import resource
import socket
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from hypergrid import of_torch
from hypergrid.agreement.commit import another_rank_failed
from hypergrid.agreement.store import (
    Descriptor,
    descriptors,
    duplicate,
    listens,
    look_until,
    sockets,
)
from hypergrid.groups import closing

_BATCHES = "GLOO_ENABLE_STORE_V2_API"
_LAZY = "TORCH_GLOO_LAZY_INIT"
_GIVEN_UP_AFTER = 3.0  # seconds of a wait after which a rank asks whether it is in vain
_FOR_ADDRESSES = timedelta(seconds=5)  # a member may be busy: a short timeout is stretched to it
_THREADS = 4  # the usual group and its device start three
_USUAL_STACK = 8 << 20  # bytes
_OF_A_DEVICE = 4  # descriptors
# Settings of the user's under which two groups on one device would have the same address, or which
# are another transport than TCP.
_ALONE = ("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "GLOO_DEVICE_TRANSPORT")

# tfd: 12 events: 19 data: 7f3c08 pos:0 ino:5e21 sdev:9
_MEMBER = re.compile(r"tfd: +(\d+) events: +\w+ data: +(\w+) +pos:\d+ ino:(\w+)")
# For each group the inodes of the listening sockets that its connections belong to. The references
# have no callback: Python ignores what a callback raises, and so a Ctrl-C that arrived while gloo
# ended the group before.
_listeners_of: dict[ref[ProcessGroup], set[int]] = {}


@dataclass
class _Choice:
    """How the gloo groups that a thread creates connect."""

    lazily: bool | None  # None: as torch is set
    # For each gloo group that is not noted yet the sockets that listen for it.
    listeners: list[set[int]] = field(default_factory=list)


@dataclass
class _Shared:
    """The devices that groups share, and the sockets that listen for these."""

    devices: list[Any] = field(default_factory=list)  # empty until the first group needs them
    listeners: set[int] = field(default_factory=set)


class _Thread(threading.local):
    choice: _Choice | None = None  # None: this thread creates as torch does
    shared: _Shared | None = None


_thread = _Thread()
_lock = threading.Lock()
_inside = 0  # the number of threads, and of their nested calls, in ``connecting``
_torchs: Any = None  # torch's constructor of a gloo group


@contextmanager
def connecting(lazily: bool | None = None) -> Iterator[None]:
    """Gloo groups that this thread creates inside connect ``lazily``; None: as torch is set.

    Torch's ``new_group`` takes no options for gloo; the class that it calls does.
    """
    global _inside, _torchs
    if not of_torch.has("gloo"):
        yield
        return
    kind = of_torch.gloo()
    outer = _thread.choice
    with _lock:
        if _inside == 0:
            _torchs = kind.__init__
            kind.__init__ = _create
        _inside += 1
    _thread.choice = _Choice(lazily)
    try:
        yield
    finally:
        _thread.choice = outer
        with _lock:
            _inside -= 1
            if _inside == 0:
                kind.__init__ = _torchs  # stays known: another thread may be in _create


@contextmanager
def one_device() -> Iterator[None]:
    """Gloo groups that this thread creates inside, and that connect at once, share a device.

    Torch gives each group a device of its own, whose thread wakes up a hundred times a second:
    with many ranks on a host these threads take most of a start. When a group fails to connect, a
    member that is late can still reach its device, which then calls into freed memory. Only closing
    prevents that. So the caller holds none of the groups when this raises.
    """
    outer = _thread.shared
    _thread.shared = _Shared()
    try:
        yield
    finally:
        _thread.shared = outer


def _device(lazily: bool | None, is_shared: bool) -> _Shared:
    """The devices through which a gloo group connects, and the sockets that listen for them."""
    shared = _thread.shared
    if shared is None or not is_shared:
        shared = _Shared()  # a device for this group only
    if not shared.devices:
        names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        interfaces = [name for name in names if name]
        before = {*descriptors()}
        shared.devices = of_torch.gloo_devices(interfaces, lazily)
        opened = {*descriptors()} - before
        shared.listeners = _inodes(sockets(listens, opened))
        # Another thread began to listen at the same time: nobody can tell which socket is whose.
        if len(shared.listeners) != len(shared.devices):
            shared.listeners = set()
    return shared


def _create(group: Any, store: Any, rank: int, size: int, *arguments: Any, **named: Any) -> None:
    """Stands in the place of torch's constructor of a gloo group, inside ``connecting``."""
    if dist.is_initialized() and dist.get_backend() == "fake":  # torch 2.15 ends the process here
        raise RuntimeError("gloo cannot connect ranks through the store of a fake default group.")
    choice = _thread.choice
    named_options = {name: value for name, value in named.items() if name != "timeout"}
    # Torch calls it with a timeout; outside code that brings its own options is left alone.
    is_torchs_call = not arguments and "timeout" in named
    if choice is None or not is_torchs_call or not _are_options(named_options):
        _torchs(group, store, rank, size, *arguments, **named)
        return
    timeout = named["timeout"]
    lazily = choice.lazily and size > 1  # alone, there is nobody to connect to
    connects_later = lazily or (lazily is None and _LAZY in os.environ)
    connects_now = size > 1 and not connects_later
    # For the device and as many that gloo opens meanwhile, and for the connections.
    _check_room(2 * _OF_A_DEVICE + size if connects_now else _OF_A_DEVICE)
    forbids_sharing = any(name in os.environ for name in _ALONE)
    device = _device(lazily, is_shared=not (connects_later or forbids_sharing))
    choice.listeners.append(device.listeners)
    gloo_options = of_torch.gloo_options(device.devices, timeout)
    for name, value in named_options.items():
        setattr(gloo_options, name, value)
    try:
        if not connects_now:
            _torchs(group, store, rank, size, gloo_options)
            return
        sets_batches = _BATCHES not in os.environ and store.has_extended_api()
        try:
            if sets_batches:
                os.environ[_BATCHES] = "1"
            for_addresses = max(timeout, min(5 * timeout, _FOR_ADDRESSES))
            _torchs(group, _InTime(store, for_addresses, size), rank, size, gloo_options)
        finally:
            if sets_batches:
                del os.environ[_BATCHES]
    except BaseException:
        # A member that is late could still reach the device, which would call into freed memory:
        # only closing it prevents that, and the error's traceback holds the options.
        of_torch.set_devices(gloo_options, [])
        choice.listeners.pop()
        if _thread.shared is not None:
            _thread.shared = _Shared()
        raise


def _check_room(count: int) -> None:
    """RuntimeError where this process lacks what the threads of a gloo group take.

    Torch's constructor ends the process when one of its threads starts and the next one has no
    memory for its stack, and gloo when a thread has no descriptor to accept a connection with.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack = max(limit, _USUAL_STACK)
    opened = []
    try:
        mmap.mmap(-1, _THREADS * stack, flags=mmap.MAP_PRIVATE, prot=0).close()
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise RuntimeError(
            f"this process has no room for a gloo group, which takes {count} descriptors and "
            f"{_THREADS} stacks of {stack >> 20} MiB: {error.strerror}. Raise its limits: ulimit "
            f"-n and ulimit -v."
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _are_options(names: Iterable[str]) -> bool:
    """Whether gloo's options have what torch gives its constructor besides the timeout."""
    known = of_torch.gloo_options([])
    unknown = [name for name in names if not hasattr(known, name)]
    if unknown:
        warnings.warn(
            f"torch {torch.__version__} creates gloo groups with {', '.join(unknown)}, which "
            f"hypergrid does not know: they connect at once, whatever connect= says, and abort() "
            f"does not find their connections.",
            RuntimeWarning,
            stacklevel=2,
        )
    return not unknown


class NoAddress(RuntimeError):
    """Members at these ``places`` in the group published no address within ``timeout``."""

    def __init__(self, places: list[int], timeout: timedelta) -> None:
        super().__init__(f"places {places}")
        self.places = places
        self.timeout = timeout


class _InTime(Store):
    """A store whose reads of many keys wait for no longer than ``timeout``.

    Gloo gives these its store's own timeout, which others use too. The wait ends early when an
    abort comes, or when another rank has failed, which will then not publish its address.
    """

    def __init__(self, store: Store, timeout: timedelta, size: int) -> None:
        super().__init__()
        self._store = store
        self._timeout = timeout
        # How many ranks look at the store: the group may be the default one, of all.
        self._ranks = dist.get_world_size() if dist.is_initialized() else size

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())  # type: ignore[attr-defined]

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        begin = time.monotonic()

        def are_there() -> bool | None:
            if self._store.check(keys):
                return True
            if time.monotonic() - begin > _GIVEN_UP_AFTER and another_rank_failed():
                raise dist.DistStoreError("another rank has failed.")
            return None

        try:
            look_until(are_there, timeout or self._timeout, self._ranks)
        except dist.DistStoreError as error:
            missing = [key for key in keys if not self._store.check([key])]
            if not missing:  # they came when this rank had given up
                raise
            # A key ends in the member's place: "0//222381/7".
            places = [int(key.rpartition("/")[2]) for key in missing]
            raise NoAddress(places, self._timeout) from error

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        values = self._store.multi_get(keys)
        _check_room(0)  # again: the members have taken a while, and the threads start next
        return values


def note(group: Any) -> None:
    """Remember the sockets of ``group``, which this thread created in ``connecting``, for abort."""
    choice = _thread.choice
    if choice is None or not choice.listeners or not isinstance(group, ProcessGroup):
        return
    _remember(group, set[int]().union(*choice.listeners))
    # More sockets are of groups that one call created: nobody can tell which socket is whose.
    if sum(map(len, choice.listeners)) == of_torch.gloo_devices_of(group):
        choice.listeners.clear()


def note_default() -> None:
    """Remember the listening sockets of the default group, which the caller created. *Local*.

    They are those that no other group has. If the caller had created other gloo groups by the
    first call, nobody can tell which are the default group's, and none is remembered.
    """
    default = of_torch.default_group()
    device_count = of_torch.gloo_devices_of(default)
    if device_count == 0 or ref(default) in _listeners_of:
        return
    of_other_groups = _listeners(of_torch.registered_groups())
    members_of_loops = chain.from_iterable(_event_loops())
    numbers = [descriptor.number for descriptor in members_of_loops]
    listeners = _inodes(sockets(listens, numbers)) - of_other_groups
    _remember(default, listeners if len(listeners) == device_count else set())


def shut(groups: Collection[ProcessGroup]) -> int:
    """End what waits for another rank in the gloo groups among ``groups``. *Local*.

    Shuts their connections in both directions, and closes none: the descriptors are gloo's.
    Returns the number of connections that were shut.
    """
    # Where nobody can tell which of two groups has a socket, they are shut only together.
    other_groups = of_torch.registered_groups().keys() - groups
    # A forked child has the sockets of its parent, which uses them.
    own_groups = set(groups) - closing.inherited
    listeners = _listeners(own_groups) - _listeners(other_groups)
    count = 0
    for members in _event_loops():
        if not listeners.isdisjoint(_inodes(members)):
            count += sum(_shut(*descriptor) for descriptor in members)
    return count


def _remember(group: ProcessGroup, listeners: set[int]) -> None:
    for reference in [*_listeners_of]:
        if reference() is None:
            _listeners_of.pop(reference, None)
    _listeners_of[ref(group)] = listeners


def _listeners(groups: Iterable[ProcessGroup]) -> set[int]:
    listeners = set()
    for group in groups:
        listeners |= _listeners_of.get(ref(group), set())
    return listeners


def _inodes(members: Iterable[Descriptor]) -> set[int]:
    return {descriptor.inode for descriptor in members}


def _shut(number: int, inode: int) -> bool:
    # Of a duplicate: the descriptor may by now be that of another socket, which is left alone.
    connection = duplicate(number, inode)
    if connection is None:
        return False
    with connection, suppress(OSError):
        connection.getpeername()  # raises for what listens, or is not connected yet
        connection.shutdown(socket.SHUT_RDWR)
        return True
    return False


def _event_loops() -> list[list[Descriptor]]:
    """The sockets in each event loop of this process."""
    loops = []
    for number in descriptors():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{number}") == "anon_inode:[eventpoll]":
                text = Path(f"/proc/self/fdinfo/{number}").read_text()
                loops.append(_members(text))
    return loops


def _members(text: str) -> list[Descriptor]:
    members = []
    for number, data, inode in _MEMBER.findall(text):
        # Other libraries register a descriptor by its number, gloo by an address.
        if int(data, 16) != int(number):
            members.append(Descriptor(int(number), int(inode, 16)))
    return members
