"""HyperCommGrid: rank layouts of one span together with the process groups over their dims."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid import of_torch
from hypergrid.agreement.prepare import Agreement
from hypergrid.groups import creation
from hypergrid.groups.pool import GroupPool
from hypergrid.groups.suspension import Suspended
from hypergrid.layout import Dims, RankLayout
from hypergrid.policy import Policy
from hypergrid.topology import Hosts, Topology
from hypergrid.views import BASE, Key, Views, name_of, ordered

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        The grid reaches beyond the world, or the size of the world is not known.

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
        world = world_size() if world is None else world
        if layout.stop > world:
            raise RuntimeError(
                f"{layout} is oversized: it needs {layout.size} ranks from rank "
                f"{layout.offset} on, and the world has {world}. Make the shape or the offset "
                f"smaller, or start more ranks."
            )
        self.layout = layout
        self.backend = backend
        self._views = Views(layout)
        self._pgs: dict[Key, ProcessGroup | None] = {}
        self.pool: GroupPool | None = None
        """The groups that this grid created; None before the first."""

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
        return dict(self._views.layouts)

    @property
    def groups(self) -> dict[str, ProcessGroup | None]:
        """The groups of this rank by ``name``; None for a rank outside the grid."""
        return {name_of(key): group for key, group in self._pgs.items()}

    def __repr__(self) -> str:
        here = ""
        if dist.is_initialized():
            rank = dist.get_rank()
            inside = rank in self.layout
            here = f", rank {rank} at {self.layout.coordinate(rank)}" if inside else ", not here"
        views = "".join(f", view {n}: {x!r}" for n, x in self.views.items() if n != BASE)
        created = sorted(self.groups) or "none"
        return f"HyperCommGrid({self.layout!r}{here}{views}, created: {created})"

    def register_view(
        self,
        name: str,
        shape: Sequence[int],
        dim_names: Sequence[str],
        shared_dims: Sequence[str] | None = None,
    ) -> None:
        """Add another factorisation of the same ranks, for ``view=`` of the other methods. *Local*.

        ValueError if the name is taken, the sizes do not multiply to the grid's size, or a shared
        dim is missing in one of them or has other members.

        Parameters
        ----------
        name : str
            Its name; ``"base"`` is the grid's own.
        shape, dim_names : sequence
            As for the grid; their product is the size of the grid.
        shared_dims : sequence of str, optional
            Dims whose groups are the same in both: the view uses the groups of the base.
        """
        layout = RankLayout(tuple(dim_names), tuple(shape), self.rank_offset)
        self._views.register(name, layout, shared_dims)

    def create_pg(
        self, dims: Dims, *, view: str | None = None, **options: Any
    ) -> ProcessGroup | None:
        """Create the groups over ``dims``; returns the one of this rank, None outside the grid.

        *Collective* over the grid: all its ranks create the same combinations in the same order.

        Parameters
        ----------
        dims : str or iterable of str
            In any order, which makes no difference.
        view : str, optional
            Which factorisation the dims are of; by default the grid's own.
        **options
            ``timeout`` (timedelta), ``pg_options``, ``group_desc``, as for
            ``torch.distributed.new_subgroups_by_enumeration``.

        Raises
        ------
        KeyError
            The combination exists (options cannot be compared, so ``get_pg`` must be used), or
            the view does not.
        ValueError
            A dim that the view does not have.
        """
        key, layout, names = self._views.find(dims, view)
        label = name_of(key)
        if key in self._pgs:
            raise KeyError(
                f"the groups over {label!r} have already been created, and options cannot be "
                f"compared. Call get_pg({_call(key)}) for the group of this rank."
            )
        options["backend"] = self.backend
        rank, made, ranks = dist.get_rank(), list[ProcessGroup](), self.participants()
        if rank in ranks:
            views = {f"view {name}": repr(each) for name, each in self.views.items()}
            proposal = {**views, "backend": self.backend, "groups over": label}
            mine = {label: layout.group(rank, names)} if rank in layout else {}
            everyone = lambda: layout.groups(names).tolist()  # noqa: E731
            with self.agreed(proposal, timeout=options.get("timeout"), ranks=ranks) as pool:
                made = pool.make(label, mine, everyone, dims=tuple(names), **options)
        self._pgs[key] = made[0] if made else None
        return self._pgs[key]

    def participants(self) -> Sequence[int]:
        """The ranks that create this grid's groups together. *Local*.

        Those of the grid; all of the world where members alone cannot create, as under
        ``TORCH_DIST_INIT_BARRIER=1`` or where the default group is bound to a device.
        """
        world = range(dist.get_world_size())
        if self.layout.ranks == world:
            return world
        policy = _policy() if self.pool is None else self.pool.policy
        alone = creation.way_of(creation.expected(policy), self.backend) == "members"
        return self.layout.ranks if alone else world

    def begin(self, policy: Policy, owner: str | None = None) -> GroupPool:
        """Start a pool, for callers that agree on more than dims."""
        owner = owner or f"HyperCommGrid over {self.layout!r}"
        self.pool = GroupPool(Agreement(""), policy, owner)
        self.pool.holder = weakref.ref(self)
        return self.pool

    @contextmanager
    def agreed(
        self,
        proposal: Mapping[str, Any],
        owner: str | None = None,
        timeout: timedelta | None = None,
        ranks: Sequence[int] | None = None,
    ) -> Iterator[GroupPool]:
        """Create groups inside, in the pool it yields, as ``GroupPool.agreed`` does.

        ``ranks`` are ``participants()``, for callers that have asked for them. ``hold`` then tells
        the grid which dims they are over.
        """
        first = self.pool is None
        pool = self.pool or self.begin(_policy(), owner)
        try:
            with pool.agreed(ranks or self.participants(), proposal, timeout):
                yield pool
        except BaseException:
            if first:
                self.pool = None
            raise

    def hold(self, dims: Dims, group: ProcessGroup | None, *, view: str | None = None) -> None:
        """Let ``get_pg(dims)`` return a group created elsewhere, unless it has one already."""
        self._pgs.setdefault(self._views.find(dims, view)[0], group)

    def get_pg(self, dims: Dims, *, view: str | None = None) -> ProcessGroup | None:
        """The group of this rank over ``dims``. *Local*.

        KeyError if ``create_pg`` was not called for this combination, or there is no such view.
        """
        key, _, _ = self._views.find(dims, view)
        if key not in self._pgs:
            raise KeyError(
                f"the groups over {name_of(key)!r} have not been created: call "
                f"create_pg({_call(key)}) on every rank of the grid first. Created so far: "
                f"{sorted(self.groups) or 'none'}."
            )
        return self._pgs[key]

    def name(self, dims: Dims, *, view: str | None = None) -> str:
        """The name of the groups over ``dims``: "dp-cp", or "moe/ep" in a view."""
        return name_of(self._views.find(dims, view)[0])

    def get_rank_enum(self, dims: Dims, *, view: str | None = None) -> list[list[int]]:
        """All groups over ``dims`` as lists of ranks, in the order of creation. *Local*."""
        groups: list[list[int]] = self._views.layout(view).groups(dims).tolist()
        return groups

    def is_current_rank_in_grid(self) -> bool:
        """Whether this rank is one of the grid's."""
        return dist.get_rank() in self.layout

    def coordinate(self, rank: int | None = None, *, view: str | None = None) -> dict[str, int]:
        """Position of ``rank``, by default of this one, on each dim. *Local*, as all below."""
        return self._views.layout(view).coordinate(_rank(rank))

    def rank(self, *, view: str | None = None, **coordinates: int) -> int:
        """The rank at ``coordinates``; a dim left out counts as 0."""
        return self._views.layout(view).rank(**coordinates)

    def dim_size(self, dims: Dims, *, view: str | None = None) -> int:
        """Number of ranks in a group over ``dims``."""
        return self._views.layout(view).dim_size(dims)

    def group_ranks(
        self, dims: Dims, rank: int | None = None, *, view: str | None = None
    ) -> list[int]:
        """The ranks that share a group over ``dims`` with ``rank``, by default this one."""
        return self._views.layout(view).group(_rank(rank), dims)

    def orthogonal(
        self, dims: Dims, rank: int | None = None, *, view: str | None = None
    ) -> list[int]:
        """The ranks of the group over all *other* dims; both groups have one rank in common.

        ``grid.create_pg(grid.layout.orthogonal(dims))`` creates that group.
        """
        layout = self._views.layout(view)
        return layout.group(_rank(rank), layout.orthogonal(dims))

    def shift(
        self, dim: str, by: int = 1, rank: int | None = None, *, view: str | None = None
    ) -> int:
        """The rank ``by`` steps further along ``dim``, around its end: a pipeline's neighbour."""
        return self._views.layout(view).shift(_rank(rank), dim, by)

    def topology(self, hosts: Hosts, *, view: str | None = None) -> Topology:
        """The groups that stay inside a host: ``grid.topology(hosts=8).inside("tp-cp")``."""
        return Topology(self._views.layout(view), hosts)

    def device_mesh(self, dims: Dims | None = None, device_type: str | None = None) -> DeviceMesh:
        """A torch ``DeviceMesh`` over the groups of this grid; creates none. *Local*.

        RuntimeError if this rank is outside the grid.

        Parameters
        ----------
        dims : str or iterable of str, optional
            The dims of the mesh, by default all. KeyError for one without its group, which
            ``create_pg(dim)`` creates. In the mesh the slowest is the first. Over some dims it has
            the ranks that differ on these from this one.
        device_type : str, optional
            Such as "cpu" or "cuda"; by default what the groups' backend serves.
        """
        from torch.distributed.device_mesh import DeviceMesh

        rank = dist.get_rank()
        if rank not in self.layout:
            raise RuntimeError(f"rank {rank} is outside {self.layout!r}: it has no mesh.")
        names = ordered(self.layout, self.layout.dims if dims is None else dims)
        groups = [self.get_pg(dim) for dim in names]
        mesh = torch.tensor(self.layout.group(rank, names), device="cpu")
        return DeviceMesh.from_group(
            groups,  # type: ignore[arg-type]
            device_type or _device_type(groups[0]),
            mesh=mesh.reshape([self.dim_size(dim) for dim in names]),
            mesh_dim_names=tuple(names),
        )

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> HyperCommGrid:
        """The grid of ``mesh``: its dims reversed, with its groups; ``destroy`` keeps them.

        ValueError if the mesh has no names, or its ranks do not ascend without a gap.
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
        """Destroy every group that this grid created; they can then be created again.

        *Local* with ``abort``; else NCCL waits until the other members close theirs, see
        ``GroupPool.destroy``.
        """
        if self.pool is not None:
            self.pool.destroy(abort=abort)
        self.pool = None
        self._pgs.clear()

    def suspend(
        self, how: str = "native", ranks: Sequence[int] | None = None
    ) -> dict[str, Suspended]:
        """Free the device memory of the groups that this grid created, until ``resume``.

        ``get_pg`` returns the same groups meanwhile. *Collective* over ``ranks``, by default
        ``participants()``; arguments, result and errors as for ``GroupPool.suspend``. RuntimeError
        if there are no groups.
        """
        if self.pool is None:
            raise RuntimeError(f"there are no groups to suspend: {self!r}.")
        if ranks is None:
            ranks = self.participants()
        return self.pool.suspend(ranks, how)

    def resume(self) -> None:
        """Let suspended groups work again, as ``GroupPool.resume``."""
        if self.pool is None:
            raise RuntimeError(f"there are no suspended groups: {self!r}.")
        self.pool.resume()


def _policy() -> Policy:
    # Each combination is a group of its own, whatever the environment says about sharing.
    return replace(Policy.resolve(), share="none")


def _rank(rank: int | None) -> int:
    return dist.get_rank() if rank is None else rank


def _call(key: Key) -> str:
    return repr(key) if isinstance(key, str) else f"{'-'.join(key[1])!r}, view={key[0]!r}"


def _device_type(group: ProcessGroup | None) -> str:
    types = of_torch.device_types(group)
    fast = (x for x in types if x != "cpu" and torch.get_device_module(x).is_available())
    return next(fast, "cpu")


def world_size() -> int:
    """Of torch's default group, or else of the environment."""
    if dist.is_initialized():
        return dist.get_world_size()
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    raise RuntimeError(
        "the size of the world is not known: initialise torch.distributed, or set WORLD_SIZE to "
        "lay out a grid without it."
    )
