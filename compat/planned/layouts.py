"""The layouts of a Megatron job that users know: their kinds of groups, and what cuts weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import one_line

Layouts: TypeAlias = Mapping[str, RankLayout]

# The two layouts that users know (the others are splits of these), and the dims that cut weights.
SHARDS = {"decoder": ("tp", "pp"), "expert": ("tp", "ep", "pp")}
LEVELS = "decoder_cp_levels"  # the layout with a dim for each level of a hierarchical cp

# Kind of group: its layout and its dims. A kind that sends more in a step comes before the others.
_KINDS = {
    "tp": ("decoder", ("tp",)),
    "expert tp": ("expert", ("tp",)),
    "ep": ("expert", ("ep",)),
    "cp": ("decoder", ("cp",)),
    "dp": ("decoder", ("dp", "cp")),  # gradients are summed over cp too
    "expert dp": ("expert", ("dp",)),
    "pp": ("decoder", ("pp",)),
}


def refuse_unknown_dims(layouts: Layouts) -> None:
    """Raise LayoutError if a layout that users know has a dim for which there are no rules."""
    known_dims = {dim for _, dims in _KINDS.values() for dim in dims}
    for name in filter(layouts.__contains__, SHARDS):
        unknown_dims = [dim for dim in layouts[name].trimmed.dims if dim not in known_dims]
        if unknown_dims:
            raise LayoutError(
                f"cannot check this plan: the layout {name} has the dim "
                f"{one_line(unknown_dims[0])}, and the rules are for "
                f"{', '.join(sorted(known_dims))}. Rename the dim to the one that it is, or use "
                f"show."
            )


def known(layouts: Layouts) -> dict[str, RankLayout]:
    """The layouts that users know: of dense layers, and of experts where these differ."""
    names = SHARDS if has_experts(layouts) else ["decoder"]
    return {name: layouts[name] for name in names}


def has_experts(layouts: Layouts) -> bool:
    """Whether expert layers are laid out differently from dense ones."""
    if "expert" not in layouts:
        return False
    expert = layouts["expert"]
    return expert.size_of("ep") > 1 or expert.size_of("tp") != layouts["decoder"].size_of("tp")


def groups_by_kind(layouts: Layouts) -> dict[str, np.ndarray]:
    """The groups by kind, as arrays of shape (groups, ranks of a group); none of a single rank."""
    known_layouts = known(layouts)
    groups = {}
    for kind, (name, dims) in _KINDS.items():
        if name in known_layouts:
            layout = known_layouts[name]
            ranks = layout.groups([dim for dim in dims if dim in layout.dims])
            if ranks.shape[1] > 1:
                groups[kind] = ranks
    return groups


def shards_of(before: Layouts, after: Layouts) -> Mapping[str, tuple[str, ...]]:
    """The layouts to compare, each with the dims that cut its weights; none without a decoder.

    The layout of experts is compared where a job has experts.
    """
    common = [name for name in before if name in after]
    if "decoder" not in common:
        return dict.fromkeys(common, ())
    if "expert" in common and (has_experts(before) or has_experts(after)):
        return SHARDS
    return {"decoder": SHARDS["decoder"]}
