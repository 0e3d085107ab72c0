"""Which processes have a connection to the store: the end of a process closes its own.

Linux only, and only on the host that serves a ``TCPStore``: its kernel lists the connections of all
processes. A connection is its other end in text, such as "10.0.0.7:41234".
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
from torch.distributed import Store  # type: ignore[attr-defined]

from hypergrid.agreement.store import connections_to, innermost, plain

_TABLES = {"/proc/net/tcp": socket.AF_INET, "/proc/net/tcp6": socket.AF_INET6}
_ESTABLISHED = "01"


def to_the_store(store: Store) -> list[str]:
    """The connections of this process; empty where that is not known. *Local*."""
    ends = []
    for connection in connections_to(store):
        with connection, suppress(OSError):
            address, port = connection.getsockname()[:2]
            ends.append(f"{plain(address)}:{port}")
    return ends


def at_the_store(store: Store) -> set[str] | None:
    """The connections of all processes, at the host that serves the store. *Local*.

    None on another host, and where nobody can tell: also if an address is translated on the way,
    for then this process does not find its own connections in the list. The kernel may leave
    out a line of a list that changes while it is read.
    """
    own = to_the_store(store)
    if not own:
        return None
    connections = set()
    for path, family in _TABLES.items():
        try:
            with open(path) as rows:
                connections |= _established(rows, family, innermost(store).port)
        except FileNotFoundError:  # a host without IPv6
            continue
        except OSError:
            return None
    return connections if connections.issuperset(own) else None


def _established(rows: Iterable[str], family: int, served_port: int) -> set[str]:
    """The other ends of the connections to this port, of a table as /proc/net/tcp."""
    ends = set()
    for row in rows:
        # 3: 0100007F:7D1A 0100007F:A112 01 ... is 127.0.0.1:32026 with 127.0.0.1:41234.
        _, local, remote, state, *_ = row.split(maxsplit=4)
        local_port = local.rpartition(":")[2]
        if state != _ESTABLISHED or int(local_port, 16) != served_port:
            continue
        address, _, port = remote.partition(":")
        # Words of four bytes, each written as a number of this machine.
        big_endian = np.frombuffer(bytes.fromhex(address), ">u4")
        packed = big_endian.astype("=u4").tobytes()
        host = plain(socket.inet_ntop(family, packed))
        port_number = int(port, 16)
        ends.add(f"{host}:{port_number}")
    return ends
