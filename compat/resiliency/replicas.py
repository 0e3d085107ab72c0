"""After losses: as many whole replicas of a model as the processes that are left can hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from hypergrid.layout import LayoutError, RankLayout, span_of
from hypergrid.topology import Topology

_REPLICAS = "dp"  # the dim that becomes shorter
_TOGETHER = ("tp", "ep")  # dims whose groups stay inside a host
_NOBODY = -1  # in place of a process


class NoReplicaError(RuntimeError):
    """The processes that are left cannot hold one whole replica."""


@dataclass(frozen=True)
class Replicas:
    """Assign ranks to processes, and keep the other processes in reserve. *Local*: arithmetic.

    A replica is the ranks that have one coordinate of the dim ``dp``. A block is a group over
    ``tp`` and ``ep``, and stays inside one host. If the hosts cannot hold as many replicas that way
    as without it, a block is a group over ``tp``, or else a single rank.

    Parameters
    ----------
    topology : Topology
        The full layout, and the hosts of all processes, spares included. The layout begins at 0.
    accepts : function
        Whether a number of replicas can train; such as ``lambda n: 96 % n == 0``.

    Examples
    --------
    >>> layout = RankLayout(("tp", "pp", "dp"), (2, 2, 2))
    >>> start = Replicas.first(Topology(layout, hosts=[5, 5]))
    >>> start.active, start.reserves
    ((0, 1, 2, 3, 5, 6, 7, 8), (4, 9))
    >>> later = start.without([2, 5, 6])
    >>> later.active, later.reserves
    ((0, 1, 4, 3), (7, 8, 9))
    >>> later.layout
    RankLayout(tp=2-pp=2, ranks 0..3)
    """

    topology: Topology
    together: tuple[str, ...]  # the dims of a block
    accepts: Callable[[int], bool]
    layout: RankLayout  # with as many replicas as there are
    active: tuple[int, ...]  # the process of each rank
    reserves: tuple[int, ...]  # the processes that are left over, ascending

    @classmethod
    def first(
        cls,
        topology: Topology,
        accepts: Callable[[int], bool] = lambda count: True,
    ) -> Replicas:
        """The replicas before any loss. NoReplicaError, LayoutError as the class says."""
        full = topology.layout
        if full.offset:
            raise LayoutError(f"{full} must begin at rank 0 to be placed on processes.")
        full.axes(_REPLICAS)  # refuses a layout without it
        together = tuple(dim for dim in _TOGETHER if dim in full.dims)
        nobody = (_NOBODY,) * full.size
        processes = tuple(range(len(topology.numbers)))
        alone = cls(topology, (), accepts, full, nobody, processes)
        start = replace(alone, together=together)
        # Blocks of tp=4 x ep=2 may not fit hosts that hold those of tp=4, or single ranks.
        while start._count(processes) < alone._count(processes):
            start = replace(start, together=start.together[:-1])
        return start.without(())

    def without(self, lost: Collection[int]) -> Replicas:
        """The replicas after ``lost`` processes have ended: the largest number of them.

        Surviving processes keep their ranks where that is possible, and other processes of the
        same host take the holes first. NoReplicaError if not one whole replica is left.
        """
        alive = {*self.active, *self.reserves}.difference(lost, [_NOBODY])
        count = self._count(alive)
        if not count:
            raise NoReplicaError(self._refusal(alive, lost))
        ranks_of_replicas = self._ranks_of_replicas(self.layout)
        # The process of each rank, a replica a line: an array of shape (replicas, ranks).
        members = np.array(self.active)[ranks_of_replicas]
        is_hole = ~np.isin(members, list(alive))
        # The replicas with the fewest holes go on, in their order.
        hole_counts = is_hole.sum(axis=1)
        fewest_holes_first = np.argsort(hole_counts, kind="stable")
        going_on = np.sort(fewest_holes_first[:count])
        layout = self._layout(count)
        active = np.empty(layout.size, int)
        active[self._ranks_of_replicas(layout)] = members[going_on]
        ranks_of_blocks = layout.groups(self.together)
        blocks = active[ranks_of_blocks].tolist()
        self._fill(blocks, alive)
        active[ranks_of_blocks] = blocks
        return replace(
            self,
            layout=layout,
            active=tuple(active.tolist()),
            reserves=tuple(sorted(alive.difference(*blocks))),
        )

    def _layout(self, count: int) -> RankLayout:
        full = self.topology.layout
        sizes = list(full.sizes)
        sizes[full.dims.index(_REPLICAS)] = count
        return RankLayout(full.dims, tuple(sizes))

    def _ranks_of_replicas(self, layout: RankLayout) -> np.ndarray:
        return layout.groups(layout.orthogonal(_REPLICAS))

    def _by_host(self, processes: Iterable[int]) -> dict[int, list[int]]:
        processes_of_host: dict[int, list[int]] = {}
        for process in sorted(processes):
            host = int(self.topology.numbers[process])
            processes_of_host.setdefault(host, []).append(process)
        return processes_of_host

    def _room(self, alive: Iterable[int]) -> Counter[int]:
        """How many blocks each host can hold."""
        block_size = self.topology.layout.dim_size(self.together)
        room: Counter[int] = Counter()
        for host, processes in self._by_host(alive).items():
            room[host] = len(processes) // block_size
        return room

    def _count(self, alive: Iterable[int]) -> int:
        """The largest accepted number of replicas that ``alive`` can hold."""
        full = self.topology.layout
        blocks_of_replica = self._layout(1).size // full.dim_size(self.together)
        held = self._room(alive).total() // blocks_of_replica
        most = min(held, full.size_of(_REPLICAS))
        for count in range(most, 0, -1):
            if self.accepts(count):
                return count
        return 0

    def _fill(self, blocks: list[list[int]], alive: set[int]) -> None:
        """Put processes into the holes; a block stays on its host, or moves as a whole."""
        room = self._room(alive)
        host_and_block = []
        moving_blocks = []
        # Whole blocks first: a block with holes may not take the room of one of them.
        for block in sorted(blocks, key=lambda block: len({*block} - alive)):
            host = _NOBODY
            if block[0] != _NOBODY:
                host = int(self.topology.numbers[block[0]])
            if room[host]:
                room[host] -= 1
                host_and_block.append((host, block))
            else:
                moving_blocks.append(block)
                block[:] = [_NOBODY] * len(block)
        # There may be more room than blocks that move.
        host_and_block += zip(room.elements(), moving_blocks, strict=False)
        free_processes = self._by_host(alive.difference(*blocks))
        for host, block in host_and_block:
            for place, process in enumerate(block):
                if process not in alive:
                    block[place] = free_processes[host].pop(0)

    def _refusal(self, alive: Collection[int], lost: Collection[int]) -> str:
        full = self.topology.layout
        hosts = []
        for host, processes in self._by_host(alive).items():
            hosts.append(f"{self.topology.names[host]}: {len(processes)}")
        text = (
            f"not one whole replica is left: processes {span_of(sorted(lost)) or 'none'} are lost, "
            f"{len(alive)} are alive ({', '.join(hosts)}), and one replica of "
            f"{full} needs {self._layout(1).size}"
        )
        if self.together:
            size = full.dim_size(self.together)
            text += f", {size} of them at a time on one host ({'-'.join(self.together)!r})"
        return f"{text}. Start the job again with more processes, or in a layout that needs fewer."
