"""Views: several layouts of the same ranks, and which of their groups are the same. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from hypergrid.layout import Dims, LayoutError, RankLayout

BASE = "base"
Key: TypeAlias = str | tuple[str, tuple[str, ...]]  # of a group: "dp-cp", or the view and its dims


class Views:
    """The layouts of one span of ranks by name; ``"base"`` is the first.

    ``shared`` has, for each view, the dims whose groups are those of the base.
    """

    def __init__(self, base: RankLayout) -> None:
        self.layouts = {BASE: base}
        self.shared: dict[str, tuple[str, ...]] = {BASE: ()}

    def register(self, name: str, layout: RankLayout, shared: Sequence[str] | None) -> None:
        """Add a view. Raises ValueError as ``HyperCommGrid.register_view`` says."""
        if name in self.layouts:
            raise ValueError(f"View {name!r} is already registered. Choose another name.")
        base, shared = self.layouts[BASE], tuple(shared or ())
        if layout.size != base.size:
            raise LayoutError(
                f"View {name!r} has {layout.size} ranks, {layout.sizes} multiplied, but the grid "
                f"size is {base.size}. A view lays out the same ranks."
            )
        if len(set(shared)) != len(shared):
            raise LayoutError(
                f"View {name!r} has duplicate shared_dims: {list(shared)}. Name each dim once."
            )
        for where, each in (("the base view", base), ("the view's dim_names", layout)):
            for dim in shared:
                if dim not in each.dims:
                    raise LayoutError(
                        f"Shared dim {dim!r} of view {name!r} is not in {where} "
                        f"{list(each.dims)}. Leave it out of shared_dims."
                    )
        for dim in shared:
            # The first group has the size and the stride, which decide all groups, also over
            # several such dims.
            if base.group(base.offset, (dim,)) != layout.group(base.offset, (dim,)):
                ours, theirs = (each.groups((dim,))[:4].tolist() for each in (base, layout))
                raise LayoutError(
                    f"Shared dim {dim!r} has different membership: {ours} in the grid and {theirs} "
                    f"in view {name!r}. Only groups that are the same can be shared."
                )
        self.layouts[name], self.shared[name] = layout, shared

    def layout(self, name: str | None) -> RankLayout:
        """The layout of a view, by default of the base. KeyError if there is none."""
        if (name or BASE) not in self.layouts:
            raise KeyError(
                f"there is no view {name!r}: call register_view() first. Known: "
                f"{list(self.layouts)}."
            )
        return self.layouts[name or BASE]

    def find(self, dims: Dims, view: str | None) -> tuple[Key, RankLayout, list[str]]:
        """The key of the groups over ``dims``, and the layout and dims that enumerate them."""
        layout, base = self.layout(view), self.layouts[BASE]
        names = ordered(layout, dims)
        if view in (None, BASE) or set(names) <= set(self.shared[str(view)]):
            names = ordered(base, names)
            return "-".join(names), base, names
        return (str(view), tuple(names)), layout, names


def name_of(key: Key) -> str:
    """Of the groups with this key: ``"dp-cp"``, or ``"moe/ep"`` in a view."""
    return key if isinstance(key, str) else f"{key[0]}/{'-'.join(key[1])}"


def ordered(layout: RankLayout, dims: Dims) -> list[str]:
    """``dims``, the slowest first."""
    return [layout.dims[i] for i in sorted(layout.axes(dims), reverse=True)]
