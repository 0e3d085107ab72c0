"""From the table's rows and one request to the rows of a plan, and their lists of ranks.

The lists are in the order of upstream's loops, which decides in which order groups are created.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from math import log2, prod
from typing import Any

from compat.megatron import communicators
from compat.megatron.releases import RELEASE, RELEASE_HAS, has
from compat.megatron.request import NOT_COMPARED, Request, in_words, refuse_together
from compat.megatron.table import ALIASES, ROWS, TWINS, Alias, Row
from hypergrid.layout import RankLayout
from hypergrid.messages import shown
from hypergrid.plan import GroupPlan, GroupRow


@dataclass(frozen=True, eq=False)
class PlannedRow:
    """A row of the plan and where its group goes: a private global of upstream's.

    Most table rows make one: that of ``_TENSOR_MODEL_PARALLEL_GROUP`` a row of the plan over "tp",
    whose group goes into this slot. The row of data-parallel groups makes two, for NCCL and gloo.
    """

    table_row: Row
    slot: str
    key: int | None  # place in the slot's list or dict, where it holds several groups
    plan_row: GroupRow
    chosen: list[Sequence[int]] | None = None  # of each pipeline, as the caller's function gave it
    is_twin: bool = False  # the gloo twin of its row's group


class PlannedRows:
    """The rows that one request makes groups for, in order; and the plan of these groups.

    Refuses wrong arguments, with upstream's type of error where it has one.
    """

    def __init__(self, request: Request) -> None:
        request.check()
        self.request = request
        self.rows: list[PlannedRow] = []

        def plan(row: Row) -> None:
            for planned in _plan(request, row):
                self.rows.append(_listed(request, planned))

        refuse_together(*(partial(plan, row) for row in rows_of(request)))
        plan_rows = tuple(planned.plan_row for planned in self.rows)
        self.participants = self._participants()
        self.plan = GroupPlan(request.layouts, plan_rows)

    def _participants(self) -> Sequence[int]:
        """The ranks that create groups: the window, and others that a caller's function chose."""
        window = self.request.decoder.ranks
        if self.request.decides_ranks:
            from hypergrid.of_torch import default_group

            world = default_group().size()  # get_world_size() may be replaced, and say more
            return range(self.request.rank_offset, min(window.stop, world))
        outside: set[int] = set()
        for planned in self.rows:
            for ranks in planned.plan_row.explicit or ():
                outside.update(rank for rank in ranks if rank not in window)
        if not outside:
            return window
        return sorted({*window, *outside})

    def proposal(self) -> dict[str, Any]:
        """Values that ranks compare before creation: arguments as plain values, and the plan."""
        request = self.request
        values = {}
        for argument in fields(request):
            name = argument.name
            if argument.init and name not in NOT_COMPARED and not name.startswith("get_"):
                values[name] = getattr(request, name)
        for name, options in request.nccl_configs.items():
            values[f"{shown(name)} in {communicators.FILE}"] = shown(options)
        if request.helpers:
            values["replaced in parallel_state"] = in_words(request.helpers)
        for planned in self.rows:
            label = planned.table_row.label
            if planned.chosen:
                # The first are enough to show a difference; the plan has all of them.
                values[f"ranks chosen for {label}"] = list(map(list, planned.chosen[:16]))
        if request.timeout_of_all is not None:
            values["timeout of all groups"] = str(request.timeout_of_all)
        values["megatron-core"] = RELEASE
        values["plan"] = self.plan.fingerprint()
        return values


def _conditions(request: Request) -> dict[str, bool]:
    """The conditions of the table: of the release, and of the request."""
    return {
        **RELEASE_HAS,
        "gtp_axis": request.gtp_remat_size > 1,
        "expert_gtp_axis": request.expert_gtp_remat_size > 1,
        "instances": request.num_distributed_optimizer_instances > 1,
        "all_gather": request.create_all_gather_group is True,
        "hybrid": request.hybrid_context_parallel,
        "dynamic": request.dynamic_context_parallel,
        "hierarchical": bool(request.hierarchical_context_parallel_sizes),
    }


def _holds(row: Row | Alias, conditions: Mapping[str, bool]) -> bool:
    """Whether a row is there: ``when`` is such as "instances", "not instances and gtp_axis"."""
    if not row.when:
        return True
    for condition in row.when.split(" and "):
        name = condition.removeprefix("not ")
        if conditions[name] != (name == condition):
            return False
    return True


def rows_of(request: Request) -> list[Row]:
    """Rows that the request makes groups for."""
    conditions = _conditions(request)
    return [row for row in ROWS if _holds(row, conditions)]


def aliases(request: Request) -> list[Alias]:
    """Private globals that hold the same group as another one."""
    conditions = _conditions(request)
    return [alias for alias in ALIASES if has(alias.slot) and _holds(alias, conditions)]


def _options(request: Request, row: Row) -> tuple[tuple[str, Any], ...] | None:
    """The row's options in the NCCL configuration; None if it has none."""
    if not request.nccl_configs:
        return None
    options = communicators.section(row.options, request.nccl_configs)
    if options is None:
        return None
    return tuple(options.items())


def _plan(request: Request, row: Row) -> Iterator[PlannedRow]:
    """The rows of the plan that a row of the table makes for a request."""
    if row.holds == "sizes":
        _check_even(request, row)
    elif row.holds == "levels":
        _check_levels(request, row)
    backend = None
    if row.backend:
        backend = getattr(request, row.backend)
    if backend not in (None, "nccl", "ucc"):
        raise AssertionError(
            f"{row.backend}={shown(backend)} is not supported: use 'nccl', 'ucc' or None."
        )
    options = None
    if backend == "ucc":  # which has no options
        communicators.check_ucc()
    else:
        options = _options(request, row)
    pick = row.pick
    chosen = None
    explicit = None
    if row.chooser:
        chosen = _chosen(request, row, *row.chooser)
    if chosen is not None:
        pick = "all"
        explicit = tuple(map(tuple, chosen))
    chunk = None
    if row.chunk == "instance":
        chunk = _members(request) // request.num_distributed_optimizer_instances
    # Upstream leaves the timeout to torch: always, or in releases of a fact.
    is_torchs = RELEASE_HAS.get(str(row.torch_timeout), row.torch_timeout is True)
    plan_row = GroupRow(
        label=row.label,
        layout=row.grid,
        dims=tuple(row.dims.split("-")),
        chunk=chunk,
        pick=pick,
        explicit=explicit,
        backend=backend,
        timeout=request.timeout_of_all if is_torchs else request.timeout,
        options=options,
        traffic=row.traffic,
        separate=row.separate or row.sharp == request.sharp_group,
    )
    if row.holds == "sizes":
        # Of 16 ranks from 2 on: groups of 2, 4 and 8.
        smallest = 2
        if row.least:
            smallest = getattr(request, row.least)
        for size in run_sizes(_members(request), smallest):
            of_size = replace(plan_row, label=row.label.format(size), chunk=size)
            yield PlannedRow(row, row.slot, size, of_size)
    elif row.holds == "levels":
        for level in range(len(level_sizes(request, row))):
            of_level = replace(plan_row, label=row.label.format(level), dims=(f"cp{level}",))
            yield PlannedRow(row, row.slot, level, of_level)
    else:
        yield PlannedRow(row, row.slot, None, plan_row, chosen)
    if row.gloo and _makes_gloo(request, row):
        twin = replace(
            plan_row,
            label=row.twin_label,
            backend="gloo",
            options=options if row.twin_options else None,
            timeout=request.timeout_of_all if row.twin_torch_timeout else plan_row.timeout,
            traffic=TWINS,
            separate=True,
        )
        yield PlannedRow(row, row.slot + "_GLOO", None, twin, is_twin=True)


def _members(request: Request) -> int:
    return request.decoder.dim_size(("dp", "cp"))


def _makes_gloo(request: Request, row: Row) -> bool:
    has_axis = request.gtp_remat_size > 1
    if row.grid.startswith("expert"):
        has_axis = has_axis or request.expert_gtp_remat_size > 1
    return request.create_gloo_process_groups and not has_axis


def _chosen(
    request: Request, row: Row, argument: str, default: Callable[..., list[int]]
) -> list[Sequence[int]] | None:
    """The ranks that the caller's function chooses of each pipeline; None if it is the default."""
    callers_function = getattr(request, argument)
    choose: Any = callers_function
    if callers_function is None:
        choose = request.helpers.get(default.__name__, default)
    if choose is default:
        return None
    try:
        inspect.signature(choose, follow_wrapped=False).bind([])
    except ValueError:
        pass  # a function in C may have no signature
    except TypeError as error:
        raise TypeError(
            f"{argument} must be a function from a pipeline's ranks to some of them, got "
            f"{shown(choose)}: {error}."
        ) from None
    chosen = []
    for pipeline in loops(request, row):
        chosen.append(_plain_ranks(argument, choose(pipeline), request.world))
    return chosen


def _plain_ranks(argument: str, returned: Any, world: int) -> Sequence[int]:
    """The ranks that a caller's function returned, as a list of ints."""
    ranks: Sequence[int] = returned
    if not isinstance(returned, list | tuple) or any(type(rank) is not int for rank in returned):
        try:
            ranks = [operator.index(rank) for rank in returned]
        except TypeError:
            raise TypeError(
                f"the function given as {argument} must return a list of ranks, got "
                f"{shown(returned)}."
            ) from None
    if len(set(ranks)) != len(ranks) or any(rank not in range(world) for rank in ranks):
        raise ValueError(
            f"the function given as {argument} chose {shown(ranks)}: ranks must not repeat and "
            f"must be below the world size {world}."
        )
    return ranks


def _check_even(request: Request, row: Row) -> None:
    if _members(request) % 2:
        argument = "hybrid_context_parallel"
        if row.least:
            argument = "dynamic_context_parallel"
        raise AssertionError(
            f"{argument} needs an even data x context parallel size, got {_members(request)}."
        )


def _check_levels(request: Request, row: Row) -> None:
    sizes = level_sizes(request, row)
    argument = f"hierarchical_context_parallel_sizes={shown(sizes)}"
    if prod(sizes) != request.context_parallel_size:
        raise AssertionError(
            f"{argument} multiply to {prod(sizes)}, not to "
            f"context_parallel_size={request.context_parallel_size}."
        )
    if min(sizes) < 1:
        raise ValueError(f"{argument} must be at least 1 each.")


def _listed(request: Request, planned: PlannedRow) -> PlannedRow:
    """The row with its groups listed, where outside code replaced what decides the ranks."""
    if planned.plan_row.explicit is not None or not request.decides_ranks:
        return planned
    groups: list[tuple[int, ...]] = []
    for number, ranks in enumerate(loops(request, planned.table_row)):
        groups.extend(map(tuple, cut(request, planned, number, ranks)))
    listed = replace(planned.plan_row, explicit=tuple(groups), chunk=None, pick="all")
    return replace(planned, plan_row=listed)


def origin(row: Row) -> tuple[str, str]:
    """The grid, and the dims whose groups upstream loops over to make those of ``row``."""
    return row.grid.partition("_")[0], row.loop or row.dims


def loops(request: Request, row: Row) -> list[list[int]]:
    """The rank lists over which upstream loops to make the groups of ``row``."""
    grid, token = origin(row)
    lists = request.rank_lists(grid, token)
    if not row.join:
        return lists
    if max(request.gtp_remat_size, request.expert_gtp_remat_size) > 1:
        return [sorted(chain.from_iterable(lists))]
    count = instance_size(request)
    joined = []
    for start in range(0, len(lists) - count + 1, count):
        joined.append(list(chain.from_iterable(lists[start : start + count])))
    return joined


def cut(
    request: Request, planned: PlannedRow, number: int, ranks: list[int]
) -> Sequence[Sequence[int]]:
    """The groups of a row that are cut from ``ranks``, list ``number`` of its loop."""
    row = planned.table_row
    if planned.chosen is not None:
        return [planned.chosen[number]]
    if row.levels:
        return of_level(ranks, level_sizes(request, row), level_of(planned))
    chunk = None
    if row.holds == "sizes":
        chunk = planned.key
    elif row.chunk == "instance":
        chunk = len(ranks) // request.num_distributed_optimizer_instances
    rule = GroupRow("", "", (), chunk=chunk, pick=row.pick)
    return [list(members) for members in rule.cuts([ranks])]


def of_level(ranks: list[int], sizes: list[int], level: int) -> list[list[int]]:
    """The groups of one level of ``ranks`` cut into sizes, innermost first."""
    layout = RankLayout(tuple(map(str, range(len(sizes)))), tuple(sizes))
    groups = []
    for places in layout.groups(str(level)).tolist():
        groups.append([ranks[place] for place in places])
    return groups


def level_sizes(request: Request, row: Row) -> list[int]:
    """The sizes of the levels that the groups over a dim are cut into, innermost first."""
    if row.holds == "levels":
        return request.hierarchical_context_parallel_sizes or []
    return [instance_size(request), request.num_distributed_optimizer_instances]


def level_of(planned: PlannedRow) -> int:
    """The level that the group belongs to, innermost first."""
    if planned.key is None:
        return planned.table_row.level
    return planned.key


def instance_size(request: Request) -> int:
    """Ranks over the experts' dp in one instance of the distributed optimizer."""
    return request.expert.dim_size("dp") // request.num_distributed_optimizer_instances


def run_sizes(members: int, smallest: int = 2) -> list[int]:
    """The powers of two from ``smallest`` to at most half of ``members`` ranks."""
    powers = [2**exponent for exponent in range(int(log2(members)))]
    return [size for size in powers if size >= smallest]
