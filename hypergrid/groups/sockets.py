"""The sockets of this process by their gloo group, and how to shut them. Linux only.

A gloo device, which one group or several connect through, has an event loop: an epoll instance with
one listening socket and the connections of these groups. The kernel lists the members of an epoll
instance. So a device's listener leads to its connections and to no others, also to those that were
opened later, whichever side opened them.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

from torch.distributed import ProcessGroup

from hypergrid import of_torch
from hypergrid.agreement.store import descriptors, duplicate, listens

_OPEN, _INFO = "/proc/self/fd", "/proc/self/fdinfo"


@dataclass(frozen=True)
class _Loop:
    """A gloo event loop: its listener's inode and address, and its connections."""

    listener: int
    address: Any
    connections: dict[int, int]  # descriptor -> inode


@dataclass(eq=False)
class Opened:
    """Sockets opened for some groups: the groups, their sizes, and if the last is unfinished."""

    groups: tuple[ReferenceType[ProcessGroup], ...] = ()
    sizes: tuple[int, ...] = ()
    unfinished: bool = True

    def begin(self, size: int) -> None:
        """One more group of ``size`` ranks is created on them."""
        self.sizes, self.unfinished = (*self.sizes, size), True

    def add(self, group: ProcessGroup) -> None:
        """The group that was begun exists now."""
        self.groups, self.unfinished = (*self.groups, ref(group)), False

    def live(self) -> set[int]:
        """The groups that torch knows, as their ``id``."""
        return {id(each()) for each in self.groups if of_torch.knows(each())}


# By the inode of a listener. A forked child knows none: its parent uses the sockets.
_opened: dict[int, Opened] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_opened.clear)


@contextmanager
def opening(devices: int) -> Iterator[Opened]:
    """Inside, that many gloo devices are created; gives what is to be noted of them. *Local*.

    If another thread creates a listener at the same time, nobody can tell whose is whose: none is
    remembered, and ``shut`` does not find the groups.
    """
    untaken, opened = _untaken(8 * devices), Opened()
    before = set[int]() if untaken else {*map(int, descriptors())}
    yield opened
    new = {*(untaken or map(int, descriptors()))} - before
    listeners = [inode for descriptor in new if (inode := _listener(descriptor))]
    if len(listeners) == devices:
        _opened.update(dict.fromkeys(listeners, opened))


def _untaken(many: int) -> range:
    """The next descriptors of this process, if they are a run: faster than to list all."""
    try:
        os.close(first := os.open(os.devnull, os.O_RDONLY))
    except OSError:  # none is left
        return range(0)
    for descriptor in range(first, first + many):
        with suppress(OSError):
            os.fstat(descriptor)
            return range(0)
    return range(first, first + many)


def note_default(ask_store: bool = True) -> None:
    """Remember the listeners of the default group, which the caller created. *Local*.

    They are those that no known group has. If there are more, as the caller has created other gloo
    groups, then those whose addresses the default group has published in the store; without
    ``ask_store`` none, as another thread may be waiting in it.
    """
    default = of_torch.default_group()
    devices, live = _devices(default), {inode: each.live() for inode, each in [*_opened.items()]}
    for inode in live:
        each = _opened.get(inode)  # another thread may be here too
        if each is not None and not live[inode] and not each.unfinished:
            _opened.pop(inode, None)
    if not devices or any(id(default) in groups for groups in live.values()):
        return
    loops = [loop for loop in _loops() if loop.listener not in _opened]
    if ask_store and len(loops) != devices:
        store: Any = of_torch.store_of(default)
        keys = [f"cpu//{i}/{default.rank()}" for i in range(devices)]
        with suppress(AttributeError, NotImplementedError, RuntimeError):  # of a store in Python
            told = [store.compare_set(key, "?", "?") for key in keys]  # does not wait for the key
            loops = [loop for loop in loops if any(_tells(each, loop.address) for each in told)]
    if len(loops) == devices:
        opened = Opened((ref(default),), (default.size(),), unfinished=False)
        _opened.update((loop.listener, opened) for loop in loops)


def shut(groups: Iterable[ProcessGroup], unfinished: bool = False) -> int:
    """End what waits for another rank in gloo's ``groups``. *Local*.

    Shuts their connections in both directions, and closes none: the descriptors are gloo's. Where
    a group waits until another rank connects, this process connects to itself, and leaves. What
    they share with other live groups is left alone. With ``unfinished`` also those of the group
    that another thread is creating.

    Returns
    -------
    int
        The number of connections that were found.
    """
    asked = {id(group) for group in groups}
    ending = {
        inode: opened
        for inode, opened in [*_opened.items()]
        if (live := opened.live()) <= asked and (live or (unfinished and opened.unfinished))
    }
    done, count = set[int](), 0
    for turn in range(5 if ending else 0):  # more connections may be about to open
        before = len(done)
        for loop in _loops():
            if loop.listener not in ending:
                continue
            for descriptor, inode in loop.connections.items():
                if inode not in done and _shut(descriptor, inode):
                    done.add(inode)
            opened = ending[loop.listener]
            # Never where a group has failed: gloo would call into its freed memory.
            if turn == 0 and (opened.unfinished or len(opened.sizes) == 1):
                _connect_and_leave(loop, opened.sizes)
        if turn == 0:
            count = len(done)
        elif before == len(done):
            break
    return count


def _shut(descriptor: int, inode: int) -> bool:
    # Of a duplicate: the descriptor may by now be that of another socket, which is left alone.
    with duplicate(descriptor, inode) or nullcontext() as connection:
        if connection is None or listens(connection):
            return False
        with suppress(OSError):  # not connected any more
            connection.shutdown(socket.SHUT_RDWR)
        return True


def _connect_and_leave(loop: _Loop, sizes: tuple[int, ...]) -> None:
    """Be each rank that the last group of these ``sizes`` waits for, for an instant.

    Without this it waits for a rank that does not connect until its timeout. A new connection
    begins with its number: a device counts the ranks of all its groups.
    """
    import resource  # not on every system

    first, size = sum(sizes[:-1]), sizes[-1]
    if len(loop.connections) >= first + size - len(sizes):
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = limit // 2 - len(descriptors())  # gloo ends the process when it cannot accept
    for number in range(first, first + min(size, unused)):
        with suppress(OSError), socket.create_connection(loop.address[:2], timeout=1) as connection:
            connection.sendall(struct.pack("=q", number))


def _devices(group: ProcessGroup) -> int:
    """How many event loops torch's gloo has for ``group``."""
    count = 0
    with suppress(AttributeError, RuntimeError):  # a backend that does not tell
        for part in of_torch.parts_of(group):
            inner = of_torch.checked_by(part)  # TORCH_DISTRIBUTED_DEBUG=DETAIL: two groups
            count += len(of_torch.devices_in(inner)) * (1 if inner is part else 2)
    return count


def _tells(published: bytes, address: Any) -> bool:
    """Whether what gloo has published for the other ranks is this address.

    That is the host's name, and the address as the system writes it, each after its length.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    written = struct.pack("=H", family) + struct.pack("!H", address[1])
    written += b"\0" * 4 * (family == socket.AF_INET6) + socket.inet_pton(family, address[0])
    begin = 16 + int.from_bytes(published[:8], sys.byteorder)
    return published[begin : begin + len(written)] == written


def _loops() -> list[_Loop]:
    """Gloo's event loops in this process."""
    found: dict[int, _Loop] = {}
    for name in descriptors():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"{_OPEN}/{name}") != "anon_inode:[eventpoll]":
                continue
            with open(f"{_INFO}/{name}") as info:
                members = [_member(line.split()) for line in info if line.startswith("tfd:")]
            listeners, connections = dict[int, Any](), dict[int, int]()
            for descriptor, inode, by_number in members:
                with duplicate(descriptor, inode) or nullcontext() as connection:
                    if connection is None:
                        continue
                    if not listens(connection):
                        connections[descriptor] = inode
                    elif not by_number:  # other libraries register a descriptor by its number
                        listeners[inode] = connection.getsockname()
            for inode, address in listeners.items() if len(listeners) == 1 else ():
                found[inode] = _Loop(inode, address, connections)
    return [*found.values()]


def _member(words: list[str]) -> tuple[int, int, bool]:
    """Of a line of an epoll instance: descriptor, inode, and whether its data is the descriptor."""
    values = dict(zip(words[::2], words[1::2], strict=False))
    # Before Linux 4.13 it is not told: then no socket is found.
    inode = next((int(word[4:], 16) for word in words if word.startswith("ino:")), 0)
    return int(values["tfd:"]), inode, int(values["data:"], 16) == int(values["tfd:"])


def _listener(descriptor: int) -> int | None:
    """The inode of the socket that listens at ``descriptor``, if one does."""
    with duplicate(descriptor) or nullcontext() as connection:
        if connection is None or not listens(connection):
            return None
        return os.fstat(connection.fileno()).st_ino
