"""THE TABLE: every Megatron group, one row. When upstream adds a group, add its row here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from compat.megatron.rank_generator import default_embedding_ranks, default_position_embedding_ranks


@dataclass(frozen=True, eq=False)
class Row:
    """One of upstream's private globals that holds a group, or several.

    ``slot`` is the global; without its leading underscore it is the group's description too,
    unless ``desc`` says otherwise.
    """

    slot: str
    dims: str
    # The kind of traffic, see docs/concepts.md. A communicator runs one operation at a time, so
    # groups whose operations overlap must not share one; operations of one kind never overlap. As
    # in megatron-core 0.16.1 and 0.19.2 with all options that overlap communication.
    traffic: str
    options: str  # key of its section in the NCCL configuration file
    grid: str = "decoder"
    # The row is made for requests of which this is true: "instances", "not gtp_axis".
    # The words are in ``rows._conditions``.
    when: str = ""
    field: str = ""  # of ProcessGroupCollection
    ranks: str = ""  # private global with the group's ranks, where upstream keeps them
    desc: str = ""  # with {} for the key where the global holds several
    twin_desc: str = ""  # of its gloo twin, unless it is the group's with _GLOO
    backend: str = ""  # the argument that names it; without one, the default group's
    # The argument whose function chooses the ranks, and upstream's own function.
    chooser: tuple[str, Callable[..., list[int]]] | None = None
    gloo: bool = False  # has a gloo twin, in slot + "_GLOO"
    twin_kept: bool = True  # ... or in no global: upstream creates it and drops it
    twin_options: bool = False  # upstream hands the options to the twin too
    # Upstream leaves the timeout to torch: always, or in releases of that fact.
    torch_timeout: bool | str = False
    twin_torch_timeout: bool = False  # ... of the twin alone
    # What the global holds: a group (a list, on ranks that are in "several"), a list of all
    # "levels", or a dict by "sizes".
    holds: Literal["one", "several", "levels", "sizes"] = "one"
    creator: str = ""  # upstream's function that creates the groups of all "sizes"
    least: str = ""  # the argument that is the smallest of them; without one, it is 2
    # The global of the ranks that wait for each other after each of these groups has had a barrier.
    barrier_with: str = ""
    pick: Literal["all", "ends", "first"] = "all"  # of the pipeline
    chunk: Literal["", "instance"] = ""  # cut into runs: one for each optimizer instance
    levels: str = ""  # what upstream calls the groups that are cut into levels to make these
    level: int = 0  # ... and which level this is, innermost first, if the row is one alone
    loop: str = ""  # dims whose groups upstream cuts or joins to make these, if not its own
    join: bool = False  # ... joins, to one group for each instance of the distributed optimizer
    in_instances: str = ""  # dims of the view "instances", see build.py, that have the same ranks
    separate: bool = False  # never shares a communicator: its operations overlap all others
    sharp: str = ""  # made while NCCL_COLLNET_ENABLE=1, if use_sharp picks this name
    sharp_barrier: bool = False  # ... and connected before SHARP is switched off again

    label: str = dataclasses.field(init=False)  # the description of the group
    twin_label: str = dataclasses.field(init=False)  # and of its gloo twin

    def __post_init__(self) -> None:
        label = self.desc or self.slot.lstrip("_")
        object.__setattr__(self, "label", label)
        object.__setattr__(self, "twin_label", self.twin_desc or f"{label}_GLOO")


@dataclass(frozen=True, eq=False)
class Alias:
    """A private global that holds the same group as another one."""

    slot: str
    same_as: str
    when: str
    gloo: bool = False  # and its twin the other's twin


def slots(row: Row | Alias) -> tuple[str, ...]:
    """The private globals of a row: its group's, and its gloo twin's."""
    if row.gloo and (isinstance(row, Alias) or row.twin_kept):
        return (row.slot, row.slot + "_GLOO")
    return (row.slot,)


TWINS = "checkpoint"  # the traffic of the gloo twins

# In the order of creation: SHARP serves the communicators that are created first.
# fmt: off
ROWS: tuple[Row, ...] = (
    # slot, dims
    #     traffic, options, the rest
    Row("_GTP_WEIGHT_REMAT_GROUP", "gtp_remat",
        "weights",                     "gtp_remat",       when="gtp_remat", field="gtp_remat",
        ranks="_GTP_WEIGHT_REMAT_GLOBAL_RANKS"),
    Row("_DATA_PARALLEL_GROUP_WITH_CP", "dp-cp",
        "gradients",                   "dp_cp",           field="dp_cp", gloo=True,
        ranks="_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP", sharp="dp", sharp_barrier=True),
    Row("_DATA_PARALLEL_GROUP_WITH_CP_AG", "dp-cp",
        "parameters",                  "dp_cp",           when="all_gather", separate=True,
        sharp="dp"),
    Row("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "dp-cp",
        "gradients",                   "intra_dp_cp",     when="instances", field="intra_dp_cp",
        chunk="instance", gloo=True, sharp="dp", in_instances="dp_intra-cp"),
    Row("_HYBRID_DP_CP_GROUPS", "dp-cp",
        "context",                     "dp_cp",           when="hybrid",
        holds="sizes", desc="HYBRID_DP_CP_GROUP_{}", torch_timeout=True,
        creator="create_hybrid_dp_cp_groups"),
    Row("_DYNAMIC_DP_CP_GROUPS", "dp-cp",
        "context",                     "dp_cp",           when="dynamic",
        holds="sizes", desc="DYNAMIC_DP_CP_GROUP_{}", torch_timeout=True,
        barrier_with="_DATA_PARALLEL_GROUP_WITH_CP", creator="create_dynamic_dp_cp_groups",
        least="min_dynamic_context_parallel_size"),
    Row("_DATA_PARALLEL_GROUP", "dp",
        "gradients",                   "dp",              field="dp", gloo=True,
        ranks="_DATA_PARALLEL_GLOBAL_RANKS"),
    Row("_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "gtp_remat-dp",
        "statistics",                  "gtp_remat_dp",    when="gtp_axis"),
    Row("_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", "gtp_remat-dp-cp",
        "statistics",                  "gtp_remat_dp_cp", when="gtp_axis", field="dp_cp_gtp_remat"),
    Row("_CONTEXT_PARALLEL_GROUP", "cp",
        "context",                     "cp",              field="cp",
        ranks="_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    Row("_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", "cp",
        "context",                     "hcp",             when="hierarchical",
        grid="decoder_cp_levels", loop="cp", levels="CONTEXT_PARALLEL_GROUP", holds="levels",
        field="hcp", desc="HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L{}"),
    Row("_MODEL_PARALLEL_GROUP", "tp-gtp_remat-pp",
        "optimizer",                   "mp",              field="mp",
        ranks="_MODEL_PARALLEL_GLOBAL_RANKS"),
    Row("_TENSOR_MODEL_PARALLEL_GROUP", "tp",
        "tensor",                      "tp",              field="tp",
        ranks="_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    Row("_PIPELINE_MODEL_PARALLEL_GROUP", "pp",
        "pipeline",                    "pp",              field="pp",
        ranks="_PIPELINE_GLOBAL_RANKS", holds="several", separate=True,
        backend="pipeline_model_parallel_comm_backend"),
    Row("_EMBEDDING_GROUP", "pp",
        "embeddings",                  "embd",            field="embd",
        ranks="_EMBEDDING_GLOBAL_RANKS", pick="ends",
        chooser=("get_embedding_ranks", default_embedding_ranks)),
    Row("_POSITION_EMBEDDING_GROUP", "pp",
        "embeddings",                  "pos_embd",        field="pos_embd",
        ranks="_POSITION_EMBEDDING_GLOBAL_RANKS", pick="first",
        chooser=("get_position_embedding_ranks", default_position_embedding_ranks)),
    Row("_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "tp-gtp_remat-dp-cp",
        "statistics",                  "tp_dp_cp",        field="tp_dp_cp"),
    Row("_TENSOR_AND_DATA_PARALLEL_GROUP", "tp-gtp_remat-dp",
        "statistics",                  "tp_dp"),
    Row("_TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tp-cp",
        "statistics",                  "tp_cp",           field="tp_cp"),
    Row("_EXPERT_GTP_WEIGHT_REMAT_GROUP", "gtp_remat",
        "expert weights",              "expt_gtp_remat",  grid="expert", field="expt_gtp_remat",
        when="gtp_remat", ranks="_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS"),
    Row("_EXPERT_MODEL_PARALLEL_GROUP", "ep",
        "expert tokens",               "ep",              grid="expert", field="ep",
        ranks="_EXPERT_MODEL_PARALLEL_RANKS", torch_timeout="plain_ep"),
    Row("_EXPERT_TENSOR_PARALLEL_GROUP", "tp",
        "expert tokens",               "ep_tp",           grid="expert", field="expt_tp"),
    Row("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "tp-ep",
        "expert dispatch",             "tp_ep_mp",        grid="expert", field="tp_ep"),
    Row("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "tp-ep-pp",
        "optimizer",                   "tp_ep_pp",        grid="expert", field="tp_ep_pp"),
    Row("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP", "tp-ep-gtp_remat-pp",
        "optimizer",                   "tp_ep_gtp_remat_pp",
        grid="expert", when="gtp_remat", field="tp_ep_pp_with_egtp_remat"),
    Row("_EXPERT_DATA_PARALLEL_GROUP", "dp",
        "expert gradients",            "ep_dp",           grid="expert", field="expt_dp",
        gloo=True, twin_torch_timeout=True),
    Row("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", "dp_intra",
        "expert gradients",            "intra_ep_dp",     grid="expert_instances",
        when="instances", field="intra_expt_dp", gloo=True,
        twin_options=True, loop="dp", levels="EXPERT_DATA_PARALLEL_GROUP", level=0,
        desc="HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0",
        twin_desc="HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L0", sharp="dp_replica"),
    Row("_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", "dp_inter",
        "gradients between instances", "inter_ep_dp",     grid="expert_instances",
        when="instances", field="inter_dist_opt", gloo=True,
        twin_kept=False, twin_options=True, loop="dp", levels="EXPERT_DATA_PARALLEL_GROUP",
        level=1, desc="HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1",
        twin_desc="HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L1", sharp="dp_replica",
        sharp_barrier=True, in_instances="dp_inter"),
    Row("_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "gtp_remat-dp",
        "statistics",                  "ep_gtp_remat_dp", grid="expert", when="expert_gtp_axis",
        field="expt_dp_gtp_remat"),
    Row("_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "tp-ep-gtp_remat-dp-pp",
        "optimizer",                   "intra_dist_opt_instance",
        grid="expert", when="not instances", field="intra_dist_opt",
        loop="tp-ep-pp", join=True),
    Row("_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "tp-ep-gtp_remat-dp_intra-pp",
        "optimizer",                   "intra_dist_opt_instance",
        grid="expert_instances", when="instances", field="intra_dist_opt",
        loop="tp-ep-pp", join=True),
)

ALIASES: tuple[Alias, ...] = (
    Alias("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
          "_DATA_PARALLEL_GROUP_WITH_CP",                   "not instances", gloo=True),
    Alias("_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
          "_DATA_PARALLEL_GROUP",                           "not gtp_axis"),
    Alias("_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
          "_DATA_PARALLEL_GROUP_WITH_CP",                   "not gtp_axis"),
    Alias("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
          "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",     "instances"),
    Alias("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
          "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",    "not instances"),
    Alias("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
          "_EXPERT_DATA_PARALLEL_GROUP",                    "not instances", gloo=True),
    Alias("_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
          "_EXPERT_DATA_PARALLEL_GROUP",                    "not expert_gtp_axis"),
    Alias("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
          "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",      "instances"),
    Alias("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
          "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",     "not instances"),
)

# Groups that create_all_gather_groups() makes for its caller: no private global holds them.
EXTRA_ALL_GATHER: tuple[Row, ...] = (
    Row("_DATA_PARALLEL_GROUP_WITH_CP_AG", "dp-cp",
        "parameters",                  "dp_cp",           field="dp_cp_ag"),
    Row("_EXPERT_DATA_PARALLEL_GROUP_AG", "dp",
        "parameters",                  "ep_dp",           grid="expert", field="expt_dp_ag"),
)
# fmt: on
