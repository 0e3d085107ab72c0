"""The store that ranks share: operations that every store has, and errors when it is lost."""

from __future__ import annotations

import functools
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from hypergrid import of_torch
from hypergrid.errors import AbortedError, AgreementError, CreationError
from hypergrid.messages import in_words, shown

_DESCRIPTORS = "/proc/self/fd"
_IN_STORE = timedelta(seconds=3)  # then by looking: torch logs two lines for each wait in vain
_aborts, _settled, _thread = 0, 0, threading.local()  # how many; before the last creation


def shared_store() -> Store | None:
    """The store of the default group, if ranks share it; else None."""
    switched_off = os.environ.get("HYPERGRID_AGREEMENT", "1") == "0"
    if switched_off or not dist.is_initialized() or dist.get_backend() in ("fake", "mpi"):
        return None
    return of_torch.default_store()


def end_waits() -> None:
    """Make every thread that is in ``abortable`` raise AbortedError within seconds. *Local*."""
    global _aborts
    _aborts += 1


def settle() -> None:
    """This thread has created groups: an abort before it began is over."""
    global _settled
    _settled = _thread.aborts


def was_aborted() -> bool:
    """Whether ``end_waits`` was called since groups were last created."""
    return _settled != _aborts


@contextmanager
def abortable() -> Iterator[None]:
    """Inside, ``end_waits`` ends what this thread waits for, and turns its errors into its own."""
    outer = getattr(_thread, "aborts", None)
    _thread.aborts = _aborts if outer is None else outer
    try:
        yield
    except Exception:
        raise_if_waits_ended()
        raise
    finally:
        _thread.aborts = outer


def raise_if_waits_ended() -> None:
    """AbortedError if ``end_waits`` was called since this thread is in ``abortable``."""
    if getattr(_thread, "aborts", None) not in (None, _aborts):
        raise AbortedError(
            "hypergrid.abort() was called in this process while it created groups. It has none of "
            "them now. Other ranks were not told: call it on all of them."
        )


def interval(ranks: int) -> float:
    """Seconds between two looks of a rank, where ``ranks`` wait at one store."""
    return min(5.0, max(0.5, ranks / 20_000))


def wait(
    store: Store,
    keys: list[str],
    timeout: timedelta,
    ranks: int = 1,
    given_up: Callable[[], bool] = bool,
) -> None:
    """Wait for ``keys``, as ``ranks`` do; RuntimeError after ``timeout``, and AbortedError.

    The more ranks wait, the less often each of them looks: they share one store. RuntimeError also
    when ``given_up`` says that the keys will not come.
    """
    end = time.monotonic() + timeout.total_seconds()
    raise_if_waits_ended()
    try:
        store.wait(keys, min(timeout, _IN_STORE))
    except RuntimeError:
        while not store.check(keys):
            if given_up():
                raise
            until = time.monotonic() + interval(ranks)
            while (now := time.monotonic()) < until:
                raise_if_waits_ended()
                if now >= end:
                    raise
                time.sleep(min(0.5, until - now))


def forget(store: Store, *keys: str) -> None:
    """Delete keys, if the store can: that of torchelastic in etcd cannot."""
    with suppress(RuntimeError):
        for key in keys:
            store.delete_key(key)


def peek(store: Store, key: str) -> str:
    """The value of a key that exists, in one round trip where the store can; ``get`` costs two."""
    try:
        value: bytes = store.compare_set(key, "?", "?")
    except (AttributeError, NotImplementedError, RuntimeError):  # of a store in Python
        value = store.get(key)
    return value.decode()


def first_value(store: Store, key: str, value: str) -> str:
    """The value of ``key``, which is ``value`` from now on if it had none."""
    try:
        found: bytes = store.compare_set(key, "", value)
    except (AttributeError, NotImplementedError, RuntimeError):  # of a store in Python
        if store.add(f"{key}/set", 1) == 1:
            store.set(key, value)
        found = store.get(key)
    return found.decode()


def get_all(store: Store, keys: list[str]) -> list[bytes]:
    """The values of several keys that are there, in one message where the store can."""
    own: Any = store
    found: list[bytes] = (
        own.multi_get(keys) if own.has_extended_api() else [store.get(key) for key in keys]
    )
    return found


def append(store: Store, key: str, line: str) -> None:
    """Add a line to the text of a key, which any number of ranks do at the same time."""
    own: Any = store
    if own.has_extended_api():
        own.append(key, line + "\n")
    else:
        store.set(f"{key}/{store.add(f'{key}/lines', 1)}", line)


def lines(store: Store, key: str) -> list[str]:
    """The value that has been appended so far."""
    own: Any = store
    if own.has_extended_api():
        return peek(store, key).splitlines() if store.check([key]) else []
    numbers = range(1, store.add(f"{key}/lines", 0) + 1)
    return [store.get(f"{key}/{number}").decode() for number in numbers]


def forget_lines(store: Store, *keys: str) -> None:
    """Delete what was appended where each line is a key of its own."""
    own: Any = store
    for key in () if own.has_extended_api() else keys:
        many = store.add(f"{key}/lines", 0)
        forget(store, *(f"{key}/{number + 1}" for number in range(many)), f"{key}/lines")


def another_connection(store: Store) -> Store:
    """The same store for a second thread: a client that waits for a key blocks other calls."""
    own: Any = store
    try:
        another: Store = own.clone()
    except (AttributeError, RuntimeError):  # an older torch; a store written in Python
        return store
    return another


def stay_until(told: Callable[[], bool], store: Store, seconds: float) -> None:
    """If this process serves ``store``, wait until others are ``told``, ``seconds`` at most.

    A rank that has failed usually ends, and its store with it.
    """
    if _serves(store):
        end = time.monotonic() + seconds
        with suppress(RuntimeError):
            while not told() and time.monotonic() < end:
                time.sleep(0.01)


def check_timeout(timeout: Any) -> None:
    """TypeError if it is no timedelta, nor None."""
    if not isinstance(timeout, timedelta | None):
        raise TypeError(f"timeout must be a datetime.timedelta, got {shown(timeout)}.")


def bounded(timeout: timedelta) -> timedelta:
    """A time that a store can wait for: torch's stores take 0 as no limit."""
    return min(max(timeout, timedelta(seconds=1)), timedelta(days=10))


@contextmanager
def telling_of_a_lost_store() -> Iterator[None]:
    """Turn torch's error about a lost store into an AgreementError."""
    try:
        yield
    except (AgreementError, CreationError):
        raise
    except RuntimeError as error:
        raise AgreementError(
            f"rank {dist.get_rank()} lost the store through which ranks agree: {in_words(error)} "
            f"The process or the host that serves it has ended, or the network to it is cut. "
            f"This rank has created no group."
        ) from error


@contextmanager
def noticing_a_dead_link(store: Store, timeout: timedelta) -> Iterator[None]:
    """Inside, calls of a ``TCPStore`` fail within ``timeout`` when its host is gone.

    Torch's client waits for an answer without a limit: after a cut link or a power loss such a
    call ends only when TCP gives up, on Linux after some 15 minutes. A slow store is not affected.
    Only where the system has these socket options (Linux), and not for other stores.
    """
    seconds = timeout.total_seconds()
    wanted = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", None)): max(1, int(seconds / 4)),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPINTVL", None)): max(1, int(seconds / 8)),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", None)): int(seconds * 500),
    }
    before = []
    for connection in _connections(store):
        for (level, option), value in wanted.items():
            if option is not None:
                with suppress(OSError):  # a value that this system does not accept
                    before.append((connection, level, option, connection.getsockopt(level, option)))
                    connection.setsockopt(level, option, value)
    try:
        yield
    finally:
        for connection, level, option, value in reversed(before):  # one may be here twice
            with suppress(OSError):
                connection.setsockopt(level, option, value)
        for connection in {entry[0] for entry in before}:
            connection.close()


# Looked for once for each store, as it costs a few calls for every descriptor of the process.
_connections_to: WeakKeyDictionary[Store, list[tuple[int, int]]] = WeakKeyDictionary()


def _connections(store: Store) -> list[socket.socket]:
    """Duplicates of this process's sockets whose other end is the store."""
    if store not in _connections_to:
        _connections_to[store] = _places(store)
    duplicates = [duplicate(*place) for place in _connections_to[store]]
    return [connection for connection in duplicates if connection is not None]


def _places(store: Store) -> list[tuple[int, int]]:
    served = innermost(store)
    if not hasattr(served, "port"):
        return []
    addresses = _addresses(served.host)

    def leads_there(connection: socket.socket) -> bool:
        host, port = connection.getpeername()[:2]
        return port == served.port and _plain(host) in addresses

    return _sockets(leads_there)


def _serves(store: Store) -> bool:
    served = innermost(store)
    if not hasattr(served, "port"):
        return False
    if not os.path.isdir(_DESCRIPTORS):
        return dist.get_rank() == 0  # torch's choice, unless a launcher serves the store

    def serves(connection: socket.socket) -> bool:
        return listens(connection) and connection.getsockname()[1] == served.port

    return bool(_sockets(serves))


def innermost(store: Any) -> Any:
    """The store that others wrap."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


@functools.cache
def _addresses(host: str) -> set[str]:
    name = host.encode() if host.isascii() else host  # text would load the codec of foreign names
    with suppress(OSError):  # no such name any more
        return {_plain(str(entry[4][0])) for entry in socket.getaddrinfo(name, None)}
    return set()


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:")  # IPv4 in IPv6


def _sockets(wanted: Callable[[socket.socket], bool]) -> list[tuple[int, int]]:
    """Descriptor and inode of those of this process's internet sockets that are ``wanted``."""
    places = []
    for name in descriptors():
        connection = duplicate(int(name))
        if connection is None:
            continue
        with connection, suppress(OSError):  # not connected
            if wanted(connection):
                places.append((int(name), os.fstat(connection.fileno()).st_ino))
    return places


def descriptors() -> list[str]:
    """The descriptors of this process; none where the system does not list them."""
    with suppress(OSError):  # or where none is left to read the list with
        return os.listdir(_DESCRIPTORS)
    return []


def duplicate(descriptor: int, inode: int | None = None) -> socket.socket | None:
    """A duplicate of the internet socket ``descriptor``, if that is one, and has this ``inode``."""
    try:
        status = os.fstat(descriptor)
        # Nothing else is duplicated: to close the duplicate of a file would release its locks.
        if not stat.S_ISSOCK(status.st_mode) or inode not in (None, status.st_ino):
            return None
        number = os.dup(descriptor)
    except OSError:  # closed meanwhile
        return None
    if os.fstat(number).st_ino != status.st_ino:  # and is another one by now
        os.close(number)
        return None
    # If the process has a default timeout, Python makes every new socket object non-blocking, and
    # so the original, which shares its state; but not one that is created as non-blocking.
    kind = socket.SOCK_STREAM | getattr(socket, "SOCK_NONBLOCK", 0)
    connection = socket.socket(type=kind, fileno=number)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        return connection
    connection.close()
    return None


def listens(connection: socket.socket) -> bool:
    """Whether a socket accepts connections."""
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
