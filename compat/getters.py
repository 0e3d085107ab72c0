"""The getters of one parallel state: every answer that upstream's module gives, as a method."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.release import HAS_GTP_REMAT


class Number(NamedTuple):
    """A rank or a size: the global that overrides it, the group it is of, which of the two."""

    override: str | None
    group: str
    kind: str  # "rank" or "size", the group's own methods


def _pair(name: str, group: str, override: str | None = None) -> dict[str, Number]:
    rank = size = None
    if override is not None:
        rank, size = f"_MPU_{override}_RANK", f"_MPU_{override}_WORLD_SIZE"
    return {
        f"{name}_rank": Number(rank, group, "rank"),
        f"{name}_size": Number(size, group, "size"),
    }


# Each of these is an attribute of the state: the number, or None where only the group can tell.
NUMBERS: dict[str, Number] = {
    **_pair("_tp", "_TENSOR_MODEL_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL"),
    **_pair("_pp", "_PIPELINE_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL"),
    **_pair("_cp", "_CONTEXT_PARALLEL_GROUP"),
    **_pair("_tp_cp", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"),
    **_pair("_gtp", "_GTP_WEIGHT_REMAT_GROUP"),
    **_pair("_egtp", "_EXPERT_GTP_WEIGHT_REMAT_GROUP"),
    **_pair("_ep", "_EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_MODEL_PARALLEL"),
    **_pair("_etp", "_EXPERT_TENSOR_PARALLEL_GROUP", "EXPERT_TENSOR_PARALLEL"),
    **_pair("_etp_ep", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"),
}

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


def missing(slot: str) -> AssertionError:
    """The refusal of a group that does not exist, in words."""
    name = slot.strip("_").replace("_", " ").lower()
    return AssertionError(
        f"{name} is not initialized: no model parallel state with such a group is current. Call "
        f"initialize_model_parallel() first, with the sizes that make this group."
    )


class Getters:
    """Answers from the slots of ``self``, which are named as upstream's private globals.

    All are *local*: no communication. A method that is built from other getters asks them through
    ``_via``: the state itself, or the module while somebody has patched a getter there.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # the slots of the state

        def __getattr__(self, name: str) -> Any: ...

    def _group(self, slot: str, check_initialized: bool = True) -> Any:
        group = getattr(self, slot)
        if group is None and check_initialized:
            raise missing(slot)
        return group

    def _absent(self, slot: str, check_initialized: bool = True) -> Any:
        if check_initialized:
            raise missing(slot)
        return None

    def _ask(self, name: str, *, zero: bool = True) -> Any:
        override, slot, kind = NUMBERS[name]
        if override is not None and getattr(self, override) is not None:
            return getattr(self, override)
        return self._ask_group(slot, kind, zero=zero)

    def _ask_group(self, slot: str, kind: str, *, zero: bool = True) -> int:
        if zero and not dist.is_initialized():
            return 0
        return getattr(self._group(slot), kind)()

    def _ask_or_zero(self, name: str) -> int:
        return 0 if getattr(self, NUMBERS[name].group) is None else self._ask(name)

    def _ask_data_parallel(self, kind: str, *key: bool) -> int:
        override = self._MPU_DATA_PARALLEL_RANK
        if kind == "size":
            override = self._MPU_DATA_PARALLEL_WORLD_SIZE
        return override if override is not None else self._ask_group(_data_parallel(*key), kind)

    # groups

    def get_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        return (
            self._MODEL_PARALLEL_GROUP
            if self._MODEL_PARALLEL_GROUP is not None
            else self._absent("_MODEL_PARALLEL_GROUP", check_initialized)
        )

    def get_tensor_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        return (
            self._TENSOR_MODEL_PARALLEL_GROUP
            if self._TENSOR_MODEL_PARALLEL_GROUP is not None
            else self._absent("_TENSOR_MODEL_PARALLEL_GROUP", check_initialized)
        )

    def get_gtp_weight_remat_group(self, check_initialized: bool = True) -> ProcessGroup:
        return (
            self._GTP_WEIGHT_REMAT_GROUP
            if self._GTP_WEIGHT_REMAT_GROUP is not None
            else self._absent("_GTP_WEIGHT_REMAT_GROUP", check_initialized)
        )

    def get_pipeline_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        return (
            self._PIPELINE_MODEL_PARALLEL_GROUP
            if self._PIPELINE_MODEL_PARALLEL_GROUP is not None
            else self._absent("_PIPELINE_MODEL_PARALLEL_GROUP", check_initialized)
        )

    def get_data_parallel_group(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
        independent_all_gather: bool = False,
    ) -> ProcessGroup:
        if independent_all_gather and with_context_parallel and not partial_data_parallel:
            return self._group("_DATA_PARALLEL_GROUP_WITH_CP_AG")
        slot = _data_parallel(with_context_parallel, with_gtp_remat, partial_data_parallel)
        return self._group(slot)

    def get_data_parallel_group_gloo(
        self, with_context_parallel: bool = False, partial_data_parallel: bool = False
    ) -> ProcessGroup:
        slot = _data_parallel(with_context_parallel, False, partial_data_parallel)
        return self._group(slot + "_GLOO")

    def has_separate_all_gather_group(self) -> bool:
        return self._DATA_PARALLEL_GROUP_WITH_CP_AG is not None

    def get_context_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        return (
            self._CONTEXT_PARALLEL_GROUP
            if self._CONTEXT_PARALLEL_GROUP is not None
            else self._absent("_CONTEXT_PARALLEL_GROUP", check_initialized)
        )

    def get_hierarchical_context_parallel_groups(
        self, check_initialized: bool = True
    ) -> list[ProcessGroup]:
        return (
            self._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS
            if self._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS is not None
            else self._absent("_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", check_initialized)
        )

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
        return (
            self._POSITION_EMBEDDING_GROUP
            if self._POSITION_EMBEDDING_GROUP is not None
            else self._absent("_POSITION_EMBEDDING_GROUP", check_initialized)
        )

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
        return (
            self._TENSOR_AND_CONTEXT_PARALLEL_GROUP
            if self._TENSOR_AND_CONTEXT_PARALLEL_GROUP is not None
            else self._absent("_TENSOR_AND_CONTEXT_PARALLEL_GROUP", check_initialized)
        )

    def get_expert_gtp_weight_remat_group(self, check_initialized: bool = True) -> ProcessGroup:
        return (
            self._EXPERT_GTP_WEIGHT_REMAT_GROUP
            if self._EXPERT_GTP_WEIGHT_REMAT_GROUP is not None
            else self._absent("_EXPERT_GTP_WEIGHT_REMAT_GROUP", check_initialized)
        )

    def get_expert_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        return (
            self._EXPERT_MODEL_PARALLEL_GROUP
            if self._EXPERT_MODEL_PARALLEL_GROUP is not None
            else self._absent("_EXPERT_MODEL_PARALLEL_GROUP", check_initialized)
        )

    def get_expert_tensor_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        return (
            self._EXPERT_TENSOR_PARALLEL_GROUP
            if self._EXPERT_TENSOR_PARALLEL_GROUP is not None
            else self._absent("_EXPERT_TENSOR_PARALLEL_GROUP", check_initialized)
        )

    def get_expert_tensor_and_model_parallel_group(
        self, check_initialized: bool = True
    ) -> ProcessGroup:
        return (
            self._EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP
            if self._EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP is not None
            else self._absent("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", check_initialized)
        )

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
        slot = EXPERT_DATA_PARALLEL[bool(with_gtp_remat), bool(partial_expert_data_parallel)]
        return self._group(slot, check_initialized)

    def get_expert_data_parallel_group_gloo(
        self, partial_expert_data_parallel: bool = False
    ) -> ProcessGroup:
        slot = EXPERT_DATA_PARALLEL[False, bool(partial_expert_data_parallel)]
        return self._group(slot + "_GLOO")

    def get_data_modulo_expert_parallel_group(
        self, partial_expert_data_parallel: bool = False
    ) -> ProcessGroup:
        warnings.warn(
            "get_data_modulo_expert_parallel_group is deprecated: use "
            "get_expert_data_parallel_group.",
            DeprecationWarning,
            stacklevel=3,
        )
        return self._via.get_expert_data_parallel_group(
            partial_expert_data_parallel=partial_expert_data_parallel
        )

    def get_intra_distributed_optimizer_instance_group(
        self, check_initialized: bool = True
    ) -> ProcessGroup:
        return (
            self._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP
            if self._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP is not None
            else self._absent("_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", check_initialized)
        )

    def get_inter_distributed_optimizer_instance_group(
        self, check_initialized: bool = True
    ) -> ProcessGroup:
        return (
            self._INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP
            if self._INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP is not None
            else self._absent("_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", check_initialized)
        )

    # global ranks

    def get_gtp_weight_remat_global_ranks(self, check_initialized: bool = True) -> list[int]:
        return (
            self._GTP_WEIGHT_REMAT_GLOBAL_RANKS
            if self._GTP_WEIGHT_REMAT_GLOBAL_RANKS is not None
            else self._absent("_GTP_WEIGHT_REMAT_GLOBAL_RANKS", check_initialized)
        )

    def get_expert_gtp_weight_remat_global_ranks(self, check_initialized: bool = True) -> list[int]:
        return (
            self._EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS
            if self._EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS is not None
            else self._absent("_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS", check_initialized)
        )

    def get_context_parallel_global_ranks(self, check_initialized: bool = True) -> list[int]:
        return (
            self._CONTEXT_PARALLEL_GLOBAL_RANKS
            if self._CONTEXT_PARALLEL_GLOBAL_RANKS is not None
            else self._absent("_CONTEXT_PARALLEL_GLOBAL_RANKS", check_initialized)
        )

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
        return self._group("_PIPELINE_GLOBAL_RANKS")[0]

    def get_pipeline_model_parallel_last_rank(self) -> int:
        stages = self._via.get_pipeline_model_parallel_world_size()
        return self._group("_PIPELINE_GLOBAL_RANKS")[stages - 1]

    def get_pipeline_model_parallel_next_rank(self) -> int:
        return self._pipeline_neighbour(+1)

    def get_pipeline_model_parallel_prev_rank(self) -> int:
        return self._pipeline_neighbour(-1)

    def _pipeline_neighbour(self, step: int) -> int:
        ranks = self._group("_PIPELINE_GLOBAL_RANKS")
        stage = self._via.get_pipeline_model_parallel_rank()
        return ranks[(stage + step) % self._via.get_pipeline_model_parallel_world_size()]

    # ranks and sizes

    def get_tensor_model_parallel_world_size(self) -> int:
        number = self._tp_size
        return number if number is not None else self._ask("_tp_size", zero=False)

    def get_tensor_model_parallel_rank(self) -> int:
        number = self._tp_rank
        return number if number is not None else self._ask("_tp_rank", zero=False)

    def get_pipeline_model_parallel_world_size(self) -> int:
        number = self._pp_size
        return number if number is not None else self._ask("_pp_size", zero=False)

    def get_pipeline_model_parallel_rank(self) -> int:
        number = self._pp_rank
        return number if number is not None else self._ask("_pp_rank", zero=False)

    def get_data_parallel_world_size(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> int:
        key = (with_context_parallel, with_gtp_remat, partial_data_parallel)
        number = self._dp_sizes.get(key)
        return number if number is not None else self._ask_data_parallel("size", *key)

    def get_data_parallel_rank(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> int:
        key = (with_context_parallel, with_gtp_remat, partial_data_parallel)
        number = self._dp_ranks.get(key)
        return number if number is not None else self._ask_data_parallel("rank", *key)

    def get_context_parallel_world_size(self) -> int:
        number = self._cp_size
        return number if number is not None else self._ask("_cp_size")

    def get_context_parallel_rank(self) -> int:
        number = self._cp_rank
        return number if number is not None else self._ask("_cp_rank")

    def get_tensor_and_context_parallel_world_size(self) -> int:
        number = self._tp_cp_size
        return number if number is not None else self._ask("_tp_cp_size")

    def get_tensor_and_context_parallel_rank(self) -> int:
        number = self._tp_cp_rank
        return number if number is not None else self._ask("_tp_cp_rank")

    def get_gtp_weight_remat_world_size(self) -> int:
        number = self._gtp_size
        return number if number is not None else self._ask_or_zero("_gtp_size")

    def get_gtp_weight_remat_rank(self) -> int:
        number = self._gtp_rank
        return number if number is not None else self._ask_or_zero("_gtp_rank")

    def get_expert_gtp_weight_remat_world_size(self) -> int:
        number = self._egtp_size
        return number if number is not None else self._ask_or_zero("_egtp_size")

    def get_expert_gtp_weight_remat_rank(self) -> int:
        number = self._egtp_rank
        return number if number is not None else self._ask_or_zero("_egtp_rank")

    def get_expert_model_parallel_world_size(self) -> int:
        number = self._ep_size
        return number if number is not None else self._ask("_ep_size")

    def get_expert_model_parallel_rank(self) -> int:
        number = self._ep_rank
        return number if number is not None else self._ask("_ep_rank")

    def get_expert_tensor_parallel_world_size(self) -> int | None:
        number = self._etp_size
        if number is None and self._EXPERT_TENSOR_PARALLEL_GROUP is None:
            return self._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
        return number if number is not None else self._ask("_etp_size")

    def get_expert_tensor_parallel_rank(self) -> int | None:
        number = self._etp_rank
        if number is None and self._EXPERT_TENSOR_PARALLEL_GROUP is None:
            return self._MPU_TENSOR_MODEL_PARALLEL_RANK
        return number if number is not None else self._ask("_etp_rank")

    def get_expert_tensor_and_model_parallel_world_size(self) -> int:
        number = self._etp_ep_size
        return number if number is not None else self._ask("_etp_ep_size")

    def get_expert_tensor_and_model_parallel_rank(self) -> int:
        number = self._etp_ep_rank
        return number if number is not None else self._ask("_etp_ep_rank")

    def get_expert_data_parallel_world_size(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        key = (with_gtp_remat, partial_expert_data_parallel)
        number = self._edp_sizes.get(key)
        if number is not None:
            return number
        return self._ask_group(EXPERT_DATA_PARALLEL[bool(key[0]), bool(key[1])], "size")

    def get_expert_data_parallel_rank(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        key = (with_gtp_remat, partial_expert_data_parallel)
        number = self._edp_ranks.get(key)
        if number is not None:
            return number
        return self._ask_group(EXPERT_DATA_PARALLEL[bool(key[0]), bool(key[1])], "rank")

    def get_all_ranks(self) -> str:
        ranks = [
            self._via.get_tensor_model_parallel_rank(),
            self._via.get_data_parallel_rank(),
            self._via.get_context_parallel_rank(),
            self._via.get_pipeline_model_parallel_rank(),
            self._via.get_expert_model_parallel_rank(),
        ]
        if HAS_GTP_REMAT:
            ranks.insert(1, self._via.get_gtp_weight_remat_rank())
        return "_".join(str(rank or 0) for rank in ranks)

    # predicates and virtual pipelines

    def is_initialized(self) -> bool:
        return self._DATA_PARALLEL_GROUP is not None

    def model_parallel_is_initialized(self) -> bool:
        return (
            self._TENSOR_MODEL_PARALLEL_GROUP is not None
            and self._PIPELINE_MODEL_PARALLEL_GROUP is not None
            and self._DATA_PARALLEL_GROUP is not None
        )

    def is_unitialized(self) -> bool:
        warnings.warn(
            "is_unitialized is deprecated: use is_initialized.", DeprecationWarning, stacklevel=3
        )
        return not self._via.is_initialized()

    def is_pipeline_first_stage(
        self, ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> bool:
        if ignore_virtual and self._is_first is not None:
            return self._is_first
        if not ignore_virtual:
            stages = self._virtual_stages(vp_stage)
            if stages is not None and vp_stage != 0:
                return False
        return self._via.get_pipeline_model_parallel_rank() == 0

    def is_pipeline_last_stage(
        self, ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> bool:
        if ignore_virtual and self._is_last is not None:
            return self._is_last
        if not ignore_virtual:
            stages = self._virtual_stages(vp_stage)
            if stages is not None and vp_stage != stages - 1:
                return False
        stages = self._via.get_pipeline_model_parallel_world_size()
        return self._via.get_pipeline_model_parallel_rank() == stages - 1

    def _virtual_stages(self, vp_stage: int | None) -> int | None:
        stages = self._via.get_virtual_pipeline_model_parallel_world_size()
        if stages is not None and vp_stage is None:
            raise AssertionError(
                f"virtual pipelines are on ({stages} stages per rank): pass vp_stage, or "
                f"ignore_virtual=True."
            )
        return stages

    def is_rank_in_embedding_group(
        self, ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> bool:
        ranks, rank = self._EMBEDDING_GLOBAL_RANKS, dist.get_rank()
        if ranks is None or rank not in ranks:
            return False
        if not ignore_virtual and rank == ranks[0]:
            return self._via.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        if not ignore_virtual and rank == ranks[-1]:
            return self._via.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        return True

    def is_rank_in_position_embedding_group(self) -> bool:
        ranks, rank = self._POSITION_EMBEDDING_GLOBAL_RANKS, dist.get_rank()
        return ranks is not None and rank in ranks

    def get_virtual_pipeline_model_parallel_rank(self) -> int | None:
        return self._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK

    def get_virtual_pipeline_model_parallel_world_size(self) -> int | None:
        return self._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE


def _data_parallel(with_cp: bool, with_gtp: bool, partial: bool) -> str:
    if partial and not with_cp:
        raise AssertionError(
            "a partial data-parallel group includes context parallelism: pass "
            "with_context_parallel=True with partial_data_parallel=True."
        )
    return DATA_PARALLEL[bool(with_cp), bool(with_gtp), bool(partial)]
