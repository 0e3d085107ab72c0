"""Creates the groups of a request through replaced helpers, called as in upstream's loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

from compat.megatron import communicators, helpers
from compat.megatron.request import LEVELS, Request, members_only
from compat.megatron.rows import (
    PlannedRow,
    PlannedRows,
    cut,
    level_of,
    level_sizes,
    loops,
    origin,
    rows_of,
)
from compat.megatron.table import Row
from hypergrid.groups import creation

# A row of the plan, the ranks of one of its groups, and the group that a helper created.
Created = tuple[PlannedRow, Sequence[int], Any]


def options(request: Request, section: str) -> Any:
    """The communicator options of a section, from the helper in use."""
    options_for = request.helpers.get("get_nccl_options", communicators.get_nccl_options)
    return options_for(section, request.nccl_configs)


def takes_options(planned: PlannedRow) -> bool:
    """Whether upstream asks for communicator options for this group."""
    if planned.is_twin:
        return planned.table_row.twin_options
    return planned.plan_row.backend != "ucc"


@dataclass(frozen=True, eq=False)
class Calls:
    """Creates groups through the helpers of parallel_state, as upstream calls them.

    Names of groups begin with ``purpose``; ``around`` surrounds the calls that belong together.
    """

    planned_rows: PlannedRows
    replaced: Mapping[str, Callable[..., Any]]  # the helpers that outside code has replaced
    rank: int
    purpose: str
    epoch: str
    around: Callable[[Sequence[PlannedRow]], AbstractContextManager[None]] = lambda rows: (
        nullcontext()
    )
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def members_only(self) -> bool:
        """Whether only the members of a group make its call."""
        return members_only(self.replaced)

    def create(
        self, label: str, members: Sequence[int], arguments: Callable[[], dict[str, Any]]
    ) -> Any:
        """Call ``create_group``, with ``arguments`` made for each call, as upstream does."""
        if self.members_only and self.rank not in members:
            return None
        with self._named(label, members):
            return self._helper("create_group")(members, **arguments())

    def _helper(self, name: str) -> Callable[..., Any]:
        return self.replaced.get(name) or getattr(helpers, name)  # type: ignore[no-any-return]

    def _named(self, label: str, ranks: Sequence[int]) -> AbstractContextManager[None]:
        if self.members_only:  # the others do not count this call
            return creation.named_from(label, ranks, self.epoch)
        return creation.named_from(f"{self.purpose}, {next(self.numbers)}", (), self.epoch)

    def groups(self) -> Iterator[Created]:
        """Every group that this rank is in, in upstream's order.

        *Collective* over all ranks that initialise; over the members of each group where the
        helpers were declared with ``compat.members_only``.
        """
        request = self.planned_rows.request
        for _, same_loop in groupby(rows_of(request), lambda row: (*origin(row), row.creator)):
            rows = list(same_loop)
            around: AbstractContextManager[None] = nullcontext()
            if rows[0].sharp == "dp":
                around = self.around(self._planned(rows))
            with around:
                for number, ranks in enumerate(loops(request, rows[0])):
                    for planned, members, group in self._of_one(rows, number, ranks):
                        if self.rank in members:
                            yield planned, members, group

    def _planned(self, rows: Iterable[Row]) -> list[PlannedRow]:
        """The planned rows that were made of some rows of the table, twins included."""
        planned_rows = []
        for row in rows:
            for planned in self.planned_rows.rows:
                if planned.table_row is row:
                    planned_rows.append(planned)
        return planned_rows

    def _of_one(self, rows: list[Row], number: int, ranks: list[int]) -> Iterator[Created]:
        """The groups that upstream creates from one list of ranks of a loop."""
        request = self.planned_rows.request
        # One of upstream's helpers creates all levels, or all sizes, from one list.
        several = [row for row in rows if row.levels or row.holds == "sizes"]
        if self.members_only:
            several = []
        single = [row for row in rows if row not in several and not row.chunk]
        # All groups first, then their twins.
        for planned in sorted(self._planned(single), key=lambda planned: planned.is_twin):
            for members in cut(request, planned, number, ranks):
                yield self._create(planned, members)
        # Of chunks, each is followed by its twin.
        for row in rows:
            if row.chunk:
                planned_rows = self._planned([row])
                for members in cut(request, planned_rows[0], number, ranks):
                    for planned in planned_rows:
                        yield self._create(planned, members)
        if several:
            with self.around(self._planned(several)):
                with self._named(f"{several[0].label}#", ranks):
                    created = self._create_several(several, ranks)
                for planned, group in created:
                    cuts = cut(request, planned, number, ranks)
                    yield planned, next(cut for cut in cuts if self.rank in cut), group

    def _create(self, planned: PlannedRow, members: Sequence[int]) -> Created:
        request = self.planned_rows.request

        def arguments() -> dict[str, Any]:
            """Exactly those that upstream passes to ``create_group`` besides the ranks."""
            passed: dict[str, Any] = {"group_desc": planned.plan_row.label}
            if planned.plan_row.timeout is not None:
                passed["timeout"] = planned.plan_row.timeout
            if planned.table_row.backend or planned.is_twin:
                passed["backend"] = planned.plan_row.backend
            if takes_options(planned):
                passed["pg_options"] = options(request, planned.table_row.options)
            elif not planned.is_twin:
                passed["pg_options"] = None
            return passed

        return planned, members, self.create(planned.plan_row.label, members, arguments)

    def _create_several(self, rows: list[Row], ranks: list[int]) -> list[tuple[PlannedRow, Any]]:
        """Call the helper that creates the groups of all sizes or levels at once."""
        request = self.planned_rows.request
        row = rows[0]
        planned_rows = self._planned(rows)
        created: list[tuple[PlannedRow, Any]] = []
        if row.holds == "sizes":
            smallest = {}
            if row.least:
                smallest["min_cp_size"] = getattr(request, row.least)
            pg_options = options(request, row.options)
            by_size = self._helper(row.creator)(self.rank, ranks, pg_options, **smallest)
            for planned in planned_rows:
                if planned.key in by_size:
                    created.append((planned, by_size[planned.key]))
            return created
        sizes = level_sizes(request, row)
        pg_options = [options(request, level.options) for level in rows]
        # Upstream passes one for a single level, and a list for several.
        if len(pg_options) == 1:
            (pg_options,) = pg_options
        groups, twins = self._helper(LEVELS)(
            self.rank,
            ranks,
            sizes,
            create_gloo_process_groups=row.gloo and request.create_gloo_process_groups,
            pg_options=pg_options,
            timeout=request.timeout,
            group_desc=row.levels,
        )
        # The lists are of this rank's groups: without any there are no levels to look up.
        if self.rank not in ranks:
            return []
        for planned in planned_rows:
            of_levels = twins if planned.is_twin else groups
            created.append((planned, of_levels[level_of(planned)]))
        return created
