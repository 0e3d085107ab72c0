"""Creates the groups of a request on this rank, and says which private global holds which."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.megatron import calls, communicators, replaced
from compat.megatron import helpers as group_helpers
from compat.megatron.planning import Request, aliases
from compat.megatron.releases import HAS
from compat.megatron.table import ROWS, Planned
from hypergrid.groups import creation
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.groups.pool import GroupPool
from hypergrid.groups.prepare import Agreement
from hypergrid.layout import RankLayout
from hypergrid.plan import GroupPlan, GroupRow
from hypergrid.views import BASE

DECODER = "decoder"  # the layout that is the grid's own; the others are its views
_COLLNET = "NCCL_COLLNET_ENABLE"


@dataclass
class Built:
    """The outcome: values of upstream's private globals, and the grid that owns the groups.

    ``numbers`` has, for a global that holds one group, that group, this rank's place in it and
    its size.
    """

    slots: dict[str, Any] = field(default_factory=lambda: _before_there_are_groups())
    numbers: dict[str, tuple[ProcessGroup, int, int]] = field(default_factory=dict)
    groups: list[ProcessGroup | None] = field(default_factory=lambda: [None])  # None: the default
    grid: HyperCommGrid | None = None


def _before_there_are_groups() -> dict[str, Any]:
    slots: dict[str, Any] = {"_HYBRID_DP_CP_GROUPS": {}}
    if HAS["plain_levels"]:
        slots["_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS"] = []
    return slots


def build(request: Request) -> Built:
    """Create every group of ``request`` that this rank belongs to.

    *Collective* over the request's participants; a rank that is none of them gets no groups.
    After a failure no group is left.
    """
    rank, built = dist.get_rank(), Built()
    # Plan and options first: what they refuse must be refused before a group exists.
    with request.telling_others():
        plan, alone = request.plan, not replaced.creates(request.helpers)
        options = [alone and _options(p, request, rank) for p in request.planned]
    if HAS["sharp_switched"]:
        os.environ.pop(_COLLNET, None)
    if request.pipeline_model_parallel_comm_backend == "ucc":
        communicators.prepare_ucc()
    grid = built.grid = HyperCommGrid.over(request.decoder, _views(request))
    if rank not in request.participants:
        return built
    policy, owner = request.policy, f"ParallelState over {request.decoder!r}"
    if request.helpers:
        owner += f", with {replaced.in_words(request.helpers)} replaced"
    pool = grid.begin(Agreement(""), policy, owner)
    try:
        with pool.agreed(request.participants, request.proposal(), request.timeout, request.life):
            _check_window(request, pool.agreement)
            if alone:
                for p, pg_options in zip(request.planned, options, strict=True):
                    with _sharp([p], request, built):
                        _make(built, pool, plan, p, pg_options)
            else:
                _call_helpers(built, pool, request)
            for row in aliases(request):
                for suffix in ("", "_GLOO") if row.gloo else ("",):
                    built.slots[row.slot + suffix] = built.slots.get(row.same_as + suffix)
                if row.same_as in built.numbers:
                    built.numbers[row.slot] = built.numbers[row.same_as]
    except BaseException:
        grid.destroy(abort=True)
        raise
    return built


def _check_window(request: Request, agreement: Agreement) -> None:
    world, window = dist.get_world_size(), len(request.participants)
    if agreement.way != "members" and window < world:
        raise RuntimeError(
            f"a window of {window} of {world} ranks needs groups that their members create alone, "
            f"and here every rank must take part: {agreement.why or 'creation was set so'}. Change "
            f"that, or lay out the whole world."
        )


def _views(request: Request) -> dict[str, tuple[RankLayout, tuple[str, ...]]]:
    """The other layouts as views of the decoder's grid; with it they share what is the same."""
    views: dict[str, tuple[RankLayout, tuple[str, ...]]] = {}
    for name, layout in request.layouts.items():
        if name != DECODER:
            same = layout.stride("pp") == request.decoder.stride("pp")
            views[name] = (layout, ("pp",) if same else ())
    return views


def _make(built: Built, pool: GroupPool, plan: GroupPlan, p: Planned, pg_options: Any) -> None:
    rank, row = dist.get_rank(), p.group
    mine = plan.mine(row, rank)
    made = pool.make(
        row.label,
        mine,
        lambda: plan.all(row),
        dims=row.dims,
        kind=row.kind,
        backend=row.backend,
        timeout=_seconds(row.timeout),
        pg_options=pg_options,
    )
    for group, (name, ranks) in zip(made, mine.items(), strict=True):
        chosen = p.chosen and p.chosen[int(name.rpartition("#")[2])]
        _place(built, p, group, chosen or list(ranks))
        if p.slot in built.slots and not p.row.fan and len(set(ranks)) == len(ranks):
            place = sorted(ranks).index(rank), len(ranks)
            built.numbers[p.slot] = (built.slots[p.slot], *place)
        if row.chunk is None and row.pick == "all" and row.explicit is None:
            _hold(built, row, group)


def _call_helpers(built: Built, pool: GroupPool, request: Request) -> None:
    epoch, numbers = pool.agreement.epoch, itertools.count()
    rank, alone = dist.get_rank(), replaced.by_members(request.helpers)
    helpers = {**vars(group_helpers), **request.helpers}

    def numbered(label: str, ranks: Sequence[int]) -> AbstractContextManager[None]:
        # Alone, only the members count this call.
        name = label if alone else f"call {next(numbers)} of helpers"
        return creation.named_from(name, ranks if alone else (), epoch)

    def around(rows: Sequence[Planned]) -> AbstractContextManager[None]:
        return _sharp(rows, request, built)

    with pool.connecting(), group_helpers.collecting() as made:
        through = calls.Calls(request, helpers, rank, numbered, around)
        for p, ranks, group in through.groups():
            pool.adopt(p.group.label, ranks, group, p.group.dims)
            _place(built, p, group, ranks if p.chosen else list(ranks))
        for group in made:  # also those that upstream makes and keeps in no global
            if all(group is not pooled.group for pooled in pool.groups):
                pool.adopt(group.group_desc, dist.get_process_group_ranks(group), group)
    built.groups = [None, *made] if made else []  # upstream's own create_group keeps the list


def _hold(built: Built, row: GroupRow, group: ProcessGroup) -> None:
    """Let the grid answer with ``group``; a remat axis that was not asked for need not be named."""
    assert built.grid is not None
    view = None if row.layout == DECODER else row.layout
    layout = built.grid.views[view or BASE]
    asked = [dim for dim in row.dims if dim != "gtp_remat" or layout.dim_size(dim) > 1]
    for dims in (row.dims, asked or row.dims):
        built.grid.hold(dims, group, view=view)


def _place(built: Built, p: Planned, group: Any, known: Any) -> None:
    built.groups.append(group)
    if p.row.fan == "sizes":
        built.slots[p.slot][p.key] = group
    elif p.row.fan == "levels":
        built.slots.setdefault(p.slot, []).append(group)
    else:
        before, ranks = built.slots.get(p.slot), p.row.ranks
        if before is not None and p.row.several:
            several = isinstance(before, list)
            group = [*before, group] if several else [before, group]
            earlier = built.slots[ranks]
            known = [*earlier, known] if several else [earlier, known]
        built.slots[p.slot] = group
        if ranks and p.slot == p.row.slot:
            built.slots[ranks] = known


def _options(p: Planned, request: Request, rank: int) -> Any:
    if "get_nccl_options" not in request.helpers:
        if p.group.options is None:
            return None
        return communicators.get_nccl_options(p.row.options, request.nccl_configs)
    takes = calls.takes_options(p) and request.plan.mine(p.group, rank)
    return calls.options(request, p.row.options) if takes else None


def _seconds(timeout: float | None) -> timedelta | None:
    return None if timeout is None else timedelta(seconds=timeout)


@contextmanager
def _sharp(rows: Sequence[Planned], request: Request, built: Built) -> Iterator[None]:
    """Switch SHARP on around the rows that it serves, and off behind the last of them.

    Releases that leave switching it on to the user only write the 0.

    NCCL connects on first use and takes SHARP for whatever connects while it is on: the group
    that is to have it meets once before it is switched off.
    """
    served = [q for q in request.planned if q.row.sharp == request.sharp_group]
    if request.sharp_group is None or not any(p in served for p in rows):
        yield
        return
    if HAS["sharp_switched"]:
        os.environ[_COLLNET] = "1"
    yield
    if served[-1] in rows:
        sharp = request.sharp_group
        (slot,) = (row.slot for row in ROWS if row.sharp == sharp and row.sharp_barrier)
        if slot in built.slots:  # not on a rank outside the window that a function named
            dist.barrier(group=built.slots[slot], device_ids=[torch.cuda.current_device()])
            torch.cuda.synchronize()
        os.environ[_COLLNET] = "0"
        if HAS["sharp_switched"]:
            del os.environ[_COLLNET]


@contextmanager
def environment_restored_on_failure() -> Iterator[None]:
    """Put back, after an error, the variables that ``build`` sets."""
    before = {name: os.environ.get(name) for name in (_COLLNET, *communicators.UCC_ENVIRONMENT)}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        raise
