"""Functions of parallel_state that outside code has replaced, called as stock calls them.

Stock's ``initialize_model_parallel`` calls its helpers through its module, so frameworks hook into
it by replacing them there: a longer timeout, other options, other ranks, a communicator of their
own. ``Request.helpers`` has those that were replaced, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from compat.megatron import rank_lists
from compat.megatron.planning import Planned, rows_of
from compat.megatron.releases import HAS
from compat.megatron.table import Row

if TYPE_CHECKING:
    from compat.megatron.arguments import Request

# The group that a helper made of these ranks, for a row of the plan.
Made = tuple[Planned, Sequence[int], Any]

MEMBERS_ONLY = "__hypergrid_members_only__"  # as compat.members_only() sets it
NEW_GROUP = "torch.distributed.new_group"
GENERATORS = ("RankGenerator", "generate_masked_orthogonal_rank_groups")
_LEVELS = ("create_hierarchical_groups", "create_hierarchical_parallel_groups")
_HYBRID = "create_hybrid_dp_cp_groups"
CREATORS = ("create_group", *_LEVELS, _HYBRID, NEW_GROUP)
HELPERS = (
    *(*CREATORS, *GENERATORS, "get_nccl_options", "overwrite_nccl_comm_cfgs"),
    *("default_embedding_ranks", "default_position_embedding_ranks", "_set_global_memory_buffer"),
)


def creates(request: Request) -> bool:
    """Whether outside code takes part in creating groups."""
    return any(name in request.helpers for name in CREATORS)


def by_members(request: Request) -> bool:
    """Whether the one function that creates groups was declared to need members only."""
    replaced = [name for name in CREATORS if name in request.helpers]
    return bool(replaced) and all(hasattr(request.helpers[name], MEMBERS_ONLY) for name in replaced)


def in_words(request: Request) -> str:
    """What was replaced, for reports; empty where nothing was."""
    return ", ".join(name for name in HELPERS if name in request.helpers)


def check(request: Request) -> None:
    """Refuse what cannot be had together with the functions that were replaced: ValueError."""
    seen = [name for name in (*CREATORS, "get_nccl_options") if name in request.helpers]
    if seen and request.policy.share != "none":
        raise ValueError(
            f"share={request.policy.share!r} would keep groups from {' and '.join(seen)}, which "
            f"this process has replaced to see each of them. Leave share out, put the functions "
            f"back, or declare a new_group by compat.members_only()."
        )
    lockstep = creates(request) and not by_members(request)
    if lockstep and request.policy.creation not in ("auto", "everyone"):
        raise ValueError(
            f"creation={request.policy.creation!r} is not possible here: this process has replaced "
            f"{' and '.join(name for name in seen if name in CREATORS)}, which every rank calls "
            f"for every group. Use 'auto', or declare by compat.members_only() that the members "
            f"of a group are enough."
        )


def options(request: Request, section: str) -> Any:
    """The communicator options of a section, from whoever gives them."""
    from compat.megatron import communicators as nccl

    give: Callable[..., Any] = request.helpers.get("get_nccl_options", nccl.get_nccl_options)
    return give(section, request.nccl_configs)


@dataclass(frozen=True)
class Calls:
    """Creates the groups of a request through ``helpers``, as upstream calls them.

    ``numbered`` surrounds each call, so that its groups get names of their own, and ``around``
    the calls that belong together.
    """

    request: Request
    helpers: Mapping[str, Callable[..., Any]]
    rank: int
    numbered: Callable[[str, Sequence[int]], AbstractContextManager[None]]
    around: Callable[[Sequence[Planned]], AbstractContextManager[None]]

    def groups(self) -> Iterator[Made]:
        """Every group that this rank is in, in upstream's order.

        *Collective* over all ranks that initialise; over the members of each group where that
        was declared.
        """
        for _, of_one_loop in groupby(rows_of(self.request), key=_loop):
            rows = list(of_one_loop)
            with self._all(rows) if rows[0].sharp == "dp" else nullcontext():
                for number, ranks in enumerate(rank_lists.loops(self.request, rows[0])):
                    for p, members, group in self._of_one(rows, number, ranks):
                        if self.rank in members:
                            yield p, members, group

    def _planned(self, rows: Iterable[Row]) -> list[Planned]:
        return [p for row in rows for p in self.request.planned if p.row is row]

    def _all(self, rows: Iterable[Row]) -> AbstractContextManager[None]:
        return self.around(self._planned(rows))

    def _of_one(self, rows: list[Row], number: int, ranks: list[int]) -> Iterator[Made]:
        """What upstream makes of one list of ranks of a loop."""
        alone = by_members(self.request)
        leveled = [row for row in rows if (row.fan or row.has_levels) and not alone]
        single = [row for row in rows if row not in leveled and not row.chunk]
        for p in sorted(self._planned(single), key=_is_twin):
            yield from (self._create(p, each) for each in self._cut(p, number, ranks))
        for row in rows:
            if row.chunk:
                both = self._planned([row])  # and its twin
                for each in self._cut(both[0], number, ranks):
                    yield from (self._create(p, each) for p in both)
        if leveled:
            with self._all(leveled):
                with self.numbered(f"{leveled[0].label}#", ranks):
                    made = self._call(leveled, ranks)
                for p, group in made:
                    groups = self._cut(p, number, ranks)
                    yield p, next(each for each in groups if self.rank in each), group

    def _cut(self, p: Planned, number: int, ranks: list[int]) -> list[Sequence[int]]:
        return rank_lists.cut(self.request, p, number, ranks)

    def _create(self, p: Planned, members: Sequence[int]) -> Made:
        if by_members(self.request) and self.rank not in members:
            return p, members, None
        with self.numbered(p.group.label, members):
            group = self.helpers["create_group"](members, **_arguments(self.request, p))
        return p, members, group

    def _call(self, rows: list[Row], ranks: list[int]) -> list[tuple[Planned, Any]]:
        """Call the helper that makes the groups of several sizes or levels at once."""
        request, row, planned = self.request, rows[0], self._planned(rows)
        if row.fan == "sizes":
            made = self.helpers[_HYBRID](self.rank, ranks, options(request, row.options))
            return [(p, made[p.key]) for p in planned if p.key in made]
        sizes, twins = rank_lists.level_sizes(request, row), []
        if HAS["plain_levels"]:
            size, given = request.context_parallel_size, options(request, row.options)
            levels = self.helpers[_LEVELS[1]](self.rank, ranks, size, sizes, given)
        else:
            several = [options(request, each.options) for each in rows]
            both = row.gloo and request.create_gloo_process_groups
            desc = "EXPERT_DATA_PARALLEL_GROUP" if row.gloo else "CONTEXT_PARALLEL_GROUP"
            levels, twins = self.helpers[_LEVELS[0]](
                *(self.rank, ranks, sizes),
                create_gloo_process_groups=both,
                pg_options=several if row.gloo else several[0],
                timeout=request.timeout,
                group_desc=desc,
            )
        if self.rank not in ranks:
            return []
        return [(p, (twins if _is_twin(p) else levels)[rank_lists.level(p)]) for p in planned]


def _loop(row: Row) -> tuple[str, str, bool]:
    """Rows with an equal one are made in the same loop of upstream's."""
    return (*rank_lists.origin(row), row.fan == "sizes")


def _arguments(request: Request, p: Planned) -> dict[str, Any]:
    """What upstream gives ``create_group`` beside the ranks: no more arguments, and no fewer."""
    given: dict[str, Any] = {"group_desc": p.group.label}
    if p.group.timeout is not None:
        given["timeout"] = request.timeout
    if _is_twin(p):
        given["backend"] = "gloo"
    elif p.row.several:  # the pipeline's
        given["backend"] = p.group.backend
    if takes_options(p):
        given["pg_options"] = options(request, p.row.options)
    elif not _is_twin(p):
        given["pg_options"] = None
    return given


def takes_options(p: Planned) -> bool:
    """Whether upstream asks for communicator options for this group."""
    return p.row.twin_options if _is_twin(p) else p.group.backend != "ucc"


def _is_twin(p: Planned) -> bool:
    return p.slot != p.row.slot
