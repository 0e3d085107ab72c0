"""The groups of one parallel state and their global ranks: what upstream's getters answer."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

from compat.megatron.releases import HAS

# The data-parallel groups, by (with cp, with gtp_remat, partial) ...
DATA_PARALLEL: dict[tuple[bool, ...], str] = {
    (False, False, False): "_DATA_PARALLEL_GROUP",
    (False, True, False): "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    (True, False, False): "_DATA_PARALLEL_GROUP_WITH_CP",
    (True, True, False): "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
    (True, False, True): "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    (True, True, True): "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
}
# ... and the expert ones, by (with gtp_remat, partial).
EXPERT_DATA_PARALLEL: dict[tuple[bool, ...], str] = {
    (False, False): "_EXPERT_DATA_PARALLEL_GROUP",
    (True, False): "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    (False, True): "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    (True, True): "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
}


def partial(asked: bool) -> dict[str, bool]:
    """The argument of the expert-data-parallel getter, for releases that have it."""
    return {"partial_expert_data_parallel": asked} if HAS["instances_in_expert"] else {}


def missing(slot: str) -> AssertionError:
    """The refusal of a group that does not exist, in words."""
    name = slot.strip("_").replace("_", " ").lower()
    return AssertionError(
        f"{name} is not initialized: no model parallel state with such a group is current. Call "
        f"initialize_model_parallel() first, with the sizes that make this group."
    )


class GroupGetters:
    """Answers from the slots of the state, which are named as upstream's private globals."""

    __slots__ = ()

    if TYPE_CHECKING:  # the slots of the state

        def __getattr__(self, name: str) -> Any: ...

    def _group(self, slot: str, check_initialized: bool = True) -> Any:
        group = getattr(self, slot)
        if group is None and check_initialized:
            raise missing(slot)
        return group

    # Releases without gtp_remat have one global where later ones have two, and code of theirs
    # writes that one. Only who has asked for the axis has the other there.

    def _dp_slot(self, with_cp: bool, with_gtp: bool, partial: bool) -> str:
        if partial and not with_cp:
            raise AssertionError(
                "a partial data-parallel group includes context parallelism: pass "
                "with_context_parallel=True with partial_data_parallel=True."
            )
        known = HAS["gtp_remat"] or self._has_axis("gtp_remat_size")
        return DATA_PARALLEL[bool(with_cp), bool(with_gtp) and known, bool(partial)]

    def _edp_slot(self, with_gtp: bool, partial: bool) -> str:
        known = HAS["gtp_remat"] or self._has_axis("expert_gtp_remat_size")
        return EXPERT_DATA_PARALLEL[bool(with_gtp) and known, bool(partial)]

    def _has_axis(self, size: str) -> bool:
        return self.request is not None and getattr(self.request, size) > 1

    # groups

    def get_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        if (group := self._MODEL_PARALLEL_GROUP) is None and check_initialized:
            raise missing("_MODEL_PARALLEL_GROUP")
        return group

    def get_tensor_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        if (group := self._TENSOR_MODEL_PARALLEL_GROUP) is None and check_initialized:
            raise missing("_TENSOR_MODEL_PARALLEL_GROUP")
        return group

    def get_gtp_weight_remat_group(self, check_initialized: bool = True) -> ProcessGroup:
        if (group := self._GTP_WEIGHT_REMAT_GROUP) is None and check_initialized:
            raise missing("_GTP_WEIGHT_REMAT_GROUP")
        return group

    def get_pipeline_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        if (group := self._PIPELINE_MODEL_PARALLEL_GROUP) is None and check_initialized:
            raise missing("_PIPELINE_MODEL_PARALLEL_GROUP")
        return group

    def get_data_parallel_group(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
        independent_all_gather: bool = False,
    ) -> ProcessGroup:
        if independent_all_gather and with_context_parallel and not partial_data_parallel:
            return self._group("_DATA_PARALLEL_GROUP_WITH_CP_AG")
        key = (with_context_parallel, with_gtp_remat, partial_data_parallel)
        group = self._dp_groups.get(key)
        return group if group is not None else self._group(self._dp_slot(*key))

    def get_data_parallel_group_gloo(
        self, with_context_parallel: bool = False, partial_data_parallel: bool = False
    ) -> ProcessGroup:
        slot = self._dp_slot(with_context_parallel, False, partial_data_parallel)
        return self._group(slot + "_GLOO")

    def has_separate_all_gather_group(self) -> bool:
        return self._DATA_PARALLEL_GROUP_WITH_CP_AG is not None

    def get_context_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        if (group := self._CONTEXT_PARALLEL_GROUP) is None and check_initialized:
            raise missing("_CONTEXT_PARALLEL_GROUP")
        return group

    def get_hierarchical_context_parallel_groups(
        self, check_initialized: bool = True
    ) -> list[ProcessGroup]:
        if (group := self._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS) is None and check_initialized:
            raise missing("_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS")
        return group

    def get_hybrid_data_context_parallel_groups(
        self, check_initialized: bool = True, group_size: int | None = None
    ) -> ProcessGroup:
        if self._via.get_data_parallel_world_size(with_context_parallel=True) == group_size:
            return self._group("_DATA_PARALLEL_GROUP_WITH_CP", check_initialized)
        groups = self._group("_HYBRID_DP_CP_GROUPS", check_initialized)
        if group_size not in groups:
            raise KeyError(
                f"there is no hybrid data x context parallel group of size {group_size!r}; sizes "
                f"that exist: {sorted(groups) or 'none'}. Initialise with "
                f"hybrid_context_parallel=True."
            )
        return groups[group_size]

    def get_embedding_group(self, check_initialized: bool = True) -> ProcessGroup:
        group = self._EMBEDDING_GROUP
        return (
            group if group is not None or not check_initialized else self._group("_EMBEDDING_GROUP")
        )

    def get_position_embedding_group(self, check_initialized: bool = True) -> ProcessGroup:
        if (group := self._POSITION_EMBEDDING_GROUP) is None and check_initialized:
            raise missing("_POSITION_EMBEDDING_GROUP")
        return group

    def get_amax_reduction_group(
        self, with_context_parallel: bool = False, tp_only_amax_red: bool = False
    ) -> ProcessGroup:
        if tp_only_amax_red:
            with_cp, without = "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP"
        else:
            with_cp = "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"
            without = "_TENSOR_AND_DATA_PARALLEL_GROUP"
        return self._group(with_cp if with_context_parallel else without)

    def get_tensor_and_data_parallel_group(
        self, check_initialized: bool = True, with_context_parallel: bool = False
    ) -> ProcessGroup:
        slot = "_TENSOR_AND_DATA_PARALLEL_GROUP"
        return self._group(slot + "_WITH_CP" if with_context_parallel else slot, check_initialized)

    def get_tensor_and_context_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        if (group := self._TENSOR_AND_CONTEXT_PARALLEL_GROUP) is None and check_initialized:
            raise missing("_TENSOR_AND_CONTEXT_PARALLEL_GROUP")
        return group

    def get_expert_gtp_weight_remat_group(self, check_initialized: bool = True) -> ProcessGroup:
        if (group := self._EXPERT_GTP_WEIGHT_REMAT_GROUP) is None and check_initialized:
            raise missing("_EXPERT_GTP_WEIGHT_REMAT_GROUP")
        return group

    def get_expert_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        if (group := self._EXPERT_MODEL_PARALLEL_GROUP) is None and check_initialized:
            raise missing("_EXPERT_MODEL_PARALLEL_GROUP")
        return group

    def get_expert_tensor_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        if (group := self._EXPERT_TENSOR_PARALLEL_GROUP) is None and check_initialized:
            raise missing("_EXPERT_TENSOR_PARALLEL_GROUP")
        return group

    def get_expert_tensor_and_model_parallel_group(
        self, check_initialized: bool = True
    ) -> ProcessGroup:
        if (group := self._EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP) is None and check_initialized:
            raise missing("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
        return group

    def get_expert_tensor_model_pipeline_parallel_group(
        self, check_initialized: bool = True, with_egtp_remat: bool = False
    ) -> ProcessGroup:
        slot = "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"
        return self._group(slot + "_WITH_EGTP" if with_egtp_remat else slot, check_initialized)

    def get_expert_data_parallel_group(
        self,
        check_initialized: bool = True,
        with_gtp_remat: bool = True,
        partial_expert_data_parallel: bool = False,
    ) -> ProcessGroup:
        slot = self._edp_slot(with_gtp_remat, partial_expert_data_parallel)
        return self._group(slot, check_initialized)

    def get_expert_data_parallel_group_gloo(
        self, partial_expert_data_parallel: bool = False
    ) -> ProcessGroup:
        return self._group(self._edp_slot(False, partial_expert_data_parallel) + "_GLOO")

    def get_data_modulo_expert_parallel_group(
        self, partial_expert_data_parallel: bool = False
    ) -> ProcessGroup:
        warnings.warn(
            "get_data_modulo_expert_parallel_group is deprecated: use "
            "get_expert_data_parallel_group.",
            DeprecationWarning,
            stacklevel=3,
        )
        return self._via.get_expert_data_parallel_group(**partial(partial_expert_data_parallel))

    def get_intra_distributed_optimizer_instance_group(
        self, check_initialized: bool = True
    ) -> ProcessGroup:
        if (
            group := self._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP
        ) is None and check_initialized:
            raise missing("_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP")
        return group

    def get_inter_distributed_optimizer_instance_group(
        self, check_initialized: bool = True
    ) -> ProcessGroup:
        if (group := self._INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP) is None and check_initialized:
            raise missing("_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP")
        return group

    def get_inter_partial_data_parallel_group(self) -> ProcessGroup:
        return self._group("_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP")

    # global ranks

    def get_gtp_weight_remat_global_ranks(self, check_initialized: bool = True) -> list[int]:
        if (group := self._GTP_WEIGHT_REMAT_GLOBAL_RANKS) is None and check_initialized:
            raise missing("_GTP_WEIGHT_REMAT_GLOBAL_RANKS")
        return group

    def get_expert_gtp_weight_remat_global_ranks(self, check_initialized: bool = True) -> list[int]:
        if (group := self._EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS) is None and check_initialized:
            raise missing("_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS")
        return group

    def get_context_parallel_global_ranks(self, check_initialized: bool = True) -> list[int]:
        if (group := self._CONTEXT_PARALLEL_GLOBAL_RANKS) is None and check_initialized:
            raise missing("_CONTEXT_PARALLEL_GLOBAL_RANKS")
        return group

    def get_tensor_model_parallel_src_rank(self) -> int:
        return self._group("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS")[0]

    def get_model_parallel_src_rank(self) -> int:
        return self._group("_MODEL_PARALLEL_GLOBAL_RANKS")[0]

    def get_data_parallel_src_rank(self, with_context_parallel: bool = False) -> int:
        slot = "_DATA_PARALLEL_GLOBAL_RANKS"
        return self._group(slot + "_WITH_CP" if with_context_parallel else slot)[0]

    def get_expert_model_parallel_src_rank(self) -> int:
        return self._group("_EXPERT_MODEL_PARALLEL_RANKS")[0]

    def get_pipeline_model_parallel_first_rank(self) -> int:
        ranks = self._group("_PIPELINE_GLOBAL_RANKS")
        return ranks[0][0] if isinstance(ranks[0], list) else ranks[0]

    def get_pipeline_model_parallel_last_rank(self) -> int | list[int]:
        ranks = self._group("_PIPELINE_GLOBAL_RANKS")
        return _at(ranks, self._via.get_pipeline_model_parallel_world_size() - 1)

    def get_pipeline_model_parallel_next_rank(self) -> int | list[int]:
        return self._pipeline_neighbour(+1)

    def get_pipeline_model_parallel_prev_rank(self) -> int | list[int]:
        return self._pipeline_neighbour(-1)

    def _pipeline_neighbour(self, step: int) -> int | list[int]:
        ranks = self._group("_PIPELINE_GLOBAL_RANKS")
        stage = self._via.get_pipeline_model_parallel_rank()
        return _at(ranks, (stage + step) % self._via.get_pipeline_model_parallel_world_size())


def _at(ranks: Any, stage: int) -> Any:
    """The rank at ``stage``; one for each pipeline where there are several."""
    return [each[stage] for each in ranks] if isinstance(ranks[0], list) else ranks[stage]
