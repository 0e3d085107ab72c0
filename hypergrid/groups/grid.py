"""HyperCommGrid: rank layouts of one span together with the process groups over their dims."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid.groups import creation, meshes
from hypergrid.groups.pool import GroupPool
from hypergrid.groups.suspension import Suspended
from hypergrid.layout import Dims, LayoutError, RankLayout, ordered
from hypergrid.messages import Sentence
from hypergrid.policy import Policy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BASE = "base"  # the view that is the grid's own layout
Key: TypeAlias = str | tuple[str, tuple[str, ...]]  # of a group: "dp-cp", or the view and its dims


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
    world_size : int, optional
        Of a world that is neither torch's nor that of the environment.

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
        world_size: int | None = None,
    ) -> None:
        layout = RankLayout(tuple(dim_names), tuple(shape), rank_offset)
        if world_size is None:
            world_size = known_world_size()
        if layout.stop > world_size:
            raise RuntimeError(
                f"Grid shape {list(layout.sizes)} is over sized: it needs {layout.size} ranks from "
                f"rank {layout.offset} on, and the world has {world_size}. Make the shape or the "
                f"offset smaller, or start more ranks."
            )
        self.layout = layout
        self.backend = backend
        self._layouts = {BASE: layout}
        # For each view the dims whose groups are those of the base.
        self._shared: dict[str, tuple[str, ...]] = {BASE: ()}
        self._pgs: dict[Key, ProcessGroup | None] = {}
        self.pool: GroupPool | None = None
        """The groups that this grid created; None before the first."""

    @classmethod
    def over(
        cls,
        layout: RankLayout,
        backend: str | None = None,
        world_size: int | None = None,
    ) -> HyperCommGrid:
        """A grid over ``layout``."""
        return cls(layout.sizes, layout.dims, layout.offset, backend, world_size)

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
        return dict(self._layouts)

    @property
    def groups(self) -> dict[str, ProcessGroup | None]:
        """The groups of this rank by ``name``; None for a rank outside the grid."""
        return {name_of(key): group for key, group in self._pgs.items()}

    def __repr__(self) -> str:
        parts = [repr(self.layout)]
        if dist.is_initialized():
            rank = dist.get_rank()
            if rank in self.layout:
                place = self.layout.trimmed.coordinate(rank)
                parts.append(f"rank {rank} at {place}")
            else:
                parts.append("not here")
        for name, layout in self._layouts.items():
            if name != BASE:
                parts.append(f"view {name}: {layout!r}")
        parts.append(f"created: {sorted(self.groups) or 'none'}")
        return f"HyperCommGrid({', '.join(parts)})"

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
        base = self.layout
        layout = RankLayout(tuple(dim_names), tuple(shape), base.offset)
        shared = tuple(shared_dims or ())
        if name in self._layouts:
            raise ValueError(f"View {name!r} is already registered. Choose another name.")
        if layout.size != base.size:
            raise LayoutError(
                f"View {name!r} has {layout.size} ranks, {layout.sizes} multiplied, but the grid "
                f"size is {base.size}. A view lays out the same ranks."
            )
        if len(set(shared)) != len(shared):
            raise LayoutError(
                f"View {name!r} has duplicate shared_dims: {list(shared)}. Name each dim once."
            )
        views = {"the base view": base.dims, "the view's dim_names": layout.dims}
        for dim in shared:
            for where, dims in views.items():
                if dim not in dims:
                    raise LayoutError(
                        f"Shared dim {dim!r} of view {name!r} is not in {where} {list(dims)}. "
                        f"Leave it out of shared_dims."
                    )
            # The first group has the size and the stride, which decide all groups, also over
            # several such dims.
            in_base = base.group(base.offset, (dim,))
            in_view = layout.group(base.offset, (dim,))
            if in_base != in_view:
                raise LayoutError(
                    f"Shared dim {dim!r} has different membership: the first group is {in_base} in "
                    f"the grid and {in_view} in view {name!r}. Only groups that are the same can "
                    f"be shared."
                )
        self._layouts[name] = layout
        self._shared[name] = shared

    def _layout(self, view: str | None) -> RankLayout:
        """The layout of a view, by default of the base. KeyError if there is none."""
        name = view or BASE
        if name not in self._layouts:
            known = list(self._layouts)
            raise KeyError(
                Sentence(
                    f"View {name!r} is not registered: call register_view() first. Known: {known}."
                )
            )
        return self._layouts[name]

    def _find(self, dims: Dims, view: str | None) -> tuple[Key, RankLayout, list[str]]:
        """The key of the groups over ``dims``, and the layout and dims that enumerate them."""
        name = view or BASE
        layout = self._layout(name)
        names = ordered(layout, dims)
        if name != BASE and not set(self._shared[name]).issuperset(names):
            return (name, tuple(names)), layout, names
        # Of a view all are shared: these groups are those of the base, in its order.
        names = ordered(self.layout, names)
        return "-".join(names), self.layout, names

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
            The combination exists, whatever the options (``get_pg`` gives the group), or the view
            does not.
        ValueError
            A dim that the view does not have.
        """
        key, layout, names = self._find(dims, view)
        self._check_is_new(key)
        label = name_of(key)
        options["backend"] = self.backend
        rank = dist.get_rank()
        ranks = self.participants()
        groups: list[ProcessGroup] = []
        if rank in ranks:
            proposal = {"backend": self.backend, "groups over": label}
            for name, view_layout in self._layouts.items():
                proposal[f"view {name}"] = repr(view_layout)
            members = {}
            if rank in layout:
                members[label] = layout.group(rank, names)

            timeout = options.get("timeout")
            with self.two_phase_commit(proposal, timeout=timeout, ranks=ranks) as pool:
                groups = pool.make(
                    label,
                    members,
                    lambda: layout.groups(names).tolist(),
                    dims=tuple(names),
                    **options,
                )
        # A rank outside the grid takes part where every rank must, and has no group.
        group = groups[0] if groups else None
        self._pgs[key] = group
        return group

    def participants(self) -> Sequence[int]:
        """The ranks that create this grid's groups together. *Local*.

        Those of the grid; all of the world where members alone cannot create, as under
        ``TORCH_DIST_INIT_BARRIER=1`` or where the default group is bound to a device.
        """
        world = range(dist.get_world_size())
        if self.layout.ranks == world:
            return world
        policy = _policy()
        if self.pool is not None:
            policy = self.pool.policy
        expected = creation.expected(policy)
        way = creation.way_of(expected, self.backend, self.size)
        if way == "members":
            return self.layout.ranks
        return world

    def keep(self, pool: GroupPool) -> None:
        """Own the groups of ``pool`` from now on: they are destroyed with the grid's own."""
        self.pool = pool
        pool.holder = weakref.ref(self)

    @contextmanager
    def two_phase_commit(
        self,
        proposal: Mapping[str, Any],
        owner: str | None = None,
        timeout: timedelta | None = None,
        ranks: Sequence[int] | None = None,
    ) -> Iterator[GroupPool]:
        """Create groups inside, in the pool it yields, as ``GroupPool.two_phase_commit`` does.

        ``ranks`` are ``participants()``, for callers that have asked for them. ``hold`` then tells
        the grid which dims they are over.
        """
        pool = self.pool
        is_first = pool is None
        if pool is None:
            pool = GroupPool(_policy(), owner or f"HyperCommGrid over {self.layout!r}")
            self.keep(pool)
        try:
            with pool.two_phase_commit(ranks or self.participants(), proposal, timeout):
                yield pool
        except BaseException:
            if is_first:
                pool.destroy(abort=True)  # a Ctrl-C may come when all ranks have their groups
                self.pool = None
            raise

    def hold(self, dims: Dims, group: ProcessGroup | None, *, view: str | None = None) -> None:
        """Let ``get_pg(dims)`` return a group created elsewhere, unless it has one already."""
        self._pgs.setdefault(self._find(dims, view)[0], group)

    def get_pg(self, dims: Dims, *, view: str | None = None) -> ProcessGroup | None:
        """The group of this rank over ``dims``. *Local*.

        KeyError if ``create_pg`` was not called for this combination, or there is no such view.
        """
        key, _, _ = self._find(dims, view)
        return self._created(key)

    def _check_is_new(self, key: Key) -> None:
        if key in self._pgs:
            raise KeyError(
                Sentence(
                    f"Process group {_in_words(key)} has already been created, perhaps with "
                    f"other options. Call get_pg({_call(key)}) for the group of this rank."
                )
            )

    def _created(self, key: Key) -> ProcessGroup | None:
        if key not in self._pgs:
            raise KeyError(
                Sentence(
                    f"Process group for {_in_words(key)} hasn't been created: call "
                    f"create_pg({_call(key)}) on every rank of the grid first. Created so far: "
                    f"{sorted(self.groups) or 'none'}."
                )
            )
        return self._pgs[key]

    def get_rank_enum(self, dims: Dims, *, view: str | None = None) -> list[list[int]]:
        """All groups over ``dims`` as lists of ranks, in the order of creation. *Local*."""
        layout = self._layout(view)
        groups: list[list[int]] = layout.groups(dims).tolist()
        return groups

    def is_current_rank_in_grid(self) -> bool:
        """Whether this rank is one of the grid's."""
        return dist.get_rank() in self.layout

    def coordinate(self, rank: int | None = None, *, view: str | None = None) -> dict[str, int]:
        """Position of ``rank``, by default of this one, on each dim. *Local*.

        What else follows from the layout, ``grid.layout`` and ``grid.views[...]`` have.
        """
        if rank is None:
            rank = dist.get_rank()
        return self._layout(view).coordinate(rank)

    def device_mesh(
        self,
        dims: Dims | None = None,
        device_type: str | None = None,
        *,
        view: str | None = None,
        flattened: Mapping[str, Dims] | None = None,
    ) -> DeviceMesh:
        """A torch ``DeviceMesh`` over the groups of this grid; creates none. *Local*.

        In the mesh the slowest dim is the first. Over some dims it has the ranks that differ on
        these from this one. Dims of it that are flattened use the grid's group over them, if it has
        one; with a torch that cannot, which ``hypergrid doctor`` says, they have one more group.

        Parameters
        ----------
        dims : str or iterable of str
            The dims of the mesh, by default all. One of several names may join dims of the grid:
            ``["replicate", "shard-cp"]`` are two dims of the mesh.
        device_type : str, optional
            Such as "cpu" or "cuda"; by default the accelerator that is there if the groups serve
            it, else "cpu".
        view : str, optional
            Which factorisation the dims are of; by default the grid's own.
        flattened : mapping of str to dims, optional
            Further names of such flattened dims of the mesh: ``{"fsdp": "shard-cp"}``. Without
            one it is torch's, "shard_cp".

        Raises
        ------
        RuntimeError
            This rank is outside the grid.
        KeyError
            There is no such view, or no group over one of the dims: ``create_pg(dim)`` creates it.
        ValueError
            A dim that the view does not have, or that is named twice; dims to flatten that the
            mesh does not have, or has in another order than the group.

        Examples
        --------
        >>> grid = HyperCommGrid([2, 2, 2], ["cp", "shard", "replicate"])  # doctest: +SKIP
        >>> grid.device_mesh(["replicate", "shard-cp"]).mesh.tolist()      # doctest: +SKIP
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        """
        layout = self._layout(view)
        if dist.get_rank() not in layout:
            raise RuntimeError(f"rank {dist.get_rank()} is outside {layout!r}: it has no mesh.")

        asked_for = flattened or {}
        mesh_dims = meshes.joined_dims(layout, dims)
        groups = [self.get_pg(joined, view=view) for joined in mesh_dims.values()]
        mesh = meshes.over(layout, mesh_dims, groups, device_type)
        for name, parts in meshes.flattened_dims(mesh_dims, asked_for).items():
            joined = meshes.join(mesh_dims, parts)
            key, _, _ = self._find(joined, view)
            # Without it torch creates one more group, when a caller flattens these dims.
            if name in asked_for or self._pgs.get(key) is not None:
                meshes.flatten(mesh, name, parts, self._created(key), must=name in asked_for)
        return mesh

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> HyperCommGrid:
        """The grid of ``mesh``: its dims reversed, with its groups; ``destroy`` keeps them.

        ValueError if the mesh has no names, or its ranks do not ascend without a gap.
        """
        names = mesh.mesh_dim_names
        ranks = mesh.mesh.flatten().tolist()
        if not names:
            raise ValueError("the mesh has no names for its dims: give it mesh_dim_names.")
        first = ranks[0]
        if ranks != list(range(first, first + len(ranks))):
            raise ValueError(
                f"the ranks of the mesh are {ranks}; those of a grid ascend without a gap."
            )
        # In a mesh the last dim is the fastest, in a grid the first.
        sizes = list(mesh.mesh.shape)[::-1]
        grid = cls(sizes, names[::-1], rank_offset=first)
        if mesh.get_coordinate() is not None:  # this rank is in the mesh
            for name in names:
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

    def suspend(self, ranks: Sequence[int] | None = None) -> dict[str, Suspended]:
        """Free the device memory of the groups that this grid created, until ``resume``.

        ``get_pg`` returns the same groups meanwhile. *Collective* over ``ranks``, by default
        ``participants()``; result and errors as for ``GroupPool.suspend``. RuntimeError
        if there are no groups.
        """
        if self.pool is None:
            raise RuntimeError(f"there are no groups to suspend: {self!r}.")
        if ranks is None:
            ranks = self.participants()
        return self.pool.suspend(ranks)

    def resume(self) -> None:
        """Let suspended groups work again, as ``GroupPool.resume``."""
        if self.pool is None:
            raise RuntimeError(f"there are no suspended groups: {self!r}.")
        self.pool.resume()


def name_of(key: Key) -> str:
    """Of the groups with this key: ``"dp-cp"``, or ``"moe/ep"`` in a view."""
    if isinstance(key, str):
        return key
    view, dims = key
    return f"{view}/{'-'.join(dims)}"


def _in_words(key: Key) -> str:
    """Of the groups with this key, in stock's words: ``'dp-cp'``, or ``'ep' for view 'moe'``."""
    if isinstance(key, str):
        return repr(key)
    view, dims = key
    return f"{'-'.join(dims)!r} for view {view!r}"


def _call(key: Key) -> str:
    """The arguments that ask for the groups with this key."""
    if isinstance(key, str):
        return repr(key)
    view, dims = key
    return f"{'-'.join(dims)!r}, view={view!r}"


def _policy() -> Policy:
    # Each combination is a group of its own, whatever the environment says about sharing.
    return replace(Policy.resolve(), share="none")


def known_world_size() -> int:
    """Of torch's default group, or else of the environment."""
    if dist.is_initialized():
        return dist.get_world_size()
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    raise RuntimeError(
        "Cannot determine world size: initialise torch.distributed, or set WORLD_SIZE to lay out a "
        "grid without it."
    )
