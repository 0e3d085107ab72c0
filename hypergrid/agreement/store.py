"""The store that ranks share: operations that every store has, and bounded waits for it."""

from __future__ import annotations

import functools
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from hypergrid import of_torch
from hypergrid.errors import AbortedError, AgreementError, CreationError
from hypergrid.messages import in_words

LONG_WAIT = 8.0  # seconds that a rank waits, or creates groups, until it writes where it is
_DESCRIPTORS = "/proc/self/fd"
_NO_VALUE = "?"
_NO_COMPARE_SET = (AttributeError, NotImplementedError, RuntimeError)  # of a store in Python
_FIRST_PAUSE = 0.0005  # seconds between the first two looks of a rank that waits
_LOOKS_A_SECOND = 20_000  # by all ranks together: a fifth of what a TCPStore can answer
T = TypeVar("T")


class _Thread(threading.local):
    aborts: int | None = None  # the number of aborts when this thread entered ``abortable``


_thread = _Thread()
_aborts = 0  # the number of aborts in this process
_aborts_before_creation = 0  # the number when groups were last created


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
    global _aborts_before_creation
    if _thread.aborts is not None:
        _aborts_before_creation = _thread.aborts


def was_aborted() -> bool:
    """Whether ``end_waits`` was called since groups were last created."""
    return _aborts_before_creation != _aborts


@contextmanager
def abortable() -> Iterator[None]:
    """Inside, ``end_waits`` ends what this thread waits for, and turns its errors into its own."""
    outer = _thread.aborts
    if outer is None:  # not inside another one, whose abort ends this one too
        _thread.aborts = _aborts
    try:
        yield
    except Exception:
        raise_if_waits_ended()
        raise
    finally:
        _thread.aborts = outer


def raise_if_waits_ended() -> None:
    """AbortedError if ``end_waits`` was called since this thread is in ``abortable``."""
    if _thread.aborts not in (None, _aborts):
        raise AbortedError(
            "hypergrid.abort() was called in this process while it created groups. It has none of "
            "them now. Other ranks were not told: call it on all of them."
        )


def interval(ranks: int) -> float:
    """The most seconds between two looks of a rank, where ``ranks`` wait at one store."""
    return min(5.0, max(0.5, ranks / _LOOKS_A_SECOND))


def look_until(look: Callable[[], T | None], timeout: timedelta, ranks: int = 1) -> T:
    """Wait until ``look`` gives a value, and return it.

    DistStoreError after ``timeout``; AbortedError.

    The longer a rank has waited the less often it looks, and the less often the more ``ranks`` wait
    at one store. Of 64 ranks that have waited for 1.6 s each looks after a further 0.1 s. A wait
    inside the store would be a single call, but torch logs two lines for each that is in vain,
    and until its end neither an abort nor another thread gets at the store.
    """
    begin = time.monotonic()
    while True:
        raise_if_waits_ended()
        found = look()
        if found is not None:
            return found
        waited = time.monotonic() - begin
        left = timeout.total_seconds() - waited
        if left <= 0:
            raise dist.DistStoreError(f"nothing came within {timeout}.")
        pause = max(_FIRST_PAUSE, ranks / _LOOKS_A_SECOND, waited / 16)
        _sleep(min(pause, interval(ranks), left))


def _sleep(seconds: float) -> None:
    """Sleep in short steps: an abort ends the wait soon."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        raise_if_waits_ended()
        time.sleep(min(0.5, max(0, end - time.monotonic())))


@contextmanager
def look_beside(look: Callable[[], object]) -> Iterator[None]:
    """Call ``look`` from time to time in a thread, while torch may block this one inside.

    The first call is after 8 s. An error in it ends the thread, and nothing else.
    """
    is_over = threading.Event()

    def run() -> None:
        pause = LONG_WAIT
        with suppress(Exception):  # the store is lost: who is inside will hear of it
            while not is_over.wait(pause):
                look()
                pause = 0.5

    thread = threading.Thread(target=run, name="hypergrid waits", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no memory for a thread
        yield
        return
    try:
        yield
    finally:
        is_over.set()
        thread.join(1.0)  # no longer than one call to the store


def forget(store: Any, *keys: str) -> None:
    """Delete keys, if the store can: that of torchelastic in etcd cannot.

    Lines in a store that does not append stay, each under a key of its own.
    """
    with suppress(RuntimeError):
        for key in keys:
            store.delete_key(key)


def peek(store: Store, key: str) -> str | None:
    """The value of a key, None if it has none; in one round trip where the store can."""
    try:
        value: bytes = store.compare_set(key, _NO_VALUE, _NO_VALUE)  # which a missing key gives too
    except _NO_COMPARE_SET:
        if not store.check([key]):
            return None
        value = store.get(key)
    text = value.decode()
    return None if text == _NO_VALUE else text


def first_value(store: Store, key: str, value: str) -> str:
    """The value of ``key``, which is ``value`` from now on if it had none."""
    try:
        current: bytes = store.compare_set(key, "", value)
    except _NO_COMPARE_SET:
        if store.add(f"{key}/set", 1) == 1:
            store.set(key, value)
        current = store.get(key)
    return current.decode()


def append(store: Any, key: str, line: str) -> None:
    """Add a line to the text of a key, which any number of ranks do at the same time."""
    if store.has_extended_api():
        store.append(key, line + "\n")
    else:
        number = store.add(f"{key}/lines", 1)
        store.set(f"{key}/{number}", line)


def lines(store: Any, key: str) -> list[str]:
    """The lines that have been appended so far."""
    if store.has_extended_api():
        text = peek(store, key) or ""
        return text.splitlines()
    count = store.add(f"{key}/lines", 0)
    return [store.get(f"{key}/{number}").decode() for number in range(1, count + 1)]


def another_connection(store: Any) -> Store:
    """The same store for a second thread: a client that waits for a key blocks other calls."""
    try:
        clone: Store = store.clone()
    except (AttributeError, RuntimeError):  # an older torch; a store written in Python
        clone = store
    return clone


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
    # Linux has all of these options, other systems some.
    values = {
        (socket.SOL_SOCKET, "SO_KEEPALIVE"): 1,
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE"): max(1, int(seconds / 4)),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL"): max(1, int(seconds / 8)),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT"): int(seconds * 500),
    }
    with ExitStack() as at_the_end:
        for connection in connections_to(store):
            at_the_end.enter_context(connection)  # closes it
            for (level, name), value in values.items():
                # No such option, or a value that this system does not accept.
                with suppress(AttributeError, OSError):
                    option = getattr(socket, name)
                    old_value = connection.getsockopt(level, option)
                    connection.setsockopt(level, option, value)
                    at_the_end.callback(_set_option, connection, level, option, old_value)
        yield


def _set_option(connection: socket.socket, level: int, option: int, value: int) -> None:
    with suppress(OSError):  # the connection is lost
        connection.setsockopt(level, option, value)


class Descriptor(NamedTuple):
    """A socket of this process. Its number may be another one's by now, the inode is not."""

    number: int
    inode: int


# Looked for once for each store, as it costs a few calls for every descriptor of the process.
_descriptors_to: WeakKeyDictionary[Store, list[Descriptor]] = WeakKeyDictionary()


def connections_to(store: Store) -> list[socket.socket]:
    """Duplicates of this process's sockets whose other end is the store."""
    if store not in _descriptors_to:
        _descriptors_to[store] = _find_connections(store)
    duplicates = [duplicate(*descriptor) for descriptor in _descriptors_to[store]]
    return [connection for connection in duplicates if connection is not None]


def _find_connections(store: Store) -> list[Descriptor]:
    """This process's sockets whose other end is the store; none where it is no ``TCPStore``."""
    served = innermost(store)
    if not hasattr(served, "port"):  # a store of files, or of one process
        return []
    addresses = _addresses(served.host)

    def leads_there(connection: socket.socket) -> bool:
        host, port = connection.getpeername()[:2]
        return port == served.port and plain(host) in addresses

    return sockets(leads_there, descriptors())


def serves(store: Store) -> bool:
    """Whether this process serves the store."""
    served = innermost(store)
    if not hasattr(served, "port"):
        return False

    def listens_there(connection: socket.socket) -> bool:
        return listens(connection) and connection.getsockname()[1] == served.port

    return bool(sockets(listens_there, descriptors()))


def innermost(store: Any) -> Any:
    """The store that others wrap."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


@functools.cache
def _addresses(host: str) -> set[str]:
    name = host.encode() if host.isascii() else host  # text would load the codec of foreign names
    with suppress(OSError):  # no such name any more
        return {plain(str(address[0])) for *_, address in socket.getaddrinfo(name, None)}
    return set()


def plain(address: str) -> str:
    """An address without the prefix of IPv4 in IPv6."""
    return address.removeprefix("::ffff:")


def sockets(accepts: Callable[[socket.socket], bool], numbers: Iterable[int]) -> list[Descriptor]:
    """The internet sockets among the descriptors ``numbers`` that a function ``accepts``."""
    accepted = []
    for number in numbers:
        connection = duplicate(number)
        if connection is None:
            continue
        with connection, suppress(OSError):  # not connected
            if accepts(connection):
                accepted.append(Descriptor(number, os.fstat(connection.fileno()).st_ino))
    return accepted


def descriptors() -> list[int]:
    """The descriptors of this process; none where the system does not list them."""
    with suppress(OSError):  # or where none is left to read the list with
        numbers = [int(name) for name in os.listdir(_DESCRIPTORS)]
        # The list has the descriptor that it was read with, whose number the next one takes.
        closed_number = os.open(_DESCRIPTORS, os.O_RDONLY)
        os.close(closed_number)
        return [number for number in numbers if number != closed_number]
    return []


def duplicate(number: int, inode: int | None = None) -> socket.socket | None:
    """A duplicate of the internet socket ``number``, if that is one, and has this ``inode``."""
    try:
        status = os.fstat(number)
        # Nothing else is duplicated: to close the duplicate of a file would release its locks.
        if not stat.S_ISSOCK(status.st_mode) or inode not in (None, status.st_ino):
            return None
        duplicate_number = os.dup(number)
    except OSError:  # closed meanwhile
        return None
    if os.fstat(duplicate_number).st_ino != status.st_ino:  # and is another one by now
        os.close(duplicate_number)
        return None
    # If the process has a default timeout, Python makes every new socket object non-blocking, and
    # so the original, which shares its state; but not one that is created as non-blocking.
    kind = socket.SOCK_STREAM | getattr(socket, "SOCK_NONBLOCK", 0)
    connection = socket.socket(type=kind, fileno=duplicate_number)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        return connection
    connection.close()
    return None


def listens(connection: socket.socket) -> bool:
    """Whether a socket accepts connections."""
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
