"""The store that ranks share, and what is said, in time, when it cannot be reached any more."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from hypergrid.errors import AgreementError, CreationError
from hypergrid.words import in_words


def shared_store() -> Store | None:
    """The default group's store, where it is one that ranks really share; else None."""
    switched_off = os.environ.get("HYPERGRID_AGREEMENT", "1") == "0"
    if switched_off or not dist.is_initialized() or dist.get_backend() in ("fake", "mpi"):
        return None
    return c10d._get_default_store()


def forget(store: Store, *keys: str) -> None:
    """Take keys away, where the store can: one of torchelastic's, in etcd, cannot."""
    with suppress(RuntimeError):
        for key in keys:
            store.delete_key(key)


def bounded(timeout: timedelta) -> timedelta:
    """A time that a store can wait for: to torch's, none at all means without end."""
    return min(max(timeout, timedelta(seconds=1)), timedelta(days=10))


@contextmanager
def telling_of_a_lost_store() -> Iterator[None]:
    """Turn what torch raises inside when the store is gone into an AgreementError."""
    try:
        yield
    except (AgreementError, CreationError):
        raise
    except RuntimeError as error:
        raise AgreementError(
            f"rank {dist.get_rank()} lost the store through which ranks agree: {in_words(error)} "
            f"The process or the host that serves it has ended, or the network to it is cut. "
            f"This rank has made no group."
        ) from error


@contextmanager
def noticing_a_dead_link(store: Store, timeout: timedelta) -> Iterator[None]:
    """While inside, let calls of a ``TCPStore`` fail within ``timeout`` when its host is gone.

    Torch's client waits for an answer without a limit: a cut link or a host that lost power ends
    such a call only when TCP gives up, which Linux does after some 15 minutes. A store that is
    merely slow is waited for as before. Only where the system has these options (Linux); for
    other stores it does nothing.
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
                with suppress(OSError):  # a value that this system does not take
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


def _connections(store: Store) -> list[socket.socket]:
    """Duplicates of this process's sockets whose other end is the store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port, found = getattr(store, "port", None), []
    if port is None or not os.path.isdir("/proc/self/fd"):
        return []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
            try:
                address = connection.getpeername()
            except OSError:
                address = ()
            if isinstance(address, tuple) and address[1:2] == (port,):
                found.append(connection)
            else:
                connection.close()
    return found
