"""What Megatron's layouts carry: the flows and volumes of the model, and what cuts the weights.

The unit of a volume is one activation tensor (the micro-batch that a rank holds, of one layer, in
16 bits) per layer and micro-batch. A transformer of hidden size 4096 with sequences of 8192,
8 layers a rank and 32 micro-batches gives:

======  ============  =======  ====================================================================
flow    pattern       volume   because
======  ============  =======  ====================================================================
tp      ring          8        forward and backward each gather and scatter the tensor twice
ep      all-to-all    8        each token goes to two experts and back, forward and backward
cp      ring          3        keys and values go round forward and backward, gradients backward
dp      ring          0.4      gradients and weights (12 x hidden^2) once a step, not a micro-batch
pp      neighbours    0.25     one tensor to the next stage and one back, for 8 layers
======  ============  =======  ====================================================================

Other models send other volumes; only their ratios matter to the ranking of orders.
"""

from __future__ import annotations

from collections.abc import Mapping

from hypergrid.analysis.traffic import Flow, Layouts, Pattern
from hypergrid.plan import GroupPlan

VOLUMES: Mapping[str, float] = {"tp": 8, "ep": 8, "cp": 3, "dp": 0.4, "pp": 0.25}
# Name, layout, dims, pattern, and whose volume.
_FLOWS: tuple[tuple[str, str, tuple[str, ...], Pattern, str], ...] = (
    ("tp", "decoder", ("tp",), "ring", "tp"),
    ("expert tp", "expert", ("tp",), "ring", "tp"),
    ("ep", "expert", ("ep",), "all-to-all", "ep"),
    ("cp", "decoder", ("cp",), "ring", "cp"),
    ("dp", "decoder", ("dp", "cp"), "ring", "dp"),  # gradients are summed over cp too
    ("expert dp", "expert", ("dp",), "ring", "dp"),
    ("pp", "decoder", ("pp",), "neighbours", "pp"),
)
# The two layouts that users know (the others are splits of these), and the dims that cut weights.
SHARDS = {"decoder": ("tp", "pp"), "expert": ("tp", "ep", "pp")}


def flows_of(layouts: Layouts, volumes: Mapping[str, float] = VOLUMES) -> list[Flow]:
    """The flows of a job; those of expert layers only where they are laid out differently."""
    experts = has_experts(layouts)
    return [
        Flow(name, layout, dims, pattern, volumes[whose])
        for name, layout, dims, pattern, whose in _FLOWS
        if layout == "decoder" or experts
    ]


def has_experts(layouts: Layouts) -> bool:
    """Whether expert layers are laid out differently from dense ones."""
    if "expert" not in layouts:
        return False
    dense, expert = layouts["decoder"], layouts["expert"]
    return expert.dim_size("ep") > 1 or expert.dim_size("tp") != dense.dim_size("tp")


def shards_of(*plans: GroupPlan) -> dict[str, tuple[str, ...]] | None:
    """The layouts to compare, each with the dims that cut its weights; None without a decoder.

    The layout of experts is compared only where it differs from the dense one.
    """
    shared = {n: dims for n, dims in SHARDS.items() if all(n in plan.layouts for plan in plans)}
    if "decoder" not in shared:
        return None
    if all(p.layouts["decoder"].trimmed == p.layouts[n].trimmed for p in plans for n in shared):
        return {"decoder": shared["decoder"]}
    return shared
