"""Ranks of one host arrive at the store as one, so that it serves hosts and not ranks.

The first of them to arrive binds an abstract Unix socket that is named after what they say: it
speaks for all that connect within a second. A rank that says something else, comes later or runs in
another network namespace finds no such socket and arrives at the store itself; so does, if the
speaker dies, every rank for which it has not yet arrived. No rank depends on ``LOCAL_WORLD_SIZE``
being right: it says only how many to wait for.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from hypergrid.groups.store import innermost, raise_if_aborted

_PATIENCE = 1.0  # seconds for ranks of this host; the window needs them in any case
_FROM = 16384  # ranks of a window; below, one store serves all of them in 1.3 s
_COUNTED, _ALONE, _END = b"+", b"-", b"\0"

_met: dict[tuple[object, ...], int] = {}  # how many ranks of this host met the last time


def host_of(rank: int) -> range:
    """The ranks that probably run on the host of ``rank``: launchers number hosts one by one."""
    size = os.environ.get("LOCAL_WORLD_SIZE", "")
    many = max(1, int(size)) if size.isdecimal() and len(size) < 10 else 1
    return range(rank // many * many, rank // many * many + many)


@dataclass
class Speaker:
    """Arrives at the store for itself and for ``others``, by rank."""

    others: dict[int, socket.socket] = field(default_factory=dict)
    # Keeps its name, without listening: a rank that comes later sees that it is late.
    server: socket.socket | None = None
    where: tuple[object, ...] = ()

    @property
    def many(self) -> int:
        return 1 + len(self.others)

    def about_to_arrive(self) -> None:
        """Tell the others that they are spoken for: who has ended or withdrawn, is not.

        If this process ends between this and its arrival, the round fails after its time.
        """
        if self.server is not None:
            _met[self.where] = self.many
        for rank, connection in list(self.others.items()):
            if not _send(connection, _COUNTED + b"%d\n" % self.many):
                connection.close()
                del self.others[rank]

    def let_go(self) -> None:
        """Let the others arrive themselves."""
        for connection in self.others.values():
            _send(connection, _ALONE)
            connection.close()
        self.others.clear()

    def tell(self, outcome: str) -> None:
        for connection in self.others.values():
            _send(connection, outcome.encode() + _END)

    def close(self) -> None:
        """Idempotent. Who has not been told asks the store."""
        for connection in (self.server, *self.others.values()):
            if connection is not None:
                connection.close()


@dataclass
class Listener:
    """A rank for which another one of its host arrives."""

    connection: socket.socket
    where: tuple[object, ...]
    counted: bool = True  # whether the other one has promised to arrive for this one

    def hear(self, timeout: timedelta) -> str | None:
        """The outcome, or None: then this rank asks the store, and if not ``counted`` arrives."""
        start, seconds = time.monotonic(), timeout.total_seconds()
        with self.connection:
            said = self._read(start + min(5 * _PATIENCE, seconds / 2), b"\n")
            if said:
                said += self._read(start + seconds)
            else:  # From here on it cannot promise any more; it may have, just now.
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RD)
                said = self._read(start + seconds)
        head, _, text = said.partition(b"\n")
        self.counted = head.startswith(_COUNTED) and text != _ALONE
        _met[self.where] = int(head[1:]) if self.counted and head[1:].isdigit() else 1
        return text[:-1].decode() if text.endswith(_END) else None

    def _read(self, end: float, last: bytes = _END) -> bytes:
        """What was sent by then, to ``last`` or to where the other one closes."""
        said = b""
        with suppress(OSError):
            while not said.endswith(last):
                raise_if_aborted()
                left = end - time.monotonic()
                self.connection.settimeout(max(0.001, min(left, 1)))
                try:
                    part = self.connection.recv(1 << 16)
                except TimeoutError:
                    if left > 1:
                        continue
                    raise
                if not part:
                    break
                said += part
        return said

    def close(self) -> None:
        self.connection.close()


def meet(
    what: str, store: Store, ranks: Sequence[int], rank: int, timeout: timedelta
) -> Speaker | Listener:
    """Find the ranks of this host that say ``what`` too; alone where that is not worth it.

    Only with a ``TCPStore``, on Linux, from 16,384 ``ranks`` on or as many as
    ``HYPERGRID_HOSTS_FIRST`` says (0: never). Waits a second at most.
    """
    least = os.environ.get("HYPERGRID_HOSTS_FIRST", "")
    least_ranks = int(least) if least.isdecimal() else _FROM
    host, served = host_of(rank), innermost(store)
    where = (ranks[0], ranks[-1], len(ranks), host.start, host.stop)
    here = bisect_left(ranks, host.stop) - bisect_left(ranks, host.start)
    expected = _met.get(where, here)
    if (
        not least_ranks
        or len(ranks) < least_ranks
        or expected < 2
        or not hasattr(served, "port")
        or sys.platform != "linux"
    ):
        return Speaker()
    job = [os.environ.get(f"TORCHELASTIC_{name}") for name in ("RUN_ID", "RESTART_COUNT")]
    words = repr((what, where, served.host, served.port, job, os.getuid()))
    name = b"\0hypergrid/" + hashlib.sha256(words.encode()).hexdigest().encode()
    with suppress(OSError):  # no such sockets here, or no descriptors left
        for _ in range(25):  # a speaker listens as soon as it has its name
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                server.bind(name)
                server.listen(here)
                patience = min(_PATIENCE, timeout.total_seconds() / 4)
                return Speaker(_gathered(server, rank, expected, patience), server, where)
            except OSError:  # another one speaks, or did
                server.close()
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(1)
            try:
                connection.connect(name)
                if _same_user(connection):
                    connection.sendall(b"%d\n" % rank)
                    return Listener(connection, where)
            except OSError:  # it does not listen yet, or no longer
                pass
            connection.close()
            time.sleep(0.002)
    _met[where] = 1
    return Speaker()


def _gathered(
    server: socket.socket, rank: int, expected: int, patience: float
) -> dict[int, socket.socket]:
    end, connections = time.monotonic() + patience, list[socket.socket]()
    others: dict[int, socket.socket] = {}
    with suppress(OSError):
        while len(connections) < expected - 1:
            server.settimeout(max(0.001, end - time.monotonic()))
            connections.append(server.accept()[0])
    # From here on nobody can connect; those that could are waiting in the queue.
    with suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
        server.settimeout(0)
        while True:
            connections.append(server.accept()[0])
    for connection in connections:
        other = -1
        with suppress(OSError, ValueError):
            connection.settimeout(max(0.1, end - time.monotonic()))
            other = int(connection.recv(64))
        if other in (-1, rank, *others) or not _same_user(connection):
            _send(connection, _ALONE)
            connection.close()
        else:
            others[other] = connection
    return others


def _send(connection: socket.socket, message: bytes) -> bool:
    try:
        connection.sendall(message)
    except OSError:
        return False
    return True


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1]) == os.getuid()
