"""Traffic of Megatron's layouts: the model's flows and volumes, and the dims that cut weights.

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

Other models send other volumes; only their ratios matter to the ranking of orders. Where the shape
of the model is known, ``Shape.flows`` has the volumes in GB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hypergrid.network.traffic import Flow, Layouts, Pattern
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


_HALF, _FULL = 2e-9, 4e-9  # GB of a number in 16 and 32 bits


@dataclass(frozen=True)
class Shape:
    """The model and the batch of a job, as far as they decide what is sent."""

    hidden: int
    layers: int
    sequence: int
    micro_batches: int  # of one pipeline in a step
    micro_batch: int = 1  # sequences in each
    ffn: int | None = None  # 4 x hidden
    experts: int | None = None  # in each layer; None: the layers are dense
    topk: int = 2
    expert_ffn: int | None = None  # as ffn
    expert_layers: int | None = None  # that have experts; None: all, if there are experts
    kv_share: float = 1.0  # heads of keys and values for each of the queries'
    gated: bool = False  # an MLP has three matrices (SwiGLU), not two

    def flows(self, layouts: Layouts, virtual_stages: int = 1) -> list[Flow]:
        """The flows of a step, in GB of a rank; docs/placement.md has the formulas.

        Sequences are cut by tp, as Megatron does with experts and with --sequence-parallel.
        """
        dense, expert = layouts["decoder"], layouts.get("expert", layouts["decoder"])
        tp, cp, pp = (dense.size_of(dim) for dim in ("tp", "cp", "pp"))
        etp, ep = expert.size_of("tp"), expert.size_of("ep") if self.experts else 1
        many = self.layers if self.expert_layers is None else self.expert_layers
        with_experts = many / pp if self.experts else 0.0
        layers = self.layers / pp
        tensor = self.micro_batch * self.sequence / cp * self.hidden * _HALF
        wide = self.ffn or (self.hidden * 8 // 3 // 64 * 64 if self.gated else 4 * self.hidden)
        # Gradients are reduced in 32 bits, weights gathered in 16.
        mlp = (3 if self.gated else 2) * self.hidden
        attention = (2 + 2 * self.kv_share) * self.hidden**2
        weights = (layers * attention + (layers - with_experts) * mlp * wide) / tp
        each = mlp * (self.expert_ffn or wide)
        of_experts = with_experts * each * (self.experts or 0) / (etp * ep)
        often, routed = self.micro_batches * tensor, 4 * self.topk * self.micro_batches * tensor
        volumes = {
            "tp": (8 * layers - 4 * with_experts) * often,
            "expert tp": routed / tp * etp * with_experts,
            "ep": routed / tp * with_experts,
            "cp": 6 * self.kv_share * often / tp * cp * layers,
            "dp": weights * (_HALF + _FULL),
            "expert dp": of_experts * (_HALF + _FULL),
            "pp": 2 * tensor / tp * self.micro_batches * virtual_stages,
        }
        found = []
        for name, layout, dims, pattern, _ in _FLOWS:
            if layout not in layouts or not volumes[name]:
                continue
            n = layouts[layout].dim_size([dim for dim in dims if dim in layouts[layout].dims])
            # A member of a ring of n passes on the whole but for its neighbour's part.
            part = (n - 1) / n if pattern == "ring" else 1
            found.append(Flow(name, layout, dims, pattern, volumes[name] * part, name in _HIDDEN))
        return found


# Computation goes on with --overlap-grad-reduce, --overlap-param-gather and --overlap-p2p.
_HIDDEN = {"dp", "expert dp", "pp"}


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
