"""The ranks of Megatron's groups as lists, in the order of upstream's loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import log2

from compat.megatron import encoder
from compat.megatron.arguments import Arguments
from compat.megatron.table import PlannedGroup, Row
from hypergrid.layout import RankLayout
from hypergrid.plan import GroupRow


def origin(row: Row) -> tuple[str, str]:
    """The grid, and the dims whose groups upstream loops over to make those of ``row``."""
    return row.grid.partition("_")[0], row.loop or row.dims


def loops(request: Arguments, row: Row) -> list[list[int]]:
    """The rank lists over which upstream loops to make the groups of ``row``."""
    grid, token = origin(row)
    lists = request.rank_lists(grid, token)
    if request.encoder is not None:
        lists = encoder.beside(row, request.rank_lists("encoder", token), lists, request.instances)
    if not row.join:
        return lists
    if max(request.gtp_remat_size, request.expert_gtp_remat_size) > 1:
        return [sorted(chain.from_iterable(lists))]
    many = instance_size(request)
    starts = range(0, len(lists) - many + 1, many)
    return [list(chain.from_iterable(lists[at : at + many])) for at in starts]


def cut(
    request: Arguments, p: PlannedGroup, number: int, ranks: list[int]
) -> Sequence[Sequence[int]]:
    """The groups of a row that are cut from ``ranks``, list ``number`` of its loop."""
    row = p.row
    if p.chosen is not None:
        return [p.chosen[number]]
    if row.chunk == "between instances":
        places = len(ranks) // request.instances
        return [ranks[at::places] for at in range(places)]
    if row.levels:
        return of_level(ranks, level_sizes(request, row), level(p))
    size = p.key if row.holds == "sizes" else None
    if row.chunk == "instance":
        size = len(ranks) // request.instances
    rule = GroupRow("", "", (), chunk=size, pick=row.pick)
    return [list(members) for members in rule.cuts([ranks])]


def of_level(ranks: list[int], sizes: list[int], level: int) -> list[list[int]]:
    """The groups of one level of ``ranks`` cut into sizes, innermost first."""
    layout = RankLayout(tuple(map(str, range(len(sizes)))), tuple(sizes))
    return [[ranks[place] for place in places] for places in layout.groups(str(level)).tolist()]


def level_sizes(request: Arguments, row: Row) -> list[int]:
    """The sizes of the levels that the groups over a dim are cut into, innermost first."""
    if row.holds == "levels":
        return request.hierarchical_context_parallel_sizes or []
    return [instance_size(request), request.instances]


def level(p: PlannedGroup) -> int:
    """The level that the group belongs to, innermost first."""
    return p.row.level if p.key is None else p.key


def instance_size(request: Arguments) -> int:
    """Ranks over the experts' dp in one instance of the distributed optimizer."""
    return request.expert.dim_size("dp") // request.instances


def run_sizes(members: int, least: int = 2) -> list[int]:
    """The powers of two from ``least`` to at most half of ``members`` ranks."""
    return [2**i for i in range(int(log2(members))) if 2**i >= least]


def listed(request: Arguments, planned: list[PlannedGroup]) -> list[PlannedGroup]:
    """The rows with their groups listed, where no one layout describes them.

    Over encoder and decoder, between 0.12's optimizer instances, and where outside code replaced
    what decides the ranks.
    """
    every, found = request.encoder is not None or request.decides_ranks, []
    for p in planned:
        if p.group.explicit is None and (every or p.row.chunk == "between instances"):
            lists = enumerate(loops(request, p.row))
            groups = [tuple(each) for i, ranks in lists for each in cut(request, p, i, ranks)]
            row = replace(p.group, explicit=tuple(groups), chunk=None, pick="all")
            p = replace(p, group=row)
        found.append(p)
    return found
