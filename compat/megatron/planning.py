"""From the table's rows and one request to the rows of a plan, with the checks of each row."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from math import prod
from typing import Any

from compat.megatron import communicators, rank_lists, replaced
from compat.megatron.arguments import NO_ARGUMENTS, Arguments
from compat.megatron.releases import RELEASE, RELEASE_HAS, has
from compat.megatron.table import ALIASES, ROWS, TWINS, Alias, PlannedGroup, Row
from hypergrid.messages import shown
from hypergrid.plan import GroupPlan, GroupRow


def rows_of(request: Arguments) -> list[Row]:
    """Rows that the request makes groups for."""
    return [row for row in ROWS if row.when.holds(request)]


def aliases(request: Arguments) -> list[Alias]:
    """Private globals that hold the same group as another one."""
    return [each for each in ALIASES if has(each.slot) and each.when.holds(request)]


def _plan(request: Arguments, row: Row) -> Iterator[PlannedGroup]:
    if row.check:
        _CHECKS[row.check](request, row)
    backend = getattr(request, row.backend) if row.backend else None
    if backend == "ucc":
        communicators.check_ucc()
    chosen = _chosen(request, row, *row.chooser) if row.chooser else None
    configs = {} if backend == "ucc" else request.nccl_configs
    section = communicators.section(row.options, configs) if configs else None
    if backend not in (None, "nccl", "ucc"):
        raise AssertionError(
            f"{row.backend}={shown(backend)} is not supported: use 'nccl', 'ucc' or None."
        )
    torchs = RELEASE_HAS.get(str(row.torch_timeout), row.torch_timeout is True)
    base = GroupRow(
        label=row.label,
        layout=row.grid,
        dims=tuple(row.dims.split("-")),
        chunk=_members(request) // request.instances if row.chunk == "instance" else None,
        pick="all" if chosen is not None else row.pick,
        explicit=None if chosen is None else tuple(tuple(ranks) for ranks in chosen),
        backend=backend,
        timeout=None if torchs else request.timeout.total_seconds(),
        options=None if section is None else tuple(section.items()),
        traffic=row.traffic,
        separate=row.separate or (row.sharp != "" and row.sharp == request.sharp_group),
    )
    if row.holds == "sizes":
        least = getattr(request, row.least) if row.least else 2
        for size in rank_lists.run_sizes(_members(request), least):
            group = replace(base, label=row.label.format(size), chunk=size)
            yield PlannedGroup(row, row.slot, size, group)
    elif row.holds == "levels":
        for i in range(len(rank_lists.level_sizes(request, row))):
            group = replace(base, label=row.label.format(i), dims=(f"cp{i}",))
            yield PlannedGroup(row, row.slot, i, group)
    else:
        yield PlannedGroup(row, row.slot, None, base, chosen)
    if row.gloo and _makes_gloo(request, row):
        twin = replace(
            base,
            label=row.twin_label,
            backend="gloo",
            options=base.options if row.twin_options else None,
            timeout=None if row.twin_torch_timeout else base.timeout,
            traffic=TWINS,
            separate=True,
        )
        yield PlannedGroup(row, row.slot + "_GLOO", None, twin)


def _members(request: Arguments) -> int:
    return request.decoder.dim_size(("dp", "cp"))


def _makes_gloo(request: Arguments, row: Row) -> bool:
    expert = row.grid.startswith("expert")
    sharded = max(request.gtp_remat_size, request.expert_gtp_remat_size if expert else 1) > 1
    return request.create_gloo_process_groups and not sharded


def _chosen(
    request: Arguments, row: Row, argument: str, default: Callable[..., list[int]]
) -> list[Sequence[int]] | None:
    """The ranks that the caller's function chooses of each pipeline; None if it is the default."""
    given, split = getattr(request, argument), request.pipeline_model_parallel_split_rank
    own = request.helpers.get(default.__name__, default)
    choose: Any = own if given is None else given
    if choose is default and (split is None or given is not None):
        return None
    splits = given is None and (RELEASE_HAS["splits"] or split is not None)
    if splits:
        choose = partial(own, split_rank=split)
    if not callable(choose):
        raise TypeError(
            f"{argument} must be a function from a pipeline's ranks to some of them, got "
            f"{shown(choose)}."
        )
    chosen = []
    for pipeline in rank_lists.loops(request, row):
        try:
            given = choose(pipeline)
        except IndexError:
            if not splits:
                raise
            raise ValueError(
                f"invalid pipeline_model_parallel_split_rank={split} for a pipeline of "
                f"{len(pipeline)} stages; allowed: 0 to {len(pipeline) - 1}."
            ) from None
        except TypeError as error:
            if splits or error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # an error inside the function; without a frame of its own, the call failed
            raise TypeError(
                f"the function given as {argument} does not take a pipeline's ranks: {error}. Give "
                f"one that takes a list of ranks and returns some of them."
            ) from None
        communicators.section(row.options, request.nccl_configs)  # upstream's order of refusals
        chosen.append(_plain_ranks(argument, given, request.world))
    return chosen


def _plain_ranks(argument: str, given: Any, world: int) -> Sequence[int]:
    """The ranks that a caller's function returned, as a list of ints."""
    ranks: Sequence[int] = given
    if not isinstance(given, list | tuple) or any(type(rank) is not int for rank in given):
        try:
            ranks = [operator.index(rank) for rank in given]
        except TypeError:
            raise TypeError(
                f"the function given as {argument} must return a list of ranks, got {shown(given)}."
            ) from None
    if len(set(ranks)) != len(ranks) or any(rank not in range(world) for rank in ranks):
        raise ValueError(
            f"the function given as {argument} chose {shown(ranks)}: ranks must not repeat and "
            f"must be below the world size {world}."
        )
    return ranks


def _check_instances(request: Arguments, what: str, size: int) -> None:
    if size % request.instances:
        raise AssertionError(
            f"num_distributed_optimizer_instances={request.instances} does not divide the "
            f"{what} {size}."
        )


def _check_expert_instances(request: Arguments, row: Row) -> None:
    if RELEASE_HAS["instances_in_expert"]:
        _check_instances(request, "expert data parallel size", request.expert.dim_size("dp"))


def _check_even(request: Arguments, row: Row) -> None:
    if _members(request) % 2:
        argument = "dynamic_context_parallel" if row.least else "hybrid_context_parallel"
        raise AssertionError(
            f"{argument} needs an even data x context parallel size, got {_members(request)}."
        )


def _check_levels(request: Arguments, row: Row) -> None:
    levels = request.hierarchical_context_parallel_sizes or []
    named = f"hierarchical_context_parallel_sizes={shown(levels)}"
    if prod(levels) != request.context_parallel_size:
        raise AssertionError(
            f"{named} multiply to {prod(levels)}, not to "
            f"context_parallel_size={request.context_parallel_size}."
        )
    if min(levels) < 1:
        raise ValueError(f"{named} must be at least 1 each.")


_CHECKS: dict[str, Callable[[Arguments, Row], None]] = {
    "even dp x cp": _check_even,
    "levels": _check_levels,
    "expert instances": _check_expert_instances,
}


class Request(Arguments):
    """Arguments and the groups that they ask for."""

    @cached_property
    def planned(self) -> list[PlannedGroup]:
        """The rows to create, in order.

        Refuses what upstream refuses while it creates groups, row by row in the same order, so
        that of two errors the same one is raised.
        """
        self.positive("num_distributed_optimizer_instances")
        rows = rows_of(self)
        if RELEASE_HAS["dp_first"]:
            communicators.section(rows[0].options, self.nccl_configs)
        _check_instances(self, "data x context parallel size", _members(self))
        communicators.section(rows[0].options, self.nccl_configs)
        if self.decoder.stop > self.world:
            raise ValueError(
                f"rank_offset={self.rank_offset} + local_world_size={self.world_size} is larger "
                f"than the world size {self.world}. Make one of them smaller."
            )
        return rank_lists.listed(self, [each for row in rows for each in _plan(self, row)])

    @cached_property
    def sharp_rows(self) -> list[PlannedGroup]:
        """The rows whose groups use SHARP."""
        return [p for p in self.planned if p.row.sharp and p.row.sharp == self.sharp_group]

    @cached_property
    def plan(self) -> GroupPlan:
        """The groups of this request as data."""
        rows = tuple(p.group for p in self.planned)  # first: it refuses what cannot be laid out
        return GroupPlan(self.layouts, rows)

    @cached_property
    def participants(self) -> Sequence[int]:
        """The ranks that create groups: the window, and others that a caller's function chose."""
        window = self.decoder.ranks
        if self.decides_ranks:
            from hypergrid.of_torch import default_group

            world = default_group().size()  # get_world_size() may be replaced, and say more
            return range(self.rank_offset, min(self.decoder.stop, world))
        chosen = (ranks for p in self.planned for ranks in p.group.explicit or ())
        besides = {rank for ranks in chosen for rank in ranks if rank not in window}
        return sorted({*window, *besides}) if besides else window

    def proposal(self) -> dict[str, Any]:
        """Values that ranks compare before creation: arguments as plain values, and the plan."""
        values = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.init and f.name not in NO_ARGUMENTS and not f.name.startswith("get_")
        }
        if self.helpers:
            values["replaced in parallel_state"] = replaced.in_words(self.helpers)
        for p in self.planned:
            if p.chosen:
                values[f"ranks chosen for {p.row.label}"] = self._places(p, p.chosen)
            if p.group.options is not None:
                values[f"options of {p.row.label}"] = p.group.options
        return {**values, "megatron-core": RELEASE, "plan": self.plan.fingerprint()}

    def _places(self, p: PlannedGroup, chosen: Sequence[Sequence[int]]) -> Any:
        """The chosen ranks as places in their pipelines, if the same in all: short for any W."""
        places = [
            [pipeline.index(rank) if rank in pipeline else f"rank {rank}" for rank in ranks]
            for pipeline, ranks in zip(rank_lists.loops(self, p.row), chosen, strict=True)
        ]
        if all(each == places[0] for each in places):
            return f"places {places[0]} of each pipeline"
        return [list(ranks) for ranks in chosen[:16]]
