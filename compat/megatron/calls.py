"""Creates the groups of a request through replaced helpers, called as in upstream's loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

from compat.megatron import communicators, helpers, rank_lists
from compat.megatron.planning import Request, rows_of
from compat.megatron.releases import RELEASE_HAS
from compat.megatron.replaced import LEVELS, by_members
from compat.megatron.table import PlannedGroup, Row
from hypergrid.groups import creation

# A row of the plan, the ranks of one of its groups, and the group that a helper created.
Made = tuple[PlannedGroup, Sequence[int], Any]


def options(request: Request, section: str) -> Any:
    """The communicator options of a section, from the helper in use."""
    give = request.helpers.get("get_nccl_options", communicators.get_nccl_options)
    return give(section, request.nccl_configs)


@dataclass(frozen=True, eq=False)
class Calls:
    """Creates groups through the helpers of parallel_state, as upstream calls them.

    Names of groups begin with ``what``; ``around`` surrounds the calls that belong together.
    """

    request: Request
    replaced: Mapping[str, Callable[..., Any]]  # the helpers that outside code has replaced
    rank: int
    what: str
    epoch: str
    around: Callable[[Sequence[PlannedGroup]], AbstractContextManager[None]] = lambda rows: (
        nullcontext()
    )
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def alone(self) -> bool:
        """Whether only the members of a group make its call."""
        return by_members(self.replaced)

    def create(
        self, label: str, members: Sequence[int], arguments: Callable[[], dict[str, Any]]
    ) -> Any:
        """Call ``create_group``, with ``arguments`` made for each call, as upstream does."""
        if self.alone and self.rank not in members:
            return None
        with self._named(label, members):
            return self._helper("create_group")(members, **arguments())

    def _helper(self, name: str) -> Callable[..., Any]:
        return self.replaced.get(name) or getattr(helpers, name)  # type: ignore[no-any-return]

    def _named(self, label: str, ranks: Sequence[int]) -> AbstractContextManager[None]:
        if self.alone:  # the others do not count this call
            return creation.named_from(label, ranks, self.epoch)
        return creation.named_from(f"{self.what}, {next(self.numbers)}", (), self.epoch)

    def groups(self) -> Iterator[Made]:
        """Every group that this rank is in, in upstream's order.

        *Collective* over all ranks that initialise; over the members of each group where the
        helpers were declared with ``compat.members_only``.
        """
        for _, of_one_loop in groupby(
            rows_of(self.request), lambda row: (*rank_lists.origin(row), row.creator)
        ):
            rows = list(of_one_loop)
            with self.around(self._planned(rows)) if rows[0].sharp == "dp" else nullcontext():
                for number, ranks in enumerate(rank_lists.loops(self.request, rows[0])):
                    for p, members, group in self._of_one(rows, number, ranks):
                        if self.rank in members:
                            yield p, members, group

    def _planned(self, rows: Iterable[Row]) -> list[PlannedGroup]:
        return [p for row in rows for p in self.request.planned if p.row is row]

    def _of_one(self, rows: list[Row], number: int, ranks: list[int]) -> Iterator[Made]:
        """The groups that upstream creates from one list of ranks of a loop."""
        # One of upstream's helpers creates all levels, or all sizes, from one list.
        leveled = [r for r in rows if (r.levels or r.holds == "sizes") and not self.alone]
        single = [row for row in rows if row not in leveled and not row.chunk]
        for p in sorted(self._planned(single), key=lambda p: p.is_twin):
            for each in rank_lists.cut(self.request, p, number, ranks):
                yield self._create(p, each)
        for row in rows:
            if row.chunk:
                both = self._planned([row])  # and its twin
                for each in rank_lists.cut(self.request, both[0], number, ranks):
                    yield from (self._create(p, each) for p in both)
        if leveled:
            with self.around(self._planned(leveled)):
                with self._named(f"{leveled[0].label}#", ranks):
                    made = self._call(leveled, ranks)
                for p, group in made:
                    groups = rank_lists.cut(self.request, p, number, ranks)
                    yield p, next(each for each in groups if self.rank in each), group

    def _create(self, p: PlannedGroup, members: Sequence[int]) -> Made:
        def arguments() -> dict[str, Any]:
            """Exactly those that upstream passes to ``create_group`` besides the ranks."""
            given: dict[str, Any] = {"group_desc": p.group.label}
            if p.group.timeout is not None:
                given["timeout"] = self.request.timeout
            if p.row.backend or p.is_twin:
                given["backend"] = p.group.backend
            if takes_options(p):
                given["pg_options"] = options(self.request, p.row.options)
            elif not p.is_twin:
                given["pg_options"] = None
            return given

        return p, members, self.create(p.group.label, members, arguments)

    def _call(self, rows: list[Row], ranks: list[int]) -> list[tuple[PlannedGroup, Any]]:
        """Call the helper that creates the groups of all sizes or levels at once."""
        request, row, planned = self.request, rows[0], self._planned(rows)
        if row.holds == "sizes":
            least = {"min_cp_size": getattr(request, row.least)} if row.least else {}
            given = options(request, row.options)
            made = self._helper(row.creator)(self.rank, ranks, given, **least)
            return [(p, made[p.key]) for p in planned if p.key in made]
        sizes, twins = rank_lists.level_sizes(request, row), []
        if RELEASE_HAS["plain_levels"]:
            size, given = request.context_parallel_size, options(request, row.options)
            levels = self._helper(LEVELS[1])(self.rank, ranks, size, sizes, given)
        else:
            several = [options(request, each.options) for each in rows]
            both = row.gloo and request.create_gloo_process_groups
            levels, twins = self._helper(LEVELS[0])(
                *(self.rank, ranks, sizes),
                create_gloo_process_groups=both,
                pg_options=several if len(several) > 1 else several[0],
                timeout=request.timeout,
                group_desc=row.levels,
            )
        if self.rank not in ranks:
            return []
        return [(p, (twins if p.is_twin else levels)[rank_lists.level(p)]) for p in planned]


def takes_options(p: PlannedGroup) -> bool:
    """Whether upstream asks for communicator options for this group."""
    return p.row.twin_options if p.is_twin else p.group.backend != "ucc"
