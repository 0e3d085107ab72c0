"""THE TABLE: every Megatron group, one row. When upstream adds a group, add its row here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hypergrid.plan import GroupRow


@dataclass(frozen=True)
class Row:
    """One of upstream's private globals that holds a group.

    ``slot`` is the global; without its leading underscore it is the group's description too,
    unless ``desc`` says otherwise. ``dims`` over ``grid`` are the group's; a row without dims is
    the same group as ``same_as``. ``when`` names a fact (see ``request.facts``) that the row needs.
    """

    slot: str
    dims: str = ""
    grid: str = "decoder"
    options: str = ""  # key of its section in the NCCL configuration file
    ranks: str = ""  # private global with the group's ranks, where upstream keeps them
    gloo: bool = False  # has a gloo twin, in slot + "_GLOO"
    when: str = ""
    same_as: str = ""
    traffic: str = ""  # one of TRAFFIC; a row without dims carries what ``same_as`` does
    desc: str = ""
    twin_desc: str = ""
    twin_options: bool = False  # upstream hands the options to the twin too
    default_timeout: str | None = None  # a fact under which upstream leaves the timeout to torch
    twin_default_timeout: bool = False  # ... as it does for this twin alone
    pick: Literal["all", "ends", "first"] = "all"  # of the pipeline
    # cut into runs; "instance": one for each instance of the distributed optimizer, "between
    # instances": members with the same place in each
    chunk: str = ""
    several: bool = False  # a rank may be in more than one: the global holds a list then
    loop: str = ""  # dims whose groups upstream cuts or joins to make these, if not its own
    fan: str = ""  # several groups in one slot: "levels" a list, "sizes" a dict
    separate: bool = False  # never shares a communicator: it is there to run beside others
    sharp: str = ""  # made while NCCL_COLLNET_ENABLE=1, if use_sharp picks this name
    sharp_barrier: bool = False  # ... and brought to life before SHARP is switched off again

    @property
    def label(self) -> str:
        return self.desc or self.slot.lstrip("_")

    @property
    def has_levels(self) -> bool:
        """Whether the groups over one dim are cut into levels to make these."""
        return self.loop in ("cp", "dp")

    @property
    def twin_label(self) -> str:
        return self.twin_desc or self.label + "_GLOO"


@dataclass(frozen=True)
class Planned:
    """A row of the plan and where its group goes: a private global of upstream's."""

    row: Row
    slot: str
    key: int | None  # place in the slot's list or dict, where it holds several groups
    group: GroupRow
    chosen: list[Sequence[int]] | None = None  # as the caller's function gave them


# What a group carries, and why it must not wait for the rest: a communicator runs one operation at
# a time, and rows of one kind are never in flight together, or follow each other anyway. Read in
# megatron-core 0.16.1 and 0.19.2; where an option decides, the kinds are those of the overlap.
TWINS = "checkpoint"
TRAFFIC = {
    "gradients": "buckets are reduced behind the backward pass, parameters gathered ahead of the "
    "forward pass; DDP waits for neither",
    "parameters": "gathered while gradients are reduced: what the second group is there for",
    "expert gradients": "buckets of expert layers, reduced in the same backward pass in between",
    "gradients between instances": "a bucket is reduced between the instances of the optimizer "
    "while the next one is reduced within each, on a stream of its own",
    "weights": "sharded weights are gathered ahead of the layers that need them",
    "expert weights": "sharded weights of expert layers, gathered ahead of them too",
    "context": "the attention's ring or all-to-all, on streams of its own, beside its computation",
    "tensor": "activations, beside weight gradients, and those of shared experts beside the tokens "
    "of the others",
    "pipeline": "activations and their gradients between stages, sent and received while a stage "
    "computes",
    "embeddings": "gradients of tied weights, once a step when all other gradients are there",
    "optimizer": "norms and overflow flags, once a step in the optimizer, one after the other",
    "statistics": "sums of router and FP8 statistics, token counts and losses, each small and "
    "waited for where it is asked for, in the midst of everything else",
    "expert tokens": "all-to-all of one microbatch while another one computes; the all-gather "
    "over expert tp follows it",
    "expert dispatch": "how many tokens go where, asked while another microbatch's tokens are on "
    "the way; with other dispatchers the tokens themselves",
    TWINS: "gloo on the host: optimizer states are gathered and scattered beside the training",
}

# The order is the order of creation: SHARP serves the communicators that come first.
# fmt: off
ROWS: tuple[Row, ...] = (
    Row("_GTP_WEIGHT_REMAT_GROUP", "gtp_remat", traffic="weights", options="gtp_remat",
        ranks="_GTP_WEIGHT_REMAT_GLOBAL_RANKS", when="gtp_remat"),
    Row("_DATA_PARALLEL_GROUP", "dp", traffic="gradients", options="dp", gloo=True,
        ranks="_DATA_PARALLEL_GLOBAL_RANKS", when="dp_first"),
    Row("_DATA_PARALLEL_GROUP_WITH_CP", "dp-cp", traffic="gradients", options="dp_cp", gloo=True,
        ranks="_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP", sharp="dp", sharp_barrier=True),
    Row("_DATA_PARALLEL_GROUP_WITH_CP_AG", "dp-cp", traffic="parameters", options="dp_cp",
        when="all_gather", separate=True, sharp="dp"),
    Row("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "dp-cp", traffic="gradients",
        options="intra_dp_cp", gloo=True, when="instances", chunk="instance", sharp="dp"),
    Row("_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "dp-cp",
        traffic="gradients between instances", options="inter_dp_cp", when="dense_instances",
        chunk="between instances", sharp="dp"),
    Row("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", when="one_instance", gloo=True,
        same_as="_DATA_PARALLEL_GROUP_WITH_CP"),
    Row("_HYBRID_DP_CP_GROUPS", "dp-cp", traffic="context", options="dp_cp", when="hybrid",
        fan="sizes", desc="HYBRID_DP_CP_GROUP_{}", default_timeout=""),
    Row("_DATA_PARALLEL_GROUP", "dp", traffic="gradients", options="dp", gloo=True,
        ranks="_DATA_PARALLEL_GLOBAL_RANKS", when="dp_later"),
    Row("_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "gtp_remat-dp", traffic="statistics",
        options="gtp_remat_dp", when="gtp_axis"),
    Row("_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", "gtp_remat-dp-cp", traffic="statistics",
        options="gtp_remat_dp_cp", when="gtp_axis"),
    Row("_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", when="no_gtp_axis", same_as="_DATA_PARALLEL_GROUP"),
    Row("_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", when="no_gtp_axis",
        same_as="_DATA_PARALLEL_GROUP_WITH_CP"),
    Row("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", when="instances",
        same_as="_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"),
    Row("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", when="one_instance",
        same_as="_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT"),
    Row("_CONTEXT_PARALLEL_GROUP", "cp", traffic="context", options="cp",
        ranks="_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    Row("_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", grid="decoder_cp_levels", traffic="context",
        options="hcp", when="hierarchical", loop="cp", fan="levels", default_timeout="plain_levels",
        desc="HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L{}"),
    Row("_MODEL_PARALLEL_GROUP", "tp-gtp_remat-pp", traffic="optimizer", options="mp",
        ranks="_MODEL_PARALLEL_GLOBAL_RANKS"),
    Row("_TENSOR_MODEL_PARALLEL_GROUP", "tp", traffic="tensor", options="tp",
        ranks="_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    Row("_PIPELINE_MODEL_PARALLEL_GROUP", "pp", traffic="pipeline", options="pp",
        ranks="_PIPELINE_GLOBAL_RANKS", separate=True, several=True),
    Row("_EMBEDDING_GROUP", "pp", traffic="embeddings", options="embd",
        ranks="_EMBEDDING_GLOBAL_RANKS", pick="ends"),
    Row("_POSITION_EMBEDDING_GROUP", "pp", traffic="embeddings", options="pos_embd",
        ranks="_POSITION_EMBEDDING_GLOBAL_RANKS", pick="first"),
    Row("_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "tp-gtp_remat-dp-cp", traffic="statistics",
        options="tp_dp_cp"),
    Row("_TENSOR_AND_DATA_PARALLEL_GROUP", "tp-gtp_remat-dp", traffic="statistics",
        options="tp_dp"),
    Row("_TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tp-cp", traffic="statistics", options="tp_cp"),
    Row("_EXPERT_GTP_WEIGHT_REMAT_GROUP", "gtp_remat", "expert", traffic="expert weights",
        options="expt_gtp_remat", ranks="_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS", when="gtp_remat"),
    Row("_EXPERT_MODEL_PARALLEL_GROUP", "ep", "expert", traffic="expert tokens", options="ep",
        ranks="_EXPERT_MODEL_PARALLEL_RANKS", default_timeout="plain_ep"),
    Row("_EXPERT_TENSOR_PARALLEL_GROUP", "tp", "expert", traffic="expert tokens", options="ep_tp"),
    Row("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "tp-ep", "expert", traffic="expert dispatch",
        options="tp_ep_mp"),
    Row("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "tp-ep-pp", "expert", traffic="optimizer",
        options="tp_ep_pp"),
    Row("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP", "tp-ep-gtp_remat-pp", "expert",
        traffic="optimizer", options="tp_ep_gtp_remat_pp", when="gtp_remat"),
    Row("_EXPERT_DATA_PARALLEL_GROUP", "dp", "expert", traffic="expert gradients", options="ep_dp",
        gloo=True, twin_default_timeout=True),
    Row("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", "dp_intra", "expert_instances",
        traffic="expert gradients", options="intra_ep_dp", gloo=True, when="expert_instances",
        sharp="dp_replica", twin_options=True, loop="dp",
        desc="HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0",
        twin_desc="HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L0"),
    Row("_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", "dp_inter", "expert_instances",
        traffic="gradients between instances", options="inter_ep_dp", when="expert_instances",
        sharp="dp_replica", sharp_barrier=True, loop="dp",
        desc="HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1"),
    Row("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", when="one_expert_instance", gloo=True,
        same_as="_EXPERT_DATA_PARALLEL_GROUP"),
    Row("_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "gtp_remat-dp", "expert",
        traffic="statistics", options="ep_gtp_remat_dp", when="egtp_axis"),
    Row("_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", when="no_egtp_axis",
        same_as="_EXPERT_DATA_PARALLEL_GROUP"),
    Row("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", when="instances",
        same_as="_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"),
    Row("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", when="one_instance",
        same_as="_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
    Row("_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "tp-ep-gtp_remat-dp_intra-pp",
        "expert_instances", traffic="optimizer", options="intra_dist_opt_instance",
        when="instances_in_expert", loop="tp-ep-pp"),
)
# fmt: on
