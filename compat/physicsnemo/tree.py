"""Groups described as a tree (model-parallel = spatial x channel), turned into dims. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from numbers import Integral
from typing import Generic, TypeVar

from hypergrid.layout import Dims, LayoutError, RankLayout, span_of
from hypergrid.messages import shown
from hypergrid.topology import Hosts, Topology

OPEN = -1  # the size of a leaf that takes what is left


class TreeError(LayoutError, AssertionError):
    """An invalid tree, or one that cannot be laid out; physicsnemo raises AssertionError."""


@dataclass(eq=False)
class GroupNode:
    """One group of the tree.

    Parameters
    ----------
    name : str
        Unique in the tree.
    size : int, optional
        Number of ranks; -1 on one leaf for the rest. Sizes of parents follow from the leaves.
    orthogonal_group : str, optional
        Name for the group over all dims of the world that this one is not over.
    within : {"host"}, optional
        No group of this node may cross hosts.
    """

    name: str
    size: int | None = None
    orthogonal_group: str | None = None
    within: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TreeError(f"a group's name must be a text, got {shown(self.name)}.")
        if self.size is not None:
            self.size = _check_size(self.name, self.size)
        if self.within not in (None, "host"):
            raise TreeError(
                f"invalid within={shown(self.within)} for {self.name!r}; allowed: 'host'. Leave "
                f"it out for a group that may cross hosts."
            )


Node = TypeVar("Node", bound=GroupNode)


class GroupTree(Generic[Node]):
    """A model's groups as a tree: sizes are set on leaves, those of parents are products.

    *Declared order* is depth first, siblings as they were added: the order of the dims of
    ``place``. The first leaf is the fastest dim, so its ranks are neighbours, as in physicsnemo.
    ``node`` is the root.

    Examples
    --------
    >>> tree = GroupTree(GroupNode("model", orthogonal_group="data"))
    >>> tree.add_node(GroupNode("spatial"), parent="model")
    >>> tree.add_node(GroupNode("channel"), parent="model")
    >>> tree.set_leaf_group_sizes({"channel": 4, "spatial": 2})
    >>> tree.get_node("model").size
    8
    >>> placed = tree.place(world_size=32)
    >>> placed.layout
    RankLayout(spatial=2-channel=4-data=4, ranks 0..31)
    >>> placed.dims("model"), placed.orthogonal("model")
    (('spatial', 'channel'), ('data',))
    """

    def __init__(self, node: Node) -> None:
        self.root = node
        self._nodes: dict[str, Node] = {node.name: node}
        self._children: dict[str, list[str]] = {node.name: []}

    @property
    def root_id(self) -> str:
        """The name of the root."""
        return self.root.name

    def __str__(self) -> str:
        return "\n".join(self._drawn(self.root_id, ""))

    def _drawn(self, name: str, indent: str) -> Iterator[str]:
        size = self._nodes[name].size
        line = f"{indent}{name}"
        if size is not None:
            line += f"={size}"
        yield line
        for child in self._children[name]:
            yield from self._drawn(child, indent + "  ")

    def add_node(self, node: Node, parent: str | Node) -> None:
        """Add ``node`` as the last child of ``parent``, a node or its name.

        TreeError if the name is taken, or the tree has no such parent.
        """
        parent_name = parent.name if isinstance(parent, GroupNode) else parent
        self.get_node(parent_name)  # refuses an unknown one
        if node.name in self._nodes:
            raise TreeError(f"the tree has a group {node.name!r} already. Take another name.")
        self._nodes[node.name] = node
        self._children[node.name] = []
        self._children[parent_name].append(node.name)

    def get_node(self, name: str) -> Node:
        """The node of that name. Raises TreeError if there is none."""
        if name not in self._nodes:
            raise TreeError(f"the tree has no group {shown(name)}. It has {list(self._nodes)}.")
        return self._nodes[name]

    def children(self, name: str) -> list[str]:
        """The names of the children of ``name``, as they were added."""
        return list(self._children[self.get_node(name).name])

    def leaf_groups(self) -> list[str]:
        """The names of all leaves in the order in which they were added, as in physicsnemo."""
        return [name for name in self._nodes if not self._children[name]]

    def breadth_first(self) -> list[str]:
        """All names, level by level."""
        names = [self.root_id]
        for name in names:
            names.extend(self._children[name])
        return names

    def set_leaf_group_sizes(
        self, group_sizes: Mapping[str, int], update_parent_sizes: bool = True
    ) -> None:
        """Set sizes of leaves; none if one is refused.

        TreeError on an unknown group, not a leaf, an invalid size, a second -1, a missing size.

        Parameters
        ----------
        group_sizes : mapping of name to size
            -1 for one leaf of the tree: it takes the rest of the world.
        update_parent_sizes : bool
            Also compute the sizes of the parents, for which all leaves need a size.
        """
        for name in group_sizes:
            if self.children(name):
                raise TreeError(
                    f"{name!r} is not a leaf: its size follows from {self.children(name)}. Set "
                    f"theirs."
                )
        checked = {}
        for name, size in group_sizes.items():
            checked[name] = _check_size(name, size)
        self._check_leaves(checked, complete=update_parent_sizes)
        for name, size in checked.items():
            self._nodes[name].size = size
        if update_parent_sizes:
            self.update_parent_sizes()

    def update_parent_sizes(self, verbose: bool = False) -> int:
        """Set each parent's size to the product of its children's; returns that of the root.

        It is -1 above a leaf of size -1. Raises TreeError if a leaf has no size.
        """
        self._check_leaves()
        # From the leaves upwards.
        for name in reversed(self.breadth_first()):
            sizes = [self._nodes[child].size or 0 for child in self._children[name]]
            if not sizes:
                continue
            size = prod(sizes)
            if OPEN in sizes:
                size = OPEN
            node = self._nodes[name]
            if verbose and node.size != size:
                print(f"size of {name}: {node.size} -> {size}")
            node.size = size
        assert self.root.size is not None
        return self.root.size

    def place(self, world_size: int | None = None, *, hosts: Hosts | None = None) -> Placement:
        """Lay the tree out over ``world_size`` ranks. *Local*; the tree is not changed.

        Parameters
        ----------
        world_size : int, optional
            By default the size of the root. The rest of a larger world is the slowest dim, named
            by the root's ``orthogonal_group``, else ``"outside"``. If the size of a parent is a
            multiple of its children's, the rest is a dim ``"rest of NAME"``.
        hosts : optional
            As for ``~hypergrid.topology.Topology``.

        Raises
        ------
        TreeError
            A leaf without a size, sizes that do not divide the world, an orthogonal group whose
            name already means other ranks, a group with ``within="host"`` that crosses hosts.
        """
        self._check_leaves()
        sizes: dict[str, int] = {}
        spans: dict[str, tuple[str, ...]] = {}
        self._lay(self.root_id, sizes, spans)
        if world_size is not None:
            total = _check_size("the world", world_size, least=1)
            _close("the world", total, list(sizes), sizes, self._outside_dim)
        for dim, size in sizes.items():
            if size == OPEN:
                raise TreeError(
                    f"{dim!r} takes the rest of the ranks, whose number is not known: give "
                    f"world_size."
                )
        layout = RankLayout(tuple(sizes), tuple(sizes.values()))
        topology = None
        if hosts is not None:
            topology = Topology(layout, hosts)
        placement = Placement(layout, spans, topology)
        for name in self.breadth_first():
            orthogonal = self._nodes[name].orthogonal_group
            if orthogonal is not None:
                spans[orthogonal] = _orthogonal(placement, name, orthogonal)
        for name, node in self._nodes.items():
            if node.within is not None:
                _check_within_host(placement, name)
        return placement

    def _check_leaves(self, changed: Mapping[str, int] = {}, complete: bool = True) -> None:
        missing = []
        open_leaves = []
        for name in self.leaf_groups():
            size = changed.get(name, self._nodes[name].size)
            if size is None:
                missing.append(name)
            # The size may have been assigned to the node.
            elif _check_size(name, size) == OPEN:
                open_leaves.append(name)
        if missing and complete:
            raise TreeError(
                f"leaves {missing} have no size: give each one by set_leaf_group_sizes(), -1 for "
                f"one that takes the rest."
            )
        if len(open_leaves) > 1:
            raise TreeError(f"{open_leaves} cannot all take the rest: give all but one a size.")

    @property
    def _outside_dim(self) -> str:
        """The name of the dim that the world has beside the tree."""
        outside = self.root.orthogonal_group or "outside"
        # A group of the tree may have that name.
        if outside in self._nodes:
            outside = f"outside {self.root_id}"
        return outside

    def _lay(self, name: str, sizes: dict[str, int], spans: dict[str, tuple[str, ...]]) -> None:
        """Add the dims of a node and of all below it to ``sizes``, and its span to ``spans``."""
        size = self._nodes[name].size
        first_dim = len(sizes)
        if not self._children[name]:
            assert size is not None
            sizes[name] = size
        else:
            spans[name] = ()  # parents come first
            for child in self._children[name]:
                self._lay(child, sizes, spans)
            if size is not None and size != OPEN:
                dims = list(sizes)[first_dim:]
                _close(repr(name), size, dims, sizes, f"rest of {name}")
        spans[name] = tuple(sizes)[first_dim:]


@dataclass(frozen=True)
class Placement:
    """A tree laid out over ranks: each of its groups is a combination of dims.

    ``grid = HyperCommGrid.over(placement.layout)`` is the grid of these dims, and
    ``grid.create_pg(placement.dims(name))`` creates the groups of a node.

    Parameters
    ----------
    layout : RankLayout
        Its dims are the leaves in declared order, the first one fastest.
    spans : mapping of str to tuple of str
        The dims of each node and of each orthogonal group that has a name.
    topology : Topology, optional
        Where hosts were given.
    """

    layout: RankLayout
    spans: Mapping[str, tuple[str, ...]] = field(repr=False)
    topology: Topology | None = None

    def dims(self, of: Dims) -> tuple[str, ...]:
        """The dims of a node, of an orthogonal group, or of several names or dims."""
        if isinstance(of, str):
            of = [of]
        dims: set[str] = set()
        for name in of:
            if name in self.spans:
                dims.update(self.spans[name])
            elif name in self.layout.dims:
                dims.add(name)
            else:
                valid_names = list(dict.fromkeys([*self.spans, *self.layout.dims]))
                raise TreeError(f"there is no group {shown(name)}. Known: {valid_names}.")
        return tuple(dim for dim in self.layout.dims if dim in dims)

    def orthogonal(self, of: Dims) -> tuple[str, ...]:
        """All dims that ``of`` is not over.

        A group of ``of`` and one orthogonal to it have exactly one rank in common, and their sizes
        multiply to that of the world. Raises TreeError on an unknown group.
        """
        return self.layout.orthogonal(self.dims(of))

    def size(self, of: Dims) -> int:
        """Number of ranks in a group of ``of``."""
        return self.layout.dim_size(self.dims(of))

    def group(self, of: Dims, rank: int) -> list[int]:
        """The ranks in the group of ``rank``, ascending."""
        return self.layout.group(rank, self.dims(of))


def _check_size(name: str, size: object, least: int = OPEN) -> int:
    # True is an Integral, too.
    if isinstance(size, Integral) and not isinstance(size, bool):
        number = int(size)
        if number >= least and number != 0:
            return number
    or_open = ""
    if least == OPEN:
        or_open = ", or -1"
    raise TreeError(f"the size of {name} must be at least 1{or_open}, got {shown(size)}.")


def _close(owner: str, total: int, dims: list[str], sizes: dict[str, int], rest: str) -> None:
    """Make ``dims`` multiply to ``total``: by the one that takes the rest, or by one more."""
    # Dims of 2 and -1 in a world of 8: the second one becomes 4. Dims of 2 and 2: one of 2 more.
    open_dims = []
    factors = []
    product = 1
    for dim in dims:
        if sizes[dim] == OPEN:
            open_dims.append(dim)
        else:
            factors.append(f"{dim}={sizes[dim]}")
            product *= sizes[dim]
    if total % product:
        raise TreeError(
            f"{owner} has {total} ranks, which {' x '.join(factors)} = {product} does not divide: "
            f"{total} / {product} leaves a remainder. Change a size."
        )
    for dim in open_dims:  # one at most
        sizes[dim] = total // product
    if total > product and not open_dims:
        sizes[rest] = total // product


def _orthogonal(placement: Placement, name: str, orthogonal: str) -> tuple[str, ...]:
    """The dims of ``orthogonal``, the name of the group that is orthogonal to ``name``."""
    dims = placement.orthogonal(name)
    # The name may already be one of a group or a dim: of the same dims, then.
    if orthogonal in placement.spans or orthogonal in placement.layout.dims:
        taken_dims = placement.dims(orthogonal)
        if taken_dims != dims:
            raise TreeError(
                f"{orthogonal!r} cannot be orthogonal to {name!r}: it is already over "
                f"{list(taken_dims)}, and the orthogonal group is over {list(dims)}. Take "
                f"another name."
            )
    return dims


def _check_within_host(placement: Placement, name: str) -> None:
    dims = placement.dims(name)
    if placement.topology is None:
        raise TreeError(
            f"{name!r} must stay inside a host, and the hosts are not known: give hosts=, such as "
            f"the number of ranks per host."
        )
    crossing = placement.topology.crossing(dims)
    if crossing:
        ranks = crossing[0]
        groups = placement.layout.size // len(ranks)
        hosts = ", ".join(placement.topology.hosts_of(dims, ranks[0]))
        raise TreeError(
            f"{name!r} must stay inside a host and does not: {len(crossing)} of its {groups} "
            f"groups cross hosts, the first with ranks {span_of(ranks)} on {hosts}. Make it "
            f"smaller, declare it before others (the first leaf's ranks are neighbours), or leave "
            f"out within='host'."
        )
