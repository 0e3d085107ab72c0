"""HyperCommGrid: a rank layout together with the process groups over its dims."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid import creation
from hypergrid.agreement import agree
from hypergrid.layout import Dims, RankLayout
from hypergrid.policy import Policy
from hypergrid.pool import GroupPool


class HyperCommGrid:
    """N-dimensional communication grid, as megatron-core's ``HyperCommGrid``.

    Parameters
    ----------
    shape : sequence of int
        The size of each dim, at least 1.
    dim_names : sequence of str
        Names of the dims, fastest first, as in the ``order`` of Megatron.
    rank_offset : int
        First rank of the grid, where it does not start at rank 0.
    backend : str, optional
        Backend of its groups; None means that of the default group.

    Raises
    ------
    ValueError
        Names and sizes that do not match, repeated names, sizes below 1, a negative offset.
    RuntimeError
        The grid reaches beyond the world, or nothing tells the size of the world.

    Examples
    --------
    >>> grid = HyperCommGrid([2, 3, 4, 5], ["tp", "cp", "pp", "dp"])   # doctest: +SKIP
    >>> dp = grid.create_pg("dp")                                      # doctest: +SKIP
    >>> grid.get_pg("dp") is dp                                        # doctest: +SKIP
    True
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
    ) -> None:
        self.layout = RankLayout(tuple(dim_names), tuple(shape), rank_offset)
        world = _world_size()
        if self.layout.ranks.stop > world:
            raise RuntimeError(
                f"{self.layout} is oversized: it needs {self.layout.size} ranks from rank "
                f"{rank_offset} on, and the world has {world}. Make the shape or the offset "
                f"smaller, or start more ranks."
            )
        self.backend = backend
        self._pgs: dict[str, ProcessGroup | None] = {}
        self._pool: GroupPool | None = None

    @property
    def shape(self) -> list[int]:
        """The size of each dim, fastest first."""
        return list(self.layout.sizes)

    @property
    def dim_names(self) -> list[str]:
        """The names of the dims, fastest first."""
        return list(self.layout.dims)

    @property
    def size(self) -> int:
        """Number of ranks in the grid."""
        return self.layout.size

    @property
    def rank_offset(self) -> int:
        """First rank of the grid."""
        return self.layout.offset

    def __repr__(self) -> str:
        here = ""
        if dist.is_initialized():
            rank = dist.get_rank()
            inside = rank in self.layout
            here = f", rank {rank} at {self.layout.coordinate(rank)}" if inside else ", not here"
        return f"HyperCommGrid({self.layout!r}{here}, created: {sorted(self._pgs) or 'none'})"

    def create_pg(self, dims: Dims, **options: Any) -> ProcessGroup | None:
        """Create the groups over ``dims``, once, and give that of this rank.

        *Collective* over the grid: all its ranks create the same combinations in the same order.

        Parameters
        ----------
        dims : str or iterable of str
            In any order; it names the same group.
        **options
            ``timeout`` (timedelta), ``pg_options``, ``group_desc``, as for
            ``torch.distributed.new_subgroups_by_enumeration``.

        Returns
        -------
        ProcessGroup or None
            None on a rank outside the grid.

        Raises
        ------
        KeyError
            The combination exists. Options cannot be compared, so it is not handed out again.
        ValueError
            A dim that the grid does not have.
        """
        ordered, key = self._order_dims(dims)
        if key in self._pgs:
            raise KeyError(
                f"the groups over {key!r} have already been created, and whether the options are "
                f"the same cannot be told. Call get_pg({key!r}) to have them."
            )
        options["backend"] = self.backend
        group: ProcessGroup | None
        if not dist.is_initialized():
            group, _ = dist.new_subgroups_by_enumeration(self._gen_rank_enum(ordered), **options)
        else:
            group = self._create(ordered, key, options)
        self._pgs[key] = group
        return group

    def _create(self, ordered: list[str], key: str, options: dict[str, Any]) -> ProcessGroup | None:
        if not self.is_current_rank_in_grid():
            self._create_from_outside(key, self._gen_rank_enum(ordered), options)
            return None
        if self._pool is None:
            proposal = {"grid": repr(self.layout), "backend": self.backend}
            policy = Policy.resolve(share="none")  # each combination has options of its own
            agreement = agree(self.layout.ranks, proposal, policy)
            self._pool = GroupPool(agreement, policy, f"HyperCommGrid over {self.layout!r}")
        mine = {key: self.layout.group(dist.get_rank(), ordered)}
        (group,) = self._pool.make(
            key, mine, lambda: self._gen_rank_enum(ordered), dims=tuple(ordered), **options
        )
        return group

    def _create_from_outside(
        self, key: str, groups: list[list[int]], options: dict[str, Any]
    ) -> None:
        # Where members alone cannot create, every rank of the world takes part, these too.
        can = creation.abilities()
        bound = can.bound is not None and self.backend in (None, dist.get_backend())
        if can.obstacle is not None or bound:
            way = "split" if can.obstacle is None and can.can_split else "everyone"
            creation.by_world(way, key, groups, "outside", **options)

    def get_pg(self, dims: Dims) -> ProcessGroup | None:
        """The group of this rank over ``dims``. *Local*.

        Raises
        ------
        KeyError
            ``create_pg`` was not called for this combination.
        """
        _, key = self._order_dims(dims)
        if key not in self._pgs:
            raise KeyError(
                f"the groups over {key!r} have not been created: call create_pg({key!r}) on every "
                f"rank of the grid first. Created so far: {sorted(self._pgs) or 'none'}."
            )
        return self._pgs[key]

    def get_rank_enum(self, dims: Dims) -> list[list[int]]:
        """All groups over ``dims`` as lists of ranks, in the order of creation. *Local*."""
        return self._gen_rank_enum(self._order_dims(dims)[0])

    def is_current_rank_in_grid(self) -> bool:
        """Whether this rank is one of the grid's."""
        return dist.get_rank() in self.layout

    def destroy(self) -> None:
        """Give back every group of this grid; they can then be created anew. *Local*."""
        if self._pool is not None:
            self._pool.destroy()
        self._pool = None
        self._pgs.clear()

    def _gen_rank_enum(self, dims: Iterable[str]) -> list[list[int]]:
        # As upstream: members run through ``dims`` with the last one fastest.
        groups: list[list[int]] = self.layout.groups(list(dims)[::-1], as_given=True).tolist()
        return groups

    def _order_dims(self, dims: Dims) -> tuple[list[str], str]:
        # As upstream: reversed order of dim_names; the key is the dims joined by "-".
        ordered = [self.layout.dims[i] for i in sorted(self.layout.axes(dims), reverse=True)]
        return ordered, "-".join(ordered)


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    raise RuntimeError(
        "the size of the world is not known: initialise torch.distributed, or set WORLD_SIZE to "
        "lay out a grid without it."
    )
