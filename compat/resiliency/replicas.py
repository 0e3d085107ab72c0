"""After losses: as many whole replicas of a model as the processes that are left can hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from hypergrid.layout import RankLayout

_REPLICAS = "dp"  # the dim that becomes shorter
_TOGETHER = ("tp", "ep")  # dims whose groups stay inside a host


class NoReplicaError(RuntimeError):
    """The processes that are left cannot hold one whole replica."""


def active_processes(
    layout: RankLayout,
    hosts: Sequence[str],
    alive: Collection[int],
    accepts: Callable[[int], bool] = lambda count: True,
) -> list[int]:
    """The process of each rank of the largest number of whole replicas. *Local*: arithmetic.

    A replica is the ranks that have one coordinate of the dim ``dp``. A block is a group over
    ``tp`` and ``ep``, and stays inside one host. If the hosts of all processes cannot hold the
    layout that way, a block is a group over ``tp``, or else a single rank.

    Parameters
    ----------
    layout : RankLayout
        The full layout, from rank 0 on.
    hosts : sequence of str
        The host of each process, spares included.
    alive : collection of int
        The processes that are left.
    accepts : function
        Whether a number of replicas can train; such as ``lambda n: 96 % n == 0``.

    Raises
    ------
    NoReplicaError
        Not one whole replica is left.

    Examples
    --------
    >>> layout = RankLayout(("tp", "pp", "dp"), (2, 2, 2))
    >>> hosts = ["a"] * 5 + ["b"] * 5
    >>> active_processes(layout, hosts, range(10))
    [0, 1, 2, 3, 5, 6, 7, 8]
    >>> active_processes(layout, hosts, [0, 1, 3, 4, 7, 8, 9])
    [0, 1, 3, 4]
    """
    replicas = layout.size_of(_REPLICAS)
    replica_size = layout.size // replicas
    everyone = range(len(hosts))
    together = [dim for dim in _TOGETHER if dim in layout.dims]
    # Blocks of tp=4 x ep=2 may not fit hosts that hold those of tp=4, or single ranks.
    while together:
        block_size = layout.dim_size(together)
        places = len(_blocks(hosts, everyone, block_size)) * block_size
        if places >= layout.size:
            break
        together.pop()
    block_size = layout.dim_size(together)
    blocks = _blocks(hosts, alive, block_size)
    places = len(blocks) * block_size
    count = min(places // replica_size, replicas)
    while count and not accepts(count):
        count -= 1
    if not count:
        raise NoReplicaError(
            f"not one whole replica is left: {len(alive)} of {len(hosts)} processes are alive, "
            f"and one replica of {layout} needs {replica_size}, {block_size} of them at a time on "
            f"one host. Start the job again with more processes, or in a layout that needs fewer."
        )
    # The same layout with fewer replicas: which ranks of it are one block.
    sizes = list(layout.sizes)
    sizes[layout.dims.index(_REPLICAS)] = count
    new_layout = replace(layout, sizes=tuple(sizes))
    ranks_of_blocks = new_layout.groups(together)
    block_count = len(ranks_of_blocks)
    active = np.empty(ranks_of_blocks.size, int)
    active[ranks_of_blocks] = blocks[:block_count]
    processes: list[int] = active.tolist()
    return processes


def _blocks(hosts: Sequence[str], processes: Iterable[int], block_size: int) -> list[list[int]]:
    """Cut the processes of each host into blocks, and leave out what fills none."""
    processes_of_host: dict[str, list[int]] = {}
    for process in sorted(processes):
        members = processes_of_host.setdefault(hosts[process], [])
        members.append(process)
    all_processes = Counter(hosts)

    def lost_blocks(host: str) -> int:
        blocks_before = all_processes[host] // block_size
        blocks_left = len(processes_of_host[host]) // block_size
        return blocks_before - blocks_left

    blocks = []
    # The hosts that have lost none come first, and keep their replicas whole.
    for host in sorted(processes_of_host, key=lost_blocks):
        members = processes_of_host[host]
        # Five processes are two blocks of two, and one that is left over.
        last_start = len(members) - block_size
        for start in range(0, last_start + 1, block_size):
            end = start + block_size
            blocks.append(members[start:end])
    return blocks
