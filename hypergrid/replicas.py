"""After losses: as many whole replicas of a model as the processes that are left can hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import shown, span_of
from hypergrid.topology import Topology


class NoReplicaError(RuntimeError):
    """The processes that are left cannot hold one whole replica."""


def any_number(_: int) -> bool:
    """Any number of replicas is accepted."""
    return True


@dataclass(frozen=True)
class Replicas:
    """Assign ranks to processes, and keep the other processes in reserve. *Local*: arithmetic.

    A replica is the ranks that have one coordinate of the dim ``replicas``. A block is a group
    over the dims ``together``, and stays inside one host. If the hosts cannot hold as many
    replicas that way as without it, dims are left out, the last one first.

    Parameters
    ----------
    topology : Topology
        The full layout, and the hosts of all processes, spares included. The layout begins at 0.
    replicas : str
        The dim that becomes shorter.
    together : iterable of str
        Dims whose groups stay inside a host. Those that the layout has not are ignored.
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
    RankLayout(tp=2-pp=2-dp=1, ranks 0..3)
    """

    topology: Topology
    replicas: str
    together: tuple[str, ...]
    accepts: Callable[[int], bool]
    layout: RankLayout  # with as many replicas as there are
    active: tuple[int, ...]  # the process of each rank
    reserves: tuple[int, ...]  # the processes that are left over, ascending

    @classmethod
    def first(
        cls,
        topology: Topology,
        replicas: str = "dp",
        together: Iterable[str] = ("tp", "ep"),
        accepts: Callable[[int], bool] = any_number,
    ) -> Replicas:
        """The replicas before any loss. NoReplicaError, LayoutError as the class says."""
        full = topology.layout
        if full.offset:
            raise LayoutError(f"{full} must begin at rank 0 to be placed on processes.")
        full.axes(replicas)
        dims = [dim for dim in together if dim in full.dims]
        if replicas in dims:
            raise LayoutError(f"{replicas!r} cannot be both the replicas and inside each of them.")
        everyone = range(len(topology.numbers))
        nobody = cls(topology, replicas, (), accepts, full, (-1,) * full.size, tuple(everyone))
        most = nobody._most(everyone)
        while dims and nobody._but(together=tuple(dims))._most(everyone) < most:
            dims.pop()
        return nobody._but(together=tuple(dims)).without(())

    def without(self, lost: Collection[int]) -> Replicas:
        """The replicas after ``lost`` processes have ended: the largest number of them.

        Surviving processes keep their ranks where that is possible, and spares of the
        same host are taken first. NoReplicaError if not one whole replica is left.
        """
        alive = sorted({*self.active, *self.reserves} - {-1, *lost})
        count = self._most(alive)
        if not count:
            raise NoReplicaError(self._refusal(alive, lost))
        layout = self._layout(count)
        kept = self._kept(alive, count)
        # The place of each process in the new layout, as far as it may stay.
        members = layout.groups(layout.orthogonal(self.replicas))
        wanted = dict(zip(kept, members.ravel().tolist(), strict=True))
        blocks = [
            [(wanted[old], self.active[old]) for old in block]
            for block in self.layout.groups(self.together).tolist()
            if block[0] in wanted
        ]
        active = self._fill(blocks, alive, layout)
        idle = tuple(sorted({*alive}.difference(active)))
        return self._but(layout=layout, active=active, reserves=idle)

    def _but(self, **changes: object) -> Replicas:
        return Replicas(**{**vars(self), **changes})

    def _layout(self, count: int) -> RankLayout:
        full = self.topology.layout
        sizes = [count if d == self.replicas else full.size_of(d) for d in full.dims]
        return RankLayout(full.dims, tuple(sizes))

    def _host(self, process: int) -> int:
        return int(self.topology.numbers[process])

    def _most(self, alive: Iterable[int]) -> int:
        """The largest accepted number of replicas that ``alive`` can hold."""
        full = self.topology.layout
        size = full.dim_size(self.together)
        if self.together:
            held = sum(many // size for many in Counter(map(self._host, alive)).values())
        else:
            held = len(list(alive))
        per_replica = full.size // full.size_of(self.replicas) // size
        most = min(full.size_of(self.replicas), held // per_replica)
        return next((n for n in range(most, 0, -1) if self.accepts(n)), 0)

    def _kept(self, alive: Collection[int], count: int) -> list[int]:
        """The old ranks of the ``count`` replicas with the most members left, in their order."""
        members = self.layout.groups(self.layout.orthogonal(self.replicas)).tolist()
        there = {*alive}
        left = [sum(self.active[rank] in there for rank in ranks) for ranks in members]
        best = sorted(range(len(members)), key=lambda i: (-left[i], i))[:count]
        return [rank for i in sorted(best) for rank in members[i]]

    def _fill(
        self, blocks: list[list[tuple[int, int]]], alive: list[int], layout: RankLayout
    ) -> tuple[int, ...]:
        """The process of each rank: whole blocks stay, broken ones are filled or moved."""
        free: dict[int, list[int]] = {}
        for process in alive:  # without dims that stay together, all hosts are one
            free.setdefault(self._host(process) if self.together else 0, []).append(process)
        there, before = {*alive}, dict(zip(self.active, self.layout.ranks, strict=True))
        size, placed = len(blocks[0]), dict[int, int]()
        capacity = {host: len(processes) // size for host, processes in free.items()}
        stay: list[tuple[int, list[tuple[int, int]]]] = []
        move: list[list[tuple[int, int]]] = []
        # Whole blocks first: a block that is filled may not take the place of one of them.
        for block in sorted(blocks, key=lambda b: sum(p not in there for _, p in b)):
            hosts = Counter(
                self._host(p) if self.together else 0 for _, p in block if p in there
            ).most_common(1)
            if hosts and capacity[hosts[0][0]]:
                capacity[hosts[0][0]] -= 1
                stay.append((hosts[0][0], block))
            else:
                move.append(block)
        for host, block in stay:
            for rank, process in block:
                if process in free[host]:
                    placed[rank] = process
                    free[host].remove(process)
        for block in move:
            host = min(each for each in capacity if capacity[each])
            capacity[host] -= 1
            stay.append((host, block))
        for host, block in stay:
            for rank, _ in block:
                if rank not in placed:
                    placed[rank] = self._next(free[host], before, rank, layout)
                    free[host].remove(placed[rank])
        return tuple(placed[rank] for rank in layout.ranks)

    def _next(self, free: list[int], before: dict[int, int], rank: int, layout: RankLayout) -> int:
        """A process that had the same part of the model, else a spare, else any."""

        def part(of: RankLayout, at: int) -> dict[str, int]:
            return {**of.coordinate(at), self.replicas: 0}

        wanted = part(layout, rank)

        def preference(process: int) -> tuple[int, int]:
            if process not in before:
                return 1, process
            return (0 if part(self.layout, before[process]) == wanted else 2), process

        return min(free, key=preference)

    def _refusal(self, alive: list[int], lost: Collection[int]) -> str:
        full, names = self.topology.layout, self.topology.names
        size = full.size // full.size_of(self.replicas)
        hosts = Counter(map(self._host, alive))
        left = ", ".join(f"{names[host]}: {many}" for host, many in sorted(hosts.items()))
        text = (
            f"not one whole replica is left: processes {span_of(sorted(lost)) or 'none'} are lost, "
            f"{len(alive)} are alive ({left or 'on no host'}), and one replica of {full} needs "
            f"{size}"
        )
        if self.together:
            many = full.dim_size(self.together)
            text += f", {many} of them at a time on one host ({shown('-'.join(self.together))})"
        return f"{text}. Start the job again with more processes, or in a layout that needs fewer."
