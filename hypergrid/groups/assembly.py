"""Assembly: the live groups of several grids and of the links between them, created together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid.agreement.prepare import Agreement, telling_others
from hypergrid.agreement.store import check_timeout
from hypergrid.assembly import AssemblyPlan, Parts, link_rows
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.groups.pool import GroupPool
from hypergrid.layout import LayoutError
from hypergrid.links import Ends, Link
from hypergrid.messages import shown
from hypergrid.plan import GroupPlan
from hypergrid.policy import Policy


@runtime_checkable
class Creates(Protocol):
    """A part that creates its groups itself, inside the assembly's two-phase commit."""

    def proposal(self) -> dict[str, Any]:
        """The values that the ranks compare first, besides the plan."""

    def create(self, agreement: Agreement, prefix: str) -> Any:
        """Create its groups on this rank; called on every rank of the world.

        What it returns has ``destroy(abort=...)`` and ``grid``. If this raises, it leaves nothing.
        ``prefix`` begins the labels.
        """


@dataclass(frozen=True)
class LinkGroups:
    """A link on this rank: its groups, and whom this rank sends to and receives from.

    Attributes
    ----------
    ends : Ends
        The link as arithmetic, the same on every rank.
    leaving, entering : ProcessGroup or None
        The part of this rank on either side, over which its leader broadcasts; None outside.
    leaders : ProcessGroup or None
        All leaders, who send to each other; None on other ranks.
    """

    ends: Ends
    leaving: ProcessGroup | None
    entering: ProcessGroup | None
    leaders: ProcessGroup | None

    @property
    def sends_to(self) -> list[int]:
        """The leaders that this rank sends to."""
        return self.ends.sends_to(dist.get_rank())

    @property
    def receives_from(self) -> list[int]:
        """The leaders that this rank receives from."""
        return self.ends.receives_from(dist.get_rank())


class Assembly:
    """Several grids and the links between them, whose groups are created together.

    Encoders with sizes of their own beside a language model, pipelines whose stages differ in size,
    models on the same ranks: each is a grid, and what goes from one to another is a link. The
    constructor plans, and ``create`` creates: all ranks of the world agree once, and then create
    the groups of all grids and links in one order, by members alone where that is possible.
    So no rank waits for a group that another has not planned, and none is created later.

    Parameters
    ----------
    parts, links
        As for ``hypergrid.AssemblyPlan``, equal on every rank.
    timeout : timedelta, optional
        For ranks to arrive, and of the links' groups; by default 30 minutes, and torch's.

    Raises
    ------
    LayoutError
        As ``AssemblyPlan``. Where torch.distributed is initialised, the other ranks are told, and
        raise in ``create``; to plan on one rank alone, use ``AssemblyPlan``.

    Examples
    --------
    >>> assembly = Assembly({"vision": GridPart({"dp": 4}, range(4)),       # doctest: +SKIP
    ...                      "text": GridPart({"tp": 2, "pp": 2}, range(4, 8))},
    ...                     [Link("vision", "text")]).create()
    >>> assembly["text"].get_pg("tp")                                       # doctest: +SKIP
    """

    def __init__(
        self, parts: Parts, links: Iterable[Link] = (), *, timeout: timedelta | None = None
    ) -> None:
        with telling_others(lambda: range(dist.get_world_size())):
            self.layout = AssemblyPlan(parts, links)
            """Grids and links as arithmetic."""
            self.plan: GroupPlan = self.layout.plan
            """All groups as data; ``plan.to_json()`` is for the command line."""
            check_timeout(timeout)
        self._timeout = timeout
        self._made: dict[str, Any] = {}
        self._links: dict[str, LinkGroups] = {}
        self.pool: GroupPool | None = None
        """The groups of the links; those of a grid are in the pool of the grid."""

    def __repr__(self) -> str:
        grids = ", ".join(f"{name}: {layout!r}" for name, layout in self.layout.layouts.items())
        links = ", ".join(f"{name} ({each.kind})" for name, each in self.layout.ends.items())
        created = "" if self.pool else ", not created"
        return f"Assembly({grids}; links: {links or 'none'}{created})"

    def create(self) -> Assembly:
        """Create the groups of all grids and links; returns this assembly. *Collective* over the
        world, also for ranks that are in no grid.

        Raises
        ------
        RuntimeError
            They exist already, or a grid reaches beyond the world.
        AgreementError, CreationError
            Ranks declared different assemblies, or a group could not be created; none is left.
        """
        world = range(dist.get_world_size())
        with telling_others(lambda: world):
            if self.pool is not None:
                raise RuntimeError(f"rank {dist.get_rank()} has created {self!r} already.")
            for name, layout in self.layout.layouts.items():
                if layout.stop > len(world):
                    raise RuntimeError(
                        f"the grid {name} is {layout!r}, and the world has {len(world)} ranks. "
                        f"Give it other ranks, or start more."
                    )
            proposal = self._proposal()
        policy = replace(Policy.resolve(), share="none")
        pool = GroupPool(Agreement(""), policy, f"links of {self!r}")
        pool.holder = weakref.ref(self)
        try:
            with pool.agreed(world, proposal, self._timeout):
                for name in self.layout.parts:
                    self._made[name] = self._create(name, pool.agreement, policy)
                for name, ends in self.layout.ends.items():
                    self._links[name] = self._link(pool, ends)
        except BaseException:
            self._destroy_parts(abort=True)
            raise
        self.pool = pool
        return self

    def _proposal(self) -> dict[str, Any]:
        """The values that the ranks compare: each grid and link by its name, and the whole plan."""
        grids = {f"the grid {name}": repr(x) for name, x in self.layout.layouts.items()}
        links = {f"the link {name}": repr(x.link) for name, x in self.layout.ends.items()}
        groups = [row.label for row in self.plan.rows]
        options = {
            f"{key} of {row.label}": value
            for row in self.plan.rows
            for key, value in (("backend", row.backend), ("timeout", row.timeout))
            if value is not None
        }
        said = {
            f"{key} of {name}": value
            for name, part in self.layout.parts.items()
            if isinstance(part, Creates)
            for key, value in part.proposal().items()
        }
        known = {**grids, **links, **options, **said, "groups": groups}
        return {**known, "plan": self.plan.fingerprint()}

    def _create(self, name: str, agreement: Agreement, policy: Policy) -> Any:
        part, prefix = self.layout.parts[name], f"{name}/"
        # Groups of two grids may have the same label and ranks.
        own = replace(agreement, epoch=f"{agreement.epoch}/{name}")
        if isinstance(part, Creates):
            return part.create(own, prefix)
        layout = self.layout.layouts[name]
        rows = part.rows
        plan = GroupPlan({"": layout}, tuple(rows))
        grid = HyperCommGrid.over(layout, backend=rows[0].backend if rows else None)
        pool = grid.begin(own, policy, f"the grid {name} of an assembly, {layout!r}", prefix)
        try:
            for row in rows:
                made = pool.make_row(plan, row)
                grid.hold(row.dims, made[0] if made else None)
        except BaseException:
            grid.destroy(abort=True)
            raise
        return grid

    def _link(self, pool: GroupPool, ends: Ends) -> LinkGroups:
        groups = [pool.make_row(self.plan, row, self._timeout) for row in link_rows(ends)]
        return LinkGroups(ends, *(made[0] if made else None for made in groups))

    def __getitem__(self, name: str) -> Any:
        """The object made of a grid: a ``HyperCommGrid``, or the result of its part, such as a
        ``ParallelState``; of a pipeline, the list of its stages'. *Local*.

        KeyError for an unknown name, RuntimeError before ``create``.
        """
        if name in self.layout.pipelines:
            return [self[stage] for stage in self.layout.pipelines[name]]
        if name not in self.layout.parts:
            known = ", ".join([*self.layout.parts, *self.layout.pipelines])
            raise KeyError(f"there is no grid {shown(name)}; there are {known}.")
        if name not in self._made:
            raise RuntimeError(f"call create() on every rank before asking for {name}: {self!r}.")
        return self._made[name]

    def grid(self, name: str) -> HyperCommGrid:
        """The grid of that name, also where a state was made of it. *Local*; errors as above."""
        made = self[name]
        if isinstance(made, list):
            raise LayoutError(f"{name} is a pipeline of {len(made)} grids: ask for a stage.")
        grid: HyperCommGrid = made if isinstance(made, HyperCommGrid) else made.grid
        return grid

    def link(self, name: str, target: str | None = None) -> LinkGroups:
        """A link by its name, or by source and target. *Local*; errors as for a grid."""
        name = name if target is None else f"{name}->{target}"
        if name not in self.layout.ends:
            known = ", ".join(self.layout.ends) or "none"
            raise KeyError(f"there is no link {shown(name)}; links: {known}.")
        if name not in self._links:
            raise RuntimeError(f"call create() on every rank before asking for {name}: {self!r}.")
        return self._links[name]

    @property
    def links(self) -> dict[str, LinkGroups]:
        """All links by name; empty before ``create``."""
        return dict(self._links)

    def destroy(self, *, abort: bool = False) -> None:
        """Destroy every group of the assembly; it can then be created again. Idempotent.

        *Local* with ``abort``; else NCCL waits until the other members destroy theirs.
        """
        self._destroy_parts(abort=abort)
        if self.pool is not None:
            self.pool.destroy(abort=abort)
        self.pool = None

    def _destroy_parts(self, *, abort: bool) -> None:
        self._links.clear()
        for made in self._made.values():
            made.destroy(abort=abort)
        self._made.clear()
