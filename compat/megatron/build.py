"""Creates the groups of a request on this rank, and the values of upstream's private globals."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.megatron import calls, communicators, replaced
from compat.megatron import helpers as group_helpers
from compat.megatron.planning import Request, aliases, rows_of
from compat.megatron.releases import RELEASE_HAS
from compat.megatron.table import ROWS, PlannedGroup, Row, slots
from hypergrid.groups.grid import BASE, HyperCommGrid
from hypergrid.groups.pool import GroupPool
from hypergrid.layout import RankLayout
from hypergrid.plan import GroupPlan, GroupRow
from hypergrid.policy import Agreement

DECODER = "decoder"  # the layout that is the grid's own; the others are its views
_COLLNET = "NCCL_COLLNET_ENABLE"


def _empty() -> dict[str, Any]:
    levels = [row.slot for row in ROWS if row.holds == "levels" and RELEASE_HAS["plain_levels"]]
    return {row.slot: {} for row in ROWS if row.holds == "sizes"} | {slot: [] for slot in levels}


@dataclass
class Built:
    """The result: values of upstream's private globals, and the grid that owns the groups.

    ``numbers`` has, for a global that holds one group, that group, this rank's place in it and
    its size.
    """

    slots: dict[str, Any] = field(default_factory=_empty)
    numbers: dict[str, tuple[ProcessGroup, int, int]] = field(default_factory=dict)
    groups: list[ProcessGroup | None] = field(default_factory=lambda: [None])  # None: the default
    grid: HyperCommGrid | None = None


def build(request: Request) -> Built:
    """Create every group of ``request`` that this rank belongs to.

    *Collective* over the request's participants; a rank that is none of them gets no groups.
    After a failure no group is left.
    """
    rank, built = dist.get_rank(), Built()
    # Plan and options first: their errors must be raised before a group exists.
    with request.telling_others():
        plan, pretended_size = request.plan, request.pretended_world
        alone = pretended_size is None and not replaced.creates(request.helpers)
        some = alone and (request.nccl_configs or "get_nccl_options" in request.helpers)
        options = [_options(p, request, rank) if some else None for p in request.planned]
    if RELEASE_HAS["sharp_switched"]:
        os.environ.pop(_COLLNET, None)
    if request.pipeline_model_parallel_comm_backend == "ucc":
        communicators.prepare_ucc()
    grid = built.grid = _grid_over(request)
    if pretended_size is not None:
        _warn_of_a_pretended_world(pretended_size)
    if rank not in request.participants:
        return built
    policy, owner = request.policy, f"ParallelState over {request.decoder!r}"
    if request.helpers:
        owner += f", with {replaced.in_words(request.helpers)} replaced"
    pool = grid.begin(policy, owner)
    try:
        agreed = request.participants, request.proposal(), request.timeout, request.init_count
        agreement: AbstractContextManager[None] = pool.agreed(*agreed, one_device=alone)
        if pretended_size is not None:
            agreement = nullcontext()  # the ranks of a pretended world are not there to agree
        with agreement:
            _check_window(request, pool.agreement)
            if alone:
                for p, pg_options in zip(request.planned, options, strict=True):
                    with _sharp([p], request, built):
                        _make(built, pool.make, plan, p, pg_options)
            else:
                _call_helpers(built, pool, request)
            _assign_aliases(built, request)
        _barrier_on_each(built, request)  # when all ranks have all groups
    except BaseException:
        grid.destroy(abort=True)
        for groups in (built.slots, built.numbers, built.groups):
            groups.clear()  # the error's traceback holds ``built``
        raise
    return built


def _warn_of_a_pretended_world(size: int) -> None:
    warnings.warn(
        f"outside code has replaced functions of torch.distributed and says that there are "
        f"{size} ranks, which are not there: groups are created as megatron-core does, without an "
        f"agreement of the ranks.",
        stacklevel=5,
    )


def _check_window(request: Request, agreement: Agreement) -> None:
    """Refuse a window that is a part of the world, where members alone cannot create."""
    world, window = dist.get_world_size(), len(request.participants)
    if agreement.way != "members" and window < world:
        raise RuntimeError(
            f"a window of {window} of {world} ranks is only possible where the members of a group "
            f"create it alone; here every rank must take part: "
            f"{agreement.why or 'creation was set so'}. Change that, or use the whole world."
        )


def place(request: Request) -> Built:
    """As ``build``, through helpers that only look up groups of others. *Local*.

    The caller has replaced ``torch.distributed.new_group``, and the helpers that outside code has
    replaced.
    """
    built = Built()
    through = calls.Calls(request, request.helpers, dist.get_rank(), "shadow", "")
    with group_helpers.collecting():  # or the current state would note groups of others
        for p, ranks, group in through.groups():
            _place(built, p, group, ranks if p.chosen else list(ranks))
    _assign_aliases(built, request)
    return built


def _grid_over(request: Request) -> HyperCommGrid:
    # The other layouts are views; same pipelines share their groups.
    step = request.decoder.stride("pp")
    views: dict[str, tuple[RankLayout, tuple[str, ...]]] = {
        name: (layout, ("pp",) if layout.stride("pp") == step else ())
        for name, layout in request.layouts.items()
        if name != DECODER
    }
    return HyperCommGrid.over(request.decoder, views)


def _assign_aliases(built: Built, request: Request) -> None:
    for alias in aliases(request):
        for slot in slots(alias):
            built.slots[slot] = built.slots.get(slot.replace(alias.slot, alias.same_as))
        if alias.same_as in built.numbers:
            built.numbers[alias.slot] = built.numbers[alias.same_as]


def _make(
    built: Built,
    make: Callable[..., list[Any]],
    plan: GroupPlan,
    p: PlannedGroup,
    pg_options: Any,
) -> None:
    rank, row = dist.get_rank(), p.group
    mine = plan.mine(row, rank)
    made = make(
        row.label,
        mine,
        lambda: plan.all(row),
        dims=row.dims,
        kind=row.kind,
        backend=row.backend,
        timeout=None if row.timeout is None else timedelta(seconds=row.timeout),
        pg_options=pg_options,
    )
    for group, (name, ranks) in zip(made, mine.items(), strict=True):
        chosen = p.chosen and p.chosen[int(name.rpartition("#")[2])]
        _place(built, p, group, chosen or list(ranks))
        if p.key is None and p.slot in built.slots and len(set(ranks)) == len(ranks):
            place = sorted(ranks).index(rank), len(ranks)
            built.numbers[p.slot] = (built.slots[p.slot], *place)
        if row.chunk is None and row.pick == "all" and row.explicit is None:
            _hold(built, row, group)


def _call_helpers(built: Built, pool: GroupPool, request: Request) -> None:
    around = functools.partial(_sharp, request=request, built=built)
    what, epoch = "helpers", pool.agreement.epoch
    with pool.connecting(), group_helpers.collecting() as made:
        through = calls.Calls(request, request.helpers, dist.get_rank(), what, epoch, around)
        for p, ranks, group in through.groups():
            pool.adopt(p.group.label, ranks, group, p.group.dims)
            _place(built, p, group, ranks if p.chosen else list(ranks))
        for group in made:  # also those that upstream makes and keeps in no global
            # A replaced new_group may return an object of its own, which torch does not know.
            is_torchs = isinstance(group, ProcessGroup)
            if is_torchs and all(group is not pooled.group for pooled in pool.groups):
                pool.adopt(group.group_desc, dist.get_process_group_ranks(group), group)
    built.groups = [None, *made] if made else []  # upstream's own create_group keeps the list


def build_extra(
    row: Row,
    request: Request,
    pool: GroupPool,
    note: Callable[[ProcessGroup], None],
    timeout: timedelta | None,
    configs: communicators.Configs,
) -> ProcessGroup | None:
    """One more group for ``row``, in the order and window of ``request``. *Collective* over it.

    Calls ``note`` with the group, unless replaced helpers create it: ``create_group`` does then.
    """
    rank, helpers = dist.get_rank(), replaced.replaced_functions()
    options = helpers.get("get_nccl_options", communicators.get_nccl_options)
    known = [pooled.label.rpartition("#")[0] for pooled in pool.groups]
    name, dims = f"{row.label}#{known.count(row.label) + 1}", tuple(row.dims.split("-"))
    lists, made = functools.partial(request.rank_lists, row.grid, row.dims), None

    def arguments() -> dict[str, Any]:
        pg_options = options(row.options, configs)
        return {"timeout": timeout, "pg_options": pg_options, "group_desc": row.label}

    if not replaced.creates(helpers):
        mine = {name: tuple(request.layouts[row.grid].group(rank, row.dims))}
        (made,) = pool.make(name, mine, lists, dims=dims, **arguments())
        note(made)
        return made
    through = calls.Calls(request, helpers, rank, name, pool.agreement.epoch)
    for ranks in lists():
        group = through.create(name, ranks, arguments)
        if rank in ranks:
            pool.adopt(name, ranks, group, dims)
            made = group
    return made


def _hold(built: Built, row: GroupRow, group: ProcessGroup) -> None:
    """Let the grid answer with ``group``, also for its dims without a gtp_remat of size 1."""
    assert built.grid is not None
    view = None if row.layout == DECODER else row.layout
    layout = built.grid.views[view or BASE]
    asked = [dim for dim in row.dims if dim != "gtp_remat" or layout.dim_size(dim) > 1]
    for dims in (row.dims, asked or row.dims):
        built.grid.hold(dims, group, view=view)


def _place(built: Built, p: PlannedGroup, group: Any, known: Any) -> None:
    built.groups.append(group)
    if p.row.holds == "sizes":
        built.slots[p.slot][p.key] = group
    elif p.row.holds == "levels":
        built.slots.setdefault(p.slot, []).append(group)
    else:
        before, ranks = built.slots.get(p.slot), p.row.ranks
        if before is not None and p.row.holds == "several":
            several, earlier = isinstance(before, list), built.slots[ranks]
            group = [*before, group] if several else [before, group]
            known = [*earlier, known] if several else [earlier, known]
        built.slots[p.slot] = group
        if ranks and not p.is_twin:
            built.slots[ranks] = known


def _options(p: PlannedGroup, request: Request, rank: int) -> Any:
    asked = "get_nccl_options" not in request.helpers or request.plan.mine(p.group, rank)
    return calls.options(request, p.row.options) if asked and calls.takes_options(p) else None


@contextmanager
def _sharp(rows: Sequence[PlannedGroup], request: Request, built: Built) -> Iterator[None]:
    """Switch SHARP on while the rows that it serves are created, and off after the last of them.

    With older releases the user switches it on, and only the 0 is written here.

    NCCL connects on first use, and uses SHARP if it is on at that time: so there is a barrier on
    the group before it is switched off.
    """
    served = request.sharp_rows
    if not any(p in served for p in rows):
        yield
        return
    if RELEASE_HAS["sharp_switched"]:
        os.environ[_COLLNET] = "1"
    yield
    if served[-1] in rows:
        sharp = served[-1].row.sharp
        (slot,) = (row.slot for row in ROWS if row.sharp == sharp and row.sharp_barrier)
        if slot in built.slots:  # not on a rank outside the window that a function chose
            _barrier(built.slots[slot])
        os.environ[_COLLNET] = "0"
        if RELEASE_HAS["sharp_switched"]:
            del os.environ[_COLLNET]


def _barrier_on_each(built: Built, request: Request) -> None:
    """Connect the groups of the rows that want it, from the smallest to all of dp x cp."""
    for row in rows_of(request):
        everyone = built.slots.get(row.barrier_with)
        if everyone is not None:
            for group in (*built.slots[row.slot].values(), everyone):
                _barrier(group)


def _barrier(group: ProcessGroup) -> None:
    dist.barrier(group=group, device_ids=[torch.cuda.current_device()])
    torch.cuda.synchronize()


@contextmanager
def environment_restored_on_failure() -> Iterator[None]:
    """Restore, after an error, the variables that ``build`` sets."""
    before = {name: os.environ.get(name) for name in (_COLLNET, *communicators.UCC_ENVIRONMENT)}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        raise
