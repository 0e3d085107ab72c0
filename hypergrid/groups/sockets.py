"""Shuts the connections of gloo groups, which frees a rank that waits in one. Linux only.

Each gloo group has an event loop: an epoll instance with one listening socket and the group's
connections. The kernel lists the members of an epoll instance. So the listening socket, which is
noted when a group is created, leads to the group's connections and to no others.

Only connections are shut, as if the other rank had ended. Gloo survives that. A group that has not
connected, or has failed, is left alone: a connection to it would end the process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from weakref import ref

from torch.distributed import ProcessGroup

from hypergrid import of_torch
from hypergrid.agreement.store import descriptors, duplicate, listens

# For each group the inodes of the listening sockets that its connections belong to. The references
# have no callback: Python ignores what a callback raises, and so a Ctrl-C that arrived while gloo
# ended the group before.
_listeners_of: dict[ref[ProcessGroup], set[int]] = {}


def _inherit() -> None:
    """In a forked child no group has listeners, as the parent uses the sockets."""
    _listeners_of.clear()
    for group in of_torch.known():
        note(group, set())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)


def note(group: ProcessGroup, listeners: set[int]) -> None:
    """Remember the inodes of the sockets that listen for ``group``. *Local*."""
    for reference in [*_listeners_of]:
        if reference() is None:
            _listeners_of.pop(reference, None)
    _listeners_of[ref(group)] = listeners


@contextmanager
def opening(devices: int) -> Iterator[set[int]]:
    """Give the inodes of the listening sockets of ``devices`` that are created inside. *Local*.

    They are empty if another thread begins to listen at the same time: nobody can tell which
    socket is whose.
    """
    listeners = set[int]()
    before = {*descriptors()}
    yield listeners
    opened = {*descriptors()} - before
    listeners |= _listening(map(int, opened))
    if len(listeners) != devices:
        listeners.clear()


def note_default() -> None:
    """Remember the listening sockets of the default group, which the caller created. *Local*.

    They are those that no other group has. If the caller had created other gloo groups by the
    first call, nobody can tell which are the default group's, and none is remembered.
    """
    default = of_torch.default_group()
    devices = of_torch.gloo_devices_of(default)
    if devices == 0 or ref(default) in _listeners_of:
        return
    unknown = set[int]()
    for members in _event_loops():
        unknown |= _listening(descriptor for descriptor, _ in members)
    unknown -= _listeners(of_torch.known())
    note(default, unknown if len(unknown) == devices else set())


def shut(groups: Collection[ProcessGroup]) -> int:
    """End what waits for another rank in the gloo groups among ``groups``. *Local*.

    Shuts their connections in both directions, and closes none: the descriptors are gloo's.

    Returns
    -------
    int
        The number of connections that were shut.
    """
    # Where nobody can tell which of two groups has a socket, they are shut only together.
    listeners = _listeners(groups) - _listeners(of_torch.known().keys() - groups)
    count = 0
    for members in _event_loops():
        if not listeners.isdisjoint(inode for _, inode in members):
            count += sum(_shut(*member) for member in members)
    return count


def _listeners(groups: Iterable[ProcessGroup]) -> set[int]:
    return set().union(*(_listeners_of.get(ref(group), ()) for group in groups))


def _shut(descriptor: int, inode: int) -> bool:
    # Of a duplicate: the descriptor may by now be that of another socket, which is left alone.
    connection = duplicate(descriptor, inode)
    if connection is None:
        return False
    with connection, suppress(OSError):
        connection.getpeername()  # raises for what listens, or is not connected yet
        connection.shutdown(socket.SHUT_RDWR)
        return True
    return False


def _event_loops() -> Iterator[list[tuple[int, int]]]:
    """Descriptor and inode of the sockets in each event loop of this process."""
    for name in descriptors():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                with open(f"/proc/self/fdinfo/{name}") as lines:
                    yield [*_members(lines)]


def _members(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    for line in lines:
        # tfd: 12 events: 19 data: 7f3c08 pos:0 ino:5e21 sdev:9
        if line.startswith("tfd:"):
            words = line.split()
            descriptor = int(words[1])
            # Other libraries register a descriptor by its number, gloo by an address.
            if int(words[5], 16) != descriptor:
                yield descriptor, int(words[7][4:], 16)


def _listening(numbers: Iterable[int]) -> set[int]:
    """The inodes of the sockets among these descriptors that accept connections."""
    listeners = set()
    for descriptor in numbers:
        connection = duplicate(descriptor)
        if connection is not None:
            with connection:
                if listens(connection):
                    listeners.add(os.fstat(connection.fileno()).st_ino)
    return listeners
