"""THE TABLE: every Megatron group, one row. When upstream adds a group, add its row here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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


# The order is the order of creation: SHARP serves the communicators that come first.
# fmt: off
ROWS: tuple[Row, ...] = (
    Row("_GTP_WEIGHT_REMAT_GROUP", "gtp_remat", options="gtp_remat",
        ranks="_GTP_WEIGHT_REMAT_GLOBAL_RANKS", when="gtp_remat"),
    Row("_DATA_PARALLEL_GROUP", "dp", options="dp", gloo=True,
        ranks="_DATA_PARALLEL_GLOBAL_RANKS", when="dp_first"),
    Row("_DATA_PARALLEL_GROUP_WITH_CP", "dp-cp", options="dp_cp", gloo=True,
        ranks="_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP", sharp="dp", sharp_barrier=True),
    Row("_DATA_PARALLEL_GROUP_WITH_CP_AG", "dp-cp", options="dp_cp", when="all_gather",
        separate=True, sharp="dp"),
    Row("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "dp-cp", options="intra_dp_cp", gloo=True,
        when="instances", chunk="instance", sharp="dp"),
    Row("_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "dp-cp", options="inter_dp_cp",
        when="dense_instances", chunk="between instances", sharp="dp"),
    Row("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", when="one_instance", gloo=True,
        same_as="_DATA_PARALLEL_GROUP_WITH_CP"),
    Row("_HYBRID_DP_CP_GROUPS", "dp-cp", options="dp_cp", when="hybrid", fan="sizes",
        desc="HYBRID_DP_CP_GROUP_{}", default_timeout=""),
    Row("_DATA_PARALLEL_GROUP", "dp", options="dp", gloo=True,
        ranks="_DATA_PARALLEL_GLOBAL_RANKS", when="dp_later"),
    Row("_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "gtp_remat-dp", options="gtp_remat_dp",
        when="gtp_axis"),
    Row("_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", "gtp_remat-dp-cp",
        options="gtp_remat_dp_cp", when="gtp_axis"),
    Row("_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", when="no_gtp_axis",
        same_as="_DATA_PARALLEL_GROUP"),
    Row("_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", when="no_gtp_axis",
        same_as="_DATA_PARALLEL_GROUP_WITH_CP"),
    Row("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", when="instances",
        same_as="_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"),
    Row("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", when="one_instance",
        same_as="_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT"),
    Row("_CONTEXT_PARALLEL_GROUP", "cp", options="cp", ranks="_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    Row("_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", grid="decoder_cp_levels", options="hcp",
        when="hierarchical", loop="cp", fan="levels", default_timeout="plain_levels",
        desc="HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L{}"),
    Row("_MODEL_PARALLEL_GROUP", "tp-gtp_remat-pp", options="mp",
        ranks="_MODEL_PARALLEL_GLOBAL_RANKS"),
    Row("_TENSOR_MODEL_PARALLEL_GROUP", "tp", options="tp",
        ranks="_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    Row("_PIPELINE_MODEL_PARALLEL_GROUP", "pp", options="pp", ranks="_PIPELINE_GLOBAL_RANKS",
        separate=True, several=True),
    Row("_EMBEDDING_GROUP", "pp", options="embd", ranks="_EMBEDDING_GLOBAL_RANKS", pick="ends"),
    Row("_POSITION_EMBEDDING_GROUP", "pp", options="pos_embd",
        ranks="_POSITION_EMBEDDING_GLOBAL_RANKS", pick="first"),
    Row("_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "tp-gtp_remat-dp-cp", options="tp_dp_cp"),
    Row("_TENSOR_AND_DATA_PARALLEL_GROUP", "tp-gtp_remat-dp", options="tp_dp"),
    Row("_TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tp-cp", options="tp_cp"),
    Row("_EXPERT_GTP_WEIGHT_REMAT_GROUP", "gtp_remat", "expert", options="expt_gtp_remat",
        ranks="_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS", when="gtp_remat"),
    Row("_EXPERT_MODEL_PARALLEL_GROUP", "ep", "expert", options="ep",
        ranks="_EXPERT_MODEL_PARALLEL_RANKS", default_timeout="plain_ep"),
    Row("_EXPERT_TENSOR_PARALLEL_GROUP", "tp", "expert", options="ep_tp"),
    Row("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "tp-ep", "expert", options="tp_ep_mp"),
    Row("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "tp-ep-pp", "expert",
        options="tp_ep_pp"),
    Row("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP", "tp-ep-gtp_remat-pp", "expert",
        options="tp_ep_gtp_remat_pp", when="gtp_remat"),
    Row("_EXPERT_DATA_PARALLEL_GROUP", "dp", "expert", options="ep_dp", gloo=True,
        twin_default_timeout=True),
    Row("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", "dp_intra", "expert_instances",
        options="intra_ep_dp", gloo=True, when="expert_instances", sharp="dp_replica",
        twin_options=True, loop="dp",
        desc="HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0",
        twin_desc="HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L0"),
    Row("_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", "dp_inter", "expert_instances",
        options="inter_ep_dp", when="expert_instances", sharp="dp_replica", sharp_barrier=True,
        loop="dp",
        desc="HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1"),
    Row("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", when="one_expert_instance", gloo=True,
        same_as="_EXPERT_DATA_PARALLEL_GROUP"),
    Row("_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "gtp_remat-dp", "expert",
        options="ep_gtp_remat_dp", when="egtp_axis"),
    Row("_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", when="no_egtp_axis",
        same_as="_EXPERT_DATA_PARALLEL_GROUP"),
    Row("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", when="instances",
        same_as="_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"),
    Row("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", when="one_instance",
        same_as="_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
    Row("_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "tp-ep-gtp_remat-dp_intra-pp",
        "expert_instances", options="intra_dist_opt_instance", when="instances_in_expert",
        loop="tp-ep-pp"),
)
# fmt: on
