"""Creates the groups of a request on this rank, and the values of upstream's private globals."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.megatron import calls, communicators
from compat.megatron import helpers as group_helpers
from compat.megatron.hosts import tell_host
from compat.megatron.request import Request, creates, in_words, replaced_functions
from compat.megatron.rows import PlannedRow, PlannedRows, aliases, rows_of
from compat.megatron.table import ROWS, Row, slots
from hypergrid.groups.grid import BASE, HyperCommGrid
from hypergrid.groups.pool import GroupPool
from hypergrid.policy import Agreement

DECODER = "decoder"  # the layout that is the grid's own; the others are its views
INSTANCES = "instances"  # the view of the decoder's ranks with the optimizer's instances as a dim
_COLLNET = "NCCL_COLLNET_ENABLE"
Values = dict[str, Any]  # by the names of private globals


def build(planned_rows: PlannedRows, values: Values) -> HyperCommGrid:
    """Create every group that this rank belongs to, and put it into ``values``.

    ``values["_global_process_group_list"]`` lists the groups. *Collective* over the request's
    participants; a rank that is none of them gets no groups. After a failure no group is left.

    Of four ranks with a tensor-parallel size of 2, rank 3 creates for the row of
    ``_TENSOR_MODEL_PARALLEL_GROUP`` the group of ranks 2 and 3. Then ``values`` has it under the
    name of this global, ``[2, 3]`` under ``_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS``, and in
    ``values["_numbers"]`` the group's ``(1, 2)``: rank 3 is at place 1 of 2.
    """
    request = planned_rows.request
    pg_options: list[Any] = [None] * len(planned_rows.rows)
    if _takes_options(request):
        with request.telling_others():  # their errors must be raised before a group exists
            pg_options = options_of_rows(planned_rows)
    prepare_environment(request)
    if request.pretended_world is not None:
        _warn_of_pretended_ranks(request.pretended_world)
    if dist.get_rank() not in planned_rows.participants:
        return _grid_over(planned_rows, values)
    owner = f"ParallelState over {request.decoder!r}"
    if request.helpers:
        owner += f", with {in_words(request.helpers)} replaced"
    pool = GroupPool(request.policy, owner)
    # The ranks of a pretended world are not there to agree.
    commit: AbstractContextManager[None] = nullcontext()
    if request.pretended_world is None:
        commit = pool.two_phase_commit(
            planned_rows.participants,
            planned_rows.proposal(),
            request.timeout,
            request.init_count,
            one_device=not request.calls_helpers,
            call="initialize_model_parallel",
        )
    try:
        with commit:
            _check_window(planned_rows, pool.agreement)
            fill(values, planned_rows, pg_options, pool)
            tell_host(request)  # others read it when all ranks have all groups
        _barrier_on_each(request, values)
        return _grid_over(planned_rows, values, pool)
    except BaseException:
        pool.destroy(abort=True)
        values.clear()  # the error's traceback holds them
        raise


def _takes_options(request: Request) -> bool:
    # Helpers ask for the options themselves.
    has_options = request.nccl_configs or "get_nccl_options" in request.helpers
    return bool(has_options) and not request.calls_helpers


def options_of_rows(planned_rows: PlannedRows) -> list[Any]:
    """The communicator options of each row."""
    if not _takes_options(planned_rows.request):
        return [None] * len(planned_rows.rows)
    return [_options(planned_rows, planned) for planned in planned_rows.rows]


def prepare_environment(request: Request) -> None:
    """Set and remove the variables that upstream does before it creates a group."""
    os.environ.pop(_COLLNET, None)
    if request.pipeline_model_parallel_comm_backend == "ucc":
        communicators.prepare_ucc()


def fill(
    values: Values,
    planned_rows: PlannedRows,
    pg_options: Sequence[Any],
    pool: GroupPool,
) -> None:
    """Create this rank's groups in ``pool``, and put them into ``values``, as ``build`` says.

    A shadow run calls it too, with a pool that looks up the groups of stock. *Collective* over the
    request's participants.
    """
    values["_global_process_group_list"] = [None]  # the default group
    if not planned_rows.request.calls_helpers:
        for planned, options in zip(planned_rows.rows, pg_options, strict=True):
            with _sharp([planned], planned_rows, values):
                _create(pool, planned_rows, planned, options, values)
    else:  # outside code has replaced create_group or its like
        _call_helpers(planned_rows, values, pool)
    _assign_aliases(planned_rows.request, values)


def _check_window(planned_rows: PlannedRows, agreement: Agreement) -> None:
    """Refuse a window that is a part of the world, where members alone cannot create."""
    world = dist.get_world_size()
    creators = len(planned_rows.participants)
    if creators < world and agreement.way != "members":
        raise RuntimeError(
            f"a window of {creators} of {world} ranks is only possible where the members of a "
            f"group create it alone; here every rank must take part: "
            f"{agreement.why or 'creation was set so'}. Change that, or use the whole world."
        )


def _create(
    pool: GroupPool,
    planned_rows: PlannedRows,
    planned: PlannedRow,
    pg_options: Any,
    values: Values,
) -> None:
    """Create this rank's groups of one row: one, none, or several where their ranks are listed."""
    rank = dist.get_rank()
    plan_row = planned.plan_row
    plan = planned_rows.plan
    # Such as {"TENSOR_MODEL_PARALLEL_GROUP": (2, 3)} on rank 3.
    ranks_by_name = plan.mine(plan_row, rank)
    groups = pool.make(
        plan_row.label,
        ranks_by_name,
        lambda: plan.all(plan_row),  # where members alone cannot create: [(0, 1), (2, 3)]
        dims=plan_row.dims,
        kind=plan_row.kind,
        backend=plan_row.backend,
        timeout=plan_row.timeout,
        pg_options=pg_options,
    )
    for group, (name, ranks) in zip(groups, ranks_by_name.items(), strict=True):
        values["_global_process_group_list"].append(group)
        known_ranks: Sequence[int] = ranks
        if planned.chosen:
            # The name ends in the number of the pipeline: "EMBEDDING_GROUP#3".
            known_ranks = planned.chosen[int(name.rpartition("#")[2])]
        _place(values, planned, group, known_ranks)
        # A rank that is in a group twice has no one place.
        if planned.key is None and len(set(ranks)) == len(ranks):
            values["_numbers"][group] = (sorted(ranks).index(rank), len(ranks))


def _warn_of_pretended_ranks(count: int) -> None:
    warnings.warn(
        f"outside code has replaced functions of torch.distributed and says that there are "
        f"{count} ranks, which are not there: groups are created as megatron-core does, without an "
        f"agreement of the ranks.",
        stacklevel=6,
    )


def _grid_over(
    planned_rows: PlannedRows, values: Values, pool: GroupPool | None = None
) -> HyperCommGrid:
    """The grid of the window, which answers with the groups that were created over its dims."""
    request = planned_rows.request
    # The other layouts are views; same pipelines share their groups.
    stride = request.decoder.stride("pp")
    grid = HyperCommGrid.over(request.decoder)
    for name, layout in request.layouts.items():
        if name != DECODER:
            shared_dims = ["pp"] if layout.stride("pp") == stride else []
            grid.register_view(name, layout.sizes, layout.dims, shared_dims)
    if pool is not None:
        grid.keep(pool)
        if not request.calls_helpers:
            _hold(grid, planned_rows, pool)
        _hold_instances(planned_rows, grid, values)
    return grid


def _assign_aliases(request: Request, values: Values) -> None:
    for alias in aliases(request):
        for slot in slots(alias):
            values[slot] = values.get(slot.replace(alias.slot, alias.same_as))


def _call_helpers(planned_rows: PlannedRows, values: Values, pool: GroupPool) -> None:
    around = functools.partial(_sharp, planned_rows=planned_rows, values=values)
    helpers = planned_rows.request.helpers
    epoch = pool.agreement.epoch
    with pool.connecting(), group_helpers.collecting() as collected:
        through = calls.Calls(planned_rows, helpers, dist.get_rank(), "helpers", epoch, around)
        for planned, ranks, group in through.groups():
            pool.adopt(planned.plan_row.label, ranks, group, planned.plan_row.dims)
            _place(values, planned, group, ranks)
        # Upstream creates groups too that it keeps in no global.
        for group in collected:
            # A replaced new_group may return an object of its own, which torch does not know.
            is_torchs = isinstance(group, ProcessGroup)
            if is_torchs and all(group is not pooled.group for pooled in pool.groups):
                pool.adopt(group.group_desc, dist.get_process_group_ranks(group), group)
    # Upstream's own create_group keeps the list: without it there is none.
    values["_global_process_group_list"] = collected and [None, *collected]


def build_extra(
    row: Row,
    planned_rows: PlannedRows,
    pool: GroupPool,
    note: Callable[[ProcessGroup], None],
    timeout: timedelta | None,
    configs: communicators.Configs,
) -> ProcessGroup | None:
    """One more group for ``row``, in the order and window of a request. *Collective* over it.

    Calls ``note`` with the group, unless replaced helpers create it: ``create_group`` does then.
    """
    request = planned_rows.request
    rank = dist.get_rank()
    helpers = replaced_functions()
    options_for = helpers.get("get_nccl_options", communicators.get_nccl_options)
    labels = [pooled.label.rpartition("#")[0] for pooled in pool.groups]
    name = f"{row.label}#{labels.count(row.label) + 1}"
    dims = tuple(row.dims.split("-"))
    lists = functools.partial(request.rank_lists, row.grid, row.dims)

    def arguments() -> dict[str, Any]:
        pg_options = options_for(row.options, configs)
        return {"timeout": timeout, "pg_options": pg_options, "group_desc": row.label}

    if not creates(helpers):
        ranks_by_name = {name: tuple(request.layouts[row.grid].group(rank, row.dims))}
        (created,) = pool.make(name, ranks_by_name, lists, dims=dims, **arguments())
        note(created)
        return created
    through = calls.Calls(planned_rows, helpers, rank, name, pool.agreement.epoch)
    own_group = None
    for ranks in lists():
        group = through.create(name, ranks, arguments)
        if rank in ranks:
            pool.adopt(name, ranks, group, dims)
            own_group = group
    return own_group


def _hold(grid: HyperCommGrid, planned_rows: PlannedRows, pool: GroupPool) -> None:
    """Let the grid answer with the groups, also for their dims without a gtp_remat of size 1."""
    group_of = {pooled.label: pooled.group for pooled in pool.groups}
    for planned in planned_rows.rows:
        row = planned.plan_row
        is_over_dims = row.chunk is None and row.pick == "all" and row.explicit is None
        if row.label not in group_of or not is_over_dims:
            continue
        group = group_of[row.label]
        view = BASE if row.layout == DECODER else row.layout
        grid.hold(row.dims, group, view=view)
        dims = list(row.dims)
        if "gtp_remat" in dims and grid.views[view].dim_size("gtp_remat") == 1:
            dims.remove("gtp_remat")
        if dims:
            grid.hold(dims, group, view=view)


def _hold_instances(planned_rows: PlannedRows, grid: HyperCommGrid, values: Values) -> None:
    """Add a view of the dense ranks with the optimizer's instances: dp is dp_intra x dp_inter.

    None is added where an instance is no group over dims, as one that is a part of cp.
    """
    layout = planned_rows.request.decoder
    count = planned_rows.request.num_distributed_optimizer_instances
    cp_is_within = layout.dim_size("cp") == 1 or layout.stride("cp") < layout.stride("dp")
    # The groups of a pretended world are nobody's.
    is_pretended = planned_rows.request.pretended_world is not None
    if is_pretended or count == 1 or layout.dim_size("dp") % count or not cp_is_within:
        return
    parts = {"dp_intra": layout.dim_size("dp") // count, "dp_inter": count}
    instances = layout.split("dp", parts)
    shared_dims = [dim for dim in instances.dims if dim not in parts]
    grid.register_view(INSTANCES, instances.sizes, instances.dims, shared_dims)
    for planned in planned_rows.rows:
        dims = planned.table_row.in_instances
        if not dims or planned.is_twin:
            continue
        group = values.get(planned.slot)
        if not isinstance(group, ProcessGroup):  # of outside code's own making
            continue
        # The experts' groups between instances may have other ranks than dense ones would.
        if dist.get_process_group_ranks(group) == instances.group(dist.get_rank(), dims):
            grid.hold(dims, group, view=INSTANCES)


def _place(values: Values, planned: PlannedRow, group: Any, ranks: Sequence[int]) -> None:
    """Put a group, and its ranks, where upstream's private globals have them."""
    row = planned.table_row
    slot = planned.slot
    # Upstream keeps what the caller's function returned, or else a list.
    known: Any = ranks if planned.chosen else list(ranks)
    if row.holds == "sizes":
        values[slot][planned.key] = group
    elif row.holds == "levels":
        values.setdefault(slot, []).append(group)
    else:
        earlier_group = values.get(slot)
        if earlier_group is not None and row.holds == "several":
            earlier_ranks = values[row.ranks]
            # The second of several: from now on there are lists.
            if not isinstance(earlier_group, list):
                earlier_group = [earlier_group]
                earlier_ranks = [earlier_ranks]
            group = [*earlier_group, group]
            known = [*earlier_ranks, known]
        values[slot] = group
        if row.ranks and not planned.is_twin:
            values[row.ranks] = known


def _options(planned_rows: PlannedRows, planned: PlannedRow) -> Any:
    """The communicator options of a row's groups; None without any."""
    request = planned_rows.request
    is_replaced = "get_nccl_options" in request.helpers
    # What is in place of ours is called for this rank's own groups; ours refuses on every rank.
    if is_replaced and not planned_rows.plan.mine(planned.plan_row, dist.get_rank()):
        return None
    if not calls.takes_options(planned):
        return None
    return calls.options(request, planned.table_row.options)


@contextmanager
def _sharp(rows: Sequence[PlannedRow], planned_rows: PlannedRows, values: Values) -> Iterator[None]:
    """Switch SHARP on while the rows that it serves are created, and off after the last of them.

    NCCL connects on first use, and uses SHARP if it is on at that time: so there is a barrier on
    the group before it is switched off.
    """
    sharp = planned_rows.request.sharp_group
    if all(planned.table_row.sharp != sharp for planned in rows):
        yield
        return
    os.environ[_COLLNET] = "1"
    yield
    served = [planned for planned in planned_rows.rows if planned.table_row.sharp == sharp]
    if served[-1] in rows:
        (slot,) = (row.slot for row in ROWS if row.sharp == sharp and row.sharp_barrier)
        if slot in values:  # not on a rank outside the window that a function chose
            _barrier(values[slot])
        del os.environ[_COLLNET]


def _barrier_on_each(request: Request, values: Values) -> None:
    """Connect the groups of the rows that want it, from the smallest to all of dp x cp."""
    for row in rows_of(request):
        everyone = values.get(row.barrier_with)
        if everyone is not None:
            for group in (*values[row.slot].values(), everyone):
                _barrier(group)


def _barrier(group: ProcessGroup) -> None:
    dist.barrier(group=group, device_ids=[torch.cuda.current_device()])
    torch.cuda.synchronize()


@contextmanager
def environment_restored_on_failure() -> Iterator[None]:
    """Restore, after an error, the variables that ``build`` sets."""
    names = (_COLLNET, *communicators.UCC_ENVIRONMENT)
    before = {name: os.environ[name] for name in names if name in os.environ}
    try:
        yield
    except BaseException:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
        raise
