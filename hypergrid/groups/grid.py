"""HyperCommGrid: rank layouts of one span together with the process groups over their dims."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid.groups.pool import GroupPool
from hypergrid.groups.prepare import Agreement, expected
from hypergrid.layout import Dims, LayoutError, RankLayout
from hypergrid.messages import few
from hypergrid.policy import Policy
from hypergrid.topology import Hosts, Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BASE = "base"
Key = str | tuple[str, tuple[str, ...]]  # of a group: "dp-cp", or the view and its dims


class _View(NamedTuple):
    layout: RankLayout
    shared: tuple[str, ...]  # dims whose groups are the base's


class HyperCommGrid:
    """N-dimensional communication grid.

    One span of ranks, factorised in one way or, with ``register_view``, in several: kinds of
    layers that are laid out differently are views of one grid. Each combination of dims has one
    group.

    Parameters
    ----------
    shape : sequence of int
        The size of each dim, at least 1.
    dim_names : sequence of str
        Names of the dims, fastest first, as in the ``order`` of Megatron.
    rank_offset : int
        First rank of the grid, where it does not start at rank 0.
    backend : str, optional
        Backend of its groups; None means that of the default group.

    Raises
    ------
    ValueError
        Names and sizes that do not match, repeated names, sizes below 1, a negative offset.
    RuntimeError
        The grid reaches beyond the world, or nothing tells the size of the world.

    Examples
    --------
    >>> grid = HyperCommGrid([2, 3, 4, 5], ["tp", "cp", "pp", "dp"])   # doctest: +SKIP
    >>> dp = grid.create_pg("dp")                                      # doctest: +SKIP
    >>> grid.get_pg("dp") is dp                                        # doctest: +SKIP
    True
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
    ) -> None:
        self._start(RankLayout(tuple(dim_names), tuple(shape), rank_offset), backend)

    def _start(self, layout: RankLayout, backend: str | None, world: int | None = None) -> None:
        world = _world_size() if world is None else world
        if layout.ranks.stop > world:
            raise RuntimeError(
                f"{layout} is oversized: it needs {layout.size} ranks from rank "
                f"{layout.offset} on, and the world has {world}. Make the shape or the offset "
                f"smaller, or start more ranks."
            )
        self.layout = layout
        self.backend = backend
        self._views = {BASE: _View(layout, ())}
        self._pgs: dict[Key, ProcessGroup | None] = {}
        self._asked: dict[Key, tuple[list[str], str | None, dict[str, Any]]] = {}
        self._pool: GroupPool | None = None

    @classmethod
    def over(
        cls,
        layout: RankLayout,
        views: Mapping[str, tuple[RankLayout, Sequence[str]]] | None = None,
        backend: str | None = None,
        world_size: int | None = None,
    ) -> HyperCommGrid:
        """A grid over ``layout``, with views given as layouts and the dims that they share.

        ``world_size`` is for a world that is neither torch's nor that of the environment.
        """
        grid = cls.__new__(cls)
        grid._start(layout, backend, world_size)
        for name, (other, shared) in (views or {}).items():
            grid.register_view(name, other.sizes, other.dims, shared)
        return grid

    @property
    def shape(self) -> list[int]:
        """The size of each dim, fastest first."""
        return list(self.layout.sizes)

    @property
    def dim_names(self) -> list[str]:
        """The names of the dims, fastest first."""
        return list(self.layout.dims)

    @property
    def size(self) -> int:
        """Number of ranks in the grid."""
        return self.layout.size

    @property
    def rank_offset(self) -> int:
        """First rank of the grid."""
        return self.layout.offset

    @property
    def views(self) -> dict[str, RankLayout]:
        """The layouts by the names of the views; ``"base"`` is that of the grid itself."""
        return {name: view.layout for name, view in self._views.items()}

    @property
    def groups(self) -> dict[str, ProcessGroup | None]:
        """The groups of this rank by ``name``; None where it is outside the grid."""
        return {_label(key): group for key, group in self._pgs.items()}

    @property
    def pool(self) -> GroupPool | None:
        """The groups that this grid has made, and how; None before the first."""
        return self._pool

    def __repr__(self) -> str:
        here = ""
        if dist.is_initialized():
            rank = dist.get_rank()
            inside = rank in self.layout
            here = f", rank {rank} at {self.layout.coordinate(rank)}" if inside else ", not here"
        others = [f"{name}: {view.layout!r}" for name, view in self._views.items() if name != BASE]
        views = "".join(f", view {other}" for other in others)
        created = sorted(key if isinstance(key, str) else _label(key) for key in self._pgs)
        return f"HyperCommGrid({self.layout!r}{here}{views}, created: {created or 'none'})"

    def register_view(
        self,
        name: str,
        shape: Sequence[int],
        dim_names: Sequence[str],
        shared_dims: Sequence[str] | None = None,
    ) -> None:
        """Add another factorisation of the same ranks, for ``view=`` of the other methods. *Local*.

        Parameters
        ----------
        name : str
            Its name; ``"base"`` is the grid's own.
        shape, dim_names : sequence
            As for the grid; their product is the size of the grid.
        shared_dims : sequence of str, optional
            Dims whose groups are the same in both: the view uses those of the base.

        Raises
        ------
        ValueError
            The name is taken, the sizes do not multiply to the grid's size, or a shared dim is
            missing in one of them or has other members.
        """
        if name in self._views:
            raise ValueError(f"the view {name!r} is already registered. Take another name.")
        layout = RankLayout(tuple(dim_names), tuple(shape), self.rank_offset)
        if layout.size != self.size:
            raise LayoutError(
                f"the view {name!r} has {layout.size} ranks, {layout.sizes} multiplied, and the "
                f"grid has {self.size}. A view lays out the same ranks."
            )
        shared = tuple(shared_dims or ())
        if len(set(shared)) != len(shared):
            raise LayoutError(f"shared dims must not repeat, got {list(shared)}.")
        for dims in (*((dim,) for dim in shared), shared):
            self._check_shared(name, layout, dims)
        self._views[name] = _View(layout, shared)

    def _check_shared(self, name: str, layout: RankLayout, dims: tuple[str, ...]) -> None:
        for where, each in (("the grid", self.layout), (f"the view {name!r}", layout)):
            missing = [dim for dim in dims if dim not in each.dims]
            if missing:
                raise LayoutError(
                    f"shared dim {missing[0]!r} is not a dim of {where}, which has "
                    f"{list(each.dims)}. Leave it out of shared_dims."
                )
        if all(
            (self.layout.dim_size(dim), self.layout.stride(dim))
            == (layout.dim_size(dim), layout.stride(dim))
            for dim in dims
        ):
            return  # the same without looking at a million ranks
        ours = _enumerate(self.layout, _ordered(self.layout, dims))
        theirs = _enumerate(layout, _ordered(layout, dims))
        if not np.array_equal(ours, theirs):
            raise LayoutError(
                f"shared dims {list(dims)} have different members: {ours.tolist()[:4]} in the "
                f"grid and {theirs.tolist()[:4]} in the view {name!r}. Only groups that are the "
                f"same can be shared."
            )

    def create_pg(
        self, dims: Dims, *, view: str | None = None, **options: Any
    ) -> ProcessGroup | None:
        """Create the groups over ``dims``, once, and give that of this rank.

        *Collective* over the grid: all its ranks create the same combinations in the same order.

        Parameters
        ----------
        dims : str or iterable of str
            In any order; it names the same group.
        view : str, optional
            Which factorisation the dims are of; by default the grid's own.
        **options
            ``timeout`` (timedelta), ``pg_options``, ``group_desc``, as for
            ``torch.distributed.new_subgroups_by_enumeration``.

        Returns
        -------
        ProcessGroup or None
            None on a rank outside the grid.

        Raises
        ------
        KeyError
            The combination exists, or the view does not. Options cannot be compared, so a group
            is not handed out again.
        ValueError
            A dim that the view does not have.
        """
        key, layout, ordered = self._find(dims, view)
        if key in self._pgs:
            raise KeyError(
                f"the groups over {_label(key)!r} have already been created, and whether the "
                f"options are the same cannot be told. Call get_pg({_call(key)}) to have them."
            )
        options["backend"] = self.backend
        group = self._pgs[key] = self._create(_label(key), layout, ordered, options)
        self._asked[key] = (ordered, view, options)
        return group

    def renew(self, old: HyperCommGrid) -> None:
        """Create again what was asked of ``old`` by ``create_pg``. *Collective* as that is."""
        for dims, view, options in old._asked.values():
            self.create_pg(dims, view=view, **options)

    def _create(
        self, label: str, layout: RankLayout, ordered: list[str], options: dict[str, Any]
    ) -> ProcessGroup | None:
        rank = dist.get_rank()
        if rank not in self.participants():
            return None
        views = {f"view {name}": repr(layout) for name, layout in self.views.items()}
        proposal = {**views, "backend": self.backend, "groups over": label}
        with self.agreed(proposal, timeout=options.get("timeout")) as pool:
            made = pool.make(
                label,
                {label: layout.group(rank, ordered)} if rank in layout else {},
                lambda: _enumerate(layout, ordered).tolist(),
                dims=tuple(ordered),
                **options,
            )
        return made[0] if made else None

    def participants(self) -> range:
        """The ranks that create this grid's groups together. *Local*.

        Those of the grid; all of the world where members alone cannot create, as under
        ``TORCH_DIST_INIT_BARRIER=1`` or where the default group is bound to a device.
        """
        policy = _policy() if self._pool is None else self._pool.policy
        alone = expected(policy).way_of(self.backend) == "members"
        return self.layout.ranks if alone else range(dist.get_world_size())

    def begin(self, agreement: Agreement, policy: Policy, owner: str | None = None) -> GroupPool:
        """Make groups from here on under ``agreement``. For whoever agreed on more than dims."""
        self._pool = GroupPool(agreement, policy, owner or f"HyperCommGrid over {self.layout!r}")
        return self._pool

    @contextmanager
    def agreed(
        self,
        proposal: Mapping[str, Any],
        owner: str | None = None,
        timeout: timedelta | None = None,
    ) -> Iterator[GroupPool]:
        """Make inside, in the pool given, what the participants have agreed on: all or none.

        As ``GroupPool.agreed``. The grid answers for what it is then told to ``hold``.
        """
        first = self._pool is None
        pool = self._pool or self.begin(Agreement(""), _policy(), owner)
        try:
            with pool.agreed(self.participants(), proposal, timeout):
                yield pool
        except BaseException:
            if first:
                self._pool = None
            raise

    def hold(self, dims: Dims, group: ProcessGroup | None, *, view: str | None = None) -> None:
        """Answer ``get_pg(dims)`` with a group that somebody else made; the first one stays."""
        self._pgs.setdefault(self._find(dims, view)[0], group)

    def get_pg(self, dims: Dims, *, view: str | None = None) -> ProcessGroup | None:
        """The group of this rank over ``dims``. *Local*.

        Raises
        ------
        KeyError
            ``create_pg`` was not called for this combination, or there is no such view.
        """
        key, _, _ = self._find(dims, view)
        if key not in self._pgs:
            created = sorted(_label(known) for known in self._pgs)
            raise KeyError(
                f"the groups over {_label(key)!r} have not been created: call "
                f"create_pg({_call(key)}) on every rank of the grid first. Created so far: "
                f"{created or 'none'}."
            )
        return self._pgs[key]

    def name(self, dims: Dims, *, view: str | None = None) -> str:
        """What the groups over ``dims`` are called: "dp-cp", or "moe/ep" in a view."""
        return _label(self._find(dims, view)[0])

    def get_rank_enum(self, dims: Dims, *, view: str | None = None) -> list[list[int]]:
        """All groups over ``dims`` as lists of ranks, in the order of creation. *Local*."""
        layout = self._view(view).layout
        enumeration: list[list[int]] = _enumerate(layout, _ordered(layout, dims)).tolist()
        return enumeration

    def is_current_rank_in_grid(self) -> bool:
        """Whether this rank is one of the grid's."""
        return dist.get_rank() in self.layout

    def coordinate(self, rank: int | None = None, *, view: str | None = None) -> dict[str, int]:
        """Position of ``rank``, by default of this one, on each dim. *Local*, as all below."""
        return self._view(view).layout.coordinate(_rank(rank))

    def rank(self, *, view: str | None = None, **coordinates: int) -> int:
        """The rank at ``coordinates``; a dim left out counts as 0."""
        return self._view(view).layout.rank(**coordinates)

    def dim_size(self, dims: Dims, *, view: str | None = None) -> int:
        """Number of ranks in a group over ``dims``."""
        return self._view(view).layout.dim_size(dims)

    def group_ranks(
        self, dims: Dims, rank: int | None = None, *, view: str | None = None
    ) -> list[int]:
        """The ranks that share a group over ``dims`` with ``rank``, by default this one."""
        return self._view(view).layout.group(_rank(rank), dims)

    def orthogonal(
        self, dims: Dims, rank: int | None = None, *, view: str | None = None
    ) -> list[int]:
        """The ranks that share a group over all *other* dims: they meet ``dims`` in one rank.

        ``grid.create_pg(grid.layout.orthogonal(dims))`` makes that group.
        """
        layout = self._view(view).layout
        return layout.group(_rank(rank), layout.orthogonal(dims))

    def shift(
        self, dim: str, by: int = 1, rank: int | None = None, *, view: str | None = None
    ) -> int:
        """The rank ``by`` steps further along ``dim``, around its end: a pipeline's neighbour."""
        return self._view(view).layout.shift(_rank(rank), dim, by)

    def source_rank(self, dims: Dims, rank: int | None = None, *, view: str | None = None) -> int:
        """The first rank of the group over ``dims``: who broadcasts in it."""
        return self.group_ranks(dims, rank, view=view)[0]

    def topology(self, hosts: Hosts, *, view: str | None = None) -> Topology:
        """Which groups stay inside a host: ``grid.topology(hosts=8).inside("tp-cp")``."""
        return Topology(self._view(view).layout, hosts)

    def device_mesh(self, dims: Dims | None = None, device_type: str | None = None) -> DeviceMesh:
        """A torch ``DeviceMesh`` over the very groups of this grid. *Local*: makes none.

        Parameters
        ----------
        dims : str or iterable of str, optional
            The dims of the mesh, by default all. Each needs its group: ``create_pg(dim)``.
        device_type : str, optional
            Such as "cpu" or "cuda"; by default what the groups' backend serves.

        Returns
        -------
        DeviceMesh
            Its dims are those of the grid reversed, the slowest first. Over a part of the dims
            it holds the ranks that differ from this one on them.

        Raises
        ------
        KeyError
            The group over a single dim has not been created.
        RuntimeError
            This rank is outside the grid.
        """
        from torch.distributed.device_mesh import DeviceMesh

        if not self.is_current_rank_in_grid():
            raise RuntimeError(
                f"rank {dist.get_rank()} is outside {self.layout!r}: it has no mesh."
            )
        ordered = _ordered(self.layout, self.layout.dims if dims is None else dims)
        groups = [self.get_pg(dim) for dim in ordered]
        members = np.array(self.layout.group(dist.get_rank(), ordered))
        mesh = torch.from_numpy(members.reshape([self.dim_size(dim) for dim in ordered]))
        return DeviceMesh.from_group(
            groups,  # type: ignore[arg-type]
            device_type or _device_type(groups[0]),
            mesh=mesh,
            mesh_dim_names=tuple(ordered),
        )

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> HyperCommGrid:
        """The grid of ``mesh``: its dims reversed, its groups, none made. They stay the mesh's.

        Raises
        ------
        ValueError
            The mesh has no names, or its ranks do not ascend without a gap.
        """
        names, ranks = mesh.mesh_dim_names, mesh.mesh.flatten().tolist()
        if not names:
            raise ValueError("the mesh has no names for its dims: give it mesh_dim_names.")
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            raise ValueError(
                f"the ranks of the mesh are {ranks}; those of a grid ascend without a gap."
            )
        grid = cls(list(mesh.mesh.shape)[::-1], names[::-1], rank_offset=ranks[0])
        for name in names if mesh.get_coordinate() is not None else ():
            grid.hold((name,), mesh.get_group(name))
        return grid

    def destroy(self, *, abort: bool = False) -> None:
        """Close every group of this grid; they can then be created anew.

        *Local* with ``abort``; else NCCL waits until the other members close theirs, see
        ``GroupPool.destroy``.
        """
        if self._pool is not None:
            self._pool.destroy(abort=abort)
        self._pool = None
        self._pgs.clear()

    def _view(self, name: str | None) -> _View:
        if (name or BASE) not in self._views:
            raise KeyError(
                f"there is no view {name!r}: call register_view() first. Known: "
                f"{list(self._views)}."
            )
        return self._views[name or BASE]

    def _find(self, dims: Dims, view: str | None) -> tuple[Key, RankLayout, list[str]]:
        """The key of a group, and the layout and dims that enumerate it."""
        layout, shared = self._view(view)
        ordered = _ordered(layout, dims)
        if view in (None, BASE) or set(ordered) <= set(shared):
            ordered = _ordered(self.layout, ordered)
            return "-".join(ordered), self.layout, ordered
        return (str(view), tuple(ordered)), layout, ordered


def validate_grids(
    grids: Iterable[HyperCommGrid | RankLayout], world_size: int | None = None
) -> None:
    """Refuse grids that are declared together and do not divide the world between them. *Local*.

    Any two must lay out the same ranks or have none in common, and each rank of the world must
    be in one.

    Raises
    ------
    ValueError
        Names the ranks in conflict, or those in no grid.
    """
    layouts = [grid if isinstance(grid, RankLayout) else grid.layout for grid in grids]
    world = range(_world_size() if world_size is None else world_size)
    for i, one in enumerate(layouts):
        for other in layouts[:i]:
            both = sorted(set(one.ranks) & set(other.ranks))
            if both and one.ranks != other.ranks:
                raise ValueError(
                    f"{other!r} and {one!r} overlap on ranks {few(both)} only: grids that are "
                    f"declared together have all ranks in common or none. Change an offset or a "
                    f"shape."
                )
    covered = {rank for layout in layouts for rank in layout.ranks}
    for ranks, fault in (
        (sorted(set(world) - covered), "are in no grid"),
        (sorted(covered - set(world)), f"are in a grid and outside the world of {len(world)}"),
    ):
        if ranks:
            raise ValueError(
                f"ranks {few(ranks)} {fault}: {', '.join(map(repr, layouts)) or 'no grids'}."
            )


def _policy() -> Policy:
    # Each combination was asked for by itself, whatever the environment says of sharing.
    return replace(Policy.resolve(), share="none")


def _rank(rank: int | None) -> int:
    return dist.get_rank() if rank is None else rank


def _label(key: Key) -> str:
    return key if isinstance(key, str) else f"{key[0]}/{'-'.join(key[1])}"


def _call(key: Key) -> str:
    return repr(key) if isinstance(key, str) else f"{'-'.join(key[1])!r}, view={key[0]!r}"


def _ordered(layout: RankLayout, dims: Dims) -> list[str]:
    return [layout.dims[i] for i in sorted(layout.axes(dims), reverse=True)]


def _enumerate(layout: RankLayout, ordered: list[str]) -> np.ndarray:
    # As upstream: members run through the dims given with the last one fastest.
    return layout.groups(ordered[::-1], as_given=True)


def _device_type(group: ProcessGroup | None) -> str:
    types: list[str] = [device.type for device in getattr(group, "_device_types", [])]
    fast = [
        each for each in types if each != "cpu" and torch.get_device_module(each).is_available()
    ]
    return (fast or ["cpu"])[0]


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    raise RuntimeError(
        "the size of the world is not known: initialise torch.distributed, or set WORLD_SIZE to "
        "lay out a grid without it."
    )
