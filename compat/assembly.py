"""Megatron's models in an assembly: MegatronPart, and megatron-core's bridges over its links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, TypeAlias
from unittest import mock

import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.hyper_comm_grid import HyperCommGrid
from compat.megatron.build import check_window
from compat.state import ParallelState, request_of
from hypergrid import of_torch
from hypergrid.agreement.prepare import Agreement
from hypergrid.groups.assembly import Assembly
from hypergrid.layout import RankLayout
from hypergrid.messages import few
from hypergrid.plan import GroupRow

Key: TypeAlias = tuple[tuple[int, ...], ...]  # groups, in ascending order
_OUTSIDE: Any = dist.GroupMember.NON_GROUP_MEMBER
_SET_BY_RANKS = ("rank_offset", "local_world_size", "job_size", "init_count", "members", "helpers")


class MegatronPart:
    """A model of Megatron in an assembly: a ``ParallelState`` is made of it.

    ``assembly["text"]`` is then that state, so that Megatron's modules read it inside
    ``with assembly["text"].activate():``.

    Parameters
    ----------
    ranks : iterable of int
        Its ranks, ascending, not necessarily consecutive.
    **arguments
        As for ``initialize_model_parallel``, but for the window, which the ranks are.

    Raises
    ------
    LayoutError
        Ranks that cannot be.
    TypeError, ValueError, RuntimeError, AssertionError
        As ``initialize_model_parallel`` refuses its arguments.
    """

    def __init__(self, ranks: Iterable[int], **arguments: Any) -> None:
        for name in _SET_BY_RANKS:
            if name in arguments:
                raise TypeError(f"a MegatronPart takes no {name}: its ranks say it.")
        listed = list(ranks)
        span = RankLayout(("rank",), (len(listed),)).on(listed)
        self.request = request_of(
            arguments,
            rank_offset=0 if span.members else span.offset,
            local_world_size=span.size,
            members=span.members,
            job_size=span.stop,
        )
        self.request.check()
        _ = self.request.plan

    @property
    def layouts(self) -> Mapping[str, RankLayout]:
        """The grid of dense layers, then those of expert layers."""
        return self.request.layouts

    @cached_property
    def rows(self) -> Sequence[GroupRow]:
        """The part's groups, in Megatron's order."""
        return self.request.plan.rows

    def proposal(self) -> dict[str, Any]:
        """The arguments, which all ranks of the world compare."""
        return self.request.proposal()

    def create(self, agreement: Agreement, prefix: str) -> ParallelState:
        """The state on this rank; on one outside its ranks a state without groups."""
        check_window(self.request, agreement)
        state = ParallelState()
        state.initialize(self.request, agreement, prefix)
        return state


def grids_of(assembly: Assembly) -> dict[str, HyperCommGrid]:
    """Each grid of an assembly as megatron-core's ``HyperCommGrid``, by name. *Local*.

    ValueError for a grid over ranks that are not consecutive: megatron-core computes the ranks of
    a grid from its first one.
    """
    grids = {}
    for name in assembly.layout.parts:
        core = assembly.grid(name)
        if core.layout.members is not None:
            raise ValueError(
                f"the grid {name} is {core.layout!r}, and megatron-core's HyperCommGrid needs "
                f"consecutive ranks: it computes them from the first."
            )
        grids[name] = HyperCommGrid.from_core(core)
    return grids


@contextmanager
def bridges(assembly: Assembly) -> Iterator[None]:
    """Inside, megatron-core's ``BridgeCommunicator`` gets its groups from ``assembly``'s links.

    *Local*; its constructor ends with a barrier of the world, as ever. It creates no group: one
    that no link has is refused, instead of being created while other ranks are elsewhere. Also for
    ``MultiModulePipelineCommunicator``, which makes one for each pair of modules.

    Raises
    ------
    ValueError
        On construction: the assembly has no link between these grids, or its link has other
        leaders or ends.
    """
    from megatron.core.pipeline_parallel import bridge_communicator as upstream

    parts: dict[Key, ProcessGroup | None] = {}
    leaders: dict[Key, ProcessGroup | None] = {}
    for link in assembly.links.values():
        leaving, entering, all_leaders = map(_sorted, link.ends.groups().values())
        parts.setdefault(leaving, link.leaving)
        parts.setdefault(entering, link.entering)
        leaders.setdefault(all_leaders, link.leaders)

    def found(planned: Mapping[Key, ProcessGroup | None], lists: Any) -> ProcessGroup | None:
        key = _sorted(lists)
        if key not in planned:
            ranks = [rank for each in key for rank in each]
            raise ValueError(
                f"rank {dist.get_rank()}: a bridge asks for groups of the ranks {few(ranks)}, and "
                f"no link of the assembly has these; links: {', '.join(assembly.links) or 'none'}. "
                f"Declare a Link between its grids."
            )
        return planned[key]

    class Distributed:
        """``torch.distributed``, but for what creates groups."""

        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        @staticmethod
        def new_subgroups_by_enumeration(lists: Any, **_: Any) -> tuple[Any, list[Any]]:
            return found(parts, lists), []

        @staticmethod
        def new_group(ranks: Sequence[int], **_: Any) -> Any:
            group = found(leaders, [ranks])
            if group is None:
                # Ranks outside get the ranks of a group that is not theirs, as from torch.
                places = {rank: place for place, rank in enumerate(sorted(ranks))}
                of_torch.note_ranks(_OUTSIDE, places)
            return _OUTSIDE if group is None else group

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(upstream, "dist", Distributed()))
        for cache in ("_broadcast_pg_cache", "_bridge_pg_cache"):
            if hasattr(upstream.BridgeCommunicator, cache):
                stack.enter_context(mock.patch.object(upstream.BridgeCommunicator, cache, {}))
        yield


def _sorted(lists: Iterable[Iterable[int]]) -> Key:
    return tuple(sorted(tuple(sorted(ranks)) for ranks in lists))
